"""Kuhn poker: three cards, two players, at most three turns, and a known solution (Kuhn 1950).

Each player pays one chip and gets one of the cards J, Q and K. The first checks or bets a chip;
whoever faces a bet calls or folds; after a check the other one may bet. The higher card wins the
pot. It is the smallest game in which a player has to bluff. ``experiments/kuhn_poker`` measures how
far a model is from the solution.

``python -m medserl_agentloop.games.kuhn_poker FILE`` writes the rows of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from medserl_agentloop.core.interaction import AGENT_NAME, GameView, Interaction, Prompt, Turn
from medserl_agentloop.core.records import GameRecord

CARDS = ("J", "Q", "K")
ROLES = ("first", "second")
ACTIONS = {False: ("check", "bet"), True: ("fold", "call")}
"""The legal moves by whether the player faces a bet: the passive and the active one."""


def winnings(cards: tuple[str, str], moves: tuple[str, ...]) -> int | None:
    """Chips that the first player wins; None until the game is over."""
    if moves[-1:] == ("fold",):
        return -1 if len(moves) % 2 else 1
    if moves[-1:] == ("call",) or moves == ("check", "check"):
        stake = 2 if "call" in moves else 1
        return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake
    return None


class KuhnRecord(GameRecord):
    """One game: the cards of both players and their moves."""

    cards: tuple[str, str]
    moves: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The deal, because luck with the cards explains most of an average result."""
        return "".join(self.cards)


class KuhnGame:
    """One game in progress."""

    def __init__(self, cards: tuple[str, str]) -> None:
        self.record = KuhnRecord(cards=cards)

    def play(
        self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False
    ) -> None:
        """Make a move. Any other answer loses the maximum."""
        record, mover = self.record, len(self.record.moves) % 2
        move = text.strip().lower()
        legal = move in ACTIONS["bet" in record.moves]
        record.moves += (move if legal else "illegal",)
        won = winnings(record.cards, record.moves) if legal else (-2, 2)[mover]
        if won is not None:
            record.rewards = {"first": {"chips": float(won)}, "second": {"chips": float(-won)}}

    def make_void(self, reason: str) -> None:
        """End the game without a result."""
        self.record.void = reason


class KuhnView(GameView[KuhnRecord]):
    """The share of illegal moves, in the table of steps."""

    shown = (("illegal", "selfplay/illegal_rate"),)


class KuhnPoker(Interaction[KuhnGame, KuhnRecord]):
    """Each player has one conversation; the first player's may have two turns."""

    roles = ROLES
    Record = KuhnRecord
    View = KuhnView

    def new_game(self, facts: Mapping[str, Any]) -> KuhnGame:
        cards = (facts.get("first"), facts.get("second"))
        if cards not in set(permutations(CARDS, 2)):
            raise ValueError(
                f"the cards are {cards}; first and second must be different ones of "
                f"{', '.join(CARDS)}"
            )
        return KuhnGame(cards)

    def next_turn(self, game: KuhnGame) -> Turn | None:
        moves = game.record.moves
        if game.record.rewards or game.record.is_void:
            return None
        passive, active = ACTIONS["bet" in moves]
        news = f"The other says {moves[-1]}. " if moves else ""
        card = f"You hold {game.record.cards[len(moves) % 2]}. " if len(moves) < 2 else ""
        message = {"role": "user", "content": f"{card}{news}{passive} or {active}?"}
        return Turn(ROLES[len(moves) % 2], Prompt((message,)), max_tokens=8)

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        """The turns of check, bet, call."""
        game, turns = self.new_game(facts), []
        for move in ("check", "bet", "call"):
            turn = self.next_turn(game)
            assert turn is not None
            turns.append(turn)
            game.play(move)
        return turns

    def metrics(self, records: Any) -> dict[str, float]:
        illegal = [record.moves[-1:] == ("illegal",) for record in records]
        return super().metrics(records) | {
            "selfplay/illegal_rate": sum(illegal) / max(1, len(illegal))
        }


def rows() -> list[dict[str, Any]]:
    """The six deals, as rows of a verl data set."""
    game, shared = KuhnPoker(None), {"data_source": "kuhn_poker", "agent_name": AGENT_NAME}
    deals: list[dict[str, Any]] = []
    for first, second in permutations(CARDS, 2):
        facts = {"index": len(deals), "first": first, "second": second}
        prompt = game.sample_turns(facts)[0].prompt.filled()
        model = {"style": "rule", "ground_truth": ""}
        row = {"prompt": prompt, "ability": "poker", "reward_model": model, "extra_info": facts}
        deals.append(shared | row)
    return deals


if __name__ == "__main__":
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows() * 64), sys.argv[1])
