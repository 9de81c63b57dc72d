"""The two sides of a score: MEDEC's notes with their truth, and a system's predictions.

Submission files are the shared task's: ``text-id flag sentence-id "correction"``, one line per
note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidfuzz import fuzz, process

from medserl_agentloop.paths import regular_file

TEXTS = ("text_id", "verdict", "sentence", "correction", "number", "cut")
"""Texts from which an answer is scored; verl makes metrics only of numbers."""

UNREADABLE = "unreadable"  # the verdict of an answer that has none
CUT_OFF = "yes"  # the text of an answer that its token budget cut

_SAME_SENTENCE = 90  # minimum similarity of a copy, rapidfuzz's ratio of 0 to 100
_SHORTEST_QUOTE = 10  # characters of a part of a sentence that can stand for it

IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # each counts as a word
_IDEOGRAPH = re.compile(f"([{IDEOGRAPHS}])")

NO_CORRECTION = "NA"
_FORM = "'text-id flag sentence-id correction'"
# The lines that the published script reads, with any id; it skips others.
_LINE = re.compile(
    r"(?P<text_id>\S+)\s(?P<flag>[0-9]+)\s(?P<sentence_id>-?[0-9]+)\s(?P<correction>.+)"
)
# Because of its own bug, the published script decodes these three escapes as well.
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {written: text for text, written in _ESCAPES.items()}


@dataclass(frozen=True)
class ReferenceNote:
    text_id: str
    text: str  # as published
    flag: bool  # whether it has an error
    error_type: str | None = None
    sentence_id: int = -1  # number of the wrong sentence; -1 where there is none
    correction: str | None = None  # the corrected sentence
    sentences: Mapping[int, str] = field(default_factory=dict)  # by MEDEC's numbers
    case: str = ""  # a note with an error and its clean twin share it
    subset: str = ""  # medec_ms or medec_uw

    @property
    def error_position(self) -> str | None:
        """Where the wrong sentence is: ``first``, ``middle``, ``last``; None without a list."""
        if not self.flag or not self.sentences:
            return None
        if self.sentence_id >= max(self.sentences):
            return "last"
        return "first" if self.sentence_id <= min(self.sentences) else "middle"

    @classmethod
    def from_extra_info(cls, facts: Mapping[str, Any]) -> ReferenceNote:
        """The note of an evaluation row: the error note if there is one."""
        return cls(
            text_id=facts["text_id"],
            text=facts["clean_note"] if facts["error_note"] is None else facts["error_note"],
            flag=facts["error_note"] is not None,
            error_type=facts["error_type"],
            sentence_id=int(facts["error_sentence_id"]),
            correction=facts["corrected_sentence"],
            sentences={sentence["id"]: sentence["text"] for sentence in facts["sentences"]},
            case=facts["vignette_id"],
            subset=facts["subset"],
        )


@dataclass(frozen=True)
class Reference:
    """The notes of files, in their order."""

    notes: tuple[ReferenceNote, ...]
    dropped_empty: int  # blank records
    sha256: dict[str, str]  # by the file's name


@dataclass(frozen=True)
class Prediction:
    text_id: str
    flag: bool = False
    sentence_id: int = -1  # -1 is none
    correction: str | None = None
    # whether the system's answer could be read; if not, it is wrong in everything
    parsed: bool = True

    @classmethod
    def of_answer(
        cls,
        note: ReferenceNote,
        verdict: str,
        sentence: str | None,
        correction: str | None,
        number: int | None = None,
    ) -> Prediction:
        """The prediction of an answer on ``note``; KeyError for another verdict."""
        flag = {"safe": False, "harmful": True, UNREADABLE: None}[verdict]
        if not flag:
            return cls(note.text_id, parsed=flag is not None)
        quoted = quoted_sentence(sentence, note.sentences, correction, number)
        return cls(note.text_id, True, quoted, correction)

    @property
    def scored_correction(self) -> str | None:
        """The correction that counts: none without an error, none if it is blank or ``NA``."""
        text = (self.correction or "").strip()
        return text if self.parsed and self.flag and text not in ("", NO_CORRECTION) else None


def quoted_sentence(
    quote: str | None,
    sentences: Mapping[int, str],
    correction: str | None = None,
    number: int | None = None,
) -> int:
    """Number of the sentence that ``quote`` copies, or the only one that contains it or is in it.

    If several are in it, the only one that its ``correction`` lacks; else -1. The quote's
    ``number`` in the note counts if it is the source's own.
    """
    quote, corrected = _plain(quote or ""), _plain(correction or "")
    texts = {number: _plain(text) for number, text in sentences.items() if text.strip()}
    if number in texts and alphanumeric(texts[number]) == alphanumeric(quote):
        return number
    if copy := process.extractOne(quote, texts, scorer=fuzz.ratio, score_cutoff=_SAME_SENTENCE):
        return copy[2]
    if len(quote) < _SHORTEST_QUOTE:
        return -1
    long = {n: text for n, text in texts.items() if len(text) >= _SHORTEST_QUOTE}
    parts = [n for n, text in texts.items() if quote in text or (n in long and text in quote)]
    if len(parts) > 1 and corrected:
        parts = [number for number in parts if texts[number] not in corrected]
    return parts[0] if len(parts) == 1 else -1


def same_sentence(a: str, b: str) -> bool:
    """Return True if ``a`` is most likely meant to be ``b``: their letters are nearly the same."""
    return fuzz.ratio(_plain(a), _plain(b)) >= _SAME_SENTENCE


def spaced(text: str) -> str:
    """``text`` with spaces around the characters of scripts that write words without spaces."""
    return _IDEOGRAPH.sub(r" \1 ", text)


def alphanumeric(text: str) -> str:
    """The letters and digits of ``text``."""
    return "".join(filter(str.isalnum, text))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def majority(answers: Sequence[Prediction]) -> Prediction:
    """The flag and sentence of most readable answers on a note, and the first correction for it.

    Ties go to the votes that were given first. Unparsed if no answer can be read.
    """
    text_id = answers[0].text_id
    flags = Counter(answer.flag for answer in answers if answer.parsed)
    if not flags:
        return Prediction(text_id, parsed=False)
    ((flag, _),) = flags.most_common(1)
    if not flag:
        return Prediction(text_id)
    votes = [answer for answer in answers if answer.parsed and answer.flag]
    numbers = Counter(vote.sentence_id for vote in votes if vote.sentence_id >= 0) or Counter([-1])
    ((number, _),) = numbers.most_common(1)
    corrections = (vote.correction for vote in votes if vote.sentence_id == number)
    return Prediction(text_id, True, number, next(filter(None, corrections), None))


def read_submission(
    path: Path, text_ids: Collection[str]
) -> tuple[dict[str, Prediction], list[str]]:
    """The predictions of a file by text id, and the problems of its lines; a ValueError if none is
    about the notes.
    """
    try:
        lines = regular_file(path).read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8.") from None
    problems: list[str] = []
    predictions: dict[str, Prediction] = {}
    known = frozenset(text_ids)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        parts, place = _LINE.fullmatch(line.strip()), f"line {number}:"
        if parts is None:
            problems.append(f"{place} is not {_FORM} (single spaces); ignored")
            continue
        text_id = parts["text_id"]
        if text_id not in known:
            problems.append(f"{place} {text_id[:40]!a} is not the id of a note here; ignored")
            continue
        if text_id in predictions:
            problems.append(f"{place} {text_id} was in an earlier line; this line counts")
        flag, sentence_id = int(parts["flag"]), int(parts["sentence_id"])
        text = parts["correction"].strip().removeprefix('"').removesuffix('"')
        correction = re.sub(r"\\[\\nr]", lambda escape: _UNESCAPES[escape[0]], text)
        predictions[text_id] = Prediction(
            text_id, flag == 1, sentence_id, correction, parsed=flag in (0, 1)
        )
    if not predictions:
        raise ValueError(
            f"{path}: no line is an answer about a note of the reference, such as: ms-test-0 1 4 "
            f'"The corrected sentence." ({(problems or ["it has no lines"])[0]})'
        )
    missing = (text_id for text_id in text_ids if text_id not in predictions)
    return predictions, [*problems, *(f"{id_} has no line; counts as wrong" for id_ in missing)]


def write_submission(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write the shared task's file. Unreadable answers have no line, which counts as wrong."""
    lines = []
    for one in predictions:
        if one.parsed:
            text = re.sub(r"[\\\n\r]", lambda match: _ESCAPES[match[0]], one.correction or "")
            correction = NO_CORRECTION if one.scored_correction is None else f'"{text}"'
            lines.append(f"{one.text_id} {int(one.flag)} {one.sentence_id} {correction}\n")
    path.write_bytes("".join(lines).encode("utf-8", errors="replace"))
