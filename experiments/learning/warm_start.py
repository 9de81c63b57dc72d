"""The tiny player's training before any self-play: to imitate transcripts of both roles.

Called by ``experiments.learning.train_tiny_player``.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from experiments.learning.transcripts import Lesson, Transcript, sample_transcript
from medserl_agentloop.core.encoding import ChatEncoder, EncodedPrompt
from medserl_agentloop.core.interaction import Turn
from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.prompting import load_profile


@dataclass(frozen=True)
class WarmStart:
    """Settings of the training.

    Attributes:
        steps: Optimiser steps.
        batch: Transcripts a step.
        lr: Highest learning rate.
        note_weight: Loss weight of the note in the prompt.
        lessons: What the first steps teach, and what the last ones do.
        first_lesson: Share of the steps of the first lesson.
        seed: Seed of the transcripts.
    """

    steps: int
    batch: int
    lr: float
    note_weight: float
    lessons: tuple[Lesson, Lesson]
    first_lesson: float
    seed: int


@dataclass(frozen=True)
class Example:
    """A transcript in tokens: what follows the constant instructions of its template.

    Attributes:
        ids: Note, end of the prompt, answer, end-of-turn token.
        note_tokens: How many of them are the note.
        answer_tokens: How many of them are the answer with its end-of-turn token.
    """

    ids: list[int]
    note_tokens: int
    answer_tokens: int


class PromptCodec:
    """The product's own prompt encoding, with the constant instructions kept apart."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, profile: str) -> None:
        self.tokenizer = tokenizer
        self.chat, self.profile = ChatEncoder(tokenizer), load_profile(profile)

    def opening(self, role: Role, category: Category, note: str) -> EncodedPrompt:
        """The prompt of a role's first turn."""
        return self.chat.opening(self._asked(role, category, note))

    def instructions(self, role: Role, category: Category) -> list[int]:
        """Prompt tokens before the note, the same for every example of a template."""
        # Every template ends with the note, so the first end-of-turn token stands where the note
        # goes.
        ids = self.opening(role, category, "").ids
        return ids[: ids.index(self.tokenizer.eos_token_id)]

    def example(self, transcript: Transcript) -> Example:
        """Encode a transcript, and the attack that it follows if it follows one."""
        first = transcript.attack or transcript
        opening = self.opening(first.role, first.category, first.note)
        ids = opening.ids[len(self.instructions(first.role, first.category)) :]
        answer = self._turn(first)
        if transcript.attack:
            ids = [*ids, *answer]
            asked = self._asked(transcript.role, transcript.category, transcript.note)
            prompt = self.chat.continuation(asked, ids[-1])
            ids = [*ids, *prompt.ids]
            answer = self._turn(transcript)
        return Example([*ids, *answer], opening.data_tokens, len(answer))

    def _asked(self, role: Role, category: Category, note: str) -> Turn:
        return self.profile.turn(role, category, self.profile.shown(note, {}))

    def _turn(self, transcript: Transcript) -> list[int]:
        ids: list[int] = self.tokenizer.encode(transcript.answer, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id]


def template_loss(
    model: Qwen3ForCausalLM,
    instructions: Sequence[int],
    examples: list[Example],
    note_weight: float,
) -> torch.Tensor:
    """Summed cross-entropy over answers, plus ``note_weight`` times that over notes.

    The instructions run through the model once and their keys and values, gradients included, are
    shared by all examples: the loss is that of repeating them, most of the arithmetic is saved.
    """
    shared = model.model(input_ids=torch.tensor([list(instructions)]), use_cache=True)
    cache: DynamicCache = shared.past_key_values
    cache.batch_repeat_interleave(len(examples))
    length = max(len(e.ids) for e in examples)
    ids = torch.zeros((len(examples), length), dtype=torch.long)  # (B, T), padded on the right
    weights = torch.zeros((len(examples), length))  # (B, T): of predicting the token at t
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        weights[row, 1 : e.note_tokens] = note_weight
        weights[row, len(e.ids) - e.answer_tokens : len(e.ids)] = 1.0
    # No padding mask: causal attention never looks right, where the padding is.
    hidden = model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
    chosen = weights[:, 1:] > 0
    logits = model.lm_head(hidden[:, :-1][chosen])  # (N, V): only where there is a loss
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][chosen], reduction="none")
    return (losses * weights[:, 1:][chosen]).sum()


def warm_start(
    model: Qwen3ForCausalLM,
    codec: PromptCodec,
    plan: WarmStart,
    console: Console,
    sample: Callable[[random.Random, Lesson], Transcript] = sample_transcript,
) -> None:
    """Train on transcripts streamed from the first lesson, then from the second."""
    rng = random.Random(plan.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    smoothed = math.nan
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        task = progress.add_task("warm start", total=plan.steps)
        for step in range(1, plan.steps + 1):
            done = step / plan.steps
            decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * min(1, step / 50) * decay
            lesson = plan.lessons[done > plan.first_lesson]
            groups: dict[tuple[int, ...], list[Example]] = defaultdict(list)
            for _ in range(plan.batch):
                transcript = sample(rng, lesson)
                first = transcript.attack or transcript
                instructions = tuple(codec.instructions(first.role, first.category))
                groups[instructions].append(codec.example(transcript))
            tokens = sum(e.answer_tokens for examples in groups.values() for e in examples)
            total = 0.0
            optimizer.zero_grad()
            for instructions, examples in groups.items():
                loss = template_loss(model, instructions, examples, plan.note_weight) / tokens
                torch.autograd.backward(loss)
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            smoothed = total if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * total
            progress.update(task, advance=1, description=f"warm start, loss {smoothed:.3f}")
            if step % 100 == 0:
                console.print(f"step {step}: loss {smoothed:.3f}")
