"""The two sides of a score: MEDEC's notes with what is true of them, and what a system says about them.

Submission files are the shared task's: ``text-id flag sentence-id "correction"``, one line per note. docs/scoring.md
has the rule for each thing that can be wrong with a line.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidfuzz import fuzz

from medserl_agentloop.data.intake import MedecFormatError, RowPlace, error_flag, sentence_number, shown
from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.edits import one_line, same_sentence
from medserl_agentloop.games.medical.parsing import ParsedAssessment
from medserl_agentloop.games.medical.types import ErrorType, Label

NO_CORRECTION = "NA"
_SHORTEST_QUOTE = 10  # characters of a part of a sentence that can stand for it
# Because of a mistake of its own, the published script decodes these three escapes as well.
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {written: text for text, written in _ESCAPES.items()}


@dataclass(frozen=True)
class ReferenceNote:
    """One note and what is true of it."""

    text_id: str
    text: str  # as published
    flag: bool  # whether it has an error
    error_type: ErrorType | None = None
    sentence_id: int = -1  # number of the wrong sentence; -1 where there is none
    correction: str | None = None  # the wrong sentence put right
    sentences: tuple[Sentence, ...] = ()  # by MEDEC's numbers
    case: str = ""  # a note with an error and its clean twin share it
    subset: str = ""  # medec_ms or medec_uw

    @property
    def error_position(self) -> str | None:
        """Where the wrong sentence stands: ``first``, ``middle`` or ``last``; None without an error or a list."""
        if not self.flag or not self.sentences:
            return None
        numbers = [sentence.id for sentence in self.sentences]
        if self.sentence_id >= max(numbers):
            return "last"
        return "first" if self.sentence_id <= min(numbers) else "middle"

    @classmethod
    def from_extra_info(cls, facts: Mapping[str, Any]) -> ReferenceNote:
        """The note of an evaluation row (``data/rows.py``)."""
        return cls(
            text_id=facts["text_id"],
            text=facts["seed_note"],
            flag=facts["target_label"] == Label.HARMFUL.value,
            error_type=ErrorType(facts["error_type"]) if facts["error_type"] else None,
            sentence_id=int(facts["error_sentence_id"]),
            correction=facts["corrected_sentence"],
            sentences=tuple(Sentence(s["id"], s["text"]) for s in facts["sentences"]),
            case=facts["vignette_id"],
            subset=facts["subset"],
        )


@dataclass(frozen=True)
class Reference:
    """The notes in the order of the files, how many blank records were dropped, and each file's hash by its name."""

    notes: tuple[ReferenceNote, ...]
    dropped_empty: int
    sha256: dict[str, str]


def read_reference(paths: Sequence[Path]) -> Reference:
    """Every note of MEDEC's CSV files; a MedecFormatError names file, row and column of what is wrong in them."""
    rows, read = build_eval_rows(paths)
    notes = tuple(ReferenceNote.from_extra_info(row["extra_info"]) for row in rows)
    dropped = sum(report.dropped_empty for report in read.reports)
    return Reference(notes, dropped, {report.file: report.sha256 for report in read.reports})


@dataclass(frozen=True)
class Prediction:
    """What a system says about one note."""

    text_id: str
    flag: bool = False
    sentence_id: int = -1  # -1 is none
    correction: str | None = None
    parsed: bool = True  # whether the system's answer could be read; if not, it is wrong in everything

    @property
    def scored_correction(self) -> str | None:
        """The correction as the shared task counts it: none without an error, none if it is blank or ``NA``."""
        text = (self.correction or "").strip()
        return text if self.parsed and self.flag and text not in ("", NO_CORRECTION) else None


def predict(note: ReferenceNote, answers: Sequence[ParsedAssessment]) -> Prediction:
    """What the answers on ``note`` say by majority; unparsed if no answer can be read.

    The verdict with the most votes counts, of equally many the one that was given first; unreadable answers do not
    vote. The sentence is the one that most of its votes quote, the correction the first one given with it.
    """
    verdicts = Counter(answer.verdict for answer in answers if answer.verdict is not None)
    if not verdicts:
        return Prediction(note.text_id, parsed=False)
    ((verdict, _),) = verdicts.most_common(1)
    if verdict is Label.SAFE:
        return Prediction(note.text_id)
    said = [(quoted_sentence(a.sentence, note.sentences), a.correction) for a in answers if a.verdict is verdict]
    ((number, _),) = Counter([n for n, _ in said if n >= 0] or [-1]).most_common(1)
    correction = next((text for n, text in said if n == number and text), None)
    return Prediction(note.text_id, True, number, correction)


def quoted_sentence(quote: str | None, sentences: Sequence[Sentence]) -> int:
    """Number of the sentence that an assessor quotes; -1 where none or several could be meant.

    A copy may have the slips that training's rewards allow (``same_sentence``). Failing that, the quote may be part
    of one sentence, or hold one.
    """
    quote = one_line(quote or "").lower()
    texts = {s.id: one_line(s.text).lower() for s in sentences if s.text.strip()}
    copies = {number: fuzz.ratio(quote, text) for number, text in texts.items() if same_sentence(quote, text)}
    if copies:
        return max(copies, key=lambda number: copies[number])
    if len(quote) < _SHORTEST_QUOTE:
        return -1
    parts = [n for n, text in texts.items() if quote in text or (len(text) >= _SHORTEST_QUOTE and text in quote)]
    return parts[0] if len(parts) == 1 else -1


