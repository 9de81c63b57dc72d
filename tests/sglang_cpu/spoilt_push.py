"""Negative controls: pushes that look like the real one and leave the engine with something of the old policy."""

import os
from collections.abc import Mapping
from typing import Any

from medserl_agentloop.backends.sglang_adapters import CpuServerAdapter


class SpoiltAdapter(CpuServerAdapter):
    async def _load(self, folder: str, *, flush_cache: bool = True) -> None:
        if not hasattr(self, "_pushed"):
            self._pushed: Any = True
            await super()._load(folder)
        elif os.environ["PROBE_PUSH"] == "no-flush":
            await super()._load(folder, flush_cache=False)

    async def _push_adapter(self, name: str, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        other = {"default": "assessor", "assessor": "default"}[name]
        await super()._push_adapter(other if os.environ["PROBE_PUSH"] == "swapped" else name, state, config)
