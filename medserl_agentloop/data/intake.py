"""An input file on its way to a reader: its text, the account of its rows, and their cells.

``reader.py`` makes an ``Intake`` for each input and hands it to the format's reader. The readers of all formats
read single values here, so that all of them accept and refuse the same things.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftfy import TextFixerConfig, fix_encoding

from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.types import ErrorType

_LARGEST_ID_GAP = 3
# No guess at bytes that were lost: what stands in their place is text.
_MISREAD_ONLY = TextFixerConfig(restore_byte_a0=False, replace_lossy_sequences=False, fix_c1_controls=False)
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)


class MedecFormatError(ValueError):
    """An input file is not what it should be; the message is a sentence that names file, row and column.

    Every reader of this package raises it.
    """


@dataclass(frozen=True)
class RowPlace:
    """Where a row stands, for error messages. ``row`` counts records (not lines) from 1."""

    file: str
    row: int
    text_id: str = ""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}" + (f" ({shown(self.text_id)})" if self.text_id else "")

    def of(self, text_id: str) -> RowPlace:
        """The same place, with the id of its row."""
        return replace(self, text_id=text_id)

    def error(self, column: str, found: str, instead: str) -> MedecFormatError:
        """An error about one value."""
        return MedecFormatError(f"{self}, column {column!r}: found {shown(found)}; {instead}.")


@dataclass(frozen=True)
class SourceFile:
    """An input file: its name and its folder's, the hash of its bytes and its text."""

    name: str
    folder: str
    sha256: str
    text: str

    def lines(self, newline: str) -> Iterator[str]:
        """The file's lines with their line ends; ``newline`` as in ``open``: ``""`` or ``"\\n"``."""
        return iter(io.StringIO(self.text, newline=newline))


def read_source(path: Path) -> SourceFile:
    """Read a file and make sure that it is UTF-8."""
    try:
        content = path.read_bytes()
        # Surrogates pass here so that the row they stand in can be named; optional_text refuses them.
        text = content.decode("utf-8", errors="surrogatepass").removeprefix("\ufeff")
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); give the path of a MEDEC file"
        raise MedecFormatError(f"{path}: {reason}.") from error
    except UnicodeDecodeError as error:
        if b"\0" in content:  # UTF-16: there are no rows to name
            reason = f"byte {error.start} (0x{content[error.start]:02x}) is not UTF-8; save the file as UTF-8"
            raise MedecFormatError(f"{path}: {reason}.") from error
        # Such a byte becomes a surrogate from U+DC80 on, for the same reason.
        text = content.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")
    if not content.strip():
        raise MedecFormatError(f"{path}: the file is empty; give a MEDEC file with at least one row.")
    return SourceFile(path.name, path.absolute().parent.name, hashlib.sha256(content).hexdigest(), text)


@dataclass
class ReadReport:
    """What became of one input's records; the readers count, ``reader.py`` adds what the vignettes say.

    ``records == dropped_empty + pairs + twins + clean_only + error_only``: nothing else is lost. OpenRLHF
    files are the exception: up to four of their rows are about one case.
    """

    file: str = ""
    records: int = 0  # after the header, empty ones included
    dropped_empty: int = 0  # records without any content
    pairs: int = 0  # vignettes with both notes
    pairs_by_twin: int = 0  # of these, those whose error row has no corrected text: the twin's text stands in
    twins: int = 0  # clean rows recognised as the same case as an error row
    clean_only: int = 0
    error_only: int = 0
    no_op_edits: int = 0  # pairs whose notes differ in letter case or white space only
    non_local_edits: int = 0  # pairs that differ in more than one sentence in its place
    unlisted_error_sentences: int = 0  # error rows whose sentence number is not in their sentence list
    error_types: dict[str, int] = field(default_factory=dict)  # of error notes; ``unknown`` where none is given
    sha256: str = ""  # of the file; of the rows where the input is a data set
    joined: int = 0  # OpenRLHF rows whose case was found in a ``--join`` file
    not_joined: list[tuple[str, str]] = field(default_factory=list)  # id of each other OpenRLHF row, and why
    repaired: int = 0  # rows in which misread UTF-8 was put right
    uw_rows: int = 0  # rows of MEDEC-UW
    unknown_origin: int = 0  # OpenRLHF rows that were not joined and say nowhere which collection they are from


@dataclass
class Intake:
    """One input: its report, the row of every text id in all inputs so far, whether misread UTF-8 is put right."""

    claims: dict[str, RowPlace]
    repair: bool = False
    report: ReadReport = field(default_factory=ReadReport)

    def drop_empty(self) -> None:
        """Count a row without any content."""
        self.report.records += 1
        self.report.dropped_empty += 1

    def claim(self, place: RowPlace) -> None:
        """Count a row with content."""
        self.report.records += 1
        first = self.claims.setdefault(place.text_id, place)
        if first is not place:
            raise MedecFormatError(
                f"{place}: this text id is already that of {first.file}, row {first.row}; "
                "give every row its own id, and do not pass the same notes twice."
            )

    def text_of(self, cells: dict[str, str]) -> dict[str, str]:
        """The cells, with misread UTF-8 put right where that was asked for."""
        if not self.repair:
            return cells
        repaired = {name: repair_encoding(value) for name, value in cells.items()}
        self.report.repaired += repaired != cells
        return repaired


