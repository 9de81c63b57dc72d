"""A case: a note, its correction and the facts of its error; similar notes, MEDEC's sentence lists.

``reader.py`` turns files into cases, and ``rows.py`` turns cases into rows of games.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from medserl_agentloop.games.medical.case import ERROR_TYPES, Category, known_type
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import LONGEST_NOTE

NEAR_DUPLICATE = 0.5  # Jaccard similarity of two notes' sets of 4-grams
MEDEC_UW = "medec_uw"
NO_TYPE = "unknown"
_SUBSETS = {"ms": "medec_ms", "uw": MEDEC_UW}
_LONGEST_TYPE = 40
# De-identification marks of MEDEC-UW, such as <NAME/>, and not HTML's tags in capitals.
_MARKS_OF_UW = re.compile(
    r"<(?!(?:A|B|BR|COL|DIV|EM|FONT|H[1-6R]|I|IMG|INPUT|LI|LINK|META|OL|P|PRE|SPAN|STRONG|SUB|SUP|"
    r"TABLE|TBODY|TD|TH|THEAD|TR|U|UL|WBR) ?/>)[A-Z][A-Z _-]*/>"
)
# Only letters: an id such as 17, pat3-1 or a UUID, whose first eight digits may all be letters,
# would be a collection.
_COLLECTION = re.compile(r"(?![a-f]{8}-)([^\W\d_]+)[-_]", re.IGNORECASE)
_ABSENT = ("", "na", "n/a", "nan", "none", "null")  # how MEDEC, pandas and JSON spell no value
_EXCEL_ERROR = re.compile(r"#(NAME\?|REF!|VALUE!|N/A|DIV/0!|NUM!|NULL!|SPILL!|CALC!)")
_EXCEL_CELL = 32_767  # characters; Excel cuts longer texts
_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)
_LARGEST_ID_GAP = 3
# Word overlap of a clean row with the corrected text of the error row before it. On the official
# validation set the lowest twin has 0.86, and the highest of two unrelated notes 0.45.
_TWIN_OVERLAP = 0.7
_LONGEST_CHANGE = 200  # letters that a list of sentences may lag behind its note


class MedecFormatError(ValueError):
    """An input file is invalid; the message is a sentence that names file, line and column."""


class EditTag(str, Enum):
    """The kind of difference between the clean note and the error note."""

    LOCAL = "local_edit"  # exchanging the two sentences in place gives the clean note
    NON_LOCAL = "non_local_edit"  # the corrected sentence is elsewhere, or more was changed
    NO_OP = "no_op_edit"  # only letter case or white space differs: there is no error
    UNLOCATED = "unlocated_edit"  # the source does not name the two sentences
    NO_PAIR = "no_pair"  # only one note is known


def cell(value: Any, as_published: bool = False) -> Any:
    """A value from any kind of file as CSV text, or None.

    Line ends become LF and outer white space is removed: trailing spaces are more frequent in
    MEDEC's error notes and would leak the label.
    """
    if value is None or isinstance(value, dict | list | tuple | bytes):
        return value
    text = str(value).replace("\r\n", "\n").replace("\r", "\n").strip()
    if text.casefold() in _ABSENT:
        return None
    return str(value) if as_published else text


def _readable(text: Any) -> Any:
    """Refuse characters that no tokenizer reads, and texts damaged by Excel."""
    if not isinstance(text, str):
        return text
    if bad := re.search("[\0\ud800-\udfff]", text):
        raise ValueError(
            f"character {bad.start()} is U+{ord(bad[0]):04X}, which no tokenizer can read: write "
            "the intended character"
        )
    if _EXCEL_ERROR.fullmatch(text.strip()):
        raise ValueError("this is Excel's mark for a failed formula: write the intended text")
    if len(text) == _EXCEL_CELL:
        raise ValueError(f"Excel cuts a text at {_EXCEL_CELL:,} characters: give the full text")
    return text


def _number(value: Any) -> Any:
    """A whole number that pandas or a spreadsheet wrote as ``1.0`` or ``1.``."""
    spelled = isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,6}(\.0*)?", value)
    return float(value) if spelled else value


def _known_or_own(kind: Any) -> Any:
    if not isinstance(kind, str):
        return kind
    word = one_line(kind)
    if len(word) > _LONGEST_TYPE:
        raise ValueError(f"write {', '.join(ERROR_TYPES)}, your own type in a few words, or NA")
    return known_type(word) or (None if word.casefold() in ("", NO_TYPE) else word)


Text = Annotated[str, BeforeValidator(_readable), Field(max_length=LONGEST_NOTE)]
ErrorKind = Annotated[str | None, BeforeValidator(_known_or_own)]


@dataclass(frozen=True)
class Case:
    """A note with its source's facts: a row of a file, and its clean twin if there is one.

    The fields above ``source_sha256`` are the columns of a file.
    """

    id: Annotated[Text, Field(min_length=1)]
    note: Text
    has_error: Annotated[bool, BeforeValidator(_number)]
    corrected: Text | None = None
    error_type: ErrorKind = None  # MEDEC's name of one of its five, else the source's word
    error_sentence: Text | None = None
    corrected_sentence: Text | None = None
    sentences: Mapping[int, Text] = field(default_factory=dict)  # of the note, by the source's ids
    error_sentence_id: Annotated[int, BeforeValidator(_number), Field(ge=-1, le=999_999)] = -1
    source_sha256: str = ""  # of the file it was read from
    twin: Case | None = None  # the clean row of the same case, often with its sentences reordered
    vignette_id: str = ""  # of the case, where the row is its twin
    categories: tuple[Category, ...] | None = None  # those that the source asks for; None is any

    @field_validator("corrected", "error_type", "error_sentence", "corrected_sentence")
    @classmethod
    def _only_of_an_error(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or info.data.get("has_error") is not False:
            return value
        note = info.data.get("note", "")
        if info.field_name == "corrected" and one_line(value) == one_line(note):
            return None
        raise ValueError("the row says that its note has no error: write NA, or mark the error")

    @field_validator("sentences", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        return sentences_of(_readable(value), info.data["note"]) if "note" in info.data else {}

    @field_validator("error_sentence_id")
    @classmethod
    def _none_without_an_error(cls, number: int, info: ValidationInfo) -> int:
        if number >= 0 and info.data.get("has_error") is False:
            raise ValueError("the row says that its note has no error: write -1, or flag 1")
        return number

    @property
    def case_id(self) -> str:
        """The id of the error row, or of the only row; ``vignette_id`` in parquet rows."""
        return self.vignette_id or self.id

    @property
    def error_note(self) -> str | None:
        return self.note if self.has_error else None

    @property
    def clean_note(self) -> str | None:
        # The corrected text goes before the twin's: it differs from the error note only in the
        # error, while a twin with reordered sentences would tell the two labels apart.
        if not self.has_error:
            return self.note
        return self.corrected or (self.twin.note if self.twin else None)

    @property
    def notes(self) -> tuple[str, ...]:
        twin = self.twin.note if self.twin else None
        return tuple(note for note in (self.error_note, self.clean_note, twin) if note)

    @property
    def text_ids(self) -> tuple[str, ...]:
        """Every source row that belongs to the case."""
        return (self.id, self.twin.id) if self.twin else (self.id,)

    @property
    def pair_source(self) -> str:
        """The source of the clean note: the error row (``in_row``) or the ``twin``; ``unpaired``
        with one note.
        """
        if self.error_note is None or self.clean_note is None:
            return "unpaired"
        return "in_row" if self.corrected else "twin"

    def text_id(self, harmful: bool) -> str:
        """Id of the source row with the error note or the clean one."""
        return self.twin.id if self.twin and self.pair_source == "twin" and not harmful else self.id

    @cached_property
    def subset(self) -> str:
        """``medec_uw`` by MEDEC-UW's marks in a note, else by the letters before ``-`` or ``_``
        that begin the id.
        """
        if any(map(_MARKS_OF_UW.search, self.notes)):
            return MEDEC_UW
        named = _COLLECTION.match(self.case_id)
        prefix = named[1].lower() if named else "unnamed"
        return _SUBSETS.get(prefix, prefix)

    @cached_property
    def edit_tag(self) -> EditTag:
        """The kind of difference between the two notes; white space does not count."""
        if self.error_note is None or self.clean_note is None:
            return EditTag.NO_PAIR
        wrong, right = one_line(self.error_note), one_line(self.clean_note)
        if wrong.casefold() == right.casefold():
            return EditTag.NO_OP
        if self.error_sentence is None or self.corrected_sentence is None:
            return EditTag.UNLOCATED
        old, new = one_line(self.error_sentence), one_line(self.corrected_sentence)
        places = (match.start() for match in re.finditer(f"(?={re.escape(old)})", wrong))
        exchanged = any(wrong[:at] + new + wrong[at + len(old) :] == right for at in places)
        return EditTag.LOCAL if exchanged else EditTag.NON_LOCAL

    @property
    def contradiction(self) -> str:
        """Say why the error sentence does not match its note, white space aside; else empty."""
        if self.error_note is None or not self.error_sentence:
            return ""
        wrong = one_line(self.error_sentence)
        if wrong not in one_line(self.error_note):
            return "the error sentence is not in the error note"
        listed, named = _letters(self.sentences.get(self.error_sentence_id, "")), _letters(wrong)
        if self.sentences and not (listed and (named in listed or listed in named)):
            return "the sentence with that number is a different one"
        return ""


def conflicts(cases: Iterable[Case]) -> dict[str, str]:
    """Return by id why cases disagree about a note: it is wrong in one and correct in another;
    white space and letter case do not count.
    """
    wrong, correct = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for case in cases:
        for note in case.notes:
            of = wrong if note == case.error_note else correct
            of[one_line(note).casefold()].add(case.case_id)
    found: dict[str, str] = {}
    for note, ids in wrong.items():
        for case_id in ids:
            for other in correct.get(note, set()) - {case_id}:
                found[case_id] = "its note with an error is correct in another row"
                found[other] = "its correct note has an error in another row"
    return found


def with_twins(cases: Iterable[Case], as_published: bool) -> Iterator[Case]:
    """Every error row joined with its clean twin, which may come before it."""
    by_id = {row.id: row for row in cases}
    error_row_of: dict[str, str] = {}
    for text_id, row in by_id.items():
        if twin := _twin(row, by_id):
            error_row_of.setdefault(twin.id, text_id)
    twin_of = {text_id: by_id[twin_id] for twin_id, text_id in error_row_of.items()}
    for text_id, row in by_id.items():
        if as_published:
            yield replace(row, vignette_id=error_row_of.get(text_id, ""))
        elif text_id not in error_row_of:
            yield replace(row, twin=twin_of.get(text_id))


def _twin(row: Case, rows: Mapping[str, Case]) -> Case | None:
    """The clean row of the same case as an error row: the next id of the same series, if the text
    agrees.
    """
    numbered = re.fullmatch(r"(.*?)([0-9]{1,18})", row.id, re.DOTALL)
    if not row.has_error or not numbered:
        return None
    prefix, digits = numbered.groups()
    twin = rows.get(f"{prefix}{int(digits) + 1:0{len(digits)}d}")
    if twin is None or twin.has_error:
        return None
    # The same words, with the sentences in any order.
    one, two = (
        Counter(re.findall(r"\w+", text.casefold()))
        for text in (twin.note, row.corrected or row.note)
    )
    total = one.total() + two.total()
    overlap = 2 * (one & two).total() / total if total else 1.0  # Dice coefficient, 0 to 1
    return twin if overlap >= _TWIN_OVERLAP else None


# -- similar notes ---------------------------------------------------------------------------------


def four_grams(text: str) -> frozenset[str]:
    """The text's runs of four words without case and punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.casefold())
    return frozenset(" ".join(words[at : at + 4]) for at in range(max(1, len(words) - 3)))


