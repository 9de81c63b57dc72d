"""The shared task's rules: each note's contribution to every measure, and scorers of corrections.

Every measure is a ratio of two sums over notes (docs/evaluation.md); ``metrics`` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.scoring.notes import Prediction, ReferenceNote, spaced

_LONGEST = 512  # tokens of a sentence

Numbers = np.ndarray[Any, Any]

Scorer = Callable[[Sequence[str], Sequence[str]], Any]
"""Takes predictions and references, none of them blank; returns a number in [0, 1] per pair."""


def _rouge_1(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """ROUGE-1 F by the task's package ``rouge``; in Chinese and Japanese over characters.

    Texts of only periods, which the package refuses, are scored by equality.
    """
    from rouge import Rouge

    rouge = Rouge(metrics=["rouge-1"], stats=["f"])

    def one(prediction: str, reference: str) -> float:
        if prediction.strip(".") and reference.strip("."):
            return float(rouge.get_scores(spaced(prediction), spaced(reference))[0]["rouge-1"]["f"])
        return float(prediction == reference)

    return [one(*pair) for pair in zip(predictions, references, strict=True)]


def _bertscore(predictions: Sequence[str], references: Sequence[str]) -> Any:
    """BERTScore F1 by DeBERTa-XLarge-MNLI, rescaled with the baseline."""
    from bert_score import BERTScorer

    if not predictions:
        return []
    model = "microsoft/deberta-xlarge-mnli"
    scorer = BERTScorer(model_type=model, lang="en", rescale_with_baseline=True)
    # The tokenizer states no limit, and transformers 5 cannot truncate to the huge number there.
    scorer._tokenizer.model_max_length = _LONGEST
    return scorer.score(list(predictions), list(references))[2]


def _bleurt(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """BLEURT-20 by its PyTorch port."""
    import torch
    from bleurt_pytorch import BleurtForSequenceClassification, BleurtTokenizer

    model = BleurtForSequenceClassification.from_pretrained("lucadiliello/BLEURT-20").eval()
    tokenizer = BleurtTokenizer.from_pretrained("lucadiliello/BLEURT-20")
    limits = {"padding": "longest", "truncation": True, "max_length": _LONGEST}
    scores: list[float] = []
    for start in range(0, len(predictions), 16):
        pairs = (list(texts[start : start + 16]) for texts in (references, predictions))
        with torch.inference_mode():
            scores += (
                model(**tokenizer(*pairs, **limits, return_tensors="pt")).logits.flatten().tolist()
            )
    return scores


def _not_asked(predictions: Sequence[str], references: Sequence[str]) -> Any:
    raise ValueError("ask for it with --neural")  # the two models are large


SCORERS: dict[str, Scorer] = {"rouge_1": _rouge_1, "bertscore": _not_asked, "bleurt": _not_asked}
NEURAL_SCORERS = {**SCORERS, "bertscore": _bertscore, "bleurt": _bleurt}


@dataclass(frozen=True)
class Grades:
    """One submission, note by note, in the order of the text ids."""

    notes: tuple[ReferenceNote, ...]
    sums: dict[str, Numbers]  # by measure: each note's part in both sums, (2, N)
    why: dict[str, str]  # by measure that is not computed: the reason
    unreadable: int
    missing: int


def grade(
    reference: Sequence[ReferenceNote],
    predictions: Iterable[Prediction],
    scorers: Mapping[str, Scorer] = SCORERS,
) -> Grades:
    """Judge every note, and corrections by ``scorers``; of several predictions the last counts."""
    if not reference:
        raise ValueError("the reference has no notes; give MEDEC's CSV with at least one row.")
    notes = sorted(reference, key=lambda note: note.text_id)
    by_id = {prediction.text_id: prediction for prediction in predictions}
    answers = [by_id.get(note.text_id) for note in notes]
    given = [
        answer or Prediction(note.text_id, parsed=False)
        for answer, note in zip(answers, notes, strict=True)
    ]
    parsed = np.array([one.parsed for one in given])
    wrong = np.array([note.flag for note in notes])
    alarm = np.array([one.flag for one in given]) & parsed
    located = np.array([one.sentence_id for one in given]) == [note.sentence_id for note in notes]
    every = np.ones(len(notes))
    sums = {
        "readable": (parsed, every),
        "flag_accuracy": ((alarm == wrong) & parsed, every),
        "precision": (alarm & wrong, alarm),
        "recall": (alarm & wrong, wrong),
        "f1": (2.0 * (alarm & wrong), alarm * 1.0 + wrong),
        "false_positive_rate": (alarm & ~wrong, ~wrong),
        "sentence_accuracy": (located & parsed, every),
    }
    right = _texts(note.correction for note in notes)
    wrote = _texts(one.scored_correction for one in given)
    both = (right != "") & (wrote != "")
    neither = (right == "") & (wrote == "") & parsed
    scores, why = _corrections(wrote, right, both, scorers)
    sums |= {name: (of_notes, both) for name, of_notes in scores.items()}
    sums |= {f"{name}_composite": (of + neither, every) for name, of in scores.items()}
    return Grades(
        notes=tuple(notes),
        sums={name: np.array(sides, dtype=float) for name, sides in sums.items()},
        why=why | {f"{name}_composite": reason for name, reason in why.items()},
        unreadable=sum(answer is not None and not answer.parsed for answer in answers),
        missing=answers.count(None),
    )


def _texts(corrections: Iterable[str | None]) -> Numbers:
    return np.array([" ".join((text or "").split()) for text in corrections], dtype=object)


def _corrections(
    wrote: Numbers, right: Numbers, both: Numbers, scorers: Mapping[str, Scorer]
) -> tuple[dict[str, Numbers], dict[str, str]]:
    """Each scorer's numbers (N,), 0 except for notes with ``both`` corrections, and why one has
    none.
    """
    scores: dict[str, Numbers] = {}
    why: dict[str, str] = {}
    for name, scorer in scorers.items():
        try:
            of_pairs = np.clip(scorer(list(wrote[both]), list(right[both])), 0.0, 1.0)
        # a model that cannot be downloaded, too little memory, another version's interface
        except Exception as error:
            why[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, ImportError):
                extra = "eval" if name == "rouge_1" else "eval-neural"
                why[name] += f": pip install 'medserl-agentloop[{extra}]'"
        else:
            scores[name] = np.zeros(len(both))
            scores[name][both] = of_pairs
    if why:
        why["aggregate"] = f"needs {' and '.join(why)}"
    elif scores:
        scores["aggregate"] = np.mean(list(scores.values()), axis=0)
    return scores, why
