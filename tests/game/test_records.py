"""Records and the facts of rows travel between processes and in files; several assessments of one
attack.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from fuzz.run import HERE
from game.builders import ERROR_SENTENCE, any_game, assessment_record, finished, spec
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.games.medical.case import Category, ErrorType, GameSpec, Label, Role
from medserl_agentloop.games.medical.metrics import (
    role_metrics,
    trained_role_won,
    validation_numbers,
)
from medserl_agentloop.games.medical.records import (
    SCHEMA_VERSION,
    AssessmentRecord,
    MedicalRecord,
    Outcome,
)
from medserl_agentloop.games.medical.rewards import (
    SCHEMES,
    Medserl,
    RewardScheme,
    load_scheme,
    reward_game,
)


def texts(*fields: str) -> dict[str, str]:
    return dict.fromkeys(fields, "free text")


def full_record() -> MedicalRecord:
    """A record with every field set."""
    facts = {**texts("seed_note", "text_id", "vignette_id"), "index": 3}
    said = texts("response", "sentence", "correction", "reasoning")
    record = finished(
        Outcome.CORRECT_DETECTION,
        category="adversarial_harmful",
        facts={**facts, "error_type": ErrorType.CAUSAL_ORGANISM},
        attack={**texts("response", "note", "reasoning"), "violations": ["text_after_note"]},
        assessment={**said, "error_type": ErrorType.DIAGNOSIS},
        error_sentences=["free text"],
        **texts("scheme", "profile", "context", "uid"),
        **{"step": 5, "session": 2, "policy_version": 4},
        players={Role.ASSESSOR: "gpt"},
        opponent=OpponentRecord(role=Role.ATTACKER, kind="endpoint", version="model"),
        finished=datetime(2026, 11, 22, 11, 25, 32, tzinfo=UTC),
        seconds=[1.25, 0.5],
    )
    record.judgement.realistic, record.judgement.reason = True, "free text"
    record.rewards = Medserl().rewards(record)
    return record


def test_a_full_record_which_leaves_no_field_at_its_default_survives_json() -> None:
    record, defaults = full_record(), MedicalRecord(spec=spec()).to_json()
    written = record.to_json()
    assert {key for key, value in written.items() if value == defaults.get(key, ...)} == {
        "schema_version",
        "void",
    }
    again = MedicalRecord.model_validate(json.loads(json.dumps(written)))
    assert again == record and set(again.rewards) == set(Role)
    assert written["schema_version"] == SCHEMA_VERSION == 1


def test_first_version_record_is_read_without_later_fields() -> None:
    record = MedicalRecord.model_validate_json((HERE / "corpus/records/version_1").read_bytes())
    assert record.outcome is Outcome.CORRECT_REJECTION
    assert (record.reward(Role.ASSESSOR), record.players, record.seconds) == (1.0, {}, [])
    assert not record.to_json().keys() & {"finished", "seconds"}


@pytest.mark.parametrize(("key", "value"), [("schema_version", 2), ("a_field_to_come", 1)])
def test_a_record_of_a_newer_version_is_refused(key: str, value: int) -> None:
    with pytest.raises(ValidationError, match=key):
        MedicalRecord.model_validate({**full_record().to_json(), key: value})


# The facts of a parquet row, as the game reads them.

ROW = {"category": "vanilla_benign", "clean_note": "A note.", "index": 41, "text_id": "ms-7"}


@pytest.mark.parametrize("error_type", ["", "Lab / Serum value"])
def test_a_row_is_read_with_absent_facts_and_a_type_of_ones_own_as_nothing(error_type: str) -> None:
    facts = GameSpec.from_extra_info(
        {**ROW, "error_note": None, "error_type": error_type, "error_sentence": ""}
    )
    note = "A note."
    assert facts == GameSpec(
        Category.VANILLA_BENIGN, Label.SAFE, note, clean_note=note, text_id="ms-7", index=41
    )


def test_a_full_row_is_read() -> None:
    facts = {
        **ROW, "category": "adversarial_harmful", "target_label": "harmful", "error_note": "E",
        "clean_note": "C", "error_type": "causalOrganism", "error_sentence": "es",
        "corrected_sentence": "cs", "vignette_id": "v", "sentences": [{"id": 2, "text": "es"}],
    }  # fmt: skip
    spec = GameSpec.from_extra_info(facts)
    assert asdict(spec) == facts | {"seed_note": "E", "sentences": {2: "es"}}


# several assessments of one attack: what each earns, and what records and metrics make of them


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
    further = draw(st.lists(assessments, min_size=1, max_size=4))
    return record.model_copy(update={"further_assessments": further})


def rewarded(record: MedicalRecord, name: str = "medserl") -> MedicalRecord:
    record = record.model_copy()
    reward_game(record, load_scheme(name))
    return record


def assessed(*right: bool | None, **parts: Any) -> MedicalRecord:
    """An injected error, and whether each assessment found it; None for one nobody can read."""
    verdicts = {True: Label.HARMFUL, False: Label.SAFE, None: None}
    said = [assessment_record(verdict=verdicts[found]) for found in right]
    record = finished(Outcome.MISSED_ERROR, **parts)
    return record.model_copy(update={"assessment": said[0], "further_assessments": said[1:]})


def alone(record: MedicalRecord, assessment: AssessmentRecord) -> MedicalRecord:
    return record.model_copy(update={"assessment": assessment, "further_assessments": []})


@given(several(), schemes)
def test_each_assessment_earns_what_it_would_earn_alone(record: MedicalRecord, name: str) -> None:
    game = rewarded(record, name)
    assume(record.outcome is not Outcome.VOID)
    first, said, scheme = record.first_assessment, record.assessments, load_scheme(name)
    earned = [scheme.rewards(alone(record, each))[Role.ASSESSOR] for each in said]
    assert [game.turn_rewards[first + number] for number in range(len(said))] == earned
    mean = sum(sum(each.values()) for each in earned) / len(said)
    assert game.reward(Role.ASSESSOR) == pytest.approx(mean)


@given(several(), schemes)
def test_the_attacker_earns_the_mean_over_the_assessments(record: MedicalRecord, name: str) -> None:
    assume(record.attack is not None and record.outcome is not Outcome.VOID)
    game = rewarded(record, name)
    every = [rewarded(alone(record, each), name) for each in record.assessments]
    paid = [single.reward(Role.ATTACKER) for single in every]
    assert game.reward(Role.ATTACKER) == pytest.approx(sum(paid) / len(paid))  # in their range
    assert game.turn_rewards[0] == game.rewards[Role.ATTACKER]


@given(several() | any_game(), schemes)
def test_all_assessments_and_their_rewards_survive_json_and_score_the_same(
    record: MedicalRecord, name: str
) -> None:
    game = rewarded(record, name)
    read = MedicalRecord.model_validate(json.loads(json.dumps(game.to_json())))
    assert read == game
    for before, after in zip(game.by_assessment, read.by_assessment, strict=True):
        assert before.rewards == after.rewards
    if record.is_void:
        return
    assert load_scheme(name).rewards(read) == load_scheme(name).rewards(game)
    if not record.further_assessments:  # it is paid and written as if there could be no others
        assert game.rewards == load_scheme(name).rewards(record)
        assert not {"turn_rewards", "further_assessments"} & set(game.to_json())


def test_validation_numbers_are_shares_of_all_answers() -> None:
    facts = validation_numbers(assessed(True, True, False, None))
    assert (facts["acc"], facts["undetected"]) == (0.5, 0.25)


@given(st.lists(any_game(), max_size=8), st.integers(2, 4))
def test_the_same_play_has_the_same_metrics_however_often_it_is_assessed(
    records: list[MedicalRecord], times: int
) -> None:
    """Rates are per attack or per assessment; only numbers of assessments grow."""
    more = [{"further_assessments": record.assessments * (times - 1)} for record in records]
    pairs = zip(records, more, strict=True)
    repeated = [rewarded(record.model_copy(update=further)) for record, further in pairs]
    once, many = role_metrics([rewarded(record) for record in records]), role_metrics(repeated)
    counts = {
        n: many[n] for n in ("selfplay/assessor/turns", "selfplay/shortcut/compared") if n in many
    }
    assert many == pytest.approx(once | counts)
    kept = [MedicalRecord.model_validate(record.model_dump()) for record in repeated]
    assert role_metrics(kept) == many


@pytest.mark.parametrize(
    ("right", "attacker_won", "assessor_won"),
    [
        ((True,), False, True), ((False,), True, False), ((None,), False, False),
        ((True, True, False), False, True), ((False, None), True, False),
        ((True, False), False, False),
    ],
)  # fmt: skip
def test_majority_of_assessments_decides_a_game_against_an_opponent(
    right: tuple[bool | None, ...], attacker_won: bool, assessor_won: bool
) -> None:
    for role, won in ((Role.ASSESSOR, attacker_won), (Role.ATTACKER, assessor_won)):
        opponent = OpponentRecord(role=role, kind="endpoint", version="model")
        assert trained_role_won(assessed(*right, opponent=opponent)) is won


def test_rewards_of_a_scheme_that_leaves_a_role_out_are_of_the_other_alone() -> None:
    class Flat(RewardScheme):
        def rewards(self, record: MedicalRecord) -> Any:
            return {Role.ATTACKER: {"flat": 0.25}}

    record = assessed(True, False)
    reward_game(record, Flat())
    assert record.rewards == {Role.ATTACKER: {"flat": 0.25}}
    assert record.turn_rewards == {0: {"flat": 0.25}}
