"""One case, whatever file it came from, and how the values of a file's row are read.

The readers write cases and ``rows.py`` turns them into rows of games. Readers of all formats read single values here,
so that all of them accept and refuse the same things.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

from ftfy import TextFixerConfig, fix_encoding

from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Category, ErrorType

# Word overlap of a clean row with the corrected text of the error row before it. On the official
# validation set the lowest twin has 0.86, and the highest of two unrelated notes 0.45.
TWIN_OVERLAP = 0.7
NEAR_DUPLICATE = 0.5  # Jaccard similarity of two notes' sets of 4-grams

_SUBSETS = {"ms": "medec_ms", "uw": "medec_uw"}
_WORDS_PER_GRAM = 4
_LARGEST_ID_GAP = 3
# No guess at bytes that were lost: what stands in their place is text.
_MISREAD_ONLY = TextFixerConfig(restore_byte_a0=False, replace_lossy_sequences=False, fix_c1_controls=False)
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)


class EditTag(str, Enum):
    """How the clean note differs from the error note."""

    LOCAL = "local_edit"  # exchanging the two sentences in place gives the clean note
    NON_LOCAL = "non_local_edit"  # the corrected sentence stands elsewhere, or more was changed
    NO_OP = "no_op_edit"  # only letter case or white space differs: there is no error
    UNLOCATED = "unlocated_edit"  # the source does not name the two sentences
    NO_PAIR = "no_pair"  # only one note is known


@dataclass(frozen=True)
class Sentence:
    """One numbered sentence, under the number that the source gave it."""

    id: int
    text: str


@dataclass(frozen=True)
class Vignette:
    """One case: its error note, its clean note, or both. The unit of splitting."""

    vignette_id: str  # that of its error row, else of its only row
    error_note: str | None
    clean_note: str | None
    source_sha256: str  # of the file it was read from
    twin_text_id: str | None = None  # the clean row of the same case, where the file has one
    twin_note: str | None = None  # its text, often with its sentences in another order
    clean_from_twin: bool = False  # the error row has no corrected text: the twin's text stands in
    error_type: ErrorType | None = None
    error_sentence: str | None = None
    corrected_sentence: str | None = None
    error_sentence_id: int = -1  # number of the wrong sentence in ``sentences``; 0 is one, -1 is none
    sentences: tuple[Sentence, ...] = ()  # those of the note named by ``vignette_id``, with the source's numbers
    categories: tuple[Category, ...] | None = None  # those that the source asks for; None where it leaves them open

    @property
    def notes(self) -> tuple[str, ...]:
        """Every text of the case that is known."""
        return tuple(note for note in (self.error_note, self.clean_note, self.twin_note) if note)

    @property
    def text_ids(self) -> tuple[str, ...]:
        """Every source row that belongs to the case."""
        return (self.vignette_id, self.twin_text_id) if self.twin_text_id else (self.vignette_id,)

    @property
    def subset(self) -> str:
        """Which collection it is from: ``medec_ms``, ``medec_uw``, or the prefix of its id."""
        prefix = re.split(r"[-_]", self.vignette_id, maxsplit=1)[0].lower()
        return _SUBSETS.get(prefix, prefix or "unnamed")

    @property
    def pair_source(self) -> str:
        """Where the clean note was read: in the error row (``in_row``) or the ``twin``; ``unpaired`` with one note."""
        if self.error_note is None or self.clean_note is None:
            return "unpaired"
        return "twin" if self.clean_from_twin else "in_row"

    @cached_property
    def edit_tag(self) -> EditTag:
        """How the two notes differ; differences in white space do not count."""
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


def same_case(clean_note: str, corrected_note: str) -> bool:
    """Whether two notes describe the same case, with their sentences in any order."""
    words_a, words_b = (Counter(re.findall(r"\w+", text.casefold())) for text in (clean_note, corrected_note))
    total = words_a.total() + words_b.total()
    overlap = 2 * (words_a & words_b).total() / total if total else 1.0  # Dice coefficient, 0 to 1
    return overlap >= TWIN_OVERLAP


def four_grams(text: str) -> frozenset[str]:
    """The text's runs of four words, in lower case and without punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.casefold())
    runs = range(max(1, len(words) - _WORDS_PER_GRAM + 1))
    return frozenset(" ".join(words[i : i + _WORDS_PER_GRAM]) for i in runs)


class NearDuplicateIndex:
    """Finds the indexed note that is most like another one. Exact: no pair of near-duplicates is missed."""

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

    def find(self, text: str, threshold: float = NEAR_DUPLICATE) -> tuple[int, float] | None:
        """Number and Jaccard similarity of the most similar note, the first of several; None below ``threshold``."""
        return min(self.matches(text, threshold), key=lambda match: (-match[1], match[0]), default=None)

    def matches(self, text: str, threshold: float = NEAR_DUPLICATE) -> list[tuple[int, float]]:
        """Number and Jaccard similarity of every note that is at least so similar."""
        grams = four_grams(text)
        common = Counter(number for gram in grams for number in self._texts_of.get(gram, ()))
        found = ((n, shared / (len(grams) + self._sizes[n] - shared)) for n, shared in common.items())
        return [match for match in found if match[1] >= threshold]