class NearDuplicateIndex:
    """Finds all indexed notes similar to another one."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._sizes: list[int] = []
        self._texts_of: defaultdict[str, list[int]] = defaultdict(list)
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Index one more note, under the next number from 0."""
        grams = four_grams(text)
        for gram in grams:
            self._texts_of[gram].append(len(self._sizes))
        self._sizes.append(len(grams))

    def matches(self, text: str, threshold: float = NEAR_DUPLICATE) -> list[tuple[int, float]]:
        """Number and Jaccard similarity of every note that is at least so similar."""
        grams = four_grams(text)
        common = Counter(number for gram in grams for number in self._texts_of.get(gram, ()))
        found = (
            (n, shared / (len(grams) + self._sizes[n] - shared)) for n, shared in common.items()
        )
        return [match for match in found if match[1] >= threshold]


def near_duplicates(
    notes: Iterable[tuple[str, str]], others: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, float]]:
    """Yield every named note that is nearly one of ``others``: its name, the name of the most
    similar one, and their similarity.
    """
    index = NearDuplicateIndex(text for _, text in others)
    for name, text in notes:
        if found := index.matches(text):
            number, similarity = min(found, key=lambda match: (-match[1], match[0]))
            yield name, others[number][0], similarity


# -- MEDEC's lists of sentences --------------------------------------------------------------------


