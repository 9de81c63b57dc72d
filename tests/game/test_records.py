"""Records and the facts of rows travel between processes and in files: nothing may be lost or slipped in."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from game.builders import attack_record, finished, spec
from pydantic import ValidationError

from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.games.medical.records import SCHEMA_VERSION, InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import medserl
from medserl_agentloop.games.medical.types import Category, ErrorType, GameSpec, Label, Role


def texts(*fields: str) -> dict[str, str]:
    return dict.fromkeys(fields, "free text")


def full_record() -> MedicalRecord:
    """A record with every field set."""
    record = finished(
        Outcome.CORRECT_DETECTION,
        category="adversarial_harmful",
        facts={**texts("seed_note", "text_id", "vignette_id"), "error_type": ErrorType.CAUSAL_ORGANISM, "index": 3},
        attack={**texts("response", "note", "reasoning"), "violations": ["text_after_note"]},
        assessment={**texts("response", "sentence", "correction", "reasoning"), "error_type": ErrorType.DIAGNOSIS},
        error_sentences=["free text"],
        **texts("scheme", "profile", "context", "uid"),
        **{"step": 5, "session": 2, "policy_version": 4},
        players={Role.ASSESSOR: "gpt"},
        opponent=OpponentRecord(role=Role.ATTACKER, kind="pool", version="global_step_3"),
        finished=datetime(2026, 11, 22, 11, 25, 32, tzinfo=UTC),
        seconds=[1.25, 0.5],
    )
    record.judgement.realistic, record.judgement.reason = True, "free text"
    record.rewards = medserl(record)
    return record


def test_a_full_record_which_leaves_no_field_at_its_default_survives_json() -> None:
    record, defaults = full_record(), MedicalRecord(spec=spec()).to_json()
    written = record.to_json()
    assert {key for key, value in written.items() if value == defaults.get(key, ...)} == {"schema_version", "void"}
    again = MedicalRecord.model_validate(json.loads(json.dumps(written)))
    assert again == record and set(again.rewards) == set(Role)
    assert written["schema_version"] == SCHEMA_VERSION == 1


@pytest.mark.parametrize("outcome", Outcome)
def test_the_outcome_stands_in_json_for_readers_in_other_languages(outcome: Outcome) -> None:
    record = finished(outcome)
    written = record.to_json()
    assert written["outcome"] == outcome.value
    old = {name: value for name, value in written.items() if name != "outcome"}  # records of before it was written
    assert MedicalRecord.model_validate(old) == record
    assert MedicalRecord.model_validate({**written, "outcome": "nonsense"}) == record


VERSION_1 = """{"schema_version": 1, "spec": {"category": "vanilla_benign", "target_label": "safe", "seed_note":
"He is well.", "error_note": null, "clean_note": null, "error_type": null, "error_sentence": null,
"corrected_sentence": null, "text_id": "ms-1", "vignette_id": "ms-1", "index": 4}, "presented_note": "He is well.",
"error_sentences": [], "attack": null, "assessment": {"response": "x", "tokens": 3, "truncated": false, "verdict":
"safe", "sentence": null, "error_type": null, "correction": null, "reasoning": "y", "violations": []}, "judgement":
{"judge": "labels", "label": "safe", "realistic": null, "reason": ""}, "rewards": {"assessor": {"game": 1.0,
"format": 0.0}}, "scheme": "medserl", "void": null, "profile": "medserl", "context": "isolated", "step": 2, "uid":
"u", "session": 0, "policy_version": 1}"""


def test_a_record_of_the_first_version_is_read_without_the_fields_that_came_later() -> None:
    record = MedicalRecord.model_validate(json.loads(VERSION_1))
    assert record.outcome is Outcome.CORRECT_REJECTION
    assert (record.reward(Role.ASSESSOR), record.players) == (1.0, {})
    assert (record.finished, record.seconds) == (None, [])
    assert not record.to_json().keys() & {"finished", "seconds"}


LEFT_OUT = {"attack": "note", "assessment": "verdict", "judgement": "label"}


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        (None, "schema_version", SCHEMA_VERSION + 1, "schema_version\n  Input should be less than or equal to 1"),
        *((part, "extra", 1, "extra") for part in (None, "attack", "assessment")),
        *((part, key, ..., key) for part, key in LEFT_OUT.items()),
    ],
)
def test_a_newer_version_an_unknown_key_and_a_part_without_what_it_came_to_are_refused(
    part: str | None, key: str, value: object, message: str
) -> None:
    raw = {**full_record().to_json(), **({"a_field_to_come": 1} if key == "schema_version" else {})}
    changed = raw if part is None else raw[part]
    changed.pop(key, None)
    if value is not ...:
        changed[key] = value
    with pytest.raises(ValidationError, match=message):
        MedicalRecord.model_validate(raw)


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ({"void": "judge failed"}, Outcome.VOID),
        ({"judgement": None}, Outcome.VOID),
        ({"assessment": None}, Outcome.VOID),
        ({"judgement": Judgement(judge="llm", label=None)}, Outcome.VOID),
        ({"attack": attack_record(invalid=InvalidAttack.UNPARSED), "judgement": None}, Outcome.INVALID_ATTACK),
    ],
)
def test_a_game_without_a_valid_attack_and_a_judged_assessment_has_no_verdict(
    parts: dict[str, Any], outcome: Outcome
) -> None:
    assert finished(Outcome.MISSED_ERROR).model_copy(update=parts).outcome is outcome


# The facts of a parquet row, as the game reads them.

ROW = {"category": "vanilla_benign", "target_label": "safe", "seed_note": "A note.", "index": 41, "text_id": "ms-7"}


@pytest.mark.parametrize("error_type", ["", "Lab / Serum value"])
def test_a_row_is_read_with_absent_facts_and_a_type_of_ones_own_as_nothing(error_type: str) -> None:
    facts = GameSpec.from_extra_info({**ROW, "error_note": None, "error_type": error_type, "error_sentence": ""})
    assert facts == GameSpec(Category.VANILLA_BENIGN, Label.SAFE, "A note.", text_id="ms-7", index=41)


def test_a_longer_note_than_any_is_refused_without_being_quoted() -> None:
    with pytest.raises(ValueError, match="at most 100000 characters") as caught:
        GameSpec.from_extra_info({**ROW, "seed_note": "x" * 100_001})
    assert len(str(caught.value)) < 400


def test_a_full_row_is_read() -> None:
    facts = {
        **ROW, "category": "adversarial_harmful", "target_label": "harmful", "error_note": "E", "clean_note": "C",
        "error_type": "causalOrganism", "error_sentence": "es", "corrected_sentence": "cs", "vignette_id": "v",
    }  # fmt: skip
    spec = GameSpec.from_extra_info(facts)
    assert asdict(spec) == facts
    assert (spec.category, spec.error_type) == (Category.ADVERSARIAL_HARMFUL, ErrorType.CAUSAL_ORGANISM)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("category", "adversarial", [c.value for c in Category]),
        ("category", None, [c.value for c in Category]),
        ("target_label", "benign", ["safe", "harmful"]),
        ("seed_note", "", ["valid string"]),
        ("seed_note", None, ["valid string"]),
        ("seed_note", 5, ["valid string"]),
        ("clean_note", ["C"], ["valid string"]),
        ("error_sentence", 1.5, ["valid string"]),
        ("index", "x", ["valid integer"]),
    ],
)
def test_a_bad_row_is_refused_with_row_key_value_and_what_is_allowed(key: str, value: Any, allowed: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        GameSpec.from_extra_info({**ROW, key: value})
    row = f"row {value if key == 'index' else 41}"
    parts = (row, "ms-7", repr(key), repr(value), "medserl data convert", *allowed)
    assert all(part in str(error.value) for part in parts)
