"""A case: its two notes and what is known of the error; contradictions; similar notes; lists of
sentences.

``reader.py`` makes cases of files, and ``rows.py`` makes the rows of games of cases.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import cached_property

from pydantic.dataclasses import dataclass
from rapidfuzz.distance import Indel

from medserl_agentloop.games.medical.case import Category
from medserl_agentloop.games.medical.edit import WORD, one_line
from medserl_agentloop.terminal import shown

NEAR_DUPLICATE = 0.5  # Jaccard similarity of two notes' sets of 4-grams
MEDEC_UW = "medec_uw"
_SUBSETS = {"ms": "medec_ms", "uw": MEDEC_UW}
_WORDS_PER_GRAM = 4
# De-identification marks of MEDEC-UW, such as <NAME/>, and not HTML's tags in capitals. No note of
# MEDEC-MS has one.
_HTML = (
    "A ABBR AREA ASIDE B BASE BIG BLOCKQUOTE BODY BR BUTTON CAPTION CENTER CODE COL DD DIV DL DT "
    "EM FONT FORM H1 H2 H3 H4 H5 H6 HEAD HR HTML I IFRAME IMG INPUT LABEL LI LINK META NOBR OL "
    "OPTION P PRE Q S SMALL SPAN STRONG STYLE SUB SUP TABLE TBODY TD TFOOT TH THEAD TITLE TR TT U "
    "UL WBR"
)
_MARKS_OF_UW = re.compile(rf"<(?!(?:{'|'.join(_HTML.split())}) ?/>)[A-Z][A-Z _-]*/>")
# Letters alone: an id such as 17, pat3-1 or a UUID, whose first eight digits may all be letters,
# would be a collection.
_COLLECTION = re.compile(r"(?![a-f]{8}-)([^\W\d_]+)[-_]", re.IGNORECASE)
_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)
_LARGEST_ID_GAP = 3
_SAME_NOTE = 2 / 3  # share of the words in a list of sentences that are also in the note


class MedecFormatError(ValueError):
    """An input file is invalid; the message is a sentence that names file, line and column.

    Of several problems the message has the first one and their number, and the exception's notes
    have the next nine.
    """


class EditTag(str, Enum):
    """The kind of difference between the clean note and the error note."""

    LOCAL = "local_edit"  # exchanging the two sentences in place gives the clean note
    NON_LOCAL = "non_local_edit"  # the corrected sentence stands elsewhere, or more was changed
    NO_OP = "no_op_edit"  # only letter case or white space differs: there is no error
    UNLOCATED = "unlocated_edit"  # the source does not name the two sentences
    NO_PAIR = "no_pair"  # only one note is known


@dataclass(frozen=True)
class Case:
    """One case: its error note, its clean note, or both. The unit of splitting.

    ``case_id`` is the id of its error row, else of its only row; files call it ``vignette_id``.
    """

    case_id: str
    error_note: str | None
    clean_note: str | None
    source_sha256: str = ""  # of the file it was read from
    twin_text_id: str | None = None  # the clean row of the same case, where the file has one
    twin_note: str | None = None  # its text, often with its sentences in another order
    clean_from_twin: bool = False  # the error row has no corrected text, so the twin's is used
    error_type: str | None = None  # MEDEC's name of one of its five types, else the source's word
    error_sentence: str | None = None
    corrected_sentence: str | None = None
    error_sentence_id: int = -1  # number of the wrong sentence, from 0; -1 is none
    sentences: Mapping[int, str] = field(default_factory=dict)  # of ``case_id``, by its numbers
    categories: tuple[Category, ...] | None = None  # those that the source asks for; None is any

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for note in (self.error_note, self.clean_note, self.twin_note) if note)

    @property
    def text_ids(self) -> tuple[str, ...]:
        """Every source row that belongs to the case."""
        return (self.case_id, self.twin_text_id) if self.twin_text_id else (self.case_id,)

    def text_id(self, harmful: bool) -> str:
        """Id of the source row that holds the error note, or the clean one."""
        of_twin = self.twin_text_id if self.clean_from_twin and not harmful else None
        return of_twin or self.case_id

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

    @property
    def pair_source(self) -> str:
        """The source of the clean note: the error row (``in_row``) or the ``twin``; ``unpaired``
        with one note.
        """
        if self.error_note is None or self.clean_note is None:
            return "unpaired"
        return "twin" if self.clean_from_twin else "in_row"

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
        """Return why notes and sentences cannot belong together; empty if they can, or if the
        source names no sentence.

        White space does not count. A correction that is in neither note is no contradiction:
        MedErrBench words the corrected sentence and the corrected note independently.
        """
        if self.error_note is None or not self.error_sentence:
            return ""
        wrong, right = one_line(self.error_note), one_line(self.clean_note or "")
        old, new = one_line(self.error_sentence), one_line(self.corrected_sentence or "")
        if old not in wrong:
            return "the error sentence is not in the error note"
        if right and new and new not in right and (new in wrong or old in right or right in new):
            return "the corrected sentence is not in the corrected note"
        # Lists drop an apostrophe or a stop that the sentence has.
        listed, named = (
            re.sub(r"[\W_]", "", text)
            for text in (self.sentences.get(self.error_sentence_id, ""), old)
        )
        if self.sentences and not (listed and (named in listed or listed in named)):
            return "the sentence of that number is another one"
        return ""


def contradictions(cases: Iterable[Case]) -> tuple[dict[str, str], str]:
    """Why each case that contradicts itself does, by its id, and a sentence if most do: columns
    were exchanged.
    """
    compared = [case for case in cases if case.error_note and case.error_sentence is not None]
    wrong = {case.case_id: why for case in compared if (why := case.contradiction)}
    if 2 * len(wrong) <= len(compared):
        return wrong, ""
    examples = "; ".join(f"{shown(case_id)}: {why}" for case_id, why in list(wrong.items())[:3])
    return wrong, (
        f"{len(wrong)} of {len(compared)} error rows contradict themselves ({examples}); this is "
        "what exchanged columns look like (the two notes, or the two sentences), or sentence "
        "numbers that are not those of the list"
    )


def conflicts(cases: Iterable[Case]) -> dict[str, str]:
    """Why cases disagree about a note, by their ids: it is the error note of one and a correct note
    of another, or corrects an error note that is unlike it.

    White space and letter case do not count.
    """
    correct: defaultdict[str, set[str]] = defaultdict(set)
    of_errors: list[tuple[str, str, str]] = []
    for case in cases:
        wrong, *right = (
            one_line(note or "").casefold()
            for note in (case.error_note, case.clean_note, case.twin_note)
        )
        for note in filter(None, right):
            correct[note].add(case.case_id)
        if wrong:
            of_errors.append((case.case_id, wrong, right[0]))
    found: dict[str, str] = {}
    for case_id, wrong, right_note in of_errors:
        for other in correct.get(wrong, set()) - {case_id}:
            found[case_id] = "its note with an error is correct in another row"
            found[other] = "its correct note has an error in another row"
        if correct[right_note] - {case_id} and _unlike(wrong, right_note):
            found[case_id] = "its corrected note is another row's, and unlike its own"
    return found


def _unlike(note: str, other: str) -> bool:
    """Return whether two notes share less than half of their words."""
    return Indel.normalized_similarity(WORD.findall(note), WORD.findall(other)) < 0.5


# -- similar notes ---------------------------------------------------------------------------------


def four_grams(text: str) -> frozenset[str]:
    """The text's runs of four words, in lower case and without punctuation; a shorter text is one
    run.
    """
    words = re.findall(r"\w+", text.casefold())
    runs = range(max(1, len(words) - _WORDS_PER_GRAM + 1))
    return frozenset(" ".join(words[i : i + _WORDS_PER_GRAM]) for i in runs)


class NearDuplicateIndex:
    """Finds the indexed notes that are like another one.

    Exact: no pair of near-duplicates is missed.
    """

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
    """Yield every named note that is nearly one of ``others``: its name, that of the likest one,
    their similarity.
    """
    index = NearDuplicateIndex(text for _, text in others)
    for name, text in notes:
        if found := index.matches(text):
            number, similarity = min(found, key=lambda match: (-match[1], match[0]))
            yield name, others[number][0], similarity


# -- MEDEC's lists of sentences --------------------------------------------------------------------


def with_numbers(sentences: Iterable[str], first: int = 0) -> str:
    """MEDEC's ``Sentences`` column: every sentence on a line, behind its number."""
    return "\n".join(f"{number} {text}" for number, text in enumerate(sentences, start=first))


def sentences_of(listed: str, note: str) -> dict[int, str]:
    """The sentences of a note by the numbers that a list of them has, each on a line or all on
    one.

    A ValueError says that a list on one line is not one of this note.
    """
    sentences = numbered_sentences(listed)
    if list(sentences) != [0] or not re.search(r"\s1\s", listed):
        return sentences
    of_note = _sentences_on_one_line(listed, note)
    if not of_note:
        raise ValueError("write each sentence of the text on a line, behind its number")
    return of_note if len(of_note) > 1 else sentences


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
    """Sentences that follow one another as ``0 First one. 1 Second one.``, as MedErrBench has them;
    none if they are not those of the note.

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
