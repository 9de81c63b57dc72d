"""Reward schemes: pure functions from a judged game to named reward components of each role.

Called by whoever scores a game: the reward manager, ``medserl play``, ``medserl rescore``. A scheme is a
frozen dataclass of constants and one function; another one is named by its import path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from medserl_agentloop.games.medical.records import GameRecord, Rewards
from medserl_agentloop.games.medical.rewards.general_sum import GeneralSumTerms, medical_general_sum
from medserl_agentloop.games.medical.rewards.zero_sum import MedserlTerms, ZeroSumTerms, medserl, zero_sum
from medserl_agentloop.paths import find_object

__all__ = [
    "SCHEMES",
    "GeneralSumTerms",
    "MedserlTerms",
    "RewardScheme",
    "ZeroSumTerms",
    "load_scheme",
    "medical_general_sum",
    "medserl",
    "zero_sum",
]

RewardScheme = Callable[[GameRecord], Rewards]

SCHEMES: dict[str, RewardScheme] = {
    "medserl": medserl,
    "zero_sum": zero_sum,
    "medical_general_sum": medical_general_sum,
    "medical_general_sum_no_cot": partial(medical_general_sum, terms=GeneralSumTerms(chain_of_thought=False)),
}


def load_scheme(name: str) -> RewardScheme:
    """The scheme called ``name``, or a user's own as ``package.module:function``.

    Raises:
        ValueError: There is no such scheme; lists those there are.
    """
    expected = "package.module:function of a function GameRecord -> Rewards"
    scheme: RewardScheme = find_object("reward scheme", name, SCHEMES, expected, callable)
    return scheme
