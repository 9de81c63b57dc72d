"""``medserl doctor``: whether a run can start and last here, and what to do if not.

A check is a function that yields findings: ``ok``; ``warn``, the run starts but may not be what was meant, or may not
last; ``fail``, it would not start or would end early. What the start of a run refuses is asked of the same functions
(:mod:`medserl_agentloop.core.run_check`); here all problems are listed at once, and more is looked at.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import torch
import verl
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoModelForCausalLM

from medserl_agentloop.backends import PLATFORM_NAME
from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class, refuse
from medserl_agentloop.core.dataset import check_files
from medserl_agentloop.core.run_check import machine
from medserl_agentloop.core.run_check.composition import Composition, problems
from medserl_agentloop.core.run_check.inputs import (
    another_run,
    check_models,
    check_rows,
    data_files,
    missing_models,
    parquet_files,
    tokenizer_of,
)
from medserl_agentloop.core.run_check.run import ROLLOUT, Run

Status = Literal["ok", "warn", "fail"]
Found = Iterator[tuple[Status, str]]

GIB = 1024**3
SHARED_MEMORY_GIB = {"cuda": 10, PLATFORM_NAME: 1}
"""What ``/dev/shm`` should hold: on GPUs, what verl's docker/README.md gives its container."""

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and two moments of AdamW, each in fp32."""

DRIVER_OF_CUDA = {13: "580", 12: "525"}
"""First Linux driver that runs programs of a major version of CUDA (NVIDIA, CUDA compatibility)."""


@dataclass(frozen=True)
class Finding:
    """What a check found, with its remedy where it is not ``ok``."""

    check: str
    status: Status
    text: str


def diagnose(composed: Composition | None, *, ray: bool = False) -> Iterator[Finding]:
    """The findings of all checks, as they come; without a run, only those of the machine."""
    config = None if composed is None or "selfplay" not in composed.config else composed.config
    checks: dict[str, Callable[[], Found]] = {
        "versions": _versions,
        "plugin": _plugin,
        "GPU": partial(_gpu, config),
        "shared memory": partial(_shared_memory, config),
        "network": _network,
    }
    if ray or machine.joins_a_cluster():
        checks["Ray"] = _ray
    if composed is not None and config is not None:
        refused, warned = problems(composed)
        yield from (Finding("config", "fail", text) for text in refused)
        yield from (Finding("config", "warn", text) for text in warned)
        if not refused:
            yield Finding("config", "ok", "keys, types, names, batches and lengths fit together")
        with suppress(ConfigError):  # said above
            run = Run(config, SelfPlayConfig.from_run(config))
            checks |= {name: partial(check, run) for name, check in OF_A_RUN.items()}
    for name, check in checks.items():
        try:
            yield from (Finding(name, status, text) for status, text in refused_or_found(check))
        except Exception as error:  # a broken machine breaks in its own ways; the other checks go on
            yield Finding(name, "fail", f"the check itself failed ({type(error).__name__}: {error}). Mend that first.")


def refused_or_found(check: Callable[[], Found]) -> Found:
    """What a check finds; what the start of the run would refuse there is a failure, and the last that it finds."""
    try:
        yield from check()
    except ConfigError as error:
        yield from (("fail", text) for text in str(error).splitlines())


def _versions() -> Found:
    """Installed distributions are what this package and verl ask for."""
    refuse(_wrong_versions())
    yield "ok", f"medserl-agentloop {version('medserl-agentloop')}, verl {version('verl')}, torch {torch.__version__}"


def _wrong_versions() -> Iterator[str]:
    engine = "vllm" if find_spec("vllm") else "sglang"
    gpu = torch.version.cuda and (torch.cuda.is_available() or _driver())  # PyPI's torch is a CUDA build on any machine
    own, of_verl = (("", "gpu"), ("", "verl-core", engine, "fsdp")) if gpu else (("", "cpu"), ("",))
    for package, extras in (("medserl-agentloop", own), ("verl", of_verl)):
        for line in requires(package) or ():
            needed = Requirement(line)
            if needed.marker and not any(needed.marker.evaluate({"extra": name}) for name in extras):
                continue
            try:
                found = version(needed.name)
            except PackageNotFoundError:
                yield f"{needed.name} is not installed, and {package} needs it. Run: pip install '{needed}'"
                continue
            if not needed.specifier.contains(found, prereleases=True):
                yield (
                    f"{needed.name} {found} is installed, and {package} needs {needed.specifier}. Run: pip install "
                    f"'{needed.name}{needed.specifier}'"
                )


def _plugin() -> Found:
    """verl loads this package in the driver."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    if "medserl" not in [entry.name for entry in entry_points(group="verl.plugins")]:
        yield "fail", "medserl-agentloop is not installed as a plugin of verl. Run: pip install medserl-agentloop"
    elif policy != "auto" and "medserl" not in [name.strip() for name in policy.split(",")]:
        yield "fail", f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading the plugin. Unset it."
    else:
        yield "ok", f"loaded into verl {verl.__version__}"


