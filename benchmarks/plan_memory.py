"""The peaks of a real training step on the CPU, at three sizes, beside what ``medserl plan``
computes for them.

``python -m benchmarks.plan_memory`` prints both. A step is two micro-batches forward and backward
and one step of AdamW, in fp32, as verl's FSDP engine does them. A peak is the largest sum of what
torch's allocator has given out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.utils.torch_functional import logprobs_from_logits_v2

from medserl_agentloop.tools.plan import Engine, Shape

TOKENS = 256
SIZES = tuple(
    Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        vocab_size=vocab,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    for hidden, layers, heads, kv_heads, vocab in (
        (256, 6, 4, 2, 8000),
        (384, 6, 6, 2, 12000),
        (512, 8, 8, 4, 16000),
    )
)


def planned(config: Qwen3Config, checkpointing: bool) -> dict[str, float]:
    """Peaks of update and optimizer step as the plan computes them, in bytes."""
    plan = Engine(
        Shape(config),
        compute_bytes=4,
        checkpointing=checkpointing,
        gathers=False,
        update_tokens=TOKENS,
    )
    held = sum(plan.resident(at_work=True, steps=True).values())
    return {
        "update": held + sum(plan.update().values()),
        "optimizer step": held + sum(plan.optimizer_step().values()),
    }


def peak_of(work: Callable[[], object], held: int) -> int:
    """Most bytes that are given out while ``work`` runs; ``held`` are given out before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return held + max(accumulate(changes))


def measured(config: Qwen3Config, checkpointing: bool) -> dict[str, float]:
    """The same of a real step."""
    model = Qwen3ForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS))

    def micro_batch() -> None:
        logits = model(
            input_ids=tokens, position_ids=torch.arange(TOKENS)[None], use_cache=False
        ).logits.squeeze(0)
        logprobs_from_logits_v2(logits, tokens[0].roll(-1)).mean().neg().backward()

    micro_batch()
    # Adam's states exist from now on, and the gradients from the first micro-batch on
    optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "update": peak_of(micro_batch, 4 * weights),
        "optimizer step": peak_of(optimizer.step, 4 * weights),
    }


def rows() -> Iterator[tuple[Qwen3Config, bool, str, float, float]]:
    """Config, gradient checkpointing, phase, and its peak as it was measured and computed."""
    for config in SIZES:
        for checkpointing in (False, True):
            found = measured(config, checkpointing)
            for phase, computed in planned(config, checkpointing).items():
                yield config, checkpointing, phase, found[phase], computed


def main() -> None:
    """Print them."""
    for config, checkpointing, phase, real, computed in rows():
        size, kind = Engine(Shape(config)).parameters / 1e6, "with" if checkpointing else "without"
        print(
            f"{size:5.1f} M parameters, {kind:7} checkpointing, {phase:14}: measured "
            f"{real / 2**20:6.1f} MiB, "
            f"computed {computed / 2**20:6.1f} MiB ({computed / real - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
