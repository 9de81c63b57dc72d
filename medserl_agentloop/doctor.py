"""``medserl doctor``: check whether a run can start and last on this machine, with remedies.

A check yields what is wrong: a sentence, if the run would not start or would end early; or a status
and a sentence, with ``warn`` for a run that may not be what was meant, or may not last. The checks
of a run's start (:mod:`medserl_agentloop.core.run_check.machine`) are made here too.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple
from urllib.request import getproxies, proxy_bypass
from zipfile import ZIP_DEFLATED, ZipFile

import torch
import verl  # noqa: F401  first: in a worker of Ray's its plugin imports the trainer, which imports what follows here
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement
from ray._private.utils import get_system_memory
from rich.console import Console
from rich.progress import track

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class
from medserl_agentloop.core.run_check import RunConfig, machine, problems
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.engine_check import engine, libraries, ray_environment
from medserl_agentloop.paths import read_parquet
from medserl_agentloop.tools.plan import GIB, plan_run, read_shape

Status = Literal["ok", "warn", "fail"]
Findings = Iterator[str | tuple[Status, str]]
_On = Console | None

LIMIT_S = 120.0  # of a check: some wait for another machine, a network drive or a driver
COMPILED_WITHIN_S = 5400.0  # all kernels, of which one alone may take a quarter of an hour
BUNDLED, LEFT_OUT = 2_000_000, "[a line with words of the data]"  # last characters of a log
SECRET = re.compile("KEY|TOKEN|SECRET|PASS")  # in names of environment variables
KEYS = (r"(?<=://)[^/\s@]+(?=@)", r"\b(?:hf_|sk-)[\w-]{16,}", r"(?<=Bearer )\S+")


class CheckResult(NamedTuple):
    """The result of a check, with a remedy where it is not ``ok``."""

    check: str
    status: Status
    text: str


def diagnose(
    config: DictConfig | None,
    schema: DictConfig,
    *,
    ray: bool = False,
    compile_on: _On = None,
    start_on: _On = None,
) -> Iterator[CheckResult]:
    """The findings of all checks, as they come; without a config only the machine's.

    The two consoles show progress.
    """
    device = (
        config.trainer.device
        if config is not None
        else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    checks = {
        "versions": _versions,
        "cards": _cards,
        "shared memory": _shared_memory,
        "network": _network,
    }
    yield from _asked(checks | ({"Ray": _ray} if ray or machine.cluster_of()[0] else {}), device)
    if config is None or "selfplay" not in config:
        if compile_on or start_on:
            yield CheckResult(
                "config", "fail", "--compile and --engine need the recipe of a run, for its model."
            )
        return
    yield from _asked({"config": _config}, config, schema)
    try:
        run = RunConfig(config, SelfPlayConfig.from_run(config))
    except ConfigError:  # said above
        return
    at_start = list(_asked(machine.CHECKS, run))
    yield from at_start
    if device == "cuda" and machine.stays_here(run):
        yield from _asked({"compilers": _compilers, "libraries": libraries, "memory": _memory}, run)
    if compile_on is not None:
        yield from _asked(
            {"kernels": partial(_kernels, console=compile_on)}, run, limit_s=COMPILED_WITHIN_S
        )
    if start_on is not None:
        yield from (CheckResult("SGLang", *found) for found in engine(run, start_on))
    if all(finding.status != "fail" for finding in at_start):
        yield from _asked({"game": _game, "disk": _disk, "dry run": _dry_run}, run)


def _asked(
    checks: Mapping[str, Callable[..., Findings]], *arguments: Any, limit_s: float | None = None
) -> Iterator[CheckResult]:
    limit_s = limit_s or LIMIT_S
    for name, check in checks.items():
        found: list[Any] = []

        def ask(check: Callable[..., Findings] = check, found: list[Any] = found) -> None:
            try:
                found += list(check(*arguments)) or [("ok", (check.__doc__ or "").splitlines()[0])]
            except ConfigError as error:
                found.append(str(error))
            except (
                Exception
            ) as error:  # a broken machine breaks in its own ways; the other checks go on
                found.append(
                    f"the check itself failed ({type(error).__name__}: {error}). Mend that first."
                )

        # A thread of its own, which is left behind: nothing else ends a call that waits in a
        # library.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(limit_s)
        found = found or [
            f"the check was not over after {limit_s:g} s, and was given up. Find out what it waits "
            "for."
        ]
        yield from (
            CheckResult(name, *(("fail", text) if isinstance(text, str) else text))
            for text in found
        )


def _config(config: DictConfig, schema: DictConfig) -> Findings:
    """Keys, batches and lengths fit together."""
    refused, warned = problems(config, schema)
    yield from refused
    yield from (("warn", text) for text in warned)


def _versions(device: str) -> Findings:
    """Check that the installed packages are those that this package and verl require."""
    # PyPI's torch is a CUDA build on any machine.
    gpu = torch.version.cuda and (torch.cuda.is_available() or _driver() or find_spec("flashinfer"))
    own, of_verl = (
        (("", "gpu"), ("", "verl-core", "sglang", "fsdp")) if gpu else (("", "cpu"), ("",))
    )
    for package, extras in (("medserl-agentloop", own), ("verl", of_verl)):
        for needed in map(Requirement, requires(package) or ()):
            if needed.marker and not any(
                needed.marker.evaluate({"extra": name}) for name in extras
            ):
                continue
            try:
                installed = version(needed.name)
            except PackageNotFoundError:
                installed = "missing"
            if installed == "missing" or not needed.specifier.contains(installed, prereleases=True):
                right = f"{needed.name}{needed.specifier}"
                yield (
                    f"{needed.name} is {installed}, and {package} needs {right}. Run: pip install "
                    f"'{right}'"
                )
    yield (
        "ok",
        f"medserl-agentloop {version('medserl-agentloop')}, verl {version('verl')}, torch "
        f"{torch.__version__}",
    )


def _ray(device: str) -> Findings:
    """The plugin, its version and verl's are the same on every node of Ray's."""
    if dead := list(machine.cluster(None)):
        yield from dead
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(
        ignore_reinit_error=True,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    here = _installed()
    for node in (node for node in ray.nodes() if node["Alive"]):
        where, there = (
            f"node {node['NodeManagerAddress']}",
            NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        try:
            seen = ray.get(
                ray.remote(num_cpus=0, scheduling_strategy=there)(_in_worker).remote(), timeout=120
            )
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            yield (
                f"{where}: a worker cannot load the plugin ({reason}). Install the same packages "
                "there."
            )
        else:
            differs = (
                f"{where} has {seen}, and this machine {here}. Install the same versions there."
            )
            yield ("ok", f"{where}: {seen}") if seen == here else differs
    ray.shutdown()


def _installed() -> str:
    return ", ".join(
        f"{name} {version(name)}" for name in ("medserl-agentloop", "verl", "torch", "transformers")
    )


def _in_worker() -> str:
    """Runs on Ray's workers, where verl loads the plugin; a ValueError if it has not registered its
    trainer.
    """
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    get_trainer_cls("selfplay_sync")
    return _installed()


def _cards(device: str) -> Findings:
    """Check that torch has kernels for the GPUs, runs on the driver, and that no other process
    holds the memory.
    """
    if torch.version.cuda and not torch.cuda.is_available() and (driver := _driver()):
        yield (
            f"torch {torch.__version__} cannot use the GPU with driver {driver}: CUDA "
            f"{torch.version.cuda} needs "
            "580 or later. Update the driver, or see docs/gpu.md."
        )
        return
    if not torch.cuda.is_available():
        yield "ok", "no GPU: recipes for the CPU only"
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = (
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
        )
        free, total = torch.cuda.mem_get_info(index)
        card = f"GPU {index}, {name} (sm_{major}{minor}, {total / GIB:.0f} GiB)"
        built = torch.cuda.get_arch_list()
        # A kernel runs on cards of its major version with the same or a later minor one.
        if not any(arch in built for arch in (f"sm_{major}{m}" for m in range(minor + 1))):
            yield (
                f"{card}: torch {torch.__version__} has no kernels for it, only for "
                f"{', '.join(built)}. Install a "
                "build of torch for this card (docs/gpu.md)."
            )
        elif free < 0.9 * total:
            yield (
                "warn",
                f"{card}: another process holds {(total - free) / GIB:.0f} GiB. Find it with "
                "nvidia-smi.",
            )
        else:
            yield "ok", f"{card}, driver {_driver()}"


def _driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    return found[0] if found else None


def _shared_memory(device: str) -> Findings:
    """Ray's object store, NCCL and the push of weights use it; verl's docker/README.md gives its
    container 10 GB.
    """
    free, needed = shutil.disk_usage("/dev/shm").free / GIB, 10 if device == "cuda" else 1
    if free < needed:
        yield (
            "warn",
            f"/dev/shm has {free:.1f} GiB free, and a run on {device} should have {needed}. In a "
            "container, start it "
            f"with --shm-size={needed}g; elsewhere, remove what `ls -l /dev/shm` shows of "
            "processes that are gone.",
        )


def _network(device: str) -> Findings:
    """Processes of a run reach each other over this machine's own address, past any proxy."""
    proxy = next((f"{use}_proxy" for use in ("http", "all") if use in getproxies()), None)
    if proxy and not any(map(proxy_bypass, ("localhost", "127.0.0.1"))):
        yield (
            "warn",
            f"{proxy} is set, and no_proxy has no localhost. Run: export "
            "no_proxy=localhost,127.0.0.1",
        )
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        yield (
            "no port of this machine can be opened and reached under its own name "
            f"{socket.gethostname()} ({error}). "
            "Put the name into /etc/hosts, and let the firewall pass connections of the machine to "
            "itself."
        )