def _ray_start(run: Run) -> Found:
    """Ray can start as the run asks for it."""
    asked = [key for key in ("num_cpus", "num_gpus") if run[f"ray_kwargs.ray_init.{key}"] is not None]
    if run["ray_kwargs.ray_init.address"] is None and asked and machine.joins_a_cluster():
        yield (
            "fail",
            f"a cluster of Ray's runs here, and Ray refuses ray_kwargs.ray_init.{' and '.join(asked)} for one that it "
            "joins. Run `ray stop`; or set +ray_kwargs.ray_init.address=local, for a Ray of this run's own.",
        )


def _ray() -> Found:
    """The plugin, its version and verl's are the same on every node of Ray's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    here = _installed()
    for node in (node for node in ray.nodes() if node["Alive"]):
        where = f"node {node['NodeManagerAddress']}"
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        try:
            seen = ray.get(ray.remote(num_cpus=0, scheduling_strategy=there)(_in_worker).remote(), timeout=120)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            yield "fail", f"{where}: a worker cannot load the plugin ({reason}). Install the same packages there."
            continue
        if seen == here:
            yield "ok", f"{where}: {seen}"
        else:
            yield "fail", f"{where} has {seen}, and this machine {here}. Install the same versions there."
    ray.shutdown()


def _installed() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("medserl-agentloop", "verl", "torch", "transformers"))


def _in_worker() -> str:
    """Runs on Ray's workers, where verl loads the plugin; a ValueError if it has not registered its trainer."""
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    get_trainer_cls("selfplay_sync")
    return _installed()


def _gpu(config: DictConfig | None) -> Found:
    """Cards that this torch has kernels for, a driver that it runs on, memory that nobody else holds."""
    if config is not None:
        machine.check_gpus(config)
    if torch.version.cuda and not torch.cuda.is_available() and (driver := _driver()):
        cuda = int(torch.version.cuda.split(".")[0])
        yield (
            "fail",
            f"torch {torch.__version__} cannot use the GPU with driver {driver}: CUDA {torch.version.cuda} needs "
            f"{DRIVER_OF_CUDA.get(cuda, 'a newer one')} or later. Update the driver, or see docs/install_gpu.md.",
        )
        return
    if not torch.cuda.is_available():
        yield "ok", "none, and this run needs none" if config is not None else "none: recipes for the CPU only"
        return
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        card = f"GPU {index}, {name} (sm_{major}{minor}, {total / GIB:.0f} GiB)"
        built = torch.cuda.get_arch_list()
        # A kernel runs on cards of its major version with the same or a later minor one.
        if not any(arch in built for arch in (f"sm_{major}{m}" for m in range(minor + 1))):
            yield (
                "fail",
                f"{card}: torch {torch.__version__} has no kernels for it, only for {', '.join(built)}. Install a "
                "build of torch for this card (docs/install_gpu.md).",
            )
        elif free < 0.9 * total:
            yield "warn", f"{card}: another process holds {(total - free) / GIB:.0f} GiB. Find it with nvidia-smi."
        else:
            yield "ok", f"{card}, driver {_driver()}"


def _driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _shared_memory(config: DictConfig | None) -> Found:
    """Ray's object store, NCCL and the push of weights to the rollout engine all use it."""
    free = shutil.disk_usage("/dev/shm").free / GIB
    device = config.trainer.device if config is not None else ("cuda" if torch.cuda.is_available() else PLATFORM_NAME)
    needed = SHARED_MEMORY_GIB.get(device, 1)
    if free < needed:
        yield (
            "warn",
            f"/dev/shm has {free:.1f} GiB free, and a run on {device} should have {needed}. In a container, start it "
            f"with --shm-size={needed}g; elsewhere, remove what `ls -l /dev/shm` shows of processes that are gone.",
        )
    else:
        yield "ok", f"/dev/shm has {free:.1f} GiB free"


def _network() -> Found:
    """Processes of a run reach each other over this machine's own address, past any proxy."""
    proxy = next(
        (name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)), None
    )
    past = os.environ.get("no_proxy", "") + os.environ.get("NO_PROXY", "")
    if proxy and not ("127.0.0.1" in past or "localhost" in past or past == "*"):
        yield "warn", f"{proxy} is set, and no_proxy has no localhost. Run: export no_proxy=localhost,127.0.0.1"
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            yield "ok", f"ports of this machine can be reached at {address}"
    except OSError as error:
        yield (
            "fail",
            f"no port of this machine can be opened and reached under its own name {socket.gethostname()} ({error}). "
            "Put the name into /etc/hosts, and let the firewall pass connections of the machine to itself.",
        )


def _packages(run: Run) -> Found:
    """The engine, its kernels, flash attention and the loggers are installed."""
    engine = run[f"{ROLLOUT}.name"]
    refuse([*machine.missing_packages(run), *machine.flash_attention(run)])
    if engine == "sglang" and run["trainer.device"] == "cuda":
        try:
            import_module("sgl_kernel")
        except Exception as error:  # a library that is missing shows as ImportError, OSError, RuntimeError, ...
            yield (
                "fail",
                f"SGLang's kernels cannot be loaded ({type(error).__name__}: {error}). Install the sglang-kernel that "
                "sglang asks for, for this CUDA (docs/install_gpu.md).",
            )
            return
    yield "ok", f"rollout by {engine}"
    yield from (("warn", text) for text in machine.downloads(run))


