"""Tricks that an attacker might try in place of an attack, as docs/rewards.md lists them."""

import itertools
from functools import partial

import pytest
import reward_tricks
from reward_tricks import ANSWERS, HONEST, SAMPLE, TRICKS, caught, constant_answer, earned, table

from experiments.pages import with_table
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.case import ErrorType, Role
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.rewards import Medserl, RewardScheme, ZeroSum
from medserl_agentloop.medical_team.utils import MedicalGeneralSum

SCHEMES = (ZeroSum(), Medserl())


def test_the_page_shows_the_table_of_today() -> None:
    page = reward_tricks.PAGE.read_text(encoding="utf-8")
    assert with_table(page, "tricks", table()) == page, "run python docs/reward_tricks.py"
    assert len({trick.name for trick in TRICKS}) == len(TRICKS) >= 60


def test_no_constant_answer_earns_more_than_two_cents_a_game() -> None:
    cases = read_files([SAMPLE]).cases[::4]
    for place, kind, scheme in itertools.product(range(-4, 4), ErrorType, SCHEMES):
        answer = partial(constant_answer, place=place, kind=kind)
        assert earned(answer, scheme, cases) <= 0.02
    assert earned(lambda note: "verdict: safe", Medserl(), cases) == 0.0


@pytest.mark.parametrize("scheme", SCHEMES, ids=["zero_sum", "medserl"])
def test_trick_earns_no_more_than_a_caught_attack_under_a_reading_judge(
    scheme: RewardScheme,
) -> None:
    for trick in TRICKS:
        best = trick.best(scheme, "reads")
        assert best < 0 and best <= caught(trick, scheme), trick.name
        for answer in ANSWERS:
            record = trick.played(answer, "reads")
            failed = record.outcome is Outcome.INVALID_ATTACK or record.attack_failed
            assert failed or record.cut_off, trick.name
            assert trick.cuts or "game" not in scheme.rewards(record)[Role.ATTACKER], trick.name


@pytest.mark.parametrize("scheme", SCHEMES, ids=["zero_sum", "medserl"])
def test_under_labels_exactly_those_pay_that_the_rules_let_through(scheme: RewardScheme) -> None:
    for trick in TRICKS:
        played_for_nothing = scheme == Medserl() and trick.group == "a decoy with an error"
        pays = trick.rule == "" and not played_for_nothing and not trick.cuts
        assert (trick.best(scheme, "labels") > caught(trick, scheme)) == pays, trick.name


def test_rules_refuse_all_but_what_takes_medicine_to_see() -> None:
    valid_groups = {"harmless rewording", "a decoy with an error", "the assessor is cut off"}
    for trick in TRICKS:
        by_another_dose = trick.name == "error put right by another right dose"
        assert (trick.rule == "") == (trick.group in valid_groups or by_another_dose), trick.name


def test_honest_attacks_are_valid_under_every_judge() -> None:
    for attack, judge in itertools.product(HONEST, ("labels", "reads")):
        assert attack.rule == "" and not attack.played(ANSWERS[0], judge).attack_failed, attack.name


def test_dressing_and_rewording_pay_in_the_baseline_scheme() -> None:
    baseline = MedicalGeneralSum()
    for trick in TRICKS:
        if trick.group in ("dressing", "harmless rewording"):
            assert trick.best(baseline, "reads") > caught(trick, baseline), trick.name
