"""Canonical words of a note, so that a change of format never counts as an edit.

Unicode form, hidden characters, case, spacing, punctuation and the format of a number make no
difference. Whether "twice daily" means "b.i.d." takes medical knowledge, so the judge decides it.
The same words decide what repairs an error and what quotes it. Everything takes linear time.
"""

from __future__ import annotations

import unicodedata
from collections import Counter

import regex
from rapidfuzz.distance import OSA, Postfix, Prefix

from medserl_agentloop.scoring.notes import spaced

# What fonts do not show, and control characters that end no line. General categories miss some
# of it: U+034F is a mark, U+115F a letter.
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
# NFKC would make 102 of 10², and 51/2 of 5½.
_RAISED = regex.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070\u2074-\u2079])")
_NEXT_NUMBER = regex.compile(
    r"(?<=\d)(?=[\u00bc-\u00be\u2080-\u2089\u2150-\u215f\u2189\u2460-\u249b])"
)
_OTHER_DIGIT = regex.compile(r"(?![0-9])\p{Nd}")
_MANY_MARKS = regex.compile(r"(\p{M}{30})\p{M}+")  # normalizing sorts them, in quadratic time
# Accents of Latin letters and short vowels of Arabic ones, but not what strikes a letter through.
_ACCENTS = regex.compile(r"(?<=[A-Za-z\p{Arabic}])[\p{Mn}--[\u0334-\u0338]]+", regex.V1)
_DASH = regex.compile(r"[\p{Pd}\u2212]")
_APOSTROPHE = regex.compile(r"(?<=\p{L})['\u2019\u02bc](?=\p{L})")
# Between words, and between a number and its unit. Before a number it may be a sign: "BE-5" is not
# "BE 5".
_HYPHEN = regex.compile(r"(?<=\p{L})-(?=\p{L})|(?<=\d)-(?=\p{L})")
_TOKEN = regex.compile(
    r"(?P<number>[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)"
    # b.i.d. is one word. Of combining marks those of other scripts are left, and strokes.
    r"|(?P<word>\p{L}(?:\.\p{L})+(?!\p{L})|\p{L}[\p{L}\p{M}]*)"
    r"|(?P<sign>[[\p{S}\p{M}\p{N}%&/#@\-]--[\u00b0`\u00b4]])",
    regex.V1,
)
_ARTICLES = ("a", "an", "the")


def visible(text: str) -> str:
    """``text`` as a reader sees it, in compatible form: no hidden characters, no accents."""
    text = _UNSEEN.sub("", text)
    if text.isascii():
        return text
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = _NEXT_NUMBER.sub(" ", _RAISED.sub("^", _MANY_MARKS.sub(r"\1", text)))
    text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFKC", text).replace("\u2044", "/")


def canonical_words(text: str, *, hyphen: str = " ") -> list[str]:
    """The content of ``text``: words, numbers, signs; ``hyphen`` replaces one between words."""
    text = _APOSTROPHE.sub("", spaced(visible(text)).casefold())
    text = _HYPHEN.sub(hyphen, _DASH.sub("-", text))
    return [_canonical(token) for token in _TOKEN.finditer(text)]


def says_the_same(a: str, b: str) -> bool:
    """Return whether two notes differ only in writing; ``x-ray`` is ``x ray`` or ``xray``."""
    return any(canonical_words(a, hyphen=h) == canonical_words(b, hyphen=h) for h in (" ", ""))


def _canonical(token: regex.Match[str]) -> str:
    text: str = token[0]
    if token.lastgroup == "word":
        return text.replace(".", "")
    if token.lastgroup == "number":
        whole, _, part = text.replace(",", "").partition(".")
        whole, part = whole.lstrip("0") or "0", part.rstrip("0")
        return f"{whole}.{part}" if part else whole
    return text


# -- an error put right, or quoted -----------------------------------------------------------------


def is_repair(new: str, error: str, correction: str) -> bool:
    """Return whether ``new`` changes ``error`` as ``correction`` does, apart from slips."""
    return any(
        _repairs(*(Counter(canonical_words(t, hyphen=h)) for t in (new, error, correction)))
        for h in (" ", "")
    )


def telling_words(error: str, correction: str) -> set[str]:
    """Words of one sentence that the other lacks, except short function words."""
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
    """Return whether one letter of a long word is left out, doubled or swapped, not replaced."""
    if len(meant) <= 5 or not meant.isalpha() or word[0] != meant[0]:
        return False
    return OSA.distance(word, meant, score_cutoff=1) == 1 and (
        len(word) != len(meant) or sorted(word) == sorted(meant)
    )


def quotes_error(quote: str, wrong: str, right: str | None = None) -> bool:
    """Return whether ``quote`` has the error of the sentence ``wrong``, and nothing beyond it.

    The error is what differs from ``right``, or the full sentence if that is unknown. Spelling may
    differ, and so may one letter of a long word.
    """
    for hyphen in (" ", ""):
        said, meant, corrected = (
            [word for word in canonical_words(text, hyphen=hyphen) if word not in _ARTICLES]
            for text in (quote, wrong, right or "")
        )
        start, end = 0, len(meant)
        if right is not None and meant != corrected:
            start = Prefix.similarity(meant, corrected)
            end -= Postfix.similarity(meant[start:], corrected[start:])
            if start == end:  # words are only left out: a neighbor shows where
                start, end = (start - 1, end) if start else (start, end + 1)
        for at in range(max(0, end - len(said)), start + 1):
            part = meant[at : at + len(said)]
            if 0 < len(part) == len(said) and all(
                a == b or _is_slip(a, b) for a, b in zip(said, part, strict=True)
            ):
                return True
    return False
