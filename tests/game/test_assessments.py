"""Several assessments of one attack: what each earns, what the attacker earns, what records and metrics make of it."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from game.builders import (
    ERROR_SENTENCE,
    HARMFUL_ANSWER,
    SAFE_ANSWER,
    SUBTLE_NOTE,
    any_game,
    assessment_record,
    attack_text,
    finished,
    spec,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.metrics import role_metrics, trained_role_won, validation_numbers
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import AssessmentRecord, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, MedserlTerms, reward_game
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.games.medical.types import Category, Label, Role

TERMS = MedserlTerms()
WORST_HONEST = -TERMS.win + TERMS.largest_edit + TERMS.unrealistic

assessments = st.builds(
    assessment_record,
    verdict=st.sampled_from([Label.SAFE, Label.HARMFUL, None]),
    sentence=st.sampled_from([None, ERROR_SENTENCE]),
    violations=st.sampled_from([[], ["no_reasoning"]]),
    tokens=st.integers(1, 50),
)
schemes = st.sampled_from(sorted(SCHEMES))


@st.composite
def several(draw: st.DrawFn) -> MedicalRecord:
    """Any game whose note was assessed two to five times."""
    record = draw(any_game().filter(lambda game: game.assessment is not None))
    return record.model_copy(update={"further_assessments": draw(st.lists(assessments, min_size=1, max_size=4))})


def rewarded(record: MedicalRecord, name: str = "medserl") -> MedicalRecord:
    record = record.model_copy()
    reward_game(record, SCHEMES[name])
    return record


def assessed(*right: bool | str | None, **parts: Any) -> MedicalRecord:
    """An injected error, and whether each assessment found it; None for one that nobody can read, "cut" if cut off."""
    verdicts = {True: Label.HARMFUL, False: Label.SAFE}
    said = [assessment_record(verdict=verdicts.get(found), truncated=found == "cut") for found in right]
    return finished(Outcome.MISSED_ERROR, **parts).model_copy(
        update={"assessment": said[0], "further_assessments": said[1:]}
    )


def alone(record: MedicalRecord, assessment: AssessmentRecord) -> MedicalRecord:
    return record.model_copy(update={"assessment": assessment, "further_assessments": []})


@given(several(), schemes)
def test_each_assessment_earns_what_it_would_earn_alone(record: MedicalRecord, name: str) -> None:
    game = rewarded(record, name)
    assume(record.outcome is not Outcome.VOID)
    first = 0 if record.attack is None else 1
    said = [record.assessment, *record.further_assessments]
    earned = [SCHEMES[name](alone(record, each)).get(Role.ASSESSOR) for each in said if each is not None]
    assert [game.turn_rewards[first + number] for number in range(len(said))] == earned
    assert game.reward(Role.ASSESSOR) == pytest.approx(sum(sum(each.values()) for each in earned if each) / len(said))


@given(several(), schemes.filter(lambda name: name != "learnable"))
def test_the_attacker_earns_the_mean_over_the_assessments(record: MedicalRecord, name: str) -> None:
    assume(record.attack is not None and record.outcome is not Outcome.VOID)
    game = rewarded(record, name)
    every = [rewarded(alone(record, each.assessment), name) for each in record.by_assessment if each.assessment]
    paid = [single.reward(Role.ATTACKER) or 0.0 for single in every]
    assert game.reward(Role.ATTACKER) == pytest.approx(sum(paid) / len(paid))
    assert min(paid) - 1e-9 <= (game.reward(Role.ATTACKER) or 0.0) <= max(paid) + 1e-9  # the range stays
    assert game.turn_rewards[0] == game.rewards[Role.ATTACKER]


# Assessments that find the error, that miss it, that nobody can read (-), and that were cut off.
LEARNABLE = {
    "miss miss miss miss": -1.0, "find miss miss miss": 0.0, "find find miss miss": 1.0, "find find find miss": 0.0,
    "find find find find": -1.0, "- -": 0.0, "find -": 0.0, "miss - -": 0.0,
    "find miss - -": 1.0, "find miss find -": 1 / 3,
    "cut cut cut cut": -1.0, "find cut": -0.5, "find miss cut cut": 0.0, "find miss miss cut": 0.0,
    "find miss miss - -": 1 / 3,
}  # fmt: skip


@pytest.mark.parametrize(("answers", "worth"), LEARNABLE.items())
def test_an_attack_is_learnable_where_half_of_the_readable_assessments_find_it(answers: str, worth: float) -> None:
    record = assessed(*({"find": True, "miss": False, "-": None}.get(answer, answer) for answer in answers.split()))
    attacker = rewarded(record, "learnable").rewards[Role.ATTACKER]
    assert attacker["learnable"] == pytest.approx(worth)
    usual = rewarded(record).rewards[Role.ATTACKER]
    assert {**attacker, "learnable": 0} == {**{n: part for n, part in usual.items() if n != "game"}, "learnable": 0}


@given(several())
def test_learnable_leaves_honest_play_undominated(record: MedicalRecord) -> None:
    """As in ``medserl``: whatever an honest attack meets, one that does not count earns less."""
    assume(record.attack is not None and record.category.has_attack and record.outcome is not Outcome.VOID)
    attacker = rewarded(record, "learnable").rewards[Role.ATTACKER]
    core = sum(part for name, part in attacker.items() if name != "format")
    if "validity" in attacker:
        assert core == -2.0 < WORST_HONEST
        assert "learnable" not in attacker
    elif record.spec.task is Category.DECOY_BENIGN:
        assert core == 0.0
    else:
        assert WORST_HONEST <= core <= TERMS.win


@given(several() | any_game(), schemes)
def test_all_assessments_and_their_rewards_survive_json_and_score_the_same(record: MedicalRecord, name: str) -> None:
    game = rewarded(record, name)
    read = MedicalRecord.model_validate(json.loads(json.dumps(game.to_json())))
    assert read == game
    assert [each.rewards for each in read.by_assessment] == [each.rewards for each in game.by_assessment]
    assert SCHEMES[name](read) == SCHEMES[name](game)
    if not record.further_assessments:  # it is paid and written as if there could be no others
        assert game.rewards == SCHEMES[name](record)
        assert not {"turn_rewards", "further_assessments"} & set(game.to_json())


def test_a_validation_s_numbers_are_shares_of_all_answers() -> None:
    facts = validation_numbers(assessed(True, True, False, None))
    assert (facts["acc"], facts["undetected"]) == (0.5, 0.25)


@given(st.lists(several() | any_game(), max_size=8))
def test_every_assessment_counts_as_a_game_does(records: list[MedicalRecord]) -> None:
    found = role_metrics(records)
    single = {"further_assessments": []}
    apart = role_metrics([each.model_copy(update=single) for record in records for each in record.by_assessment])
    counted = re.compile("selfplay/(assessor/|shortcut/|attacker/success_rate|attacker/decided)").match
    assert {k: v for k, v in found.items() if counted(k)} == {k: v for k, v in apart.items() if counted(k)}
    assert found["selfplay/games"] == len(records)
    attacked = [game for game in records if game.attack is not None and game.outcome is not Outcome.VOID]
    assert found.get("selfplay/attacker/turns", 0) == len(attacked)


@pytest.mark.parametrize(
    ("right", "attacker_won", "assessor_won"),
    [((True, True, False), False, True), ((False, None), True, False), ((True, False), False, False)],
)
def test_the_majority_of_the_assessments_decides_a_game_against_an_opponent(
    right: tuple[bool | None, ...], attacker_won: bool, assessor_won: bool
) -> None:
    for role, won in ((Role.ASSESSOR, attacker_won), (Role.ATTACKER, assessor_won)):
        opponent = OpponentRecord(role=role, kind="pool", version="1")
        assert trained_role_won(assessed(*right, opponent=opponent)) is won


def test_all_assessments_are_shown_with_their_verdicts() -> None:
    sections = MedicalGameInteraction.sections(rewarded(assessed(True, False, None)))
    titles = [section.title for section in sections if section.owner == "assessor"]
    assert [title.split()[1] for title in titles] == ["harmful", "safe", "unreadable"]


def test_the_game_is_over_after_the_last_assessment() -> None:
    game = MedicalGame(spec(Category.ADVERSARIAL_BENIGN), EditLimits(), MEDSERL, assessments=3)
    game.play(attack_text(SUBTLE_NOTE))
    for answer in (SAFE_ANSWER, HARMFUL_ANSWER, HARMFUL_ANSWER):
        assert (game.next_role, game.note) == (Role.ASSESSOR, SUBTLE_NOTE)
        game.play(answer)
    assert game.next_role is None
    assert [each.verdict for each in game.record.assessments] == [Label.SAFE, Label.HARMFUL, Label.HARMFUL]


def test_rewards_of_a_scheme_that_leaves_a_role_out_are_of_the_other_alone() -> None:
    flat: Callable[[MedicalRecord], Any] = lambda record: {Role.ATTACKER: {"flat": 0.25}}  # noqa: E731
    record = assessed(True, False)
    reward_game(record, flat)
    assert record.rewards == {Role.ATTACKER: {"flat": 0.25}}
    assert record.turn_rewards == {0: {"flat": 0.25}}
