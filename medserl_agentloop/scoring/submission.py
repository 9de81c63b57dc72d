"""Submission files in the shared task's format: ``text-id flag sentence-id "correction"``, one line per note.

Called by ``medserl score``, which reads them, and ``medserl evaluate``, which writes them. Every file is read to
its end; docs/scoring.md lists the rule for each thing that can be wrong with a line.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from medserl_agentloop.data.intake import MedecFormatError, RowPlace, error_flag, sentence_number

NO_CORRECTION = "NA"
# Because of a mistake of its own, the published script decodes these three escapes as well.
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {written: text for text, written in _ESCAPES.items()}


@dataclass(frozen=True)
class Prediction:
    """What a system says about one note.

    Attributes:
        text_id: The note.
        flag: Whether it has an error.
        sentence_id: Number of the wrong sentence; -1 for none.
        correction: That sentence put right; None for no correction.
        parsed: Whether the system's answer could be read. If not, it is wrong in everything.
    """

    text_id: str
    flag: bool = False
    sentence_id: int = -1
    correction: str | None = None
    parsed: bool = True

    @property
    def scored_correction(self) -> str | None:
        """The correction as the shared task counts it: none without an error, none if it is blank or ``NA``."""
        text = (self.correction or "").strip()
        return text if self.parsed and self.flag and text not in ("", NO_CORRECTION) else None


@dataclass(frozen=True)
class Problem:
    """Something wrong with a submission, and what was done about it; ``line`` counts from 1, None for no line."""

    line: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Submission:
    """The predictions of a file by text id, and what was wrong with it."""

    predictions: dict[str, Prediction]
    problems: tuple[Problem, ...]


def read_submission(path: Path, text_ids: Collection[str]) -> Submission:
    """Read a submission of notes with these ids.

    Raises:
        ValueError: The file cannot be opened, or no line is about any of the notes.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); give a submission file.") from None
    problems: list[Problem] = []
    known = frozenset(text_ids)
    predictions: dict[str, Prediction] = {}
    line_of: dict[str, int] = {}
    for number, text in _records(_lines(data, problems), known, problems):
        text_id = text.split(maxsplit=1)[0]
        if text_id not in known:
            problems.append(Problem(number, f"{_shown(text_id)} is not the id of a note in the reference; ignored"))
            continue
        if text_id in line_of:
            problems.append(Problem(number, f"{text_id} was in line {line_of[text_id]} already; this line counts"))
        line_of[text_id] = number
        predictions[text_id] = _prediction(number, text, problems)
    if not predictions:
        raise ValueError(
            f"{path}: none of its lines begins with the id of a note in the reference; give a file with lines "
            'such as: ms-test-0 1 4 "The corrected sentence."'
        )
    problems += (Problem(None, f"{i} has no line; counts as wrong") for i in text_ids if i not in predictions)
    return Submission(predictions, tuple(problems))


def write_submission(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a file that ``read_submission`` and the published script read.

    Unreadable answers get no line: both count a missing line as wrong. Inside a correction, a backslash is written
    as ``\\\\`` and a line break as ``\\n``.
    """
    lines = []
    for prediction in predictions:
        if prediction.parsed:
            correction = NO_CORRECTION
            if prediction.scored_correction is not None:
                correction = '"' + re.sub(r"[\\\n\r]", lambda m: _ESCAPES[m[0]], prediction.correction or "") + '"'
            lines.append(f"{prediction.text_id} {int(prediction.flag)} {prediction.sentence_id} {correction}\n")
    path.write_bytes("".join(lines).encode("utf-8", errors="replace"))


def _lines(data: bytes, problems: list[Problem]) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, each decoded on its own, so that one bad byte spoils nothing else."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problems.append(Problem(1, "the file is UTF-16, not UTF-8; read as UTF-16"))
        data = data.decode("utf-16", errors="replace").encode("utf-8", errors="replace")
    data = data.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            problems.append(Problem(number, "not UTF-8; read as Windows-1252"))
            text = line.decode("cp1252", errors="replace")
        yield number, text


def _records(
    lines: Iterable[tuple[int, str]], known: Collection[str], problems: list[Problem]
) -> Iterator[tuple[int, str]]:
    """Each record with the number of its first line; a quoted correction may go on over several lines."""
    number, parts, open_quote = 0, [""], False
    for at, line in lines:
        if open_quote and not _is_record(line, known):
            problems.append(Problem(at, f"goes on with the correction of line {number}"))
            parts.append(line)
            open_quote = not line.rstrip().endswith('"')
        elif line.strip():
            if parts[0]:
                yield number, "\n".join(parts).strip()
            number, parts = at, [line]
            cells = line.split(maxsplit=3)
            correction = cells[3].rstrip() if _is_record(line, known) and len(cells) == 4 else ""
            open_quote = correction.startswith('"') and (correction == '"' or not correction.endswith('"'))
    if parts[0]:
        yield number, "\n".join(parts).strip()


def _is_record(line: str, known: Collection[str]) -> bool:
    """Whether a line begins with a note's id, a flag and a sentence number."""
    cells = line.split(maxsplit=3)
    return len(cells) > 2 and cells[0] in known and _numbers(cells) is not None


def _numbers(cells: list[str]) -> tuple[bool, int] | None:
    place = RowPlace("", 0)
    try:
        return error_flag(place, "", cells[1]), sentence_number(place, "", cells[2])
    except MedecFormatError:
        return None


def _prediction(number: int, text: str, problems: list[Problem]) -> Prediction:
    """The prediction of one record, whose id is known."""
    cells = text.split(maxsplit=3)
    text_id = cells[0]
    numbers = _numbers(cells) if len(cells) > 2 else None
    if numbers is None:
        found = " ".join(_shown(cell) for cell in cells[1:3]) or "nothing"
        problems.append(Problem(number, f"{text_id} is followed by {found}, not by flag and sentence; counts as wrong"))
        return Prediction(text_id, parsed=False)
    flag, sentence_id = numbers
    if flag is (sentence_id < 0):
        problems.append(Problem(number, f"flag {int(flag)} with sentence {sentence_id}; each counts as it stands"))
    if len(cells) < 4:
        problems.append(Problem(number, "no correction and no NA; counts as NA"))
        return Prediction(text_id, flag, sentence_id)
    correction = cells[3].strip()
    opens, closes = correction.startswith('"'), correction.endswith('"')
    if opens and closes and len(correction) > 1:
        correction = correction[1:-1]
    elif opens:
        problems.append(Problem(number, "the quote is not closed; the correction is what follows it"))
        correction = correction[1:]
    if correction.strip() in ("", NO_CORRECTION):
        return Prediction(text_id, flag, sentence_id)
    correction = re.sub(r"\\[\\nr]", lambda m: _UNESCAPES[m[0]], correction)
    return Prediction(text_id, flag, sentence_id, correction)


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= 40 else f"a text of {len(text)} characters"
