"""``medserl doctor``: check whether a run can start and last on this machine, with remedies.

A check yields problems: a sentence if the run would not start or would end early, or a status and a
sentence, with ``warn`` if the run may not be as intended or may not last.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import torch
import verl  # noqa: F401  first: its plugin imports the trainer, which imports what follows here
from omegaconf import DictConfig
from packaging.requirements import Requirement
from ray._private.utils import get_system_memory
from rich.console import Console
from rich.progress import track

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class
from medserl_agentloop.core.run_check import ROLLOUT, RunConfig, check_run, machine, warnings
from medserl_agentloop.tools.plan import GIB, plan_run, read_shape

Status = Literal["ok", "warn", "fail", "note"]
Findings = Iterator[str | tuple[Status, str]]


class CheckResult(NamedTuple):
    """The result of a check, with a remedy if it is ``warn`` or ``fail``."""

    check: str
    status: Status
    text: str


def diagnose(
    config: DictConfig | None, schema: DictConfig | None, *, compile_on: Console | None = None
) -> Iterator[CheckResult]:
    """The findings of all checks, as they come; without a config only the machine's. The console
    shows progress.
    """
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = here if config is None else config.trainer.device
    yield from _asked(
        {"versions": _versions, "cards": _cards, "shared memory": _shared_memory}, device
    )
    if config is None or "selfplay" not in config:
        if compile_on:
            yield CheckResult("kernels", "fail", "--compile needs the recipe of a run.")
        return
    yield from _asked({"config": _config}, config, schema)
    try:
        run = RunConfig(config, SelfPlayConfig.from_run(config))
    except ConfigError:  # said above
        return
    yield from (at_start := list(_asked(machine.CHECKS, run)))
    if compile_on is not None:
        yield from _asked({"kernels": _kernels}, run, compile_on)
    if all(finding.status != "fail" for finding in at_start):
        yield from _asked({"game": _game, "memory and disk": _room}, run)


def _asked(checks: Mapping[str, Callable[..., Findings]], *arguments: Any) -> Iterator[CheckResult]:
    for name, check in checks.items():
        try:
            holds = (check.__doc__ or "").split("\n")[0]
            for finding in list(check(*arguments)) or [("ok", holds)]:
                status, text = ("fail", finding) if isinstance(finding, str) else finding
                yield CheckResult(name, status, text)  # type: ignore[arg-type]
        except ValueError as error:
            yield CheckResult(name, "fail", str(error))
        except Exception as error:  # a broken machine breaks in its own ways; other checks continue
            yield CheckResult(name, "fail", f"the check failed: {type(error).__name__}: {error}")


def _config(config: DictConfig, schema: DictConfig) -> Findings:
    """Keys, batches and lengths fit together."""
    yield from (("warn", text) for text in warnings(config, schema))
    try:
        check_run(config)
    except ConfigError as error:
        yield from str(error).splitlines()


def _versions(device: str) -> Findings:
    """The installed packages match the requirements of this package and verl."""
    # PyPI's torch is a CUDA build on any machine.
    gpu = torch.version.cuda and (torch.cuda.is_available() or _driver() or find_spec("flashinfer"))
    of_verl = ("", "verl-core", "sglang", "fsdp") if gpu else ("",)
    for package, extras in (
        ("medserl-agentloop", ("", "gpu" if gpu else "cpu")),
        ("verl", of_verl),
    ):
        for needed in map(Requirement, requires(package) or ()):
            marker = needed.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in extras):
                continue
            try:
                installed = version(needed.name)
            except PackageNotFoundError:
                installed = "missing"
            if installed == "missing" or not needed.specifier.contains(installed, prereleases=True):
                right = f"{needed.name}{needed.specifier}"
                said = f"{needed.name} is {installed}, and {package} needs {right}"
                yield f"{said}. Run: pip install '{right}'"
    names = ("medserl-agentloop", "verl", "torch", "transformers")
    yield "ok", ", ".join(f"{name} {version(name)}" for name in names)


def _cards(device: str) -> Findings:
    """torch has kernels for the GPUs and runs on the driver, and their memory is free."""
    if not torch.cuda.is_available():
        if torch.version.cuda and (driver := _driver()):
            yield (
                f"torch {torch.__version__} cannot use the GPU with driver {driver}: CUDA "
                f"{torch.version.cuda} needs 580 or later. Update the driver, or see docs/gpu.md."
            )
        else:
            yield "ok", "no GPU: recipes for the CPU only"
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        card = f"GPU {index}, {name} (sm_{major}{minor}, {total / GIB:.0f} GiB)"
        built = torch.cuda.get_arch_list()
        # A kernel runs on cards of its major version with the same or a later minor one.
        if not any(arch in built for arch in (f"sm_{major}{m}" for m in range(minor + 1))):
            yield (
                f"{card}: torch {torch.__version__} has no kernels for it, only for "
                f"{', '.join(built)}. Install a build of torch for this card (docs/gpu.md)."
            )
        elif free < 0.9 * total:
            held = f"{(total - free) / GIB:.0f} GiB"
            yield "warn", f"{card}: another process holds {held}. Find it with nvidia-smi."
        else:
            yield "ok", f"{card}, driver {_driver()}"


def _driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _shared_memory(device: str) -> Findings:
    """/dev/shm has room for Ray's object store, NCCL and the push of weights."""
    # verl's docker/README.md gives its container 10 GB.
    free, needed = shutil.disk_usage("/dev/shm").free / GIB, 10 if device == "cuda" else 1
    if free < needed:
        text = f"/dev/shm has {free:.1f} GiB free, but a run on {device} should have {needed}"
        remedy = f"Start a container with --shm-size={needed}g, or remove dead processes' files"
        yield "warn", f"{text}. {remedy}."


