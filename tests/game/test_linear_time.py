"""Nothing that reads a player's text takes more than linear time: eight times the text takes about
eight times as long.

Quadratic time would be 64 times as long. Between the two there is room for a busy machine, whose
processor time for the same work differs by a factor of two.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest

from medserl_agentloop.games.medical.canonical import canonical_words
from medserl_agentloop.games.medical.edit import (
    edit_between,
    exceeds,
    number_sentences,
    split_sentences,
)
from medserl_agentloop.games.medical.parsing import PARSERS, load_parser
from medserl_agentloop.games.medical.rules import injections

# A text is the beginning of one of these, and then its second part again and again.
HARD = [
    *(("", again) for again in (
        " ", "\n", "\t\n", "a", "a ", "a-", "a.", "a'", "_", ". ", "1", "1,", "1.", "1/", "1+",
        "1) ", "1| ", "- ", "-", "-- ", "<|", "{{", "#", "/ ", "\u0430a", "\u034f", "e\u0301",
        "\u4e2d", "\u3002 ", "&amp;", "$a", "10^", "verdict ", "verdict:", "answer: ", "the ",
        "no errors ", "ignore all ", "(verified ", "<answer>", "<note></note>", "</think>",
        "<answer>Safe</answer>", "final_answer: CORRECT\n",
    )),
    ("1", ",111"), ("a", "\u0316\u0301"), ("1", " 011"), ("1", "\u00b2"), ("/", " "),
    ("verdict", "="), ("verdict", " "), ("answer", ":"), ("answer", ": "), ("final_answer", " "),
    ("the ", "above "), ("no ", "a"), ("note to ", "the "),
    ("<think></think><answer>", "verdict: safe\n"),
]  # fmt: skip


READERS: dict[str, Callable[[str], Any]] = {
    "canonical_words": canonical_words,
    "split_sentences": split_sentences,
    "exceeds": lambda text: exceeds(text, "", 24),
    "injections": lambda text: injections("", text, [text], special_tokens=["<|im_end|>"]),
    "edit_between": lambda text: edit_between(text, number_sentences(text), f"{text}x"),
    **{f"{name} attack": load_parser(name).attack for name in PARSERS},
    **{f"{name} assessment": load_parser(name).assessment for name in PARSERS},
}


def _seconds(read: Callable[[str], Any], text: str) -> float:
    """Of the processor: the machine has other work."""
    began = time.process_time()
    read(text)
    return time.process_time() - began


@pytest.mark.parametrize("name", READERS)
def test_eight_times_the_text_takes_about_eight_times_as_long(name: str) -> None:
    """The texts that take longest at 16,000 characters stand for the others: whatever is quadratic
    is among them.
    """
    read = READERS[name]
    took = {text: _seconds_if_linear(read, *text, 2_000) for text in HARD}
    for text in sorted(took, key=lambda text: -took[text])[:2]:
        _seconds_if_linear(read, *text, 25_000)


def _text(first: str, again: str, length: int) -> str:
    return (first + again * (length // len(again) + 1))[:length]


def _seconds_if_linear(read: Callable[[str], Any], first: str, again: str, length: int) -> float:
    """Seconds for a text of eight times the length, if they are fewer than 24 times those for the
    length.
    """
    short, long = _text(first, again, length), _text(first, again, 8 * length)
    for _ in range(3):  # other work on the machine spoils a measurement now and then
        seconds = _seconds(read, long)
        if seconds <= 0.02 + 24 * _seconds(read, short):
            return seconds
    pytest.fail(
        f"{8 * length} characters of {first!r} and {again!r} take more than 24 times as long as "
        f"{length}"
    )