def _loggers(run: Run) -> Found:
    """W&B has a key, or is offline."""
    refuse(machine.wandb_key(run))
    yield "ok", ", ".join(run.names("trainer.logger"))


def _model(run: Run) -> Found:
    """Model and tokenizer are here, with weights, a chat template and layers that restart."""
    refuse(missing_models(run))
    model = run.config.actor_rollout_ref.model
    check_models(run)
    folder = Path(model.path)
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        yield "fail", f"{folder} has no weights (*.safetensors). Name a folder that has them."
    tokenizer = tokenizer_of(model)
    if not tokenizer.chat_template:
        yield (
            "fail",
            f"the tokenizer of {model.path} has no chat template: it is of a base model. Take an instruction-tuned "
            "model, or set actor_rollout_ref.model.custom_chat_template.",
        )
        return
    if tokenizer.eos_token_id is None:
        yield "fail", f"the tokenizer of {model.path} names no end-of-turn token, so no turn would end. Set eos_token."
    asked = OmegaConf.select(run.config, "data.apply_chat_template_kwargs.enable_thinking")
    thinks = "enable_thinking" in str(tokenizer.chat_template)
    mode = f"thinking {'on' if asked is None or asked else 'off'}" if thinks else "no thinking mode"
    yield "ok", f"{model.path}: ends turns with {tokenizer.eos_token}, {mode}, layers restart with positions"


def _data(run: Run) -> Found:
    """Files are there, of one conversion, written with the run's profile, and no row is too long."""
    refuse(data_files(run))
    for key in ("data.train_files", "data.val_files"):
        check_files(names := run.names(key))
        rows = sum(pq.read_metadata(file).num_rows for file in parquet_files(run, key))
        yield "ok", f"{key}: {rows} rows in {', '.join(names)}"
    check_rows(run)


def _game(run: Run) -> Found:
    """What the game itself says before a run: of the medical one, whether its judge answers and was measured."""
    for line in game_class(run.selfplay.game).startup_lines(run.config, run.selfplay):
        unsure = line.startswith("warning: ") or "never measured" in line
        yield "warn" if unsure else "ok", line.removeprefix("warning: ")


def _disk(run: Run) -> Found:
    """The folder of the run can be written to and holds its checkpoints."""
    folder = Path(run["trainer.default_local_dir"]).resolve()
    refuse([*machine.folders(run), *another_run(run)])
    yield "ok", f"{folder} can be written to"
    if run["trainer.save_freq"] <= 0 or any(missing_models(run)):
        return
    keep = run["trainer.max_actor_ckpt_to_keep"]
    shape = AutoConfig.from_pretrained(run["actor_rollout_ref.model.path"])
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(shape).parameters())
    size = size * BYTES_PER_PARAMETER / GIB
    needed = size * ((keep or 1) + 1)  # a new checkpoint is written before the oldest is removed
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free / GIB
    text = f"{folder}: {free:.0f} GiB free; checkpoints of {size:.1f} GiB, {keep or 'all'} kept, need {needed:.1f}"
    if free < needed:
        remedy = "Set trainer.default_local_dir to another disk, or trainer.max_actor_ckpt_to_keep to fewer"
        yield "fail", f"{text}. {remedy}."
    else:
        yield "ok", text


def _dry_run(run: Run) -> Found:
    """One game on the first row, with the run's own agent loop and tokenizer; a script stands in for the model."""
    from medserl_agentloop.testing.mock_engine import MockSGLangEngine
    from medserl_agentloop.testing.tiny import build_agent_loop

    files = parquet_files(run, "data.train_files")
    if not files or any(missing_models(run)):
        yield "warn", "no game was played: it needs the model's tokenizer and data.train_files. Mend these first."
        return
    tokenizer = tokenizer_of(run.config.actor_rollout_ref.model)
    row = pq.read_table(files[0]).slice(0, 1).to_pylist()[0]
    engine = MockSGLangEngine(lambda prompt, sampling: "no answer", tokenizer)

    async def play() -> Any:
        loop = build_agent_loop(engine, tokenizer, run.config)
        facts = row["extra_info"]
        return await loop.run({"logprobs": True}, extra_info=facts, uid="dry run", session_id=0, global_steps=0)

    output = asyncio.run(play())
    turns = f"{len(engine.calls)} turn{'s' * (len(engine.calls) != 1)}"
    tokens = len(output.prompt_ids) + len(output.response_ids)
    yield "ok", f"a game on row 0 of {files[0]}: {turns} by a script, {tokens} tokens"


OF_A_RUN: dict[str, Callable[[Run], Found]] = {
    "Ray's start": _ray_start,
    "packages": _packages,
    "loggers": _loggers,
    "model": _model,
    "data": _data,
    "game": _game,
    "disk": _disk,
    "dry run": _dry_run,
}