@dataclass(frozen=True)
class Submission:
    """The predictions of a file by text id, and what was wrong with which of its lines and what was done about it."""

    predictions: dict[str, Prediction]
    problems: tuple[str, ...]


def read_submission(path: Path, text_ids: Collection[str]) -> Submission:
    """Read a submission of notes with these ids, whatever is in it; a ValueError if it is about none of them."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); give a submission file.") from None
    problems: list[str] = []
    predictions: dict[str, Prediction] = {}
    line_of: dict[str, int] = {}
    known = frozenset(text_ids)
    for number, text in _records(_lines(data, problems), known, problems):
        text_id = text.split(maxsplit=1)[0]
        if text_id not in known:
            problems.append(f"line {number}: {shown(text_id)} is not the id of a note in the reference; ignored")
            continue
        if text_id in line_of:
            problems.append(f"line {number}: {text_id} was in line {line_of[text_id]} already; this line counts")
        line_of[text_id] = number
        predictions[text_id] = _prediction(number, text, problems)
    if not predictions:
        raise ValueError(
            f"{path}: none of its lines begins with the id of a note in the reference; give a file with lines "
            'such as: ms-test-0 1 4 "The corrected sentence."'
        )
    problems += (f"{i} has no line; counts as wrong" for i in text_ids if i not in predictions)
    return Submission(predictions, tuple(problems))


def write_submission(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a file that ``read_submission`` and the published script read.

    Unreadable answers get no line: both count a missing line as wrong. Inside a correction, a backslash is written
    as ``\\\\`` and a line break as ``\\n``.
    """
    lines = []
    for said in predictions:
        if said.parsed:
            correction = NO_CORRECTION
            if said.scored_correction is not None:
                correction = '"' + re.sub(r"[\\\n\r]", lambda m: _ESCAPES[m[0]], said.correction or "") + '"'
            lines.append(f"{said.text_id} {int(said.flag)} {said.sentence_id} {correction}\n")
    path.write_bytes("".join(lines).encode("utf-8", errors="replace"))


def _lines(data: bytes, problems: list[str]) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, each decoded on its own, so that one bad byte spoils nothing else."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problems.append("line 1: the file is UTF-16, not UTF-8; read as UTF-16")
        data = data.decode("utf-16", errors="replace").encode("utf-8", errors="replace")
    data = data.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            problems.append(f"line {number}: not UTF-8; read as Windows-1252")
            text = line.decode("cp1252", errors="replace")
        yield number, text


def _records(
    lines: Iterable[tuple[int, str]], known: Collection[str], problems: list[str]
) -> Iterator[tuple[int, str]]:
    """Each record with the number of its first line; a quoted correction may go on over several lines."""
    number, parts, open_quote = 0, [""], False
    for at, line in lines:
        cells = line.split(maxsplit=3)
        begins = bool(cells) and cells[0] in known and _numbers(cells) is not None
        if open_quote and not begins:
            problems.append(f"line {at}: goes on with the correction of line {number}")
            parts.append(line)
            open_quote = not line.rstrip().endswith('"')
        elif cells:
            if parts[0]:
                yield number, "\n".join(parts).strip()
            number, parts = at, [line]
            correction = cells[3].rstrip() if begins and len(cells) == 4 else ""
            open_quote = correction.startswith('"') and (correction == '"' or not correction.endswith('"'))
    if parts[0]:
        yield number, "\n".join(parts).strip()


def _numbers(cells: list[str]) -> tuple[bool, int] | None:
    """Flag and sentence number behind a note's id, in any spelling that MEDEC's own files may have."""
    place = RowPlace("", 0)
    try:
        return error_flag(place, "", cells[1]), sentence_number(place, "", cells[2])
    except (MedecFormatError, IndexError):
        return None


def _prediction(number: int, text: str, problems: list[str]) -> Prediction:
    """The prediction of one record, whose id is known."""
    text_id, *cells = text.split(maxsplit=3)
    numbers = _numbers([text_id, *cells])
    if numbers is None:
        found = " ".join(shown(cell) for cell in cells[:2]) or "nothing"
        problems.append(f"line {number}: {text_id} is followed by {found}, not by flag and sentence; counts as wrong")
        return Prediction(text_id, parsed=False)
    flag, sentence_id = numbers
    if flag is (sentence_id < 0):
        problems.append(f"line {number}: flag {int(flag)} with sentence {sentence_id}; each counts as it stands")
    if len(cells) < 3:
        problems.append(f"line {number}: no correction and no NA; counts as NA")
        return Prediction(text_id, flag, sentence_id)
    correction = cells[2].strip()
    if correction.startswith('"'):
        closed = len(correction) > 1 and correction.endswith('"')
        if not closed:
            problems.append(f"line {number}: the quote is not closed; the correction is what follows it")
        correction = correction[1:-1] if closed else correction[1:]
    if correction.strip() in ("", NO_CORRECTION):
        return Prediction(text_id, flag, sentence_id)
    return Prediction(text_id, flag, sentence_id, re.sub(r"\\[\\nr]", lambda m: _UNESCAPES[m[0]], correction))
