"""The arithmetic of the shared task's published script, its mistakes included. Only for ``--official-bugs``.

Written from its behaviour: the script states no licence and is not part of this project. docs/scoring.md lists where
it differs from ``metrics.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medserl_agentloop.scoring.corrections import SCORERS, NotComputed, Scorer

NA = "NA"
_LINE = re.compile(r"[a-z0-9\-]+\s[0-9]+\s-?[0-9]+\s.+")
_NAMES = {"bertscore": ("BERTSCORE_subset_check", "BERTC"), "bleurt": ("BLEURT_subset_check", "BLEURTC")}


def official_scores(
    reference: Path, submission: Path, scorers: Mapping[str, Scorer] = SCORERS
) -> dict[str, float | None]:
    """What the published script prints, under the names it prints.

    Args:
        reference: MEDEC's CSV.
        submission: The submission.
        scorers: ``bertscore`` and ``bleurt`` of these are used where they can be computed.

    Raises:
        ValueError: The script stops on this submission; says how.
    """
    try:
        import rouge  # noqa: F401
    except ImportError:
        raise ValueError("the package rouge is not installed: pip install 'medserl-agentloop[eval]'") from None
    try:
        return _scores(_reference(reference), _submission(submission), scorers)
    except (re.error, AssertionError, ValueError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"the published script stops on {submission.name} with {reason}") from None


def _reference(path: Path) -> dict[Any, tuple[str, str, str]]:
    """Flag, sentence and correction as text, by text id.

    pandas turns the whole numbers of a column with an empty cell into fractions, so one blank record makes every
    flag "1.0". All blank records have the id NaN and become one more note without a correction.
    """
    import pandas

    table = pandas.read_csv(path)
    blank = table["Text ID"].isna()
    corrections = table["Corrected Sentence"].where(table["Corrected Sentence"].notna(), NA).astype(str)
    flags, sentences = table["Error Flag"].astype(str), table["Error Sentence ID"].astype(str)
    ids = table["Text ID"].where(~blank, None)
    return dict(zip(ids, zip(flags, sentences, corrections, strict=True), strict=True))


def _submission(path: Path) -> dict[Any, tuple[str, str, str]]:
    found: dict[Any, tuple[str, str, str]] = {}
    for line in path.read_text("utf-8").split("\n"):
        line = line.strip()
        if not _LINE.fullmatch(line):
            continue
        # Meant to collapse white space in the line, but here the line is the template of the replacement: its
        # backslashes are read as escapes.
        text_id, flag, sentence, *words = re.sub(r"\s+", line, " ").split()
        correction = " ".join(words)
        while correction.startswith('"') and len(correction) > 1:
            correction = correction[1:]
        while correction.endswith('"') and len(correction) > 1:
            correction = correction[:-1]
        found[text_id] = flag, sentence, NA if flag == "0" else correction
    return found


def _scores(
    reference: Mapping[Any, tuple[str, str, str]],
    submission: Mapping[Any, tuple[str, str, str]],
    scorers: Mapping[str, Scorer],
) -> dict[str, float | None]:
    from rouge import Rouge

    total = len(reference)
    answered = [(right, submission[text_id]) for text_id, right in reference.items() if text_id in submission]
    pairs = [(right[2], said[2]) for right, said in answered if NA not in (right[2], said[2])]
    both_na = sum(right[2] == said[2] == NA for right, said in answered)
    result: dict[str, float | None] = {
        "Error Flags Accuracy": sum(right[0] == said[0] for right, said in answered) / total,
        "Error Sentence Detection Accuracy": sum(right[1] == said[1] for right, said in answered) / total,
    }
    references, predictions = [right for right, _ in pairs], [said for _, said in pairs]
    rouge = Rouge().get_scores(predictions, references)
    per_pair = {short: np.array([scores[name]["f"] for scores in rouge]) for short, name in _ROUGE.items()}
    for short, values in per_pair.items():
        result |= {f"{short}_subset_check": _mean(values), f"{short}C": float((values.sum() + both_na) / total)}
    together = [per_pair["R1F"]]
    for name, (subset, composite) in _NAMES.items():
        try:
            values = np.array(scorers[name](predictions, references))
        except NotComputed:
            return result
        together.append(values)
        result |= {subset: _mean(values), composite: float((values.sum() + both_na) / total)}
    aggregate = np.sum(together, axis=0) / len(together)
    return result | {
        "aggregate_subset_check": _mean(aggregate),
        "AggregateC": float((aggregate.sum() + both_na) / total),
    }


_ROUGE = {"R1F": "rouge-1", "R2F": "rouge-2", "RLF": "rouge-l"}


def _mean(values: Any) -> float | None:
    """None where the script prints ``nan``."""
    return float(values.mean()) if len(values) else None
