"""The column ``Sentences`` of MEDEC and MedErrBench: a note's sentences behind their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rapidfuzz.distance import Indel

_NUMBERED_LINE = re.compile(r"[ \t]*([0-9]{1,6})(?:[ \t]+(.*))?$", re.DOTALL)
_LARGEST_ID_GAP = 3
_SAME_NOTE = 2 / 3  # share of the words in a list of sentences that stand in the note as well


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
        missing = len(skipped) <= _LARGEST_ID_GAP and all(last_line_of.get(n, -1) < at for n in skipped)
        if match and number > current and missing:
            current = number
            sentences[number] = [match[2] or ""]
        elif sentences:
            sentences[current].append(line)
        elif line.strip():
            sentences[-1] = [line]
    return {number: "\n".join(parts).strip() for number, parts in sentences.items()}


def sentences_on_one_line(line: str, note: str) -> dict[int, str]:
    """Sentences that follow one another as ``0 First one. 1 Second one.``; none if they are not those of the note.

    A number opens a sentence if it is the next one and the note has no such word there.
    """
    words = line.replace("\\n", "\n").split()  # some lists have line breaks spelled out
    spelled, of_note = ([re.sub(r"[\W_]", "", word) for word in text] for text in (words, note.split()))
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
