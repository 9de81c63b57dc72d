"""Notes -> a model's answers -> predictions, scores and files. Called by ``medserl evaluate``.

The prompt, the reading of an answer and the scores are those of verl's validation, so both give the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Group

from medserl_agentloop.evaluation.answering import ANY_CATEGORY, Question
from medserl_agentloop.evaluation.robustness import SHORTCUTS, robustness_tables, score_twins
from medserl_agentloop.games.medical.parsing import ParsedAssessment, TurnFormat
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.play.driver import Reply
from medserl_agentloop.scoring.metrics import compare, grade
from medserl_agentloop.scoring.notes import (
    Prediction,
    Reference,
    ReferenceNote,
    predict,
    quoted_sentence,
    write_submission,
)
from medserl_agentloop.scoring.official import Scorer
from medserl_agentloop.scoring.report import as_json, report_on, tables
from medserl_agentloop.scoring.yardsticks import TrainingNotes

SUBMISSION, ANSWERS, RESULTS, CACHE = "submission.txt", "answers.jsonl", "results.json", "cache.jsonl"
PUBLISHED, TWINS = "as published", "twins"
_PACKAGES = ("medserl-agentloop", "verl", "torch", "transformers")


@dataclass(frozen=True)
class Answered:
    """A note as it was shown, and what was said of it."""

    note: ReferenceNote
    replies: tuple[Reply, ...]  # one per sample; none where the model gave no answer
    read: tuple[ParsedAssessment, ...]
    prediction: Prediction | None  # what they say by majority


def note_sets(reference: Reference, twins: Sequence[ReferenceNote], shortcuts: bool) -> dict[str, list[ReferenceNote]]:
    """All notes to ask about, by what they are asked for."""
    sets = {PUBLISHED: list(reference.notes)} | ({TWINS: list(twins)} if twins else {})
    for name, change in SHORTCUTS.items() if shortcuts else ():
        sets[name] = [replace(note, text=change(note)) for note in reference.notes]
    return sets


def questions(sets: Mapping[str, Sequence[ReferenceNote]], samples: int) -> list[Question]:
    """What to ask, equal questions included."""
    return [Question(note.text, sample) for notes in sets.values() for note in notes for sample in range(samples)]


def read_answers(
    notes: Sequence[ReferenceNote], replies: Mapping[Question, Reply], samples: int, parser: TurnFormat
) -> list[Answered]:
    """The answers on ``notes``; of several samples, those that are there."""
    found = []
    for note in notes:
        asked = (Question(note.text, sample) for sample in range(samples))
        given = tuple(replies[question] for question in asked if question in replies)
        read = tuple(parser.assessment(reply.text, reply.prefill) for reply in given)
        found.append(Answered(note, given, read, predict(note, read) if given else None))
    return found


def conclude(
    folder: Path,
    reference: Reference,
    answered: Mapping[str, Sequence[Answered]],
    training: TrainingNotes | None,
    scorers: Mapping[str, Scorer],
    settings: Mapping[str, Any],
) -> Group:
    """Score the answers and write the three files. The notes are in none of them; answers may quote them.

    Args:
        folder: For the files.
        reference: The published notes.
        answered: The answers on every set of notes.
        training: For the classifiers among the floors.
        scorers: Of the corrections.
        settings: What the results are of: model, prompts, sampling.

    Returns:
        The tables for a terminal.
    """
    given = {asked: [one.prediction for one in found if one.prediction] for asked, found in answered.items()}
    systems = {settings["model"]["name"]: [grade(reference.notes, given[PUBLISHED], scorers)]}
    report = report_on(reference, systems, training, seed=settings["sampling"]["seed"])
    twins = score_twins([one.prediction for one in answered[TWINS]]) if TWINS in answered else None
    grades = {name: [grade(reference.notes, given[name])] for name in given.keys() - {TWINS}}
    shortcuts = {change: compare(grades[change], grades[PUBLISHED]) for change in SHORTCUTS if change in grades}
    write_submission(folder / SUBMISSION, given[PUBLISHED])
    lines = (json.dumps(line) for asked, found in answered.items() for one in found for line in _lines(asked, one))
    (folder / ANSWERS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    results = {
        **as_json(report),
        **settings,
        "versions": _versions(),
        "twins": twins and asdict(twins),
        "shortcuts": {change: asdict(found) for change, found in shortcuts.items()},
    }
    (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return Group(tables(report), robustness_tables(twins, shortcuts))


def _lines(name: str, one: Answered) -> Iterator[dict[str, Any]]:
    for sample, (reply, read) in enumerate(zip(one.replies, one.read, strict=True)):
        yield {
            "notes": name,
            "text_id": one.note.text_id,
            "sample": sample,
            "response": reply.text,
            "tokens": reply.tokens,
            "truncated": reply.truncated,
            "verdict": read.verdict.value if read.verdict else None,
            "sentence": read.sentence,
            "sentence_id": quoted_sentence(read.sentence, one.note.sentences),
            "error_type": read.error_type.value if read.error_type else None,
            "correction": read.correction,
            "violations": list(read.violations),
        }


def prompt_facts(profile: PromptProfile) -> dict[str, Any]:
    """Name and hash of the assessor's prompt."""
    messages = profile.messages(Role.ASSESSOR, ANY_CATEGORY, "{{ note }}")
    text = json.dumps([messages, profile.settings.model_dump(mode="json")], sort_keys=True)
    return {"profile": profile.folder.name, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _versions() -> dict[str, str]:
    """Of Python and of the packages that answers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