def _compilers(run: RunConfig) -> Findings:
    """Check the compilers that SGLang, flashinfer and Triton need at a first start, or with
    ``--compile``.
    """
    cuda, sglang = torch.version.cuda or "13.0", run["actor_rollout_ref.rollout.name"] == "sglang"
    # The plugin has set CUDA_HOME, if the lock's compiler is installed.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(f"{home}/bin/nvcc" if home else "nvcc") or "/usr/local/cuda/bin/nvcc"
    release = re.search(r"release ([\d.]+)", _output(nvcc, "--version"))
    if sglang and (release is None or release[1].split(".")[0] != cuda.split(".")[0]):
        yield (
            f"{nvcc} is {release[1] if release else 'missing'}, and torch is built for CUDA "
            f"{cuda}. The GPU packages "
            f"have its compiler. Run: unset CUDA_HOME CUDA_PATH; {machine.GPU_SET}"
        )
    # nvcc calls g++, unless a variable names another.
    chosen = re.search(r"-ccbin[ =](\S+)", os.environ.get("NVCC_PREPEND_FLAGS", ""))
    host = chosen[1] if chosen else os.environ.get("NVCC_CCBIN") or "g++"
    compiler = _output(host, "-dumpfullversion").strip()
    if sglang and compiler.split(".")[0] in (
        "",
        "12",
    ):  # which refuses a template in SGLang 0.5.12's activation.cuh
        yield (
            f"{host} is {compiler or 'missing'}, and SGLang's kernels need one that compiles them, "
            "as 11, 13 and 14 do "
            "and 12 does not. Run: apt-get install g++-11; export NVCC_PREPEND_FLAGS='-ccbin "
            "g++-11'"
        )
    if not shutil.which(os.environ.get("CXX", "c++")):
        yield "there is no c++. Run: apt-get install g++"
    if not shutil.which("ninja"):
        yield "there is no ninja. Run: pip install ninja"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        version = sysconfig.get_python_version()
        yield f"there is no Python.h. Run: apt-get install python{version}-dev"


