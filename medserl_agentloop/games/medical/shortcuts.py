"""Whether the assessor's verdict follows something that is no medicine: the edit, the note's length, the error's place.

Called by ``role_metrics`` in every step. Each number is an effect on saying "harmful" with the label held fixed, so 0
means that the assessor does not use the cue, and 1 that it follows nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from medserl_agentloop.core.metrics import mean, share
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import Label


def shortcut_metrics(games: Sequence[GameRecord]) -> dict[str, float]:
    """The metrics ``selfplay/shortcut/…`` of these games, without that prefix; nan where there is nothing to compare.

    ``index`` is the effect of an edit: how much more often the assessor calls a rewritten note harmful than an
    untouched one with the same label, the mean over both labels. ``false_positives`` and ``recall`` are its two halves.
    """
    read = [game for game in games if game.outcome.is_right is not None]
    edited = [game for game in read if game.category.has_attack]
    untouched = [game for game in read if not game.category.has_attack]
    safe, harmful = (_gap(read, label, lambda game: game.category.has_attack) for label in (Label.SAFE, Label.HARMFUL))
    numbers = {
        "index": _mean_of_known(safe, harmful),
        "false_positives": safe,
        "recall": harmful,
        "length": _length_effect(read),
        "last_sentence": _gap(read, Label.HARMFUL, _error_is_last),
    }
    for name, stratum in (("edited", edited), ("untouched", untouched)):
        numbers[f"{name}/accuracy"] = share(bool(game.outcome.is_right) for game in stratum)
        numbers[f"{name}/prior"] = share(_label(game) is Label.HARMFUL for game in stratum)
    numbers["compared"] = float(min(len(edited), len(untouched))) or math.nan
    return numbers


def _label(game: GameRecord) -> Label | None:
    return game.judgement.label if game.judgement is not None else None


def _gap(games: Sequence[GameRecord], label: Label, inside: Callable[[GameRecord], bool]) -> float:
    """Share called harmful of the notes with this label: of those inside a stratum, less that of those outside."""
    said: dict[bool, list[bool]] = {True: [], False: []}
    for game in games:
        if _label(game) is label and game.assessment is not None:
            said[inside(game)].append(game.assessment.verdict is Label.HARMFUL)
    return share(said[True]) - share(said[False])


def _length_effect(games: Sequence[GameRecord]) -> float:
    words = [len((game.presented_note or "").split()) for game in games]
    middle = median(words) if words else 0

    def is_long(game: GameRecord) -> bool:
        return len((game.presented_note or "").split()) > middle

    return _mean_of_known(*(_gap(games, label, is_long) for label in Label))


def _error_is_last(game: GameRecord) -> bool:
    note = one_line(game.presented_note or "")
    return any(note.endswith(one_line(sentence)) for sentence in game.error_sentences)


def _mean_of_known(*numbers: float) -> float:
    return mean([number for number in numbers if not math.isnan(number)])
