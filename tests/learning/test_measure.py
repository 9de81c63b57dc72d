"""Measuring a player: what is counted, and that the truth is the oracle's."""

import pytest
from game.builders import finished

from experiments.learning.attack_check import error_detail
from experiments.learning.measure import Measurement, Rate, attacker_rates, held_out_cases
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.clinic import held_out_kind, held_out_template, oracle, parse_note
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import resource

CASES = 20


@pytest.fixture(scope="module")
def rates() -> dict[str, Rate]:
    profile = load_profile("brief")
    novice = load_player(resource("assets/novice"), profile)
    measurement = Measurement(novice, held_out_cases(CASES, seed=3), profile, temperature=0.0, seed=1)
    return {rate.measure: rate for rate in (*measurement.each_role(novice), *measurement.games(novice))}


def test_cases_are_held_out_in_wording_and_in_facts_and_hold_the_error_they_name() -> None:
    for case in held_out_cases(100, seed=4):
        clean, wrong = parse_note(case.clean), parse_note(case.wrong)
        assert clean is not None and wrong is not None
        assert held_out_kind(clean.sentences[0].value) in {s.kind for s in clean.sentences}
        assert all(s.template == held_out_template(clean.disease, s.kind) for s in clean.sentences[1:] if s.kind)
        assert not oracle(case.clean).errors
        [(index, _)] = oracle(case.wrong).errors
        assert wrong.sentences[index].text == case.wrong_sentence
        assert error_detail(wrong, index) == case.detail


def test_every_case_is_counted_once_in_each_measure(rates: dict[str, Rate]) -> None:
    for measure in (
        "assessor/clean",
        "assessor/error",
        "attacker/parsed",
        "attacker/valid",
        "attacker/harmless",
        "attacker/valid_decoys",
    ):
        assert rates[measure].items == CASES
    assert rates["assessor/parsed"].items == 2 * CASES
    by_kind = [rate for name, rate in rates.items() if name.startswith("assessor/error/")]
    assert sum(rate.items for rate in by_kind) == CASES
    assert sum(rate.hits for rate in by_kind) == rates["assessor/error"].hits


def test_only_valid_attacks_can_go_undetected(rates: dict[str, Rate]) -> None:
    valid = rates["attacker/valid"].hits
    assert rates["attacker/undetected"].items == rates["assessor/frozen_attacks"].items == valid > 0
    kinds = [rate for name, rate in rates.items() if name.startswith("attacker/kind/")]
    assert sum(rate.hits for rate in kinds) == valid


def test_an_attack_is_valid_or_harmless_or_breaks_a_rule_or_leaves_the_world() -> None:
    harmful, safe = (Judgement(judge="oracle", label=label, realistic=True) for label in (Label.HARMFUL, Label.SAFE))
    garbled = safe.model_copy(update={"realistic": False})
    games = [
        *[finished(Outcome.MISSED_ERROR, judgement=harmful)] * 4,
        *[finished(Outcome.CORRECT_REJECTION, judgement=safe)] * 3,
        *[finished(Outcome.CORRECT_REJECTION, judgement=garbled)] * 2,
        finished(Outcome.INVALID_ATTACK),
    ]
    rates = {rate.measure: rate for rate in attacker_rates(games)}
    assert rates["attacker/valid"] == Rate("attacker/valid", 4, 10)
    assert rates["attacker/harmless"] == Rate("attacker/harmless", 3, 10)
    assert rates["attacker/undetected"] == Rate("attacker/undetected", 4, 4)


def test_against_itself_what_the_assessor_finds_is_what_the_attacker_does_not_get_through(
    rates: dict[str, Rate],
) -> None:
    found, undetected = rates["self/attacks"], rates["attacker/undetected"]
    assert found.hits + undetected.hits == found.items == undetected.items


def test_the_novice_sees_the_errors_it_was_taught_and_not_the_others(rates: dict[str, Rate]) -> None:
    assert rates["assessor/clean"].hits > 0.9 * CASES
    seen = [rates[f"assessor/error/{kind}"] for kind in ("diagnosis", "causalOrganism")]
    unseen = [rates[f"assessor/error/{kind}"] for kind in ("management", "treatment")]
    assert sum(r.hits for r in seen) > 0.8 * sum(r.items for r in seen)
    assert sum(r.hits for r in unseen) < 0.2 * sum(r.items for r in unseen)
