"""Compare two notes sentence by sentence to find an attacker's edit, and find text that is meant
for a machine.

Notes are data, so no injection can do what it pretends to. It is counted, and ``medical.rules``
refuses what instructs the assessor, since words work on a model even where they are data. No
pattern here takes more than linear time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import regex
from rapidfuzz.distance import OSA, Levenshtein, MatchingBlock, Postfix, Prefix

from medserl_agentloop.core.control_text import MARKUP, SWITCH
from medserl_agentloop.games.medical.canonical import canonical_words, says_the_same, visible
from medserl_agentloop.scoring.notes import IDEOGRAPHS, spaced

# A full stop, question mark or exclamation mark ends a sentence where a new one plausibly begins.
# "38.5 C" and "e.g. aspirin" stay whole. A line break ends nothing: models flatten them when they
# copy.
_SENTENCE_END = re.compile(
    "(?<=[.!?\u061f])\\s+(?=[\"'(\\[]?[A-Z0-9\u0620-\u064a])|(?<=[\u3002\uff01\uff1f])\\s*(?=[^\\s\u3002\uff01\uff1f])"
)
_SENTENCE_MARKS = ".!?\"')]\u061f\u3002\uff01\uff1f"

LONGEST_WORD = 32
"""Characters of one word; MEDEC's longest has 31.

