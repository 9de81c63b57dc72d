"""verl's FSDP2 engine on a GPU, with an adapter for each role in a run that wants it, and attention within each context
where there is no flash attention. Otherwise verl's own.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from medserl_agentloop.backends import packed_attention
from medserl_agentloop.backends.role_adapters import RoleAdapters


# verl's own is registered for "cuda" of any vendor, and a vendor's engine goes before it.
@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class NvidiaFSDP2EngineWithLMHead(RoleAdapters, FSDPEngineWithLMHead):  # type: ignore[misc]  # verl is untyped
    """Actor and reference policy."""

    def _build_module(self) -> Any:
        return packed_attention.instead_of_sdpa(super()._build_module())
