"""One game, from its first turn to its last, between any two players. Called by ``play.batch``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from medserl_agentloop.games.medical.parsing import TurnFormat
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.rules import EditLimits, Game
from medserl_agentloop.games.medical.types import Category, GameSpec, Role, VanillaAttacker


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
    """Takes turns in a role. ``name`` goes into the record, ``parser`` reads what the player writes."""

    name: str
    parser: TurnFormat

    async def reply(self, role: Role, category: Category, note: str) -> Reply:
        """Take ``role``'s turn on ``note``.

        Raises:
            NoReplyError: There is no answer.
        """
        ...


async def play_game(
    spec: GameSpec,
    players: Mapping[Role, Player],
    limits: EditLimits,
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP,
) -> GameRecord:
    """Play the game of one row.

    Returns:
        The record, not yet judged. A player without an answer makes it void.
    """
    parser = replace(players[Role.ATTACKER].parser, assessment=players[Role.ASSESSOR].parser.assessment)
    game = Game(spec, limits, parser, vanilla_attacker=vanilla_attacker)
    record = game.record
    while game.next_role is not None:
        role = game.next_role
        record.players[role] = players[role].name
        try:
            reply = await players[role].reply(role, spec.task, game.note)
        except NoReplyError as reason:
            game.make_void(f"{role.value}: {reason}")
            break
        game.play(reply.text, prefill=reply.prefill, tokens=reply.tokens, truncated=reply.truncated)
    return record