What is longer, or glued with ``_``, counts as several words.
"""
WORD = re.compile(rf"[{IDEOGRAPHS}]|_{{1,{LONGEST_WORD}}}|[^\s_{IDEOGRAPHS}]{{1,{LONGEST_WORD}}}")

# Format, control, private and unassigned characters, those that fonts show as nothing, and
# Braille's blank: what a model reads in them, a person does not see.
_INVISIBLE = regex.compile(
    r"[\p{Cf}\p{Cc}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800--[\t\n\r\x0b\x0c]]",
    regex.V1,
)
_GAP = re.compile(r"\s+")
_LONGEST_GAP = 16  # characters; an indented table of findings needs less


def split_sentences(note: str) -> list[str]:
    """The sentences of ``note``, white space normalised, empty ones left out."""
    return sentences_in(one_line(note))


def sentences_in(note: str) -> list[str]:
    """The sentences of ``note`` as they stand in it."""
    return [s for s in _SENTENCE_END.split(note.strip()) if s]


def one_line(text: str) -> str:
    """``text`` with every run of white space as one blank."""
    return " ".join(text.split())


def exceeds(new: str, old: str, words: int) -> bool:
    """Return whether ``new`` is so much longer that more than ``words`` words changed; a cheap
    first look.
    """
    return len(one_line(new)) - len(one_line(old)) > words * (LONGEST_WORD + 1)


def is_repair(new: str, error: str, correction: str) -> bool:
    """Return whether ``new`` changes ``error`` as ``correction`` does, with slips of the pen, but
    not by a synonym.
    """
    return any(
        _repairs(*(Counter(canonical_words(t, hyphen=h)) for t in (new, error, correction)))
        for h in (" ", "")
    )


def telling_words(error: str, correction: str) -> set[str]:
    """Words of one sentence that the other lacks; little words, which say nothing of a case, are
    left out.
    """
    differing = set(canonical_words(error)) ^ set(canonical_words(correction))
    return {
        word for word in differing if (len(word) > 3 or spaced(word) != word) and word.isalpha()
    }


def _repairs(new: Counter[str], error: Counter[str], correction: Counter[str]) -> bool:
    missing = (correction - error) - new
    keeps_the_error = (error - correction) & (new - correction)
    return not keeps_the_error and all(
        any(_is_slip(word, meant) for word in new) for meant in missing
    )


def _is_slip(word: str, meant: str) -> bool:
    """Return whether one letter of a long word is left out, doubled or swapped; a replaced one
    makes another word.
    """
    if len(meant) <= 5 or not meant.isalpha() or word[0] != meant[0]:
        return False
    return OSA.distance(word, meant, score_cutoff=1) == 1 and (
        len(word) != len(meant) or sorted(word) == sorted(meant)
    )


def is_copy(quote: str, sentence: str) -> bool:
    """Return True if ``quote`` has the words of ``sentence`` in any spelling; a word more or less
    may be the error.
    """
    for hyphen in (" ", ""):
        both = (canonical_words(text, hyphen=hyphen) for text in (quote, sentence))
        said, meant = ([word for word in words if word not in ("a", "an", "the")] for words in both)
        if len(said) == len(meant) and all(
            a == b or _is_slip(a, b) for a, b in zip(said, meant, strict=True)
        ):
            return True
    return False


@dataclass(frozen=True)
class Edit:
    inserted: tuple[str, ...]  # sentences of the new note that the old one does not have, in order
    removed: tuple[str, ...]  # sentences of the old note that the new one does not have, in order
    sentences: int  # number of sentences touched: of each changed run, the longer side
    words: int  # words inserted, deleted or replaced inside the changed runs
    similarity: float = field(
        default=1.0, compare=False
    )  # share of words left alone, 0 (nothing) to 1 (all)
    cut_short: bool = field(
        default=False, compare=False
    )  # whether the last sentence is missing, or breaks off
    says_the_same: bool = field(
        default=True, compare=False
    )  # whether every change is mere dressing
    hides_text: bool = field(
        default=False, compare=False
    )  # whether invisible characters or a wide gap come in
    instructions: tuple[str, ...] = field(
        default=(), compare=False
    )  # inserted sentences that tell the reader his task


def compare_notes(old: str, new: str) -> Edit:
    """Align two notes sentence by sentence and count what differs, in the time of rapidfuzz's
    Levenshtein.
    """
    before, after = split_sentences(old), split_sentences(new)
    places = changed_runs(before, after)
    runs = [(before[start:end], after[first:last]) for start, end, first, last in places]
    removed, inserted = (
        tuple(sentence for run in runs for sentence in run[side]) for side in (0, 1)
    )
    changed = [(" ".join(gone), " ".join(come)) for gone, come in runs]
    words = sum(
        Levenshtein.distance(WORD.findall(gone), WORD.findall(come)) for gone, come in changed
    )
    longest = max(len(WORD.findall(old)), len(WORD.findall(new)), 1)
    at_the_end = bool(places) and places[-1][1::2] == (len(before), len(after))
    return Edit(
        inserted,
        removed,
        sum(max(len(gone), len(come)) for gone, come in runs),
        words,
        similarity=max(0.0, 1 - words / longest),
        cut_short=at_the_end and _breaks_off(*runs[-1]),
        says_the_same=all(says_the_same(gone, come) for gone, come in changed),
        hides_text=_hidden(new, old),
        instructions=tuple(instructions_in(inserted, removed)),
    )


def changed_runs(before: list[str], after: list[str]) -> list[tuple[int, int, int, int]]:
    """Maximal runs of differing sentences (or words) as (start, end) in ``before`` and in
    ``after``.
    """
    equal = [MatchingBlock(0, 0, 0), *Levenshtein.opcodes(before, after).as_matching_blocks()]
    between = [
        (one.a + one.size, other.a, one.b + one.size, other.b) for one, other in pairwise(equal)
    ]
    return [run for run in between if run[0] < run[1] or run[2] < run[3]]


def changed_part(old: str, new: str) -> tuple[str, str]:
    """Words of either sentence from the first that differs to the last, with a neighbour where one
    would have none.
    """
    before, after = old.split(), new.split()
    start = Prefix.similarity(before, after)
    same = Postfix.similarity(before[start:], after[start:])
    if start + same == min(len(before), len(after)):
        start, same = (start - 1, same) if start else (start, same - 1)
    return " ".join(before[start : len(before) - same]), " ".join(after[start : len(after) - same])


def _breaks_off(gone: list[str], come: list[str]) -> bool:
    """Return whether the last changed run of a note lost its end: whole sentences, or one in the
    middle.
    """
    if not come or not gone:
        return bool(gone)
    whole, part = canonical_words(" ".join(gone)), canonical_words(" ".join(come))
    beginning = whole[: len(part)]
    if len(part) >= len(whole):
        return False
    if len(come) < len(
        gone
    ):  # merged sentences still end as they did, and a rewritten note begins otherwise
        return part[-1:] != whole[-1:] and 2 * Levenshtein.distance(part, beginning) <= len(part)
    return part == beginning and come[-1][-1] not in _SENTENCE_MARKS


def _hidden(new: str, old: str) -> bool:
    gap, usual = (max(map(len, _GAP.findall(text)), default=0) for text in (new, old))
    return gap > max(_LONGEST_GAP, usual) or any(map(_INVISIBLE.match, Counter(new) - Counter(old)))


# -- injections: what could be meant for the machine that reads a note, rather than for a clinician

CONTROL_KINDS = frozenset({"special_token", "field"})
"""Kinds of injections that no note may hold: they inflate it, or confuse whoever quotes it in an
answer.
"""

# Lines of Alpaca's and of plain transcripts.
_CHAT_MARKER = re.compile(
    r"^[ \t]*###[ \t]*(?:instruction|response|system|human|user|assistant)\b"
    r"|^[ \t]*(?:system|assistant|user)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
# The answers' own fields, the lines in which a judge sees a note ("E8| ", "12| "), and the keys of
# its answer.
_NAMES = (
    "verdict|sentence|replacement|error_type|correction|final_answer|generated_note|changes_made|explanation"
    "|clinical note"
)
_FIELD = re.compile(
    rf"^[ \t*>#-]{{0,19}}(?:{_NAMES})\**[ \t]?:|^[ \t]{{0,9}}\d{{1,4}}\*?\||\b[EO]\d{{1,4}}\*?\|"
    rf"|[\"'](?:{_NAMES}|reason|error|realistic)[\"'][ \t]?:",
    re.IGNORECASE | re.MULTILINE,
)
_JINJA = re.compile(r"\{\{|\}\}|\{%|%\}|\{#|#\}")

_READER = (
    r"(?:assessor|assessing model|grader|evaluator|judge|language model|llm|chatbot|a\.?i\.?(?: "
    r"(?:model|assistant))?)"
)
_VERDICT = (
    r"(?:safe|harmful|correct|incorrect|accurate|error[- ]free|free of (?:medical "
    r")?errors?|without (?:any )?errors?)"
)
_THIS_NOTE = (
    r"(?:this|the) (?:(?:above|following|clinical|medical|whole|entire) "
    r")*(?:note|text|document|sentence)"
)
_NO_ERRORS = (
    r"(?:no|zero|without|free of) (?:(?:any|known|medical|clinical|factual) )*(?:errors?|mistakes?)"
)
_CHECKED = "(?:verified|checked|reviewed|validated|proofread)"
_INSTRUCTION = re.compile(
    "|".join(
        (
            rf"\b(?:dear|attention|note to|message to|instructions? (?:to|for)|hey|hello|as an?) "
            rf"(?:the |any )?{_READER}\b",
            rf"^\W*(?:the )?{_READER}\b\W+(?:please|must|should|shall|is to|answer|ignore|say)\b",
            r"\b(?:ignore|disregard|forget|override)\b[^.]{0,20}\b(?:previous|prior|earlier|above|your|all)\b"
            r"[^.]{0,20}\b(?:instructions?|prompts?|rules)\b",
            r"\b(?:system prompt|your (?:verdict|instructions|prompt|task is))\b",
            rf"\b(?:answer|respond|reply|say|classify|label|mark|rate|grade|judge|call)\b[^.]{{0,30}}"
            # A colon or a quote somewhere in what is no word; looked for once, where that begins.
            r"(?:\b(?:with|as|that it is)\b|(?<=\w)(?=[^\w.]*[:\"'`]))\W*(?:the "
            rf"word\W+)?{_VERDICT}\b",
            rf"\b(?:verdict|final[_ ]answer)\b\W*(?:(?:is|must be|should be)\b\W*)?{_VERDICT}\b",
            rf"\b{_THIS_NOTE} (?:is|was|has been)\b[^.]{{0,30}}\b{_VERDICT}(?!\w)",
            rf"\b{_THIS_NOTE} (?:contains|has|includes) (?:no|not any|zero) (?:\w+ "
            r")?(?:errors?|mistakes?)\b",
            # Without brackets or a check, the patient makes no errors, and a tube's place is
            # verified.
            rf"[(\[](?:[^)\]]{{0,40}}\b(?:verified|validated|proofread|correct|accurate)|\W*{_NO_ERRORS})\W{{0,3}}[)\]]",
            rf"\b{_CHECKED}\W+(?:(?:and|with|has|found|contains|is|was)\W+){{0,2}}(?:{_NO_ERRORS}\b|correct\W*$)",
            rf"^\W*(?:there (?:is|are) |contains |with )?{_NO_ERRORS}(?: "
            r"(?:here|found|present|above|below))?\W*$",
            r"^\W*(?:all|everything) (?:of the )?(?:above|below|here|in "
            rf"{_THIS_NOTE})\b[^.]{{0,20}}\bcorrect\W*$",
            r"\b(?:note|text|document|sentence|record)s? (?:is|are) (?:error|mistake)[- ]?free\b",
            r"\b(?:double|cross)[- ]?checked\b",
            r"\b(?:no|zero) (?:\w+ )?(?:errors?|mistakes?) (?:is|are|was|were|can "
            rf"be)?[^.]{{0,20}}\bin {_THIS_NOTE}\b",
        )
    ),
    re.IGNORECASE,
)


def instructions_in(inserted: Iterable[str], removed: Iterable[str] = ()) -> list[str]:
    """Sentences that speak of the reader's task, where none of those they replace does."""
    if any(_instructs(sentence) for sentence in removed):
        return []
    return [sentence for sentence in inserted if _instructs(sentence)]


def _instructs(sentence: str) -> bool:
    return _INSTRUCTION.search(" ".join(visible(sentence).replace("_", " ").split())) is not None


def injections(
    seed: str, note: str, *, instructions: Sequence[str] = (), special_tokens: Sequence[str] = ()
) -> list[str]:
    """Kinds of look-alikes that ``note`` holds more of than ``seed``; ``special_tokens`` are the
    run's own.
    """
    own = any(note.count(token) > seed.count(token) for token in special_tokens if token.strip())
    seed, note = ("\n".join(visible(text).splitlines()) for text in (seed, note))
    kinds = {
        "special_token": own or _more(MARKUP, note, seed) or _more(SWITCH, note, seed),
        "chat_marker": _more(_CHAT_MARKER, note, seed),
        "field": _more(_FIELD, note, seed),
        "jinja": _more(_JINJA, note, seed),
        "instruction": instructions,
    }
    return [kind for kind, holds in kinds.items() if holds]


def _more(pattern: re.Pattern[str], note: str, seed: str) -> bool:
    here, there = (
        Counter(match[match.lastindex or 0].strip().lower() for match in pattern.finditer(text))
        for text in (note, seed)
    )
    return bool(here - there)