def with_numbers(sentences: Iterable[str], first: int = 0) -> str:
    """MEDEC's ``Sentences`` column: a line for every sentence, which begins with its number."""
    return "\n".join(f"{number} {text}" for number, text in enumerate(sentences, start=first))


def sentences_of(listed: str, note: str) -> dict[int, str]:
    """A note's sentences by their numbers in a list: one per line or, as in MedErrBench, all on one
    line.

    On one line, a number begins a sentence if it is the next one and the note does not have it as a
    word there.
    """
    sentences = numbered_sentences(listed)
    if list(sentences) != [0]:
        return sentences
    letters, at = _letters(note), 0
    found: dict[int, list[str]] = {}
    for word in listed.replace("\\n", "\n").split():  # some lists have line breaks spelled out
        own = _letters(word)
        if word == str(len(found)) and not letters.startswith(own, at):
            found[len(found)] = []
        elif found:
            found[len(found) - 1].append(word)
            start = letters.find(own, at, at + _LONGEST_CHANGE)
            at = start + len(own) if start >= 0 else at
    return {n: " ".join(words) for n, words in found.items()} if len(found) > 1 else sentences


def numbered_sentences(text: str) -> dict[int, str]:
    """MEDEC's ``Sentences`` column by the source's own numbers; -1 is text before the first one.

    A line opens a sentence when it carries the next number. A larger one opens a sentence too if
    the numbers between are truly missing; otherwise it is a continuation line that happens to begin
    with a figure ("500 mg twice a day"). Lines without a number belong to the sentence above.
    """
    lines = re.split(r"\r\n?|\n", text)
    matches = [_NUMBERED_LINE.match(line) for line in lines]
    last_line_of = {int(match[1]): at for at, match in enumerate(matches) if match}
    sentences: dict[int, list[str]] = {}
    for at, (line, match) in enumerate(zip(lines, matches, strict=True)):
        current = max(sentences, default=-1)
        number = int(match[1]) if match else -1
        skipped = range(current + 1, number)
        missing = all(last_line_of.get(n, -1) < at for n in skipped[: _LARGEST_ID_GAP + 1])
        if match and number > current and len(skipped) <= _LARGEST_ID_GAP and missing:
            sentences[number] = [match[2] or ""]
        elif sentences or line.strip():
            sentences.setdefault(current, []).append(line)
    return {number: "\n".join(parts).strip() for number, parts in sentences.items()}


def _letters(text: str) -> str:
    """The letters and digits: lists drop apostrophes and periods that a note has."""
    return re.sub(r"[\W_]", "", text)
