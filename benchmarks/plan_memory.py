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

from medserl_agentloop.planning.arithmetic import Engine, Shape

TOKENS = 256
SIZES = (
    Shape(256, 768, 6, 4, 2, 64, 8000, tied=True, qk_norm=True, max_tokens=4096),
    Shape(384, 1152, 6, 6, 2, 64, 12000, tied=True, qk_norm=True, max_tokens=4096),
    Shape(512, 1536, 8, 8, 4, 64, 16000, tied=True, qk_norm=True, max_tokens=4096),
)


def planned(shape: Shape, checkpointing: bool) -> dict[str, float]:
    """Peaks of update and optimizer step as the plan computes them, in bytes."""
    plan = Engine(
        shape,
        compute_bytes=4,
        checkpointing=checkpointing,
        fused_loss=False,
        gathers=False,
        update_tokens=TOKENS,
    )
    held = sum(plan.resident(weights=True, adam=True).values())
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


def measured(shape: Shape, checkpointing: bool) -> dict[str, float]:
    """The same of a real step."""
    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    tokens = torch.randint(0, shape.vocab, (1, TOKENS))

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


def rows() -> Iterator[tuple[Shape, bool, str, float, float]]:
    """Shape, gradient checkpointing, phase, and its peak as it was measured and computed."""
    for shape in SIZES:
        for checkpointing in (False, True):
            found = measured(shape, checkpointing)
            for phase, computed in planned(shape, checkpointing).items():
                yield shape, checkpointing, phase, found[phase], computed


def main() -> None:
    """Print them."""
    for shape, checkpointing, phase, real, computed in rows():
        size, kind = Engine(shape).parameters / 1e6, "with" if checkpointing else "without"
        print(
            f"{size:5.1f} M parameters, {kind:7} checkpointing, {phase:14}: measured "
            f"{real / 2**20:6.1f} MiB, "
            f"computed {computed / 2**20:6.1f} MiB ({computed / real - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
