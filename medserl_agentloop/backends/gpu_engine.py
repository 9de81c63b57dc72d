"""verl's FSDP2 engine on a GPU, with an adapter for each role in a run that wants it; otherwise verl's own."""

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from medserl_agentloop.backends.role_adapters import RoleAdapters


# verl's own is registered for "cuda" of any vendor, and a vendor's engine goes before it.
@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class FSDP2EngineWithRoleAdapters(RoleAdapters, FSDPEngineWithLMHead):  # type: ignore[misc]  # verl is untyped
    """Actor and reference policy."""
