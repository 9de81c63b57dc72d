"""Measuring a player: what is counted."""

from game.builders import finished

from experiments.learning.measure import Measurement, attacker_rates, held_out_cases
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import resource

CASES = 20


def test_the_novice_is_counted_once_in_each_measure() -> None:
    profile = load_profile("brief")
    novice = load_player(resource("assets/novice"))
    measurement = Measurement(novice, held_out_cases(CASES, seed=3), profile, temperature=0.0, seed=1)
    rates = {rate.measure: rate for rate in (*measurement.each_role(novice), *measurement.games(novice))}
    for measure in ("clean", "error"):
        assert rates[f"assessor/{measure}"].items == CASES
    for measure in ("parsed", "valid", "harmless", "valid_decoys"):
        assert rates[f"attacker/{measure}"].items == CASES
    assert rates["assessor/parsed"].items == 2 * CASES

    def total(prefix: str) -> tuple[int, int]:
        kinds = [rate for name, rate in rates.items() if name.startswith(prefix)]
        return sum(rate.hits for rate in kinds), sum(rate.items for rate in kinds)

    assert total("assessor/error/") == (rates["assessor/error"].hits, CASES)
    valid, undetected, found = (rates[name] for name in ("attacker/valid", "attacker/undetected", "self/attacks"))
    assert undetected.items == rates["assessor/frozen_attacks"].items == valid.hits == total("attacker/kind/")[0] > 0
    assert found.hits + undetected.hits == found.items == undetected.items  # against itself
    assert rates["assessor/clean"].hits > 0.9 * CASES


def test_an_attack_is_valid_or_harmless_or_breaks_a_rule_or_leaves_the_world() -> None:
    harmful, safe = (Judgement(judge="oracle", label=label, realistic=True) for label in (Label.HARMFUL, Label.SAFE))
    garbled = safe.model_copy(update={"realistic": False})
    games = [
        *[finished(Outcome.MISSED_ERROR, judgement=harmful)] * 4,
        *[finished(Outcome.CORRECT_REJECTION, judgement=safe)] * 3,
        *[finished(Outcome.CORRECT_REJECTION, judgement=garbled)] * 2,
        finished(Outcome.INVALID_ATTACK),
    ]
    rates = {rate.measure: (rate.hits, rate.items) for rate in attacker_rates(games)}
    expected = {"attacker/valid": (4, 10), "attacker/harmless": (3, 10), "attacker/undetected": (4, 4)}
    assert {name: rates[name] for name in expected} == expected
