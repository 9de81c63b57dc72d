"""What a GPU says in a quarter of an hour: ``python benchmarks/card.py --minutes 15``.

Each case adds a row to ``card.csv``. A case that has one for this card is not measured again, and
one that would take longer than the time left waits for another day. Parts a and b need torch and
transformers alone:

- a: attention over a pack by one kernel, by a loop over contexts and by one mask
- b: update and log-probs of a random Qwen3 under FSDP2, with and without Liger and recomputation
- c: ``[quickstart,sglang_gpu]`` to the end
- d: an adapter for each role, in CUDA graphs by triton, without them by csgmv
- e: the run of c, killed after a checkpoint, and on from there

``--size tiny`` is the short form without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from medserl_agentloop.backends.attention import Pack, attend_within_contexts, one_by_one, varlen

HERE = Path(__file__).resolve().parent
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CARD = torch.cuda.get_device_name() if GPU else "CPU"
COLUMNS = (
    "card",
    "torch",
    "part",
    "case",
    "seconds",
    "gib",
    "planned_gib",
    "mfu_6n",
    "value",
    "of",
)
CONTEXTS = (910, 690, 870, 700, 1130, 820, 760, 640, 980, 770, 1240, 900)
"""Tokens of the two contexts of six games: assumed, of the size that ``edits`` plans for MEDEC."""
SIZES = {  # hidden, intermediate, layers, heads, heads of keys and values, their size
    "0.6b": (1024, 3072, 28, 16, 8, 128),
    "4b": (2560, 9728, 36, 32, 8, 128),
    "tiny": (64, 128, 2, 4, 2, 16),
}
DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s by NVIDIA's data sheets
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A measurement, and the minutes that it may take."""

    part: str
    name: str
    minutes: float
    measure: Callable[[], Row]


def positions_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)[None]


def timed(work: Callable[[], Any], rounds: int = 3) -> tuple[float, float | None]:
    """Median seconds of ``work`` after a first call, and the peak GiB that torch gave out."""
    seconds = []
    for _ in range(rounds + 1):
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        work()
        if GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else None
    return statistics.median(seconds[1:]), peak


# -- a: attention ----------------------------------------------------------------------------------