def _kernels(run: RunConfig, console: Console) -> Findings:
    """Compile the kernels of SGLang and flashinfer for this run's model, unless their caches have
    them.
    """
    card = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    if torch.cuda.is_available():
        card = "{}.{}".format(*torch.cuda.get_device_capability())
    if card is None or run[f"{ROLLOUT}.name"] != "sglang" or find_spec("flashinfer") is None:
        name = "export FLASHINFER_CUDA_ARCH_LIST=9.0 (H100) or 12.0"
        yield f"this needs SGLang and a GPU. Without one, name the card: {name}."
        return
    from flashinfer.jit import cascade, gen_batch_decode_module, gen_batch_prefill_module, sampling
    from sglang.jit_kernel.kvcache import can_use_store_cache
    from sglang.jit_kernel.norm import can_use_fused_inplace_qknorm
    from sglang.jit_kernel.utils import override_jit_cuda_arch

    shape, bf16 = read_shape(run["actor_rollout_ref.model.path"]), torch.bfloat16
    row = 2 * shape.kv // run[f"{ROLLOUT}.tensor_model_parallel_size"]
    # Queries, keys and values, outputs, indices; no positions, window or cap (flashinfer_backend.py
    # in SGLang).
    attention = (bf16, bf16, bf16, torch.int32, shape.head_dim, shape.head_dim, 0, False, False)
    paged = run["ray_kwargs.ray_init.runtime_env.env_vars.SGLANG_FLASHINFER_USE_PAGED"]
    # With it, the run prefills only with fa2.
    prefills = ("fa2", "fa3") if card.startswith("9.") and not paged else ("fa2",)
    builds: list[tuple[Any, ...]] = [
        ("qknorm", can_use_fused_inplace_qknorm, shape.head_dim, bf16),
        ("store_cache", can_use_store_cache, row),
        ("merge_state", cascade.gen_cascade_module().build, False),
        ("sampling", sampling.gen_sampling_module().build, False),
    ]
    for name in prefills:
        build = gen_batch_prefill_module(name, *attention, False).build
        builds.append((f"prefill ({name})", build, False))
    if shape.q // shape.kv < 4:  # with more, SGLang decodes with the kernels for prefill
        builds.append(("decode", gen_batch_decode_module(*attention).build, False))
    with override_jit_cuda_arch(*map(int, card.split("."))):
        for name, build, *arguments in track(builds, "compiling", console=console, transient=True):
            start = monotonic()
            try:
                if build(*arguments) is False:  # SGLang logs the reason
                    raise RuntimeError("SGLang's error is above")
                yield "ok", f"{name}: {monotonic() - start:.0f} s"
            except RuntimeError as error:  # with everything that ninja printed
                yield f"{name}: {(re.search('.*error.*', str(error)) or [error])[0]}"


def _game(run: RunConfig) -> Findings:
    """The game has nothing to say before a run."""
    for line in game_class(run.selfplay.game).View.startup_lines(run.config, run.selfplay):
        yield "note", line


def _room(run: RunConfig) -> Findings:
    """The host's memory and the disk have room for what the plan computes."""
    try:
        plan = plan_run(run, 96)
    except ValueError as error:
        yield "warn", f"not planned: {error}"
        return
    if run["trainer.device"] == "cuda" and machine.stays_here(run):
        needed, here = plan.host / GIB, get_system_memory() / GIB
        text = f"this machine has {here:.0f} GiB, but a run needs {needed:.0f} (medserl plan)"
        fits = here >= needed
        yield ("ok", text) if fits else ("warn", f"{text}: train without offload, or use lora.")
    folder = Path(run["trainer.default_local_dir"]).resolve()
    exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
    size, free = plan.checkpoint / GIB, shutil.disk_usage(exists).free / GIB
    keep, saves = run["trainer.max_actor_ckpt_to_keep"], run["trainer.save_freq"] > 0
    # One stays complete while the next is written, and the best one is kept besides.
    needed = saves * size * (max(keep or 1, 2) + (run.selfplay.best_by is not None))
    text = f"{folder}: {free:.0f} GiB free; checkpoints of {size:.1f} GiB, {keep or 'all'} kept"
    text = f"{text}, need {needed:.1f}"
    if free < needed:
        yield f"{text}. Set trainer.default_local_dir or trainer.max_actor_ckpt_to_keep."
    else:
        yield "warn" if saves and not keep else "ok", text
