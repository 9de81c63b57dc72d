"""Games between frozen players on this machine's CPU: any attacker against any assessor.

Success against the live opponent of a run says little, because both sides move; this measures a
checkpoint against a fixed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medserl_agentloop.backends.cpu_sampling import (
    Completion,
    SamplingRequest,
    SamplingSettings,
    eos_token_ids,
    sample_batch,
)
from medserl_agentloop.core.driver import Reply, play_in_step
from medserl_agentloop.core.encoding import EncodedPrompt
from medserl_agentloop.core.interaction import Turn
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import ProfileEncoder, PromptProfile
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import GameSpec, Role

BATCH = 64


@dataclass(frozen=True)
class Player:
    """A model that can take either role.

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
    attacker: Player,
    assessor: Player,
    specs: Sequence[GameSpec],
    config: MedicalConfig,
    *,
    settings: SamplingSettings,
    budgets: Mapping[Role, int],
    seed: int,
) -> list[GameRecord]:
    """Play, judge and score one game per spec, with the profile, judge, scheme and rules of ``config``.

    ``budgets`` are the most tokens of each role's turn. Each game has random numbers of its own, whatever batch it is
    in, which follow ``seed``.
    """
    interaction = MedicalGameInteraction(config)
    games = [interaction.new_game(asdict(spec)) for spec in specs]

    def answer(name: str, turns: Mapping[int, Turn]) -> list[Reply]:
        role = Role(name)
        player = attacker if role is Role.ATTACKER else assessor
        numbers, replies = list(turns), []
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            prompts = [player.encoder.opening(turns[number]) for number in part]
            again = [int(turns[number].conversation or 0) << 48 for number in part]  # another assessment of the note
            seeds = [seed * 1_000_003 + 2 * n + role.id + other for n, other in zip(part, again, strict=True)]
            replies += player.replies(role, prompts, seeds, settings, budget=budgets[role])
        return replies

    play_in_step(interaction, games, answer)
    for game in games:
        await interaction.score(game.record)
    return [game.record for game in games]