def by_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> Any:
    """SDPA over the whole pack behind one mask; returns (1, T, H, D)."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=mask).transpose(1, 2)


def attention(way: str, size: str, lengths: tuple[int, ...]) -> Row:
    """Forward and backward of one layer, and its largest error against a mask in float32."""
    *_, heads, key_heads, head = SIZES[size]
    draws = torch.Generator(DEVICE).manual_seed(0)
    states = [
        torch.randn(1, n, sum(lengths), head, generator=draws, device=DEVICE)
        for n in (heads, key_heads, key_heads)
    ]
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    mask = (of[:, None] == of).tril()
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    positions = positions_of(lengths)
    pack = Pack.of(positions)

    def attend(given: list[torch.Tensor]) -> torch.Tensor:
        if way == "mask":
            return by_mask(*given, mask)
        return varlen(*given, pack) if way == "varlen" else one_by_one(module, *given, pack)

    exact = [state.clone().requires_grad_() for state in states]
    given = [state.bfloat16().requires_grad_() for state in states]
    weighed = torch.randn(1, sum(lengths), heads, head, generator=draws, device=DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        output = attend(given)
        return (output, *torch.autograd.grad(output, given, weighed.to(output.dtype)))

    seconds, peak = timed(step)
    expected = by_mask(*exact, mask)
    expected = (expected, *torch.autograd.grad(expected, exact, weighed))
    pairs = zip(step(), expected, strict=True)
    errors = [(found.float() - exact).abs().max().item() for found, exact in pairs]
    return {"seconds": seconds, "gib": peak, "value": max(errors), "of": "largest error"}


# -- b: a training step ----------------------------------------------------------------------------


class LogProbs(torch.nn.Module):
    """A model that gives the log-probs (T - 1,) of a pack's tokens, 512 at a time, so that no
    logits of all are there.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        def of(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.model.lm_head(states).float()
            return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")

        states = self.model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        chunks = zip(states[0, :-1].split(512), ids[0, 1:].split(512), strict=True)
        return torch.cat([checkpoint(of, *chunk, use_reentrant=False) for chunk in chunks])


def random_model(size: str, *, liger: bool, recompute: bool) -> Any:
    """A Qwen3 of random weights under FSDP2: weights in float32, work in bf16."""
    hidden, intermediate, layers, heads, key_heads, head = SIZES[size]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        vocab_size=512 if size == "tiny" else 151936,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device(DEVICE):
        model = attend_within_contexts(Qwen3ForCausalLM(config))
    if liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(LogProbs(model.train()), mp_policy=policy)


def training(size: str, lengths: tuple[int, ...], *, ways: Row) -> Row:
    """Log-probs of a pack, or an update with AdamW; seconds, GiB and MFU by 6N (2N)."""
    update, recompute = ways["update"], ways["recompute"]
    torch.manual_seed(0)
    model = random_model(size, liger=ways["liger"], recompute=recompute)
    parameters = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=GPU)
    positions = positions_of(lengths)
    ids = torch.randint(0, 512, positions.shape, device=DEVICE)

    def step() -> None:
        if not update:
            with torch.no_grad():
                model(ids, positions)
            return
        (-model(ids, positions).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds, peak = timed(step)
    rate = next((rate for name, rate in DENSE_BF16.items() if name in CARD), None)
    flops = (6 if update else 2) * parameters * sum(lengths)
    return {
        "seconds": seconds,
        "gib": peak,
        "planned_gib": planned(size, sum(lengths), recompute, update),
        "mfu_6n": rate and flops / seconds / rate,
        "value": parameters,
        "of": "parameters",
    }


def planned(size: str, tokens: int, recompute: bool, update: bool) -> float | None:
    """What ``medserl plan`` says of this phase; None where the package's own needs are missing."""
    if size == "tiny" or not update or find_spec("typer") is None:
        return None
    from medserl_agentloop.tools import plan

    engine = plan.Engine(
        plan.read_shape(f"qwen3-{size}"),
        checkpointing=recompute,
        foreach=False,
        chunk=512,
        update_tokens=tokens,
    )
    held = engine.resident(at_work=True, steps=True)
    phases = (held | engine.update(), held | engine.optimizer_step())
    return max(sum(parts.values()) for parts in phases) / 2**30


# -- c to e: runs ----------------------------------------------------------------------------------


def run(name: str, *overrides: str, kill_at: int | None = None) -> tuple[int, float]:
    """Run verl until its end, or kill it when the checkpoint of a step is there; its exit code and
    seconds. Its log is in ``runs/card``.
    """
    from medserl_agentloop.tools.quickstart import write_data  # a and b do without its imports

    write_data()
    folder = Path("runs/card") / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    command += [f"trainer.default_local_dir={folder}", f"trainer.experiment_name=card_{name}"]
    started = time.monotonic()
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    latest = folder / "latest_checkpointed_iteration.txt"
    try:
        while process.poll() is None:
            if kill_at is not None and latest.exists() and int(latest.read_text()) >= kill_at:
                break
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), time.monotonic() - started


def steps_of(name: str) -> list[Row]:
    lines = (Path("runs/card") / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "steps" in row]


def quickstart(name: str, recipes: str, *overrides: str) -> Row:
    """A run to its end: seconds of its later steps, and the mismatch of rollout and actor."""
    code, _ = run(name, f"+recipes=[{recipes}]", *overrides)
    if code:
        return {"value": code, "of": f"exit code; see runs/card/{name}/log.txt"}
    steps = steps_of(name)
    return {
        "seconds": statistics.median(row["timing_s/step"] for row in steps[1:]),
        "value": statistics.fmean(row["training/rollout_probs_diff_mean"] for row in steps),
        "of": f"rollout_probs_diff_mean, {len(steps)} steps",
    }


