"""verl's platform, engines and rollouts: on the CPU, and on GPUs with an adapter for each role.

The plugin registers them in every process at ``import verl``. Environment variables decide what is
active, so the CPU backend does not affect a GPU cluster. There :func:`use_wheels` finds CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

SGLANG = "medserl_agentloop.backends.sglang_adapters"


def register() -> None:
    """Register the platform ``cpu``, and with ``VERL_PLATFORM=cpu`` its engines and rollout."""
    # By name: each module registers itself while it is first executed.
    platform = import_module("medserl_agentloop.backends.cpu_platform")
    import_module("medserl_agentloop.backends.sglang_cpu").register()
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    platform.register_gloo()
    import_module("medserl_agentloop.backends.engines")  # takes a second
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    # base.py has no registering function in verl 0.9.1; the dict holds names, so nothing is
    # imported yet.
    rollout = "medserl_agentloop.backends.cpu_rollout"
    _ROLLOUT_REGISTRY[("cpu_hf", "async")] = f"{rollout}.ServerAdapter"
    replica = partial(resolve_name, f"{rollout}:CpuRolloutReplica")
    RolloutReplicaRegistry.register("cpu_hf", replica)


def use_wheels() -> None:
    """Point the loader and ``CUDA_HOME`` to the libraries and the compiler of NVIDIA's wheels.

    SGLang preloads torch_memory_saver's hook into its scheduler. The hook does not say where CUDA's
    runtime is, so that process would exit with code 127. SGLang and flashinfer call the compiler at
    run time. It lacks what a linker needs: lib64, a library without a version, a driver library.
    """
    home = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    if (home / "lib" / "libcudart.so.13").exists():  # last, so that it hides nothing of the user's
        places = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
        if str(home / "lib") not in places:
            os.environ["LD_LIBRARY_PATH"] = ":".join([*places, str(home / "lib")])
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named or not (home / "bin" / "nvcc").exists():
        return
    os.environ["CUDA_HOME"] = str(home)
    if not (home / "lib64").exists():
        stub = home / "lib" / "stubs" / "libcuda.so"
        command = ("c++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull, "-o")
        with suppress(OSError, subprocess.CalledProcessError):  # medserl doctor reports it
            stub.parent.mkdir(exist_ok=True)
            subprocess.run([*command, stub], check=True, capture_output=True)
            stub.with_name("libcuda.so.1").symlink_to(stub.name)
            (home / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
            (home / "lib64").symlink_to("lib")


def register_adapters() -> None:
    """Register an FSDP2 engine and an SGLang rollout with an adapter for each role."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from medserl_agentloop.backends import sglang_cpu

    import_module("medserl_agentloop.backends.engines")
    RolloutReplicaRegistry.register("sglang", load_replica)
    if not sglang_cpu.is_chosen():
        _ROLLOUT_REGISTRY[("sglang", "async")] = f"{SGLANG}.ServerAdapter"


def load_replica() -> type:
    """verl's SGLang replica with adapters."""
    import ray
    from verl.workers.rollout.replica import _load_sglang

    # First: verl sets SGLang's flag of a process without a GPU while it imports the server.
    replica, server = _load_sglang(), import_module(SGLANG).AdapterServer

    class AdapterReplica(replica):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(server)

    return AdapterReplica
