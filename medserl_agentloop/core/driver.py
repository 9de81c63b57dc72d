"""Plays games of any kind, from the first turn to the last, between any players.

A player is a model behind a server, a model in this process, or a person. Used by ``medserl play`` and by tournaments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from medserl_agentloop.core.interaction import Interaction, Message, Turn


class NoReplyError(Exception):
    """A player gave no answer; the message says why. The game is void."""


@dataclass(frozen=True)
class Reply:
    """A player's turn.

    Attributes:
        text: What the player wrote.
        tokens: Its length in tokens; 0 where nobody counted.
        truncated: Whether a token budget cut it off.
        prefill: How the prompt began the turn for the player, e.g. ``<think>``.
    """

    text: str
    tokens: int = 0
    truncated: bool = False
    prefill: str = ""


class Player(Protocol):
    """Takes turns in a role. ``name`` goes into the record."""

    name: str

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """Take a turn.

        Args:
            turn: Whose turn it is, and what is new to them.
            messages: The whole conversation up to this turn, which its last messages ask for.

        Raises:
            NoReplyError: There is no answer.
        """
        ...


async def play_game(interaction: Interaction[Any, Any], game: Any, players: Mapping[str, Player]) -> None:
    """Play a game that ``interaction`` has started. A player without an answer makes it void.

    Args:
        interaction: Says whose turn it is.
        game: The game in progress.
        players: Who plays each role.
    """
    conversations: dict[tuple[str, str | None], list[Message]] = defaultdict(list)
    while (turn := interaction.next_turn(game)) is not None:
        player = players[turn.role]
        game.record.players[turn.role] = player.name
        messages = conversations[turn.role, turn.conversation]
        messages += turn.prompt.filled()
        try:
            reply = await player.reply(turn, messages)
        except NoReplyError as reason:
            game.make_void(f"{turn.role}: {reason}")
            return
        messages.append({"role": "assistant", "content": reply.prefill + reply.text})
        _take(game, reply)


def play_in_step(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    answer: Callable[[str, Mapping[int, Turn]], Sequence[Reply]],
) -> None:
    """Play games side by side: a role answers at once in all games that wait for it, which suits models in batches.

    Args:
        interaction: Says whose turn it is in each game.
        games: The games in progress.
        answer: Gets a role and its turns by the number of the game, and returns a reply to each.
    """
    while waiting := {n: turn for n, game in enumerate(games) if (turn := interaction.next_turn(game)) is not None}:
        role = min((turn.role for turn in waiting.values()), key=interaction.roles.index)
        turns = {n: turn for n, turn in waiting.items() if turn.role == role}
        for number, reply in zip(turns, answer(role, turns), strict=True):
            _take(games[number], reply)


def _take(game: Any, reply: Reply) -> None:
    game.play(reply.text, prefill=reply.prefill, tokens=reply.tokens, truncated=reply.truncated)
