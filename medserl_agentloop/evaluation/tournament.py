"""Games between frozen players: any attacker against any assessor, in folders or behind servers.

Success against the live opponent of a run says little, because both sides move.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from medserl_agentloop.core.interaction import NoReplyError, Reply, Turn, play_in_step
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import GameSpec, Role
from medserl_agentloop.play.endpoint import EndpointOptions, EndpointPlayer

if TYPE_CHECKING:
    from medserl_agentloop.evaluation.local_models import Player

Seat: TypeAlias = "EndpointPlayer | Player"
"""A model that can take either role: behind a server, or on this machine. Its ``name`` goes into the records."""


def seat_of(
    model: str, served: str | None, prompts: PromptProfile, template_kwargs: dict[str, Any], **options: Any
) -> Seat:
    """The model in a folder, or the one that a server calls ``served``, asked by these :class:`EndpointOptions`."""
    if model.startswith(("http://", "https://")):
        if served is None:
            raise ValueError("a server needs --model, the name of the model it serves")
        return EndpointPlayer(EndpointOptions(url=model, model=served, template_kwargs=template_kwargs, **options))
    if served is not None:
        raise ValueError("--model names the model of a server, whose address begins with http:// or https://")
    from medserl_agentloop.evaluation.local_models import load_player  # loads verl

    return load_player(model, prompts, template_kwargs)


@asynccontextmanager
async def connected(seat: Seat) -> AsyncIterator[None]:
    """Check that the model's server is there, and close its connections in the end."""
    if not isinstance(seat, EndpointPlayer):
        yield
        return
    async with aclosing(seat):
        await seat.check()
        yield


async def play_match(
    attacker: Seat,
    assessor: Seat,
    specs: Sequence[GameSpec],
    config: MedicalConfig,
    *,
    temperature: float,
    budgets: Mapping[Role, int] | None = None,
    seed: int,
    attacks: dict[int, Reply | NoReplyError] | None = None,
) -> list[GameRecord]:
    """Play, judge and score one game per spec, with the profile, judge, scheme and rules of ``config``.

    ``budgets`` are the most tokens of each role's turn; those of ``config`` if not given. Each game has random numbers
    of its own, whatever batch it is in, which follow ``seed``. ``attacks`` holds the attacker's turns, by the number of
    the game, that were played against another assessor; turns that are not in it are played and put there.
    """
    interaction = MedicalGameInteraction(config)
    games = [interaction.new_game(asdict(spec)) for spec in specs]
    known = {} if attacks is None else attacks
    if budgets is None:
        longest = max(attacker.count(spec.seed_note) for spec in specs)
        budgets = {Role.ATTACKER: config.budget.attacker(longest), Role.ASSESSOR: config.budget.assessor}

    async def answer(name: str, turns: Mapping[int, Turn]) -> list[Reply | NoReplyError]:
        role = Role(name)
        seat, given = (attacker, known) if role is Role.ATTACKER else (assessor, {})
        new = {number: turn for number, turn in turns.items() if number not in given}
        async with aclosing(seat.answers(new, budget=budgets[role], temperature=temperature, seed=seed)) as answers:
            async for number, reply in answers:
                given[number] = reply
        return [given[number] for number in turns]

    await play_in_step(interaction, games, answer)
    await asyncio.gather(*(interaction.score(game.record) for game in games))
    for game in games:  # who never got a turn is named too: an invalid attack belongs to its pairing
        names = {Role.ATTACKER.value: attacker.name, Role.ASSESSOR.value: assessor.name}
        game.record.players = names if game.record.category.has_attack else {Role.ASSESSOR.value: assessor.name}
    return [game.record for game in games]
