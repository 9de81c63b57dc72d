"""Notes -> a model's answers -> predictions, and the files of an evaluation. Called by ``medserl evaluate``.

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

from medserl_agentloop.core.driver import Reply
from medserl_agentloop.evaluation.answering import Question
from medserl_agentloop.evaluation.robustness import SHORTCUTS, Twins, TwinScores, compare_shortcuts, score_twins
from medserl_agentloop.games.medical.parsing import ParsedAssessment, TurnFormat
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.scoring.answers import predict, quoted_sentence
from medserl_agentloop.scoring.corrections import Scorer
from medserl_agentloop.scoring.grading import grade
from medserl_agentloop.scoring.metrics import Comparison
from medserl_agentloop.scoring.reference import Reference, ReferenceNote
from medserl_agentloop.scoring.report import Report, as_json, report_on
from medserl_agentloop.scoring.submission import Prediction, write_submission
from medserl_agentloop.scoring.yardsticks import TrainingNotes

SUBMISSION, ANSWERS, RESULTS, CACHE = "submission.txt", "answers.jsonl", "results.json", "cache.jsonl"
PUBLISHED, TWINS = "as published", "twins"
_PACKAGES = ("medserl-agentloop", "verl", "torch", "transformers")


@dataclass(frozen=True)
class Answered:
    """A note and what was said of it.

    Attributes:
        note: The note, as it was shown.
        replies: One per sample; none where the model gave no answer.
        read: The same, read.
        prediction: What they say by majority; None without an answer.
    """

    note: ReferenceNote
    replies: tuple[Reply, ...]
    read: tuple[ParsedAssessment, ...]
    prediction: Prediction | None


def note_sets(reference: Reference, twins: Sequence[Twins], *, shortcuts: bool) -> dict[str, list[ReferenceNote]]:
    """All notes to ask about, by what they are asked for."""
    sets = {PUBLISHED: list(reference.notes)}
    if twins:
        sets[TWINS] = [note for case in twins for note in (case.wrong, case.right)]
    if shortcuts:
        changed = {name: [replace(n, text=change(n)) for n in reference.notes] for name, change in SHORTCUTS.items()}
        sets |= changed
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


@dataclass(frozen=True)
class Conclusion:
    """What the answers amount to.

    Attributes:
        report: The official scores beside floors and published results.
        twins: Where both notes of each case were asked about.
        shortcuts: How far accuracy moves, by the change of the notes.
        predictions: On the published notes.
    """

    report: Report
    twins: TwinScores | None
    shortcuts: dict[str, Comparison]
    predictions: tuple[Prediction, ...]


def conclude(
    name: str,
    reference: Reference,
    answered: Mapping[str, Sequence[Answered]],
    training: TrainingNotes | None,
    scorers: Mapping[str, Scorer],
    seed: int,
) -> Conclusion:
    """Score the answers.

    Args:
        name: The model's, for the tables.
        reference: The published notes.
        answered: The answers on every set of notes.
        training: For the classifiers among the floors.
        scorers: Of the corrections.
        seed: Of the bootstrap.
    """
    given = {asked: [one.prediction for one in found if one.prediction] for asked, found in answered.items()}
    published = given[PUBLISHED]
    return Conclusion(
        report_on(reference, {name: [grade(reference.notes, published, scorers)]}, training, seed=seed),
        score_twins(_pairs(answered[TWINS])) if TWINS in answered else None,
        compare_shortcuts(reference.notes, {n: given[n] for n in SHORTCUTS if n in given}, published),
        tuple(published),
    )


def _pairs(answered: Sequence[Answered]) -> list[tuple[Prediction, Prediction]]:
    """The predictions on the two notes of each case; a missing one is unreadable."""
    given = [one.prediction or Prediction(one.note.text_id, parsed=False) for one in answered]
    return list(zip(given[::2], given[1::2], strict=True))


def write(
    folder: Path, answered: Mapping[str, Sequence[Answered]], conclusion: Conclusion, settings: Mapping[str, Any]
) -> None:
    """Write the three files. The notes are in none of them; answers may quote them."""
    write_submission(folder / SUBMISSION, conclusion.predictions)
    lines = (json.dumps(line) for name, found in answered.items() for one in found for line in _lines(name, one))
    (folder / ANSWERS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    results = {
        **as_json(conclusion.report),
        **settings,
        "versions": _versions(),
        "twins": conclusion.twins and asdict(conclusion.twins),
        "shortcuts": {name: asdict(found) for name, found in conclusion.shortcuts.items()},
    }
    (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


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
    messages = profile.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, "{{ note }}")
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
