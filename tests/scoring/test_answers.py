"""verl's validation is scored as MEDEC's shared task scores it, on the evaluation rows alone."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from note_files import OFFICIAL, SAMPLE, medec_file

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edit import one_line, split_sentences
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.scoring.metrics import score
from medserl_agentloop.scoring.notes import CUT_OFF, TEXTS, UNREADABLE, Prediction, quoted_sentence

ROWS = build_eval_rows([SAMPLE])[0]
NOTES = read_reference([SAMPLE]).notes


def dataset(rows: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(
        dataframe={name: [row[name] for row in rows] for name in ("data_source", "extra_info")}
    )


Answer = tuple[str | None, str | None]
"""Verdict and quoted sentence; no verdict is no answer."""


def validated(rows: list[dict[str, Any]], answers: list[Answer]) -> tuple[dict[str, float], str]:
    """All metrics and the last line of a validation in which each row was answered so."""
    sources = [row["data_source"] for row in rows]
    ids = [row["extra_info"]["text_id"] for row in rows]
    verdicts, sentences = (list(column) for column in zip(*answers, strict=True))
    cut = [CUT_OFF if number == 7 else "" for number in range(len(rows))]
    none = [None] * len(rows)
    facts = dict(zip(TEXTS, (ids, verdicts, sentences, none, none, cut), strict=True))
    game = MedicalGameInteraction(MedicalConfig(judge="labels"))
    game.view.read_validation_set(dataset(rows))
    found = list(game.view.validation_scores(sources, facts))
    metrics = {name: value for metrics, _ in found for name, value in metrics.items()}
    return metrics, found[-1][1] if found else ""


def test_the_numbers_are_those_of_the_scorer() -> None:
    answers: list[Answer] = []
    predictions = []
    for n, note in enumerate(NOTES):
        flag = n % 3 == 0
        number, first = next(iter(note.sentences.items()))
        verdict = None if n == 5 else UNREADABLE if n == 7 else "harmful" if flag else "safe"
        answers.append((verdict, first if verdict == "harmful" else None))
        if n != 5:
            number = number if flag else -1
            predictions.append(Prediction(note.text_id, flag, number, parsed=n != 7))
    metrics, line = validated(ROWS, answers)
    expected = score(NOTES, predictions, resamples=0)
    for name in ("flag_accuracy", "sentence_accuracy", "f1"):
        assert metrics[f"val-core/toy_eval/{name}"] == expected.measures[name].value
    for name in ("readable", "precision", "recall", "false_positive_rate"):
        assert metrics[f"val-aux/toy_eval/{name}"] == expected.measures[name].value
    diagnosis = expected.groups["error type"]["diagnosis"]["measures"]["flag_accuracy"].value
    assert metrics["val-aux/toy_eval/error_type/diagnosis/flag_accuracy"] == diagnosis
    assert (metrics["val-aux/toy_eval/unreadable"], metrics["val-aux/toy_eval/missing"]) == (1, 1)
    assert metrics["val-aux/toy_eval/cut_rate"] == 1 / (len(NOTES) - 1)  # one gave no answer
    assert f"{100 / (len(NOTES) - 1):.1f} % of the answers cut off" in line
    share = sum(not note.flag for note in NOTES) / len(NOTES)
    assert metrics["val-aux/toy_eval/floor/always_no_error/flag_accuracy"] == share
    assert line.startswith(f"validation on toy_eval, {len(NOTES)} notes: flag accuracy 0.")
    assert "is below " in line
    for name, value in metrics.items():
        assert isinstance(value, float) and re.fullmatch(r"[\w/.-]+", name)


def test_several_samples_of_a_note_are_a_vote() -> None:
    right: list[Answer] = [("harmful" if note.flag else "safe", None) for note in NOTES]
    wrong: list[Answer] = [("safe" if note.flag else "harmful", None) for note in NOTES]
    metrics, _ = validated(ROWS * 3, right + wrong + right)
    assert metrics["val-core/toy_eval/flag_accuracy"] == 1.0
    metrics, _ = validated(ROWS * 3, right + wrong + wrong)
    assert metrics["val-core/toy_eval/flag_accuracy"] == 0.0
    of_games = [{**row, "extra_info": {**row["extra_info"], "split": "val"}} for row in ROWS]
    assert validated(of_games, [("safe", None)] * len(ROWS)) == ({}, "")


SENTENCES = {
    0: "A 40-year-old man has fever.",
    1: "Culture grew candida,\nand the blood count was normal.",
    3: "He receives fluconazole 150 mg.",
    4: "He receives fluconazole 450 mg.",
    5: "Well.",
}
TWO = f"{SENTENCES[0]} {SENTENCES[3]}"


@pytest.mark.parametrize(
    ("quote", "correction", "number"),
    [
        ("culture grew  candida and the blood count was normal", None, 1),  # slips of copying
        ("He receives fluconazole 450 mg.", None, 4),  # a copy of one that another is much like
        ("Culture grew candida", None, 1),  # a part
        ("1 Culture grew candida, and the blood count was normal. It was a swab.", None, 1),  # more
        ("fever", None, -1),  # too short to stand for a sentence
        ("receives fluconazole", None, -1),  # a part of two
        (None, None, -1),
        (TWO, "A 40-year-old man has fever. He receives fluconazole 450 mg.", 3),  # what it changes
        (TWO, "A 40-year-old man has malaria. He receives fluconazole 150 mg.", 0),
        (TWO, "A 40-year-old man is well. He receives nothing.", -1),
    ],
)
def test_a_quote_means_the_sentence_that_it_copies(
    quote: str | None, correction: str | None, number: int
) -> None:
    assert quoted_sentence(quote, SENTENCES, correction) == number


def test_longer_sentences_of_medec_resolve_to_the_changed_fragment() -> None:
    found = []
    for case in read_files([medec_file(OFFICIAL)], as_published=True).cases:
        fragment = one_line(case.error_sentence or "")
        for whole in split_sentences(case.error_note or "") if fragment else ():
            if fragment in whole and whole != fragment:
                correction = whole.replace(fragment, one_line(case.corrected_sentence or ""))
                number = quoted_sentence(whole, case.sentences, correction)
                found.append(number == case.error_sentence_id)
    assert found == [True] * 5


def test_a_number_is_the_official_one_where_it_is_the_sources_own() -> None:
    twice = {2: "Na+:", 5: "Na+:", 7: "He has gout."}
    assert [quoted_sentence("Na+", twice, None, number) for number in (2, 5)] == [2, 5]
    # of a note that the list does not number
    assert quoted_sentence("He has gout.", twice, None, 5) == 7