def _kernels(run: RunConfig, console: Console) -> Iterator[tuple[Status, str]]:
    """Compile the kernels of SGLang and flashinfer for this run's model, unless their caches have
    them.
    """
    here = torch.cuda.is_available()
    card = (
        "{}.{}".format(*torch.cuda.get_device_capability())
        if here
        else os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    )
    if (
        card is None
        or run["actor_rollout_ref.rollout.name"] != "sglang"
        or find_spec("flashinfer") is None
    ):
        yield (
            "fail",
            "this needs SGLang and a GPU; or its name: export FLASHINFER_CUDA_ARCH_LIST=9.0 (H100) "
            "or 12.0.",
        )
        return
    from flashinfer.jit import cascade, gen_batch_decode_module, gen_batch_prefill_module, sampling
    from sglang.jit_kernel.kvcache import can_use_store_cache
    from sglang.jit_kernel.norm import can_use_fused_inplace_qknorm
    from sglang.jit_kernel.utils import override_jit_cuda_arch

    shape, bf16 = read_shape(run["actor_rollout_ref.model.path"]), torch.bfloat16
    row = 2 * shape.kv // run["actor_rollout_ref.rollout.tensor_model_parallel_size"]
    # Queries, keys and values, outputs, indices; no positions, window or cap (flashinfer_backend.py
    # in SGLang).
    attention = (bf16, bf16, bf16, torch.int32, shape.head_dim, shape.head_dim, 0, False, False)
    paged = ray_environment(run).get(
        "SGLANG_FLASHINFER_USE_PAGED"
    )  # the run prefills with fa2 alone then
    prefills = ("fa2", "fa3") if card.startswith("9.") and not paged else ("fa2",)
    builds: list[
        tuple[Any, ...]
    ] = [  # SGLang has more small kernels, which it compiles on a GPU only (--engine)
        ("qknorm", can_use_fused_inplace_qknorm, shape.head_dim, bf16),
        ("store_cache", can_use_store_cache, row),
        ("merge_state", cascade.gen_cascade_module().build, False),
        ("sampling", sampling.gen_sampling_module().build, False),
        *(
            (f"prefill ({name})", gen_batch_prefill_module(name, *attention, False).build, False)
            for name in prefills
        ),
    ]
    if shape.q // shape.kv < 4:  # with more, SGLang decodes with the kernels for prefill
        builds.append(("decode", gen_batch_decode_module(*attention).build, False))
    with override_jit_cuda_arch(*map(int, card.split("."))):
        for name, build, *arguments in track(builds, "compiling", console=console, transient=True):
            start = monotonic()
            try:
                if build(*arguments) is False:  # SGLang logs the reason
                    raise RuntimeError("SGLang's error is above")
                yield "ok", f"{name}: {monotonic() - start:.0f} s"
            except RuntimeError as error:  # with all that ninja printed
                yield "fail", f"{name}: {(re.search('.*error.*', str(error)) or [error])[0]}"


