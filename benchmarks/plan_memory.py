"""Measure the peaks of a training step on the CPU, at three sizes, beside what `medserl plan` computes for them.

    python -m benchmarks.plan_memory

Each step is two micro-batches forward and backward and one step of AdamW, in fp32, as verl's FSDP engine does them. The
peaks are the kernel's (VmHWM). Linux only.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from medserl_agentloop.planning.arithmetic import GIB, Engine, Shape

TOKENS = 256
SIZES = (
    Shape(384, 1152, 6, 6, 2, 64, 12000, tied=True, qk_norm=True, max_tokens=4096),
    Shape(512, 1536, 8, 8, 4, 64, 16000, tied=True, qk_norm=True, max_tokens=4096),
    Shape(768, 2304, 12, 12, 4, 64, 32000, tied=True, qk_norm=True, max_tokens=4096),
)


def engine(shape: Shape, checkpointing: bool) -> Engine:
    """The engine that :func:`steps` is, for the plan."""
    return Engine(
        shape,
        compute_bytes=4,
        checkpointing=checkpointing,
        fused_loss=False,
        gathers=False,
        update_tokens=TOKENS,
        infer_tokens=TOKENS,
    )


def planned(shape: Shape, checkpointing: bool) -> dict[str, float]:
    """Peaks of update and optimizer step as the plan computes them, in bytes."""
    plan = engine(shape, checkpointing)
    held = sum(plan.resident(weights=True, adam=True).values())
    return {
        "update": held + sum(plan.update().values()),
        "optimizer step": held + sum(plan.optimizer_step().values()),
    }


def measured() -> list[dict[str, Any]]:
    """Peaks for each size, with and without gradient checkpointing, of a process of its own."""
    # glibc must give back what is freed, or the peak is that of its free lists.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, __file__, "--steps"], env=environment, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]


def _peak() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def steps() -> None:
    """One step of each size; prints its peaks."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from verl.utils.torch_functional import logprobs_from_logits_v2

    torch.set_num_threads(1)

    def step(shape: Shape, checkpointing: bool) -> dict[str, Any]:
        gc.collect()  # the model before this one
        _reset_peak()
        base = _peak()
        config = Qwen3Config(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
            vocab_size=shape.vocab, tie_word_embeddings=shape.tied, attn_implementation="sdpa",
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
        tokens = torch.randint(0, shape.vocab, (1, TOKENS))

        def micro_batch() -> None:
            logits = model(input_ids=tokens, position_ids=torch.arange(TOKENS)[None], use_cache=False).logits.squeeze(0)
            logprobs_from_logits_v2(logits, tokens[0].roll(-1)).mean().neg().backward()

        peaks: dict[str, float] = {}
        for number in range(2):  # Adam's states exist from the second step on
            micro_batch()
            _reset_peak()
            micro_batch()
            peaks["update"] = _peak() - base
            _reset_peak()
            optimizer.step()
            peaks["optimizer step"] = _peak() - base
            if not number:
                optimizer.zero_grad()
        return {"parameters": sum(p.numel() for p in model.parameters()), "checkpointing": checkpointing} | peaks

    step(SIZES[0], False)  # loads what torch loads at first use
    for shape in SIZES:
        for checkpointing in (False, True):
            print(json.dumps(step(shape, checkpointing)), flush=True)


def main() -> None:
    """Print measured and computed peaks."""
    rows = iter(measured())
    for shape in SIZES:
        for checkpointing in (False, True):
            row, plan = next(rows), planned(shape, checkpointing)
            for phase, size in plan.items():
                print(
                    f"{row['parameters'] / 1e6:6.1f} M parameters, checkpointing {checkpointing!s:5}, {phase:14}: "
                    f"measured {row[phase] / GIB:.3f} GiB, computed {size / GIB:.3f} GiB ({size / row[phase] - 1:+.1%})"
                )


if __name__ == "__main__":
    steps() if "--steps" in sys.argv else main()
