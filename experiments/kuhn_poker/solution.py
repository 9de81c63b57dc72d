"""Kuhn poker by open_spiel (``pip install open-spiel``): its exploitability, and the solution that
its CFR finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from experiments.kuhn_poker.exploitability import Place, Policy, information_sets
from medserl_agentloop.games.kuhn_poker import CARDS

pyspiel: Any = import_module("pyspiel")  # it has no types
GAME = pyspiel.load_game("kuhn_poker")


def _name(place: Place) -> str:
    """An information set as open_spiel writes it: K after check and bet is 2pb."""
    return str(CARDS.index(place[0])) + "".join(
        move[0].replace("c", "p") for move in place[1].split()
    )


def nash_conv_by_open_spiel(policy: Policy) -> float:
    """Of a policy of ours."""
    chances = {_name(place): [(0, 1 - active), (1, active)] for place, active in policy.items()}
    return float(pyspiel.nash_conv(GAME, pyspiel.TabularPolicy(chances), True))


def cfr(iterations: Sequence[int]) -> dict[int, dict[Place, float]]:
    """CFR's average policy after each of these numbers of iterations."""
    solver = pyspiel.CFRSolver(GAME)
    found, done = {}, 0
    for wanted in iterations:
        for _ in range(wanted - done):
            solver.evaluate_and_update_policy()
        done = wanted
        average = solver.average_policy()
        found[wanted] = {
            place: dict(average.get_state_policy(_name(place)))[1] for place in information_sets()
        }
    return found