def optional_text(place: RowPlace, column: str, value: str) -> str | None:
    """The text of a cell, with LF line ends and no outer white space; None where it is empty or the literal ``NA``.

    Both notes of a pair go through here: trailing blanks are more frequent on MEDEC's error notes
    and would give the label away.
    """
    if bad := _UNUSABLE.search(value):
        if "\udc80" <= bad[0] <= "\udcff":
            raise MedecFormatError(
                f"{place}, column {column!r}: character {bad.start()} is the byte 0x{ord(bad[0]) - 0xDC00:02x}, which "
                "is not UTF-8; save the file as UTF-8 and try again."
            )
        name = "a NUL character" if bad[0] == "\0" else "a lone surrogate"
        raise MedecFormatError(
            f"{place}, column {column!r}: character {bad.start()} is {name} (U+{ord(bad[0]):04X}), "
            "which no tokenizer can read; write the intended character or remove it."
        )
    text = value.replace("\r\n", "\n").replace("\r", "\n").strip()
    return None if text in ("", "NA") else text


def required_text(place: RowPlace, column: str, value: str, what: str) -> str:
    """The text of a cell that must have one; ``what`` says what belongs there."""
    text = optional_text(place, column, value)
    if text is None:
        raise place.error(column, value, f"write {what}")
    return text


def error_flag(place: RowPlace, column: str, value: str) -> bool:
    """Whether the row's note has an error: 0 or 1 in any spelling, or True or False."""
    text = value.strip().lower()
    number = {"true": 1, "false": 0}.get(text, _whole_number(text))
    if number not in (0, 1):
        raise place.error(column, value, "write 1 for a note with an error and 0 for a correct one")
    return number == 1


def sentence_number(place: RowPlace, column: str, value: str) -> int:
    """The number of a sentence; -1 where there is none."""
    text = value.strip()
    number = -1 if text in ("", "NA") else _whole_number(text)
    if number is None or number < -1:
        raise place.error(column, value, "write the number of a sentence (0, 1, ...), or -1 for none")
    return number


def error_type(place: RowPlace, column: str, value: str) -> ErrorType | None:
    """The canonical error type; None where the cell is absent."""
    text = optional_text(place, column, value)
    found = None if text is None else ErrorType.parse(text)
    if text is not None and found is None:
        raise place.error(column, value, "write one of " + ", ".join(t.value for t in ErrorType) + ", or NA")
    return found


def numbered_sentences(text: str | None) -> tuple[Sentence, ...]:
    """Split MEDEC's ``Sentences`` column, keeping the source's own numbers.

    A line opens a sentence when it carries the next number. A larger one opens a sentence too if
    the numbers between are truly missing; otherwise it is a continuation line that happens to begin
    with a figure ("500 mg twice a day"). Lines without a number belong to the sentence above.
    """
    lines = [(_NUMBERED_LINE.match(line), line) for line in (text or "").split("\n")]
    last_line_of = {int(match[1]): at for at, (match, _) in enumerate(lines) if match}
    found: list[tuple[int, list[str]]] = []
    for at, (match, line) in enumerate(lines):
        number = int(match[1]) if match else -1
        previous = found[-1][0] if found else -1
        skipped = range(previous + 1, number)
        missing = len(skipped) <= _LARGEST_ID_GAP and all(last_line_of.get(n, -1) < at for n in skipped)
        if match and number > previous and missing:
            found.append((number, [match[2] or ""]))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            found.append((-1, [line]))
    return tuple(Sentence(number, "\n".join(parts).strip()) for number, parts in found)


def with_numbers(sentences: Iterable[str], first: int = 0) -> str:
    """MEDEC's ``Sentences`` column: every sentence on a line, behind its number."""
    return "\n".join(f"{number} {text}" for number, text in enumerate(sentences, start=first))


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _whole_number(text: str) -> int | None:
    """The number that ``1``, ``01``, ``1.0`` or ``-1`` spells; None for anything else."""
    return int(float(text)) if re.fullmatch(r"[+-]?[0-9]{1,6}(\.0*)?", text) else None


def shown(value: str) -> str:
    """A value for a message; a long one is described, because it may be a patient's note."""
    if not value.strip():
        return "an empty cell"
    return ascii(value) if len(value) <= 40 else f"a text of {len(value)} characters"


def repair_encoding(text: str) -> str:
    """``text`` with UTF-8 that was read as another encoding (``â€“`` for a dash) put right; genuine signs stay."""
    return fix_encoding(text, _MISREAD_ONLY)
