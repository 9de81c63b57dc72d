"""The values of one row, whatever the format of its file, and the sentences that a row lists.

In the column ``Sentences`` of MEDEC and MedErrBench, a note's sentences stand behind their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rapidfuzz.distance import Indel

from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import ERROR_TYPES, known_type
from medserl_agentloop.paths import LONGEST_NOTE
from medserl_agentloop.terminal import shown

NO_TYPE = "unknown"
NOTE = "the text of the note"  # what to write where there is none
LARGEST_CELL = 4 * LONGEST_NOTE  # the list of a note's sentences is longer than the note
_ABSENT = (
    "",
    "na",
    "n/a",
    "nan",
    "none",
    "null",
)  # in lower case: how MEDEC, pandas and JSON spell no value
_LONGEST_TYPE = 40
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)
_LARGEST_ID_GAP = 3
_SAME_NOTE = 2 / 3  # share of the words in a list of sentences that stand in the note as well


class Cells:
    """The values of one row, and their ``problems`` in sentences; all formats accept and refuse the
    same things.
    """

    def __init__(self, place: str, values: Mapping[str, str], as_published: bool = False) -> None:
        self.place, self.values, self.as_published = place, values, as_published
        self.problems: list[str] = []

    def refuse(self, column: str, instead: str) -> None:
        self.problems.append(
            f"{self.place}, column {column!r}: found {shown(self.values[column])}; {instead}."
        )

    def text(self, column: str, needed: str = "", longest: int = LONGEST_NOTE) -> str | None:
        """A text with LF line ends and without outer white space; None where there is none, which
        ``needed`` refuses.

        Both notes of a pair go through here: trailing blanks are more frequent on MEDEC's error
        notes and would give the label away.
        """
        value = self.values[column]
        text = value.replace("\r\n", "\n").replace("\r", "\n").strip()
        if bad := _UNUSABLE.search(value):
            byte = ord(bad[0]) - 0xDC00
            what = "a NUL character" if bad[0] == "\0" else "a lone surrogate"
            why = (
                f"{what} (U+{ord(bad[0]):04X}), which no tokenizer can read; write the intended "
                "character"
            )
            if 0x80 <= byte <= 0xFF:  # how _read_text marks it
                why = f"the byte 0x{byte:02x}, which is not UTF-8; save the file as UTF-8"
            self.problems.append(
                f"{self.place}, column {column!r}: character {bad.start()} is {why}."
            )
        elif len(value) > longest:
            self.refuse(column, f"a note has at most {LONGEST_NOTE:,} characters")
        elif text.casefold() in _ABSENT:
            if needed:
                self.refuse(column, f"write {needed}")
            return None
        return value if self.as_published else text

    def row_id(self, column: str, needed: str) -> str:
        """The row's id, which the place of later problems names."""
        text_id = (self.text(column, needed) or "").strip()
        self.place += f" ({shown(text_id)})" if text_id else ""
        return text_id

    def flag(self, column: str) -> bool:
        """Return whether the row's note has an error: 0 or 1 in any spelling, or True or False."""
        text = self.values[column].strip().lower()
        number = {"true": 1, "false": 0}.get(text, _whole_number(text))
        if number not in (0, 1):
            self.refuse(column, "write 1 for a note with an error and 0 for a correct one")
        return number == 1

    def sentence_number(self, column: str) -> int:
        """The number of a sentence; -1 where there is none."""
        text = self.values[column].strip()
        number = -1 if text.casefold() in _ABSENT else _whole_number(text)
        if number is None or number < -1:
            self.refuse(column, "write the number of a sentence (0, 1, ...), or -1 for none")
        return -1 if number is None else number

    def sentences(self, column: str, note: str) -> dict[int, str]:
        """The sentences of the note, by the numbers that a list of them has."""
        listed = self.text(column, longest=LARGEST_CELL) or ""
        sentences = numbered_sentences(listed)
        if list(sentences) != [0] or not re.search(r"\s1\s", listed):
            return sentences
        of_note = _sentences_on_one_line(listed, note)
        if not of_note:
            self.refuse(column, "write each sentence of the text on a line, behind its number")
        return of_note if len(of_note) > 1 else sentences

    def error_type(self, column: str) -> str | None:
        """MEDEC's name of a type, in any spelling, or the source's own word; None where there is
        none.
        """
        word = one_line(self.text(column) or "")
        if len(word) > _LONGEST_TYPE:
            self.refuse(
                column, f"write {', '.join(ERROR_TYPES)}, a type of your own in few words, or NA"
            )
        return known_type(word) or (word if word and word.lower() != NO_TYPE else None)


def _whole_number(text: str) -> int | None:
    """The number that ``1``, ``01``, ``1.0`` or ``-1`` spells; None for anything else."""
    return int(float(text)) if re.fullmatch(r"[+-]?[0-9]{1,6}(\.0*)?", text) else None


def numbered_sentences(text: str | None) -> dict[int, str]:
    """MEDEC's ``Sentences`` column by the source's own numbers; -1 is text before the first one.

    A line opens a sentence when it carries the next number. A larger one opens a sentence too if
    the numbers between are truly missing; otherwise it is a continuation line that happens to begin
    with a figure ("500 mg twice a day"). Lines without a number belong to the sentence above.
    """
    lines = [(_NUMBERED_LINE.match(line), line) for line in re.split(r"\r\n?|\n", text or "")]
    last_line_of = {int(match[1]): at for at, (match, _) in enumerate(lines) if match}
    sentences: dict[int, list[str]] = {}
    current = -1
    for at, (match, line) in enumerate(lines):
        number = int(match[1]) if match else -1
        skipped = range(current + 1, number)
        missing = len(skipped) <= _LARGEST_ID_GAP and all(
            last_line_of.get(n, -1) < at for n in skipped
        )
        if match and number > current and missing:
            current = number
            sentences[number] = [match[2] or ""]
        elif sentences:
            sentences[current].append(line)
        elif line.strip():
            sentences[-1] = [line]
    return {number: "\n".join(parts).strip() for number, parts in sentences.items()}


def _sentences_on_one_line(line: str, note: str) -> dict[int, str]:
    """Sentences that follow one another as ``0 First one. 1 Second one.``; none if they are not
    those of the note.

    A number opens a sentence if it is the next one and the note has no such word there.
    """
    words = line.replace("\\n", "\n").split()  # some lists have line breaks spelled out
    spelled, of_note = (
        [re.sub(r"[\W_]", "", word) for word in text] for text in (words, note.split())
    )
    sentences: dict[int, list[str]] = {}
    common = 0
    for edit in Indel.opcodes(of_note, spelled):
        for word in words[edit.dest_start : edit.dest_end]:
            if edit.tag != "equal" and word == str(len(sentences)):
                sentences[len(sentences)] = []
            elif sentences:
                sentences[len(sentences) - 1].append(word)
                common += edit.tag == "equal"
    alike = common >= _SAME_NOTE * (len(words) - len(sentences))
    return {number: " ".join(sentence) for number, sentence in sentences.items()} if alike else {}


def with_numbers(sentences: Iterable[str], first: int = 0) -> str:
    """MEDEC's ``Sentences`` column: every sentence on a line, behind its number."""
    return "\n".join(f"{number} {text}" for number, text in enumerate(sentences, start=first))
