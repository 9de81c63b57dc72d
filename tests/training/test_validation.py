"""verl's validation is scored as MEDEC's shared task scores it, on the evaluation rows alone."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from game.builders import game, spec
from note_files import SAMPLE

from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.scoring.metrics import score
from medserl_agentloop.scoring.notes import Prediction, read_reference
from medserl_agentloop.scoring.validation import ANSWER, TEXT_ID, official_notes, official_scores, validation_facts

ROWS = build_eval_rows([SAMPLE])[0]
NOTES = read_reference([SAMPLE]).notes


def dataset(rows: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(dataframe={name: [row[name] for row in rows] for name in ("data_source", "extra_info")})


def said(verdict: str | None, sentence: str | None = None) -> str:
    return json.dumps({"verdict": verdict, "sentence": sentence, "correction": None})


def scored(rows: list[dict[str, Any]], answers: list[str | None]) -> tuple[dict[str, float], str]:
    """All metrics and the last line of a validation in which each row was answered so."""
    sources, ids = [row["data_source"] for row in rows], [row["extra_info"]["text_id"] for row in rows]
    found = list(official_scores(official_notes(dataset(rows)), sources, {TEXT_ID: ids, ANSWER: answers}))
    return {name: value for metrics, _ in found for name, value in metrics.items()}, found[-1][1] if found else ""


def test_the_numbers_are_those_of_the_scorer() -> None:
    answers: list[str | None] = []
    predictions = []
    for n, note in enumerate(NOTES):
        flag = n % 3 == 0
        first = note.sentences[0]
        answers.append(
            None if n == 5 else said(None) if n == 7 else said("harmful", first.text) if flag else said("safe")
        )
        if n != 5:
            predictions.append(Prediction(note.text_id, flag, first.id if flag else -1, parsed=n != 7))
    metrics, line = scored(ROWS, answers)
    expected = score(NOTES, predictions, resamples=0)
    for name in ("flag_accuracy", "sentence_accuracy", "f1"):
        assert metrics[f"val-core/toy_eval/{name}"] == expected.measures[name].value
    for name in ("readable", "precision", "recall", "false_positive_rate"):
        assert metrics[f"val-aux/toy_eval/{name}"] == expected.measures[name].value
    diagnosis = expected.groups["error type"]["diagnosis"].measures["flag_accuracy"].value
    assert metrics["val-aux/toy_eval/error_type/diagnosis/flag_accuracy"] == diagnosis
    assert (metrics["val-aux/toy_eval/unreadable"], metrics["val-aux/toy_eval/missing"]) == (1, 1)
    share = sum(not note.flag for note in NOTES) / len(NOTES)
    assert metrics["val-aux/toy_eval/floor/always_no_error/flag_accuracy"] == share
    assert line.startswith(f"validation on toy_eval, {len(NOTES)} notes: flag accuracy 0.") and "is below " in line
    assert all(isinstance(value, float) and re.fullmatch(r"[\w/.-]+", name) for name, value in metrics.items())


def test_several_samples_of_a_note_are_a_vote() -> None:
    right = [said(Label.HARMFUL.value if note.flag else Label.SAFE.value) for note in NOTES]
    wrong = [said(Label.SAFE.value if note.flag else Label.HARMFUL.value) for note in NOTES]
    metrics, _ = scored(ROWS * 3, right + wrong + right)
    assert metrics["val-core/toy_eval/flag_accuracy"] == 1.0
    metrics, _ = scored(ROWS * 3, right + wrong + wrong)
    assert metrics["val-core/toy_eval/flag_accuracy"] == 0.0


def test_rows_of_games_are_not_scored() -> None:
    rows = [{**row, "extra_info": {**row["extra_info"], "split": "val"}} for row in ROWS]
    assert scored(rows, [said("safe")] * len(rows)) == ({}, "")


@pytest.mark.parametrize("text", ["<answer>\nverdict: safe\n</answer>", "no answer at all"])
def test_the_facts_of_a_game_survive_verl(text: str) -> None:
    """Texts: a number would become a metric of verl's, a list would break its metrics."""
    played = game("vanilla_harmful")
    played.play(text)
    facts = validation_facts(played.record)
    assert facts[TEXT_ID] == played.record.spec.text_id
    answer = facts[ANSWER]
    assert isinstance(answer, str) and json.loads(answer)["verdict"] == ("safe" if "safe" in text else None)


def test_a_void_game_has_no_answer() -> None:
    record = MedicalRecord(spec=spec("vanilla_benign"), void="assessor: generation aborted")
    assert validation_facts(record)[ANSWER] is None
