"""A part of ``benchmarks/gpu.py --engine none``: this package's FSDP2 engine in one process,
without Ray or a rollout.

``gpu_none.py PART OUTPUT RECIPES [OVERRIDE ...]`` writes rows of the table to ``OUTPUT/PART.json``:
what was measured, the number, what it is compared with, and how. ``gpu_bundle.py`` takes what this
needs to a machine with torch alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import certify_worker
import torch
from adapters import batch, game
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.utils.torch_functional import logprobs_from_logits_v2
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.tools import plan

GPU, FLASH = torch.cuda.is_available(), find_spec("flash_attn") is not None
DEVICE, NODE = "cuda" if GPU else "cpu", "actor_rollout_ref"
TOKENS, GAMES = (16384, 32768) if GPU else (512, 1024), 8  # of the micro-batches that are timed
WITHOUT_FLASH = (
    f"++{NODE}.model.override_config.attn_implementation=sdpa",
    f"{NODE}.model.use_fused_kernels=true",
)

Rows = Iterator[tuple[Any, ...]]


def run_of(*more: str) -> Any:
    return plan.composed(
        sys.argv[3], [*sys.argv[4:], *more, *(WITHOUT_FLASH if GPU and not FLASH else ())]
    )


def worker(run: Any, role: str) -> Any:
    made = ActorRolloutRefWorker(config=run.config.actor_rollout_ref.copy(), role=role)
    made.init_model()
    return made


def now_and_peak() -> tuple[float, float | None]:
    """The time, once the card is idle, and the most GiB that torch had given out on it since the
    last call.
    """
    if not GPU:
        return time.perf_counter(), None
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / plan.GIB
    torch.cuda.reset_peak_memory_stats()
    return time.perf_counter(), peak


def claims() -> Rows:
    """The certificate's measures in bf16 and the control of isolation, for each way to attend."""
    bf16 = f"++{NODE}.actor.fsdp_config.mixed_precision.param_dtype=bf16"
    for attention in ["flash_attention_2"] * (GPU and FLASH) + ["sdpa"]:
        run = run_of(f"++{NODE}.model.override_config.attn_implementation={attention}", bf16)
        for restart in (True, False):
            what = f"bf16, {attention}, {'positions restart' if restart else 'control: no restart'}"
            variant = {"model": run[f"{NODE}.model.path"], "overrides": [], "restart": restart}
            for measure in certify_worker.measure(run.config, variant):
                holds = measure["holds"] is (restart or measure["claim"] != "isolation")
                yield (
                    f"{measure['claim']}, {what}",
                    measure["value"],
                    None,
                    "certificate; at most 0.1, and 1e-5",
                    holds,
                )


def phases_of_a_step() -> Rows:
    """Seconds and peak of each phase with one micro-batch, and the plan's peak without a server."""
    settings, marks = (
        [f"{NODE}.actor.use_kl_loss=true", f"{NODE}.actor.use_dynamic_bsz=true"],
        [now_and_peak()],
    )
    settings.append("selfplay.reuse_log_probs=false")
    actor, reference = (worker(run_of(*settings), role) for role in ("actor", "ref"))
    adam = actor.actor.engine.optimizer_step

    def timed_adam() -> Any:
        marks.append(now_and_peak())
        return adam()

    actor.actor.engine.optimizer_step = timed_adam
    work: dict[str, Callable[[TensorDict], Any]] = {
        "log-probs, actor": actor.compute_log_prob,
        "log-probs, reference": reference.compute_ref_log_prob,
        "update, actor": actor.update_actor,
    }
    for tokens in TOKENS:
        limits = [
            f"{of}_max_token_len_per_gpu={tokens}"
            for of in ("actor.ppo", "ref.log_prob", "rollout.log_prob")
        ]
        shorter = [f"data.max_{of}_length={tokens // GAMES // 2}" for of in ("prompt", "response")]
        memory = torch.cuda.get_device_properties(0).total_memory / plan.GIB if GPU else 96
        alone = f"{NODE}.rollout.name=cpu_hf"  # no server is planned for it
        run = run_of(*settings, *shorter, *(f"{NODE}.{limit}" for limit in limits), alone)
        peaks = plan.plan_run(run, memory).phases
        for phase, compute in work.items():
            for _ in range(2):  # the first one warms up
                rows = [
                    game((tokens // GAMES // 4,) * 4, seed, {1: 1.0, 2: -1.0})
                    for seed in range(GAMES)
                ]
                made = batch([row | {"ref_log_prob": row["old_log_probs"]} for row in rows])
                tensordict_utils.assign_non_tensor(
                    made, use_dynamic_bsz=False, micro_batch_size_per_gpu=GAMES
                )
                marks[:] = [now_and_peak()]
                compute(made)
                marks.append(now_and_peak())
            for name, start, end in zip(
                (phase, "optimizer step, actor"), marks, marks[1:], strict=False
            ):
                planned = (
                    sum(size for part, size in peaks[name].items() if part != "CUDA contexts")
                    / plan.GIB
                )
                yield (
                    f"seconds of {name}, {tokens} tokens",
                    end[0] - start[0],
                    None,
                    "one micro-batch",
                )
                yield (
                    f"peak GiB of {name}, {tokens} tokens",
                    end[1],
                    planned,
                    "torch's allocator; medserl plan",
                )


def log_probs_of_tokens() -> Rows:
    """verl's cross entropy where flash-attn is missing, and the chunks that take its place
    there."""
    shape, tokens = plan.read_shape(run_of()[f"{NODE}.model.path"]), 2048 if GPU else 64
    torch.manual_seed(0)
    states, head = (
        torch.randn(n, shape.hidden, device=DEVICE).bfloat16() for n in (tokens, shape.vocab)
    )
    head, labels = (
        (0.02 * head).requires_grad_(),
        torch.randint(shape.vocab, (tokens,), device=DEVICE),
    )
    exact = (
        (states.float() @ head.detach().float().T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    )
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "verl's loop over rows": lambda: logprobs_from_logits_v2(states @ head.T, labels),
        "chunks (use_fused_kernels)": lambda: FusedLinearForPPO()(states, head, labels)[0],
    }
    for name, form in forms.items():
        for _ in range(2):
            started = now_and_peak()[0]
            found = form()
            found.sum().backward()
            ended, peak = now_and_peak()
        yield (
            f"seconds of {name}",
            ended - started,
            None,
            f"{tokens} tokens from hidden states, and the gradients",
        )
        yield f"peak GiB of {name}", peak, None, "torch's allocator, the output layer included"
        yield (
            f"largest error of {name}",
            (found.detach() - exact).abs().max().item(),
            None,
            "log-probs in fp32",
        )


PARTS = {
    "isolation": claims,
    "phases": phases_of_a_step,
    "loss": log_probs_of_tokens,
}

if __name__ == "__main__":
    done = []
    for found_row in PARTS[sys.argv[1]]():
        done.append(found_row)
        Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(
            json.dumps(done), encoding="utf-8"
        )  # all so far
