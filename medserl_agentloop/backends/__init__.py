"""The backend for machines without an accelerator: verl's platform, engine and rollout on the CPU.

The plugin calls :func:`register` in every process at ``import verl``. What becomes active is
decided by the environment alone, so a GPU cluster with this package installed behaves as if the
backend did not exist.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

ROLLOUT_NAME = "cpu_hf"
PLATFORM_NAME = "cpu"
SGLANG = "medserl_agentloop.backends.sglang_adapters"


def register() -> None:
    """Register the platform ``cpu`` and, with ``VERL_PLATFORM=cpu``, its engines, whose import
    takes a second.
    """
    # By name: each module registers itself while it is first executed.
    platform = import_module("medserl_agentloop.backends.cpu_platform")
    import_module("medserl_agentloop.backends.sglang_cpu").register()
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != PLATFORM_NAME:
        return
    platform.register_gloo()
    import_module("medserl_agentloop.backends.engines")
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    # base.py has no registering function in verl 0.9.1; the dict holds names, so nothing is
    # imported yet.
    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = (
        "medserl_agentloop.backends.cpu_rollout.ServerAdapter"
    )
    replica = "medserl_agentloop.backends.cpu_rollout:CpuRolloutReplica"
    RolloutReplicaRegistry.register(ROLLOUT_NAME, partial(resolve_name, replica))


def register_adapters() -> None:
    """Make verl's FSDP2 engine and SGLang rollout train and serve an adapter for each role, in a
    run that wants it.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from medserl_agentloop.backends import sglang_cpu

    import_module("medserl_agentloop.backends.engines")
    RolloutReplicaRegistry.register("sglang", load_replica)
    if not sglang_cpu.is_chosen():
        _ROLLOUT_REGISTRY[("sglang", "async")] = f"{SGLANG}.ServerAdapter"


def load_replica() -> type:
    """verl's SGLang replica, with servers that serve adapters."""
    import ray
    from verl.workers.rollout.replica import _load_sglang

    # First: verl sets SGLang's flag of a process without a GPU while it imports the server.
    replica, server = _load_sglang(), import_module(SGLANG).AdapterServer

    class AdapterReplica(replica):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(server)

    return AdapterReplica
