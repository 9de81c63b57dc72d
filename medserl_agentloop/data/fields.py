"""Reading single values of a MEDEC file: absent cells, whole numbers, notes, error types.

Called by the readers of every input format, so that all of them accept and refuse the same things.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.types import ErrorType

_LARGEST_ID_GAP = 3
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)


class MedecFormatError(ValueError):
    """An input file is not what it should be; the message is a sentence for the user."""


@dataclass(frozen=True)
class RowPlace:
    """Where a row stands, for error messages. ``row`` counts records (not lines) from 1."""

    file: str
    row: int
    text_id: str = ""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}" + (f" ({_shown(self.text_id)})" if self.text_id else "")

    def error(self, column: str, found: str, instead: str) -> MedecFormatError:
        """An error about one value; a long value is described, because it may be a patient's note."""
        return MedecFormatError(f"{self}, column {column!r}: found {_shown(found)}; {instead}.")


def usable_text(place: RowPlace, column: str, value: str) -> str:
    """``value`` with LF line ends and no outer white space.

    Both notes of a pair go through here: trailing blanks are more frequent on MEDEC's error notes
    and would give the label away.
    """
    if bad := _UNUSABLE.search(value):
        name = "a NUL character" if bad[0] == "\0" else "a lone surrogate"
        raise MedecFormatError(
            f"{place}, column {column!r}: character {bad.start()} is {name} (U+{ord(bad[0]):04X}), "
            "which no tokenizer can read; write the intended character or remove it."
        )
    return value.replace("\r\n", "\n").replace("\r", "\n").strip()


def optional_text(place: RowPlace, column: str, value: str) -> str | None:
    """The text of a cell; None where it is empty or the literal ``NA``."""
    text = usable_text(place, column, value)
    return None if text in ("", "NA") else text


def required_text(place: RowPlace, column: str, value: str, what: str) -> str:
    """The text of a cell that must have one; ``what`` says what belongs there."""
    text = optional_text(place, column, value)
    if text is None:
        raise place.error(column, value, f"write {what}")
    return text


def error_flag(place: RowPlace, column: str, value: str) -> bool:
    """Whether the row's note has an error: 0 or 1 in any spelling, or True or False."""
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = _whole_number(text)
    if number not in (0, 1):
        raise place.error(column, value, "write 1 for a note with an error and 0 for a correct one")
    return number == 1


def sentence_number(place: RowPlace, column: str, value: str) -> int:
    """The number of a sentence; -1 where there is none."""
    if value.strip() in ("", "NA"):
        return -1
    number = _whole_number(value.strip())
    if number is None or number < -1:
        raise place.error(column, value, "write the number of a sentence (0, 1, ...), or -1 for none")
    return number


def error_type(place: RowPlace, column: str, value: str) -> ErrorType | None:
    """The canonical error type; None where the cell is absent."""
    text = optional_text(place, column, value)
    if text is None:
        return None
    found = ErrorType.parse(text)
    if found is None:
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
        if (
            match
            and number > previous
            and len(skipped) <= _LARGEST_ID_GAP
            and all(last_line_of.get(n, -1) < at for n in skipped)
        ):
            found.append((number, [match[2] or ""]))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            found.append((-1, [line]))
    return tuple(Sentence(number, "\n".join(parts).strip()) for number, parts in found)


def _whole_number(text: str) -> int | None:
    """The number that ``1``, ``01``, ``1.0`` or ``-1`` spells; None for anything else."""
    return int(float(text)) if re.fullmatch(r"[+-]?[0-9]{1,6}(\.0*)?", text) else None


def _shown(value: str) -> str:
    if not value.strip():
        return "an empty cell"
    return ascii(value) if len(value) <= 40 else f"a text of {len(value)} characters"
