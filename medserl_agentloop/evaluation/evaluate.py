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

from medserl_agentloop.evaluation.answering import Question
from medserl_agentloop.evaluation.robustness import SHORTCUTS, Twins
from medserl_agentloop.game.parsing import ParsedAssessment, TurnFormat
from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.play.driver import Reply
from medserl_agentloop.prompting import PromptProfile
from medserl_agentloop.scoring.answers import predict, quoted_sentence
from medserl_agentloop.scoring.reference import Reference, ReferenceNote
from medserl_agentloop.scoring.submission import Prediction

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


def predictions(answered: Sequence[Answered]) -> list[Prediction]:
    """Those that there are, in order."""
    return [one.prediction for one in answered if one.prediction is not None]


def twin_predictions(answered: Sequence[Answered]) -> list[tuple[Prediction, Prediction]]:
    """The predictions on the two notes of each case; a missing one counts as unreadable."""
    given = [one.prediction or Prediction(one.note.text_id, parsed=False) for one in answered]
    return list(zip(given[::2], given[1::2], strict=True))


def write_answers(path: Path, sets: Mapping[str, Sequence[Answered]]) -> None:
    """One JSON line per answer, without the note it is about."""
    lines = (line for name, answered in sets.items() for one in answered for line in _lines(name, one))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


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


def versions() -> dict[str, str]:
    """Of Python and of the packages that answers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def to_json(value: Any) -> Any:
    """A dataclass as JSON; NaN never occurs, absent numbers are None."""
    return json.loads(json.dumps(asdict(value)))
