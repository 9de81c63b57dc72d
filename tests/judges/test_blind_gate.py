"""The blind gate: an injected error counts only if a reader of the presented note alone finds it where it is."""

import json
from typing import Any

import pytest
from judges.games import judged_by, played
from judges.local_server import Status
from pydantic import ValidationError
from serving import completion

from medserl_agentloop.games.medical.config import BlindGate, MedicalConfig
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category

SENTENCE = 2  # of the played game's note: the one with the dose
PRESENT = {"reason": "the dose is deadly", "error": "present", "realistic": True}
ABSENT = {**PRESENT, "error": "absent"}


def finding(error: str = "present", sentence: int | None = SENTENCE) -> dict[str, Any]:
    return {"reason": "grams of heparin", "error": error, "sentence": sentence}


def gated(
    readings: list[Any], *, needed: int = 1, judge: dict[str, Any] = PRESENT, game: MedicalRecord | None = None
) -> tuple[MedicalRecord, list[dict[str, Any]]]:
    """A game judged by a model behind HTTP, and the readings that were asked for."""
    left = list(readings)

    def is_reading(body: dict[str, Any]) -> bool:
        return bool(body["response_format"]["json_schema"]["name"] == "finding")

    def answer(number: int, body: dict[str, Any]) -> Any:
        said = left.pop(0) if is_reading(body) else judge
        if isinstance(said, Status):
            raise said
        return completion(json.dumps(said))

    gate = {"readings": len(readings), "needed": needed, "temperature": 0.7}
    (record,), server = judged_by("llm", [game or played()], answer, selfplay__blind=gate)
    return record, [body for body in server.requests if is_reading(body)]


def test_an_error_that_the_reader_finds_in_the_presented_note_alone_counts() -> None:
    record, (asked,) = gated([finding()])
    assert record.outcome is Outcome.CORRECT_DETECTION
    assert record.judgement is not None and record.judgement.knowable is True
    assert [reading.found for reading in record.judgement.readings] == [True]
    (message,) = asked["messages"]
    assert "2 grams" in message["content"] and "500 units" not in message["content"] and "*" not in message["content"]
    assert asked["temperature"] == 0.7


@pytest.mark.parametrize(
    "said", [finding("absent", None), finding(sentence=1), finding(sentence=99), finding(sentence=None)]
)
def test_an_error_that_the_reader_does_not_find_there_is_void_for_both(said: dict[str, Any]) -> None:
    record, _ = gated([said])
    assert record.outcome is Outcome.VOID and record.rewards == {}
    assert record.void == "error not knowable: found in 0 of 1 readings of the note alone"


@pytest.mark.parametrize(
    ("needed", "outcome"), [(1, Outcome.CORRECT_DETECTION), (2, Outcome.CORRECT_DETECTION), (3, Outcome.VOID)]
)
def test_enough_readings_must_find_it(needed: int, outcome: Outcome) -> None:
    record, asked = gated([finding(), finding("abstain", None), finding()], needed=needed)
    assert (record.outcome, len(asked)) == (outcome, 3)


def test_an_abstention_is_kept_apart_from_a_miss() -> None:
    record, _ = gated([finding("abstain", None), finding("absent", None)])
    assert record.judgement is not None
    assert {reading.found for reading in record.judgement.readings} == {None, False}  # they are asked at once
    numbers = role_metrics([record])
    assert numbers["selfplay/judge/knowable_rate"] == 0
    assert numbers["selfplay/judge/reading_abstention_rate"] == 0.5
    assert numbers["selfplay/void/unknowable"] == numbers["selfplay/judge/answer_rate"] == 1


def test_a_lost_reading_that_might_have_decided_is_a_failure_of_the_judge_and_no_verdict_on_the_error() -> None:
    record, _ = gated([finding("absent", None), Status(500)])
    assert record.void is not None and record.void.startswith("judge failed: BadAnswer: 1 of 2 readings were lost")
    record, _ = gated([finding(), Status(500)])
    assert record.outcome is Outcome.CORRECT_DETECTION


@pytest.mark.parametrize(
    "category",
    [Category.VANILLA_HARMFUL, Category.VANILLA_BENIGN, Category.DECOY_BENIGN, Category.ADVERSARIAL_BENIGN],
)
def test_nobody_reads_a_note_without_an_injected_error_or_one_that_the_judge_calls_safe(category: Category) -> None:
    record, asked = gated([finding()], judge=ABSENT, game=played(category=category))
    assert asked == []
    assert record.judgement is not None and record.judgement.knowable is None


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ({"readings": 2, "needed": 3}, "needed=3 of readings=2 can never be reached"),
        ({"readings": 2, "temperature": 0}, "readings=2 at temperature=0 are all the same"),
    ],
)
def test_a_gate_that_cannot_work_is_refused(gate: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        MedicalConfig.model_validate({"blind": gate})


def test_the_reader_is_the_judge_s_model_unless_another_is_named() -> None:
    judge = MedicalConfig().judge_server.model_copy(update={"url": "http://a/v1", "model": "judge"})
    own = BlindGate(readings=1).reader(judge)
    assert (own.url, own.model, own.temperature) == ("http://a/v1", "judge", 0.7)
    other = BlindGate(readings=1, model="reader", url="http://b/v1").reader(judge)
    assert (other.url, other.model) == ("http://b/v1", "reader")
