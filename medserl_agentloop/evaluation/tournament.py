"""Games between frozen players on this machine's CPU: any attacker against any assessor.

Success against the live opponent of a run says little, because both sides move; this measures a
checkpoint against a fixed one. Plays by ``medical.rules`` with the prompts and budgets of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from medserl_agentloop.core.encoding import EncodedPrompt
from medserl_agentloop.games.medical.judges import Judge, judge_game
from medserl_agentloop.games.medical.prompting import ProfileEncoder, PromptProfile
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.rewards import RewardScheme
from medserl_agentloop.games.medical.rules import EditLimits, Game
from medserl_agentloop.games.medical.types import GameSpec, Role
from medserl_agentloop.play.driver import Reply

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

    def take_turns(
        self, role: Role, games: Sequence[Game], settings: SamplingSettings, *, budget: int, seed: int
    ) -> None:
        """Take ``role``'s turn in all games whose turn it is.

        Args:
            role: The role to play.
            games: Games in progress; those of another turn are left alone.
            settings: How tokens are drawn.
            budget: Most tokens of a turn.
            seed: Of all draws; game ``i`` has random numbers of its own, whatever batch it is in.
        """
        waiting = [(i, game) for i, game in enumerate(games) if game.next_role is role]
        prompts = [self.encoder.of(role, game.record.spec.task, game.note) for _, game in waiting]
        seeds = [seed * 1_000_003 + 2 * i + role.id for i, _ in waiting]
        for start in range(0, len(waiting), BATCH):
            part = slice(start, start + BATCH)
            replies = self.replies(role, prompts[part], seeds[part], settings, budget=budget)
            for (_, game), reply in zip(waiting[part], replies, strict=True):
                game.play(reply.text, prefill=reply.prefill, tokens=reply.tokens, truncated=reply.truncated)

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

        A prompt that the model's context has no room for gets an empty, truncated turn.

        Args:
            role: Whose stop strings end a turn.
            prompts: What the turns answer.
            seeds: Of the draws for each prompt.
            settings: How tokens are drawn.
            budget: Most tokens of a turn.
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
    *,
    profile: PromptProfile,
    limits: EditLimits,
    judge: Judge,
    scheme: RewardScheme,
    settings: SamplingSettings,
    budgets: dict[Role, int],
    seed: int,
) -> list[GameRecord]:
    """Play one game per spec and judge and score it.

    Args:
        attacker: Takes all attacker's turns.
        assessor: Takes all assessor's turns.
        specs: The games to play.
        profile: Prompts and parser.
        limits: How much an attack may change.
        judge: Decides whether a presented note holds an error.
        scheme: Reward scheme.
        settings: Temperature and the like; temperature 0 is greedy.
        budgets: Most tokens of each role's turn.
        seed: Of all draws.

    Returns:
        The games' records in the order of ``specs``.
    """
    games = [Game(spec, limits, profile.parser) for spec in specs]
    for role, player in ((Role.ATTACKER, attacker), (Role.ASSESSOR, assessor)):
        player.take_turns(role, games, settings, budget=budgets[role], seed=seed)
    for game in games:
        record = game.record
        await judge_game(judge, record)
        record.rewards = scheme(record)
    return [game.record for game in games]
