"""``medserl doctor``: whether the compiled packages of a GPU run load, and with ``--engine``
whether SGLang starts.

A child process starts verl's own server with the settings of the run: with random weights, if the
run pushes its own (verl's ``load_format: dummy``). It gives its memory back, takes it again and
generates a token, first with an adapter where roles have adapters. Not run on a GPU here.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from medserl_agentloop.backends.sglang_cpu import SWITCH
from medserl_agentloop.compiler import show_loader
from medserl_agentloop.core.run_check import ROLLOUT, RunConfig, machine
from medserl_agentloop.tools.plan import GIB

LOG_FILE = "engine.log"  # beside the run's train.log
LIMIT_S = 1800.0  # a first start compiles
DONE, LAST = "[engine] ", "generated a token"
ADAPTER = "doctor"
REMEDIES = {
    "libnuma": "apt-get install libnuma1 (in conda: conda install numactl)",
    r"libcuda\.so": "start it where nvidia-smi shows a GPU, a container with --gpus all",
    "flash_attn": f"{machine.FLASH_ATTN} --force-reinstall",
    "cannot open shared|undefined symbol": machine.GPU_SET,
    "[Ww]atchdog": "medserl doctor RECIPE --compile, and "
    f"+{ROLLOUT}.engine_kwargs.sglang.watchdog_timeout=1800",
    "[Oo]ut of memory": f"end what nvidia-smi shows, or lower {ROLLOUT}.gpu_memory_utilization",
    "[Nn]ot enough memory|pool "
    "size": f"end what nvidia-smi shows, or raise {ROLLOUT}.gpu_memory_utilization",
    "no kernel "
    "image|attention.backend": f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=triton",
    "memory saver": "pip install --force-reinstall torch_memory_saver, at the version of "
    "constraints-gpu.txt",
    "ninja|nvcc": "medserl doctor RECIPE --compile, which names the kernel",
}
"""Signs in an error, with remedies to try."""


def libraries(run: RunConfig) -> Iterator[str]:
    """SGLang's kernels load beside the hook of its memory saver, and flash-attn beside this
    torch."""
    environment = dict(os.environ)
    if find_spec("torch_memory_saver") and torch.version.cuda:
        from torch_memory_saver import configure_subprocess

        with configure_subprocess():  # as SGLang starts its scheduler
            environment = dict(os.environ)
    imports = {
        name: f"import torch, {name}"
        for name in ("sgl_kernel", "flash_attn_2_cuda")
        if find_spec(name)
    }
    if not torch.cuda.is_available() and "sgl_kernel" in imports:
        # The compiler's stand-in for the driver, which has none of its functions.
        show_loader(
            Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "lib", "stubs"), environment
        )
        imports["sgl_kernel"] = (
            f"import os, sys; sys.setdlopenflags(os.RTLD_LAZY); {imports['sgl_kernel']}"
        )
    # verl takes an ImportError of flash-attn for a missing package, and Transformers reads only its
    # metadata.
    for name, code in imports.items():
        command = [sys.executable, "-c", code]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55)
        if child.returncode:
            yield f"{name} does not load: {_reason(child.stderr)}"


def _reason(output: str) -> str:
    """Return the first error in a process's output that has a remedy, with the remedy; else the
    last error.
    """
    lines = [line[:300] for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    # A traceback's lines of code are indented.
    errors = [
        line for line in lines if re.search(r"^\S.*(\.so[.\d]*: |[Ee]rror|atchdog)", line)
    ] or lines[-1:]
    for error in errors:
        for sign, remedy in REMEDIES.items():
            if re.search(sign, error):
                return f"{error}. Try: {remedy}"
    return errors[-1]


def missing_libraries(folder: Path) -> dict[str, set[str]]:
    """By package in ``folder``, the libraries that it needs and that neither the system nor a file
    there brings.
    """
    files = [file for file in folder.rglob("*.so*") if file.is_file()]
    brought = {file.name for file in files}  # a package loads those of another one before its own
    missing: dict[str, set[str]] = {}
    for file in files:
        said = subprocess.run(["ldd", file], capture_output=True, text=True).stdout
        if names := set(re.findall(r"^\s*(\S+) => not found", said, re.M)) - brought:
            missing.setdefault(file.relative_to(folder).parts[0], set()).update(names)
    return missing


def ray_environment(run: RunConfig) -> dict[str, str]:
    """Variables that the run gives to Ray's workers, SGLang's server among them."""
    node = OmegaConf.select(run.config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    return {str(name): str(value) for name, value in node.items()}


def engine(run: RunConfig, console: Console) -> Iterator[tuple[Any, str]]:
    """SGLang starts as in the run, gives its memory back and takes it again, and generates a
    token."""
    if run[f"{ROLLOUT}.name"] != "sglang":
        yield "warn", "not started: this needs a run with SGLang."
        return
    if run["trainer.device"] == "cuda" and not torch.cuda.is_available():
        missing = missing_libraries(Path(sysconfig.get_path("purelib")))
        found = "; ".join(
            f"{min(names)} and {len(names) - 1} more ({name})"
            for name, names in sorted(missing.items())
        )
        yield (
            "warn",
            "not started: this needs a GPU that torch sees. Libraries missing here: "
            f"{found or 'none'}.",
        )
        return
    log = Path(run.selfplay.records, LOG_FILE)
    log.parent.mkdir(parents=True, exist_ok=True)
    config = OmegaConf.to_yaml(run.config.actor_rollout_ref, resolve=True).encode()
    environment = (
        os.environ
        | ray_environment(run)
        | ({SWITCH: "1"} if run["trainer.device"] == "cpu" else {})
    )
    command, start = [sys.executable, "-m", __name__], monotonic()
    waiting = console.status(f"SGLang starts, and its log is {log}")
    with log.open("wb") as file, waiting:
        outputs: dict[str, Any] = {
            "stdout": file,
            "stderr": file,
            "env": environment,
            "start_new_session": True,
        }
        try:
            subprocess.run(command, input=config, timeout=LIMIT_S, **outputs)
        except subprocess.TimeoutExpired:
            file.write(f"\nError: it was not over after {LIMIT_S:g} s, and was given up\n".encode())
    output = log.read_text(errors="replace")
    done = re.findall(f"^{re.escape(DONE)}(.*)", output, re.M)
    text = f"{', '.join(done) or 'not started'}, after {monotonic() - start:.0f} s"
    yield ("ok", text) if LAST in done else ("fail", f"{text}: {_reason(output)}; its log is {log}")


async def _serve(node: Any) -> None:
    """Start the server of a run's ``actor_rollout_ref`` and use it as a step does; prints what is
    done.
    """
    from verl.workers.rollout.replica import RolloutMode

    from medserl_agentloop.backends.sglang_adapters import AdapterServer

    cards = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    # Colocated: the only mode in which the server takes back what it gave without a trainer's push.
    server = AdapterServer(node.rollout, node.model, RolloutMode.COLOCATED, [], 0, 0, 1, cards, 0)
    before = _free_memory()
    await server.launch_server()
    print(f"{DONE}started", flush=True)
    if node.rollout.free_cache_engine:
        started = _free_memory()
        await server.sleep()
        given = given_back(before, started, _free_memory())
        print(f"{DONE}gave {given:.1f} GiB back", flush=True)
        await server.wake_up()
        print(f"{DONE}took them again", flush=True)
    prompt, sampling = list(range(8)), {"max_new_tokens": 1, "logprobs": True}
    if server.lora_as_adapter:
        await _load_adapter(server, node.model)
        await server.generate(prompt, {**sampling, "adapter": ADAPTER}, "adapter")
        print(f"{DONE}generated with an adapter", flush=True)
    await server.generate(prompt, sampling, "base")
    print(DONE + LAST, flush=True)


def _free_memory() -> float:
    """GiB of the first card that are free; 0 without a card."""
    return torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0


def given_back(before: float, started: float, asleep: float) -> float:
    """GiB that a server gave back, from what was free before its start, after it, and while it
    sleeps.

    Raises:
        RuntimeError: It is less than a quarter of what the server had taken. The KV cache alone is
            more.
    """
    taken, given = before - started, asleep - started
    if given < taken / 4:
        raise RuntimeError(f"the memory saver gave {given:.1f} of {taken:.1f} GiB back")
    return given


async def _load_adapter(server: Any, model: Any) -> None:
    """Load an adapter of zeros into the server, as a step loads those of the roles."""
    from peft import get_peft_model, get_peft_model_state_dict
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput
    from transformers import AutoConfig, AutoModelForCausalLM

    from medserl_agentloop.backends.role_adapters import lora_config, write_adapter
    from medserl_agentloop.backends.sglang_adapters import folder_for

    settings: Any = OmegaConf.to_container(model)
    config = lora_config({**settings, "r": model.lora_rank})
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.path))
        state = get_peft_model_state_dict(get_peft_model(base, config))
    zeros = {
        name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in state.items()
    }
    with folder_for(zeros) as folder:
        write_adapter(Path(folder), zeros, config)
        request = LoadLoRAAdapterReqInput(lora_name=ADAPTER, lora_path=folder)
        loaded = await server.tokenizer_manager.load_lora_adapter(request)
    if not loaded.success:
        raise RuntimeError(f"the server did not take an adapter: {loaded.error_message}")


if __name__ == "__main__":
    try:
        asyncio.new_event_loop().run_until_complete(_serve(OmegaConf.create(sys.stdin.read())))
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # SGLang's own processes, too
