"""An assessor's answers become a prediction: which sentence is meant, and what counts where several answers differ."""

from typing import Any

import pytest

from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.parsing import ParsedAssessment
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote, predict, quoted_sentence

SENTENCES = (
    Sentence(0, "A 40-year-old man has fever."),
    Sentence(1, "Culture grew candida,\nand the blood count was normal."),
    Sentence(3, "He receives fluconazole 150 mg."),
    Sentence(4, "He receives fluconazole 450 mg."),
    Sentence(5, "Well."),
)
NOTE = ReferenceNote("toy-1", "...", flag=True, sentence_id=1, sentences=SENTENCES)


def said(verdict: str | None, sentence: str | None = None, correction: str | None = None) -> ParsedAssessment:
    return ParsedAssessment(Label(verdict) if verdict else None, sentence, None, correction, "", ())


WRONG = said("harmful", "Culture grew candida, and the blood count was normal.", "Culture grew giardia.")


@pytest.mark.parametrize(
    ("quote", "number"),
    [
        ("Culture grew candida, and the blood count was normal.", 1),
        ("culture grew  candida and the blood count was normal", 1),  # slips of copying
        ("He receives fluconazole 450 mg.", 4),  # a copy of one that another is much like
        ("Culture grew candida", 1),  # a part
        ("1 Culture grew candida, and the blood count was normal. It was a swab.", 1),  # more than the sentence
        ("fever", -1),  # too short to stand for a sentence
        ("receives fluconazole", -1),  # a part of two
        ("The patient has malaria.", -1),
        ("", -1),
        (None, -1),
        ("Well.", 5),
    ],
)
def test_a_quote_means_the_sentence_that_it_copies(quote: str | None, number: int) -> None:
    assert quoted_sentence(quote, SENTENCES) == number


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([WRONG], Prediction("toy-1", True, 1, "Culture grew giardia.")),
        ([said("safe")], Prediction("toy-1")),
        ([said(None)], Prediction("toy-1", parsed=False)),
        ([said("safe"), WRONG, WRONG], Prediction("toy-1", True, 1, "Culture grew giardia.")),
        ([WRONG, said("safe")], Prediction("toy-1", True, 1, "Culture grew giardia.")),  # a tie: the first
        ([said("safe"), WRONG], Prediction("toy-1")),
        ([said(None), said(None), WRONG], Prediction("toy-1", True, 1, "Culture grew giardia.")),  # no vote
        ([said("harmful", "?"), said("harmful", "?"), WRONG], Prediction("toy-1", True, 1, "Culture grew giardia.")),
        ([said("harmful", SENTENCES[2].text), WRONG, WRONG], Prediction("toy-1", True, 1, "Culture grew giardia.")),
        ([said("harmful")], Prediction("toy-1", True, -1)),
    ],
)
def test_the_majority_of_the_readable_answers_counts(answers: list[Any], expected: Prediction) -> None:
    assert predict(NOTE, answers) == expected