def resumed(recipes: str) -> Row:
    """A run that is killed after its first checkpoint, and the same command again."""
    settings = (f"+recipes=[{recipes}]", "trainer.total_training_steps=4", "trainer.save_freq=2")
    run("resumed", *settings, kill_at=2)
    time.sleep(15)  # Ray of the killed run ends by itself
    code, seconds = run("resumed", *settings)
    steps = [row["step"] for row in steps_of("resumed")]
    exact = code == 0 and steps == [1, 2, 3, 4]
    return {"seconds": seconds, "value": float(exact), "of": "every step once (1 is yes)"}


# -- all -------------------------------------------------------------------------------------------


def cases(size: str | None) -> Iterator[Case]:
    """The cases in the order in which they are measured."""
    lengths = CONTEXTS if GPU else tuple(length // 32 for length in CONTEXTS)
    for way in ("varlen", "loop", "mask") if GPU else ("loop", "mask"):
        for repeats in (1, 4) if GPU else (1,):
            pack = lengths * repeats
            name = f"attention by {way}, {sum(pack)} tokens in {len(pack)} contexts"
            yield Case("a", name, 0.3, partial(attention, way, size or "4b", pack))
    for model in [size] if size else ["0.6b", "4b"]:
        for liger in (False, True) if GPU and find_spec("liger_kernel") else (False,):
            for recompute, update in ((True, False), (True, True), (False, True)):
                told = f"{model}, {sum(lengths)} tokens{', Liger' * liger}"
                told += ", no recomputation" * (not recompute)
                ways = {"liger": liger, "recompute": recompute, "update": update}
                step = partial(training, model, lengths, ways=ways)
                yield Case("b", f"{'update' if update else 'log-probs'}, {told}", 1.0, step)
    recipes = "quickstart,sglang_gpu" if GPU else "quickstart"
    yield Case("c", "quickstart", 6.0, partial(quickstart, "quickstart", recipes))
    of_engine = "actor_rollout_ref.rollout.engine_kwargs.sglang"
    for backend in ("triton", "csgmv") if GPU else ("none",):
        few = ["trainer.total_training_steps=3"]
        if GPU:
            few.append(f"{of_engine}.lora_backend={backend}")
        if backend == "csgmv":  # in graphs it drops adapters, and the start check refuses it
            few.append("actor_rollout_ref.rollout.enforce_eager=true")
        name, both = f"adapters_{backend}", f"{recipes},adapter_per_role"
        run_both = partial(quickstart, name, both, *few)
        yield Case("d", f"an adapter for each role, {backend}", 4.0, run_both)
    yield Case("e", "resume after SIGKILL", 6.0, partial(resumed, recipes))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="time that there is")
    parser.add_argument("--parts", default="abcde", help="of abcde")
    parser.add_argument("--size", choices=SIZES, help="model of a and b; else 0.6b and 4b")
    parser.add_argument("--output", type=Path, default=HERE / "card.csv")
    given = parser.parse_args(arguments)
    if not GPU and given.size != "tiny":
        parser.error("there is no GPU: --size tiny --parts ab is the short form without one")
    until = time.monotonic() + 60 * given.minutes
    done = set()
    if given.output.exists():
        with given.output.open(newline="") as file:
            done = {(row["card"], row["case"]) for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if GPU else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            for case in cases(given.size):
                if case.part not in given.parts or (CARD, case.name) in done:
                    continue
                if time.monotonic() + 60 * case.minutes > until:
                    print(f"no time left for: {case.name}")
                    continue
                measure(case, given.output)
        finally:
            dist.destroy_process_group()


def measure(case: Case, output: Path) -> None:
    """Measure a case and add its row; one that does not work says why and adds none."""
    try:
        found = case.measure()
    except (RuntimeError, OSError, ImportError, ValueError) as error:
        print(f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    finally:
        if GPU:
            torch.cuda.empty_cache()
    row = {"card": CARD, "torch": torch.__version__, "part": case.part, "case": case.name, **found}
    new = not output.exists()
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(
            {
                name: f"{value:.4g}" if isinstance(value, float) else value
                for name, value in row.items()
            }
        )
    print(", ".join(f"{name} {value}" for name, value in row.items() if value not in (None, "")))


if __name__ == "__main__":
    main()
