"""What an assessor answered -> a prediction: the sentence it means, and what several answers agree on.

Called by ``medserl evaluate`` and by the trainer's validation, so that both count an answer alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from rapidfuzz import fuzz

from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.edits import one_line, same_sentence
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.scoring.reference import ReferenceNote
from medserl_agentloop.scoring.submission import Prediction

_SHORTEST_QUOTE = 10
"""Characters of a part of a sentence that can stand for it; shorter ones are in too many sentences."""


class Assessed(Protocol):
    """An assessor's turn, as a parser or a game record has it."""

    @property
    def verdict(self) -> Label | None: ...
    @property
    def sentence(self) -> str | None: ...
    @property
    def correction(self) -> str | None: ...


def predict(note: ReferenceNote, answers: Sequence[Assessed]) -> Prediction:
    """What the answers on ``note`` say by majority.

    The verdict with the most votes counts, of equally many the one that was given first; unreadable answers do not
    vote. The sentence is the one that most of its votes quote, the correction the first one given with it.

    Returns:
        The prediction; unparsed if no answer can be read.
    """
    verdicts = Counter(answer.verdict for answer in answers if answer.verdict is not None)
    if not verdicts:
        return Prediction(note.text_id, parsed=False)
    ((verdict, _),) = verdicts.most_common(1)
    if verdict is Label.SAFE:
        return Prediction(note.text_id)
    said = [(quoted_sentence(a.sentence, note.sentences), a.correction) for a in answers if a.verdict is verdict]
    ((number, _),) = Counter([n for n, _ in said if n >= 0] or [-1]).most_common(1)
    correction = next((text for n, text in said if n == number and text), None)
    return Prediction(note.text_id, True, number, correction)


def quoted_sentence(quote: str | None, sentences: Sequence[Sentence]) -> int:
    """Number of the sentence that an assessor quotes; -1 where none or several could be meant.

    A copy may have the slips that training's rewards allow (``same_sentence``). Failing that, the quote may be part
    of one sentence, or hold one.
    """
    quote = one_line(quote or "").lower()
    texts = {s.id: one_line(s.text).lower() for s in sentences if s.text.strip()}
    copies = {number: fuzz.ratio(quote, text) for number, text in texts.items() if same_sentence(quote, text)}
    if copies:
        return max(copies, key=lambda number: copies[number])
    if len(quote) < _SHORTEST_QUOTE:
        return -1
    parts = [n for n, text in texts.items() if quote in text or (len(text) >= _SHORTEST_QUOTE and text in quote)]
    return parts[0] if len(parts) == 1 else -1
