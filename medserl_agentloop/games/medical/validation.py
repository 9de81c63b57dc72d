"""What verl's validation reports: numbers of every game, and MEDEC's official scores where the rows are its notes.

An answer becomes a prediction here, for validation and for ``medserl evaluate`` alike, so both give the same scores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rapidfuzz import fuzz

from medserl_agentloop.core.metrics import share
from medserl_agentloop.games.medical.edits import one_line, same_sentence
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import EVAL_SPLIT, Label, Role
from medserl_agentloop.scoring.metrics import Scores, score
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote, majority
from medserl_agentloop.scoring.yardsticks import COMPARED, floor_value, floors, floors_above

TEXTS = ("text_id", "verdict", "sentence", "correction")
"""Texts of a game from which the official scores are made; verl makes metrics of numbers and leaves texts alone."""

UNREADABLE = "unreadable"
"""The verdict of an answer that has none."""

_CORE = ("flag_accuracy", "sentence_accuracy", "f1")
_SHORTEST_QUOTE = 10  # characters of a part of a sentence that can stand for it

Notes = Mapping[str, Mapping[str, ReferenceNote]]
"""Reference notes by data set, then by text id."""


def prediction(note: ReferenceNote, verdict: Label | None, sentence: str | None, correction: str | None) -> Prediction:
    """What an answer on ``note`` says: its verdict, the sentence that it quotes, its correction."""
    if verdict is None:
        return Prediction(note.text_id, parsed=False)
    if verdict is Label.SAFE:
        return Prediction(note.text_id)
    return Prediction(note.text_id, True, quoted_sentence(sentence, note.sentences), correction)


def quoted_sentence(quote: str | None, sentences: Mapping[int, str]) -> int:
    """Number of the sentence that an assessor quotes; -1 where none or several could be meant.

    A copy may have the slips that training's rewards allow (``same_sentence``). Failing that, the quote may be part
    of one sentence, or hold one.
    """
    quote = one_line(quote or "").lower()
    texts = {number: one_line(text).lower() for number, text in sentences.items() if text.strip()}
    copies = {number: fuzz.ratio(quote, text) for number, text in texts.items() if same_sentence(quote, text)}
    if copies:
        return max(copies, key=lambda number: copies[number])
    if len(quote) < _SHORTEST_QUOTE:
        return -1
    parts = [n for n, text in texts.items() if quote in text or (len(text) >= _SHORTEST_QUOTE and text in quote)]
    return parts[0] if len(parts) == 1 else -1


def validation_numbers(record: MedicalRecord) -> dict[str, float | str | None]:
    """One game as numbers for verl's validation metrics, and its ``TEXTS``.

    ``acc`` is the assessor's accuracy; verl reports it as the core metric of each category.
    """
    attack, assessment, outcomes = record.attack, record.assessment, [game.outcome for game in record.by_assessment]
    assessed = assessment is not None and record.outcome is not Outcome.VOID
    numbers: dict[str, float | str | None] = {
        "acc": share(bool(each.is_right) for each in outcomes) if assessed else None,
        "attacker_reward": record.reward(Role.ATTACKER),
        "assessor_reward": record.reward(Role.ASSESSOR),
        "attack_valid": None if attack is None else float(attack.invalid is None),
        "undetected": share(each is Outcome.MISSED_ERROR for each in outcomes) if attack and assessed else None,
        "void": float(record.outcome is Outcome.VOID),
    }
    texts: dict[str, str | None] = dict.fromkeys(TEXTS)
    if assessment is not None and record.void is None:
        verdict = UNREADABLE if assessment.verdict is None else assessment.verdict.value
        texts = dict(zip(TEXTS, ("", verdict, assessment.sentence, assessment.correction), strict=True))
    return numbers | texts | {"text_id": record.spec.text_id}


def official_notes(dataset: Any) -> Notes:
    """The evaluation rows of verl's ``RLHFDataset``."""
    notes: dict[str, dict[str, ReferenceNote]] = {}
    for source, facts in zip(dataset.dataframe["data_source"], dataset.dataframe["extra_info"], strict=True):
        if facts.get("split") == EVAL_SPLIT:
            note = ReferenceNote.from_extra_info(facts)
            notes.setdefault(_data_set(source), {})[note.text_id] = note
    return notes


def official_scores(
    notes: Notes, data_sources: Sequence[str], facts: Mapping[str, Sequence[str | None]]
) -> Iterator[tuple[dict[str, float], str]]:
    """For each data set its metrics, by verl's names, and a line that says the most important ones.

    Of every game there are its row's data source and what :func:`validation_numbers` gave. Games on one note are
    samples of one answer.
    """
    answers: dict[tuple[str, str | None], list[Prediction]] = {}
    columns = (facts[name] for name in TEXTS)
    for source, text_id, verdict, sentence, correction in zip(data_sources, *columns, strict=True):
        note = notes.get(_data_set(source), {}).get(text_id or "")
        if note is not None and verdict is not None:
            label = None if verdict == UNREADABLE else Label(verdict)
            answer = prediction(note, label, sentence, correction)
            answers.setdefault((_data_set(source), text_id), []).append(answer)
    for name, by_id in notes.items():
        reference = list(by_id.values())
        predictions = [majority(answers[name, n.text_id]) for n in reference if (name, n.text_id) in answers]
        yield _reported(name, reference, score(reference, predictions, resamples=0))


def _reported(name: str, reference: Sequence[ReferenceNote], scores: Scores) -> tuple[dict[str, float], str]:
    bounds = floors(reference)
    values: dict[str, float | None] = {"unreadable": scores.unreadable, "missing": scores.missing}
    values |= {measure: m.value for measure, m in scores.measures.items()}
    for kind, groups in scores.groups.items():
        for group, of_group in groups.items():
            values |= {f"{kind}/{group}/{measure}": m.value for measure, m in of_group.measures.items()}
    for title, floor in bounds.items():
        values |= {f"floor/{title}/{measure}": floor_value(floor, measure) for measure in COMPARED}
    metrics = {
        f"val-{'core' if key in _CORE else 'aux'}/{name}/{metric_name(key)}": value
        for key, value in values.items()
        if value is not None
    }
    parts = [f"{key} {values[key]:.3f}" for key in _CORE if values[key] is not None]
    parts += [f"{key} is below {', '.join(names)}" for key, names in floors_above(scores, bounds).items() if names]
    return metrics, f"validation on {name}, {scores.notes} notes: {', '.join(parts).replace('_', ' ')}"


def metric_name(text: str) -> str:
    """``text`` as a name that every logger takes; MLflow refuses parentheses and commas."""
    return re.sub(r"[^\w/.-]+", "_", text).strip("_")


def _data_set(data_source: str) -> str:
    return str(data_source).partition("/")[0]