def near_duplicates(
    notes: Iterable[tuple[str, str]], others: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, float]]:
    """Every named note that is nearly one of ``others``: its name, that of the likest one, their similarity."""
    index = NearDuplicateIndex(text for _, text in others)
    for name, text in notes:
        if match := index.find(text):
            yield name, others[match[0]][0], match[1]


class MedecFormatError(ValueError):
    """An input file is not what it should be; the message is a sentence that names file, row and column."""


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

    def error(self, column: str, value: str, instead: str) -> MedecFormatError:
        """An error about one value."""
        return MedecFormatError(f"{self}, column {column!r}: found {shown(value)}; {instead}.")


def _count(label: str) -> int:
    return field(default=0, metadata={"label": label})


@dataclass
class ReadReport:
    """What became of one input's records; the readers count, and the labels say what.

    ``records == dropped_empty + pairs + twins + clean_only + error_only``: nothing else is lost. OpenRLHF
    files are the exception: up to four of their rows are about one case.
    """

    file: str = ""
    sha256: str = ""  # of the file; of the rows where the input is a data set
    records: int = _count("records read")
    dropped_empty: int = _count("= empty records, dropped")
    pairs: int = _count("+ pairs (error note and clean note)")
    twins: int = _count("+ clean rows that are a pair's twin")
    clean_only: int = _count("+ clean notes without an error note")
    error_only: int = _count("+ error notes without a clean note")
    pairs_by_twin: int = _count("pairs whose clean note is the twin's")
    non_local_edits: int = _count("pairs edited in more than one place")
    no_op_edits: int = _count("pairs without a real edit (no-op)")
    unlisted_error_sentences: int = _count("error sentence number not in the list")
    joined: int = _count("OpenRLHF rows joined with their case")
    repaired: int = _count("rows in which misread characters were put right")
    uw_rows: int = _count("rows of MEDEC-UW")
    unknown_origin: int = _count("OpenRLHF rows that may be of MEDEC-UW")
    error_types: dict[str, int] = field(default_factory=dict)  # of error notes; ``unknown`` where none is given
    not_joined: list[tuple[str, str]] = field(default_factory=list)  # id of each other OpenRLHF row, and why


@dataclass
class Intake:
    """One input: its report, the row of every text id in all inputs so far, whether misread UTF-8 is put right."""

    claims: dict[str, RowPlace]
    repair: bool = False
    report: ReadReport = field(default_factory=ReadReport)

    def read(self, path: Path) -> str:
        """The text of a file; its name and its hash go to the report."""
        text, self.report.sha256 = read_text(path)
        self.report.file = path.name
        return text

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


def read_text(path: Path) -> tuple[str, str]:
    """A file's text, which must be UTF-8, and the hash of its bytes."""
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
    return text, hashlib.sha256(content).hexdigest()


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
    kind = None if text is None else ErrorType.parse(text)
    if text is not None and kind is None:
        raise place.error(column, value, "write one of " + ", ".join(t.value for t in ErrorType) + ", or NA")
    return kind


def numbered_sentences(text: str | None) -> tuple[Sentence, ...]:
    """Split MEDEC's ``Sentences`` column, keeping the source's own numbers.

    A line opens a sentence when it carries the next number. A larger one opens a sentence too if
    the numbers between are truly missing; otherwise it is a continuation line that happens to begin
    with a figure ("500 mg twice a day"). Lines without a number belong to the sentence above.
    """
    lines = [(_NUMBERED_LINE.match(line), line) for line in (text or "").split("\n")]
    last_line_of = {int(match[1]): at for at, (match, _) in enumerate(lines) if match}
    sentences: list[tuple[int, list[str]]] = []
    for at, (match, line) in enumerate(lines):
        number = int(match[1]) if match else -1
        previous = sentences[-1][0] if sentences else -1
        skipped = range(previous + 1, number)
        missing = len(skipped) <= _LARGEST_ID_GAP and all(last_line_of.get(n, -1) < at for n in skipped)
        if match and number > previous and missing:
            sentences.append((number, [match[2] or ""]))
        elif sentences:
            sentences[-1][1].append(line)
        elif line.strip():
            sentences.append((-1, [line]))
    return tuple(Sentence(number, "\n".join(parts).strip()) for number, parts in sentences)


def with_numbers(sentences: Iterable[str], first: int = 0) -> str:
    """MEDEC's ``Sentences`` column: every sentence on a line, behind its number."""
    return "\n".join(f"{number} {text}" for number, text in enumerate(sentences, start=first))


def repair_encoding(text: str) -> str:
    """``text`` with UTF-8 that was read as another encoding (``â€“`` for a dash) put right; genuine signs stay."""
    return fix_encoding(text, _MISREAD_ONLY)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shown(value: str) -> str:
    """A value for a message; a long one is described, because it may be a patient's note."""
    if not value.strip():
        return "an empty cell"
    return ascii(value) if len(value) <= 40 else f"a text of {len(value)} characters"


def _whole_number(text: str) -> int | None:
    """The number that ``1``, ``01``, ``1.0`` or ``-1`` spells; None for anything else."""
    return int(float(text)) if re.fullmatch(r"[+-]?[0-9]{1,6}(\.0*)?", text) else None
