"""Games between frozen players: any attacker against any assessor, in folders or behind servers.

Success against the live opponent of a run says little, because both sides move; this measures a
checkpoint against a fixed one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medserl_agentloop.backends.cpu_sampling import (
    Completion,
    SamplingRequest,
    SamplingSettings,
    eos_token_ids,
    sample_batch,
)
from medserl_agentloop.core.driver import NoReplyError, Reply, play_in_step
from medserl_agentloop.core.encoding import EncodedPrompt
from medserl_agentloop.core.interaction import Turn
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import ProfileEncoder, PromptProfile
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import GameSpec, Role
from medserl_agentloop.play.endpoint import EndpointPlayer

BATCH = 64


class Seat(Protocol):
    """A model that can take either role, wherever it runs. ``name`` goes into the records."""

    @property
    def name(self) -> str: ...

    def count(self, text: str) -> int:
        """Tokens that ``text`` takes."""
        ...

    async def turns(
        self, role: Role, turns: Mapping[int, Turn], settings: SamplingSettings, *, budget: int, seed: int
    ) -> list[Reply | NoReplyError]:
        """A reply to each turn, by the number of its game, or why there is none."""
        ...


@dataclass(frozen=True)
class ServedPlayer:
    """A model behind a server, which samples with the player's own options and holds no tokenizer."""

    player: EndpointPlayer
    name: str

    def count(self, text: str) -> int:
        return 2 * len(text.split())

    async def turns(
        self, role: Role, turns: Mapping[int, Turn], settings: SamplingSettings, *, budget: int, seed: int
    ) -> list[Reply | NoReplyError]:
        async def one(number: int, turn: Turn) -> Reply | NoReplyError:
            try:
                return await self.player.reply(turn, turn.prompt.filled(), sample=number)
            except NoReplyError as reason:
                return reason

        return list(await asyncio.gather(*(one(number, turn) for number, turn in turns.items())))


@dataclass(frozen=True)
class Player:
    """A model on this machine's CPU.

    Attributes:
        name: For tables.
        model: A causal language model on the CPU, in evaluation mode.
        tokenizer: Its tokenizer.
        encoder: Tokenises the prompts of one profile.
    """

    name: str
    model: Any
    tokenizer: Any
    encoder: ProfileEncoder

    @classmethod
    def load(cls, folder: str | Path, profile: PromptProfile, name: str | None = None) -> Player:
        """Load a Hugging Face folder in fp32."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(name or Path(folder).name, model, tokenizer, ProfileEncoder(tokenizer, profile))

    def count(self, text: str) -> int:
        return self.encoder.count(text)

    async def turns(
        self, role: Role, turns: Mapping[int, Turn], settings: SamplingSettings, *, budget: int, seed: int
    ) -> list[Reply | NoReplyError]:
        numbers = list(turns)
        found: list[Reply | NoReplyError] = []
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            prompts = [self.encoder.opening(turns[number]) for number in part]
            again = [int(turns[number].conversation or 0) << 48 for number in part]  # another assessment of the note
            seeds = [seed * 1_000_003 + 2 * n + role.id + other for n, other in zip(part, again, strict=True)]
            found += self.replies(role, prompts, seeds, settings, budget=budget)
        return found

    def replies(
        self,
        role: Role,
        prompts: Sequence[EncodedPrompt],
        seeds: Sequence[int],
        settings: SamplingSettings,
        *,
        budget: int,
    ) -> list[Reply]:
        """One turn of ``role`` per prompt, all in one batch; read and cut as the agent loop does it.

        A turn has at most ``budget`` tokens. A prompt that the model's context has no room for gets an empty,
        truncated turn.
        """
        stop: dict[str, Any] = {name: tuple(strings) for name, strings in self.encoder.stop_of(role).items()}
        room = [min(budget, self.model.config.max_position_embeddings - len(prompt.ids)) for prompt in prompts]
        fitting = [number for number, tokens in enumerate(room) if tokens > 0]
        completions = (
            sample_batch(
                self.model,
                [SamplingRequest(prompts[n].ids, room[n], torch.Generator().manual_seed(seeds[n])) for n in fitting],
                replace(settings, **stop),
                eos_token_ids=eos_token_ids(self.model.config, self.model.generation_config, self.tokenizer),
                pad_token_id=self.tokenizer.pad_token_id or 0,
                decode=self.tokenizer.decode,
            )
            if fitting
            else []
        )
        replies = [Reply("", truncated=True, prefill=prompt.prefill) for prompt in prompts]
        for number, completion in zip(fitting, completions, strict=True):
            replies[number] = Reply(
                self._text(completion, stop.get("stop_token_ids", ())),
                tokens=len(completion.token_ids),
                truncated=completion.stop_reason == "length",
                prefill=prompts[number].prefill,
            )
        return replies

    def _text(self, completion: Completion, stop_token_ids: Sequence[int]) -> str:
        ids = completion.token_ids
        if ids[-1] in (self.tokenizer.eos_token_id, *stop_token_ids):
            ids = ids[:-1]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


async def play_match(
    attacker: Seat,
    assessor: Seat,
    specs: Sequence[GameSpec],
    config: MedicalConfig,
    *,
    settings: SamplingSettings,
    budgets: Mapping[Role, int],
    seed: int,
    attacks: dict[int, Reply | NoReplyError] | None = None,
) -> list[GameRecord]:
    """Play, judge and score one game per spec, with the profile, judge, scheme and rules of ``config``.

    ``budgets`` are the most tokens of each role's turn. Each game has random numbers of its own, whatever batch it is
    in, which follow ``seed``. ``attacks`` holds the attacker's turns, by the number of the game, that were played
    against another assessor; turns that are not in it are played and put there.
    """
    interaction = MedicalGameInteraction(config)
    games = [interaction.new_game(asdict(spec)) for spec in specs]
    known = {} if attacks is None else attacks

    async def answer(name: str, turns: Mapping[int, Turn]) -> list[Reply | NoReplyError]:
        role = Role(name)
        if role is Role.ASSESSOR:
            return await assessor.turns(role, turns, settings, budget=budgets[role], seed=seed)
        new = {number: turn for number, turn in turns.items() if number not in known}
        played = await attacker.turns(role, new, settings, budget=budgets[role], seed=seed) if new else []
        known.update(zip(new, played, strict=True))
        return [known[number] for number in turns]

    await play_in_step(interaction, games, answer)
    await asyncio.gather(*(interaction.score(game.record) for game in games))
    for game in games:  # who never got a turn is named too: an invalid attack belongs to its pairing
        names = {Role.ATTACKER.value: attacker.name, Role.ASSESSOR.value: assessor.name}
        game.record.players = names if game.record.category.has_attack else {Role.ASSESSOR.value: assessor.name}
    return [game.record for game in games]
