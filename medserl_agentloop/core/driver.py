"""Plays games of any kind, from the first turn to the last, between any players.

A player is a model behind a server, a model in this process, or a person. Used by the agent loop,
``medserl play`` and tournaments.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from medserl_agentloop.core.interaction import Interaction, Message, Turn


class NoReplyError(Exception):
    """A player gave no answer; says who and why."""


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
    """Takes turns in a role. ``name`` goes into the record; it is empty for the policy in training."""

    name: str

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """Take a turn, or raise :class:`NoReplyError`. ``messages`` is its whole conversation so far."""
        ...


async def play_game(interaction: Interaction[Any, Any], game: Any, players: Mapping[str, Player]) -> None:
    """Play a game that ``interaction`` has started; ``players`` by role. One without an answer makes it void."""
    conversations: dict[tuple[str, str | None], list[Message]] = defaultdict(list)
    while (turn := interaction.next_turn(game)) is not None:
        player = players[turn.role]
        if player.name:
            game.record.players[turn.role] = player.name
        messages = conversations[turn.role, turn.conversation]
        messages += turn.prompt.filled()
        started = time.monotonic()
        try:
            reply = await player.reply(turn, messages)
        except NoReplyError as reason:
            game.make_void(str(reason))
            return
        finally:
            _clock(game, started)
        messages.append({"role": "assistant", "content": reply.prefill + reply.text})
        _take(game, reply)


async def play_in_step(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    answer: Callable[[str, Mapping[int, Turn]], Awaitable[Sequence[Reply | NoReplyError]]],
) -> None:
    """Play games side by side: a role answers at once in all games that wait for it, which suits models in batches.

    ``answer`` gets the role and its turns by the number of the game, and returns a reply to each, or why there is none:
    that game is void.
    """
    while waiting := {n: turn for n, game in enumerate(games) if (turn := interaction.next_turn(game)) is not None}:
        role = min((turn.role for turn in waiting.values()), key=interaction.roles.index)
        turns = {n: turn for n, turn in waiting.items() if turn.role == role}
        started = time.monotonic()
        for number, reply in zip(turns, await answer(role, turns), strict=True):
            _clock(games[number], started)
            _take(games[number], reply)


def _clock(game: Any, started: float) -> None:
    game.record.seconds.append(round(time.monotonic() - started, 3))
    game.record.finished = datetime.now(timezone.utc).replace(microsecond=0)


def _take(game: Any, reply: Reply | NoReplyError) -> None:
    if isinstance(reply, NoReplyError):
        game.make_void(str(reply))
    else:
        game.play(reply.text, prefill=reply.prefill, tokens=reply.tokens, truncated=reply.truncated)
