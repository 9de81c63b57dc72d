"""Negative controls: pushes that look like the real one and leave the engine with something of the
old policy.
"""

import os
from collections.abc import Mapping
from typing import Any

from medserl_agentloop.backends.sglang_adapters import CpuServerAdapter


class SpoiltAdapter(CpuServerAdapter):
    _pushed = False

    async def _ask(self, endpoint: str, request: dict[str, Any]) -> None:
        if endpoint == "update_weights_from_disk" and self._pushed:
            if os.environ["PROBE_PUSH"] == "off":
                return
            request |= {"flush_cache": os.environ["PROBE_PUSH"] != "no-flush"}
        await super()._ask(endpoint, request)
        self._pushed = True

    async def _push_adapter(
        self, name: str, state: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        other = {"default": "assessor", "assessor": "default"}[name]
        await super()._push_adapter(
            other if os.environ["PROBE_PUSH"] == "swapped" else name, state, config
        )