def _memory(run: RunConfig) -> Findings:
    """Memory of the host, by the plan."""
    try:
        needed = plan_run(run, 96).host / GIB
    except ValueError as error:
        yield "warn", f"not planned: {error}"
        return
    advice = ". Take a machine with more, or less of it: without gpu_80g's offload, or with lora."
    enough = get_system_memory() >= needed * GIB
    text = (
        f"this machine has {get_system_memory() / GIB:.0f} GiB, and a run needs {needed:.0f} "
        "(medserl plan)"
    )
    yield ("ok", text) if enough else ("warn", text + advice)


def _output(*command: str) -> str:
    """Return the output of a command; empty if it cannot be run."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _game(run: RunConfig) -> Findings:
    """Yield the game's own lines before a run: for the medical one, whether its judge answers and
    was measured.
    """
    for line in game_class(run.selfplay.game).startup_lines(run.config, run.selfplay):
        unsure = line.startswith("warning: ") or "never measured" in line
        yield "warn" if unsure else "ok", line.removeprefix("warning: ")


def _disk(run: RunConfig) -> Findings:
    """The folder of the run can be written to and holds its checkpoints."""
    folder = Path(run["trainer.default_local_dir"]).resolve()
    exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (exists.is_dir() and os.access(exists, os.W_OK)):
        yield (
            f"{exists} is no folder that can be written to. Set trainer.default_local_dir to "
            "another."
        )
        return
    try:
        size = plan_run(run, 96).checkpoint / GIB
    except ValueError as error:
        yield "warn", f"not planned: {error}"
        return
    keep, saves = run["trainer.max_actor_ckpt_to_keep"], run["trainer.save_freq"] > 0
    needed = saves * size * max(keep or 1, 2)  # one stays whole until another is written
    free = shutil.disk_usage(exists).free / GIB
    text = (
        f"{folder}: {free:.0f} GiB free; checkpoints of {size:.1f} GiB, {keep or 'all'} kept, need "
        f"{needed:.1f}"
    )
    if free < needed:
        yield (
            f"{text}. Set trainer.default_local_dir to another disk, or "
            "trainer.max_actor_ckpt_to_keep to fewer."
        )
    else:
        yield "warn" if saves and not keep else "ok", text


def _dry_run(run: RunConfig) -> Findings:
    """One game on the first row, with the run's own agent loop and tokenizer; a script stands in
    for the model.
    """
    from medserl_agentloop.testing.mock_engine import MockSGLangEngine
    from medserl_agentloop.testing.tiny import build_agent_loop

    tokenizer = run.tokenizer()
    file = machine.parquet_files(run, "data.train_files")[0]
    facts = read_parquet(file).slice(0, 1).to_pylist()[0]["extra_info"]
    engine = MockSGLangEngine(lambda prompt, sampling: "no answer", tokenizer)

    async def play() -> Any:
        loop = build_agent_loop(engine, tokenizer, run.config)
        return await loop.run(
            {"logprobs": True}, extra_info=facts, uid="dry run", session_id=0, global_steps=0
        )

    output = asyncio.run(play())
    tokens = len(output.prompt_ids) + len(output.response_ids)
    yield (
        "ok",
        f"a game on row 0 of {file}: {len(engine.calls)} turn(s) by a script, {tokens} tokens",
    )


def write_bundle(path: Path, findings: Sequence[CheckResult], config: DictConfig | None) -> None:
    """Write a zip for those who help: findings, versions, config and logs.

    Without keys, and without lines that have five words in a row of the run's data or latest games;
    without logs where the data cannot be read.
    """
    versions = sorted(f"{found.name}=={found.version}" for found in distributions())
    files = {
        "findings.txt": "\n".join(map("  ".join, findings)),
        "versions.txt": "\n".join(versions),
    }
    files["nvidia-smi.txt"], private = _output("nvidia-smi"), set[tuple[str, ...]]()
    if config is not None and "selfplay" in config:
        run, folder = (
            RunConfig(config, SelfPlayConfig.model_construct()),
            Path(config.selfplay.records),
        )
        files["config.yaml"] = OmegaConf.to_yaml(config)
        try:
            private = set(_private(run, folder))
        except (OSError, ValueError, KeyError) as error:
            files["logs_left_out.txt"] = (
                f"the data cannot be read, so what is theirs in the logs is not known: {error}"
            )
        else:
            for file in (*folder.glob("*.log"), *folder.glob("*.yaml")):
                files[file.name] = file.read_text("utf-8", "replace")[-BUNDLED:]
    secrets = [
        re.escape(value)
        for name, value in os.environ.items()
        if SECRET.search(name) and len(value) > 7
    ]
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, text in files.items():
            lines = (
                LEFT_OUT if private.intersection(_fives(line)) else line
                for line in text.splitlines()
            )
            archive.writestr(name, re.sub("|".join([*KEYS, *secrets]), "***", "\n".join(lines)))


def _private(run: RunConfig, folder: Path) -> Iterator[tuple[str, ...]]:
    """Five words in a row of the run's data and of its latest games."""
    for file in [
        *machine.parquet_files(run, "data.train_files"),
        *machine.parquet_files(run, "data.val_files"),
    ]:
        for row in read_parquet(file)["extra_info"].to_pylist():
            yield from _fives(str(row))
    for path in folder.glob(GAMES_FILE):
        with path.open(encoding="utf-8", errors="replace") as games:
            for line in deque(games, 2000):
                yield from _fives(line)


def _fives(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[^\W\d]\w*", text)
    return zip(*(words[start:] for start in range(5)), strict=False)
