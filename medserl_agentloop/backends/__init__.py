"""Where a run executes when there is no accelerator: verl's platform, engine and rollout for the CPU.

The plugin calls :func:`register` in every process at ``import verl``. What becomes active is decided by the environment
alone, so a GPU cluster with this package installed behaves as if the backend did not exist.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pkgutil import resolve_name

ROLLOUT_NAME = "cpu_hf"
PLATFORM_NAME = "cpu"


def register() -> None:
    """Register the platform ``cpu`` and, with ``VERL_PLATFORM=cpu``, its engines, whose import takes a second."""
    # By name: each module registers itself while it is first executed.
    platform = import_module("medserl_agentloop.backends.cpu_platform")
    import_module("medserl_agentloop.backends.sglang_cpu").register()
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != PLATFORM_NAME:
        return
    platform.register_gloo()
    import_module("medserl_agentloop.backends.engines")
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    # base.py has no registering function in verl 0.9.1; the dict holds names, so nothing is imported yet.
    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "medserl_agentloop.backends.cpu_rollout.ServerAdapter"
    replica = "medserl_agentloop.backends.cpu_rollout:CpuRolloutReplica"
    RolloutReplicaRegistry.register(ROLLOUT_NAME, partial(resolve_name, replica))


def register_adapters() -> None:
    """Make verl's FSDP2 engine and SGLang rollout train and serve an adapter for each role, in a run that wants it."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from medserl_agentloop.backends import sglang_cpu

    import_module("medserl_agentloop.backends.engines")
    sglang = "medserl_agentloop.backends.sglang_adapters"
    RolloutReplicaRegistry.register("sglang", lambda: import_module(sglang).load_replica())
    if not sglang_cpu.is_chosen():
        _ROLLOUT_REGISTRY[("sglang", "async")] = f"{sglang}.ServerAdapter"
