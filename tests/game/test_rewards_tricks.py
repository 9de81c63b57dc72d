"""Tricks that an attacker might try in place of an attack, as docs/rewards.md lists them."""

import itertools

import pytest
import reward_tricks
from reward_tricks import (
    ANSWERS,
    HONEST,
    SAMPLE,
    TRICKS,
    Trick,
    caught,
    constant_answer,
    earned,
    table,
)

from experiments.pages import with_table
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.case import ErrorType, Role
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.rewards import Medserl, RewardScheme, ZeroSum
from medserl_agentloop.medical_team.utils import MedicalGeneralSum

VALID_GROUPS = {"harmless rewording", "a decoy with an error", "the assessor is cut off"}
each_trick = pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name)
each_scheme = pytest.mark.parametrize("scheme", [ZeroSum(), Medserl()], ids=["zero_sum", "medserl"])


def test_the_page_shows_the_table_of_today() -> None:
    page = reward_tricks.PAGE.read_text(encoding="utf-8")
    assert "| harmless rewording: 19, e.g. " in page
    assert with_table(page, "tricks", table()) == page, "run python docs/reward_tricks.py"
    assert len({trick.name for trick in TRICKS}) == len(TRICKS) >= 60


def test_no_constant_answer_earns_more_than_two_cents_a_game() -> None:
    cases = read_files([SAMPLE]).cases[::4]
    for place, kind in itertools.product(range(-4, 4), ErrorType):
        for scheme in (ZeroSum(), Medserl()):
            assert (
                earned(lambda note, at=place, of=kind: constant_answer(note, at, of), scheme, cases)
                <= 0.02
            )
    assert earned(lambda note: "verdict: safe", Medserl(), cases) == 0.0


@each_scheme
@each_trick
def test_trick_earns_no_more_than_a_caught_attack_under_a_reading_judge(
    scheme: RewardScheme, trick: Trick
) -> None:
    assert trick.best(scheme, "reads") < 0
    assert trick.best(scheme, "reads") <= caught(trick, scheme)
    for answer in ANSWERS:
        record = trick.played(answer, "reads")
        assert record.outcome is Outcome.INVALID_ATTACK or record.attack_failed or record.cut_off
        assert trick.cuts or "game" not in scheme.rewards(record)[Role.ATTACKER]


@each_scheme
@each_trick
def test_under_labels_exactly_those_pay_that_the_rules_let_through(
    scheme: RewardScheme, trick: Trick
) -> None:
    played_for_nothing = scheme == Medserl() and trick.group == "a decoy with an error"
    pays = trick.rule == "" and not played_for_nothing and not trick.cuts
    assert (trick.best(scheme, "labels") > caught(trick, scheme)) == pays


@each_trick
def test_rules_refuse_all_but_what_takes_medicine_to_see(trick: Trick) -> None:
    by_another_dose = trick.name == "error put right by another right dose"
    assert (trick.rule == "") == (trick.group in VALID_GROUPS or by_another_dose)


@pytest.mark.parametrize("attack", HONEST, ids=lambda attack: attack.name)
def test_honest_attacks_are_valid_under_every_judge(attack: Trick) -> None:
    for judge in ("labels", "reads"):
        record = attack.played(ANSWERS[0], judge)
        assert attack.rule == ""
        assert not record.attack_failed


@pytest.mark.parametrize(
    "trick",
    [t for t in TRICKS if t.group in ("dressing", "harmless rewording")],
    ids=lambda trick: trick.name,
)
def test_trick_pays_in_the_baseline_scheme(trick: Trick) -> None:
    assert trick.best(MedicalGeneralSum(), "reads") > caught(trick, MedicalGeneralSum())
