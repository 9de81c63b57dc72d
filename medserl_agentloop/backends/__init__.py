"""verl's platform, engines and rollouts: on the CPU, and on GPUs with an adapter for each role.

The plugin registers them in every process at ``import verl``. The environment alone decides what
becomes active, so a GPU cluster behaves as if the CPU backend did not exist.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
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


def register_adapters() -> None:
    """Register an FSDP2 engine and an SGLang rollout that know an adapter for each role."""
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
