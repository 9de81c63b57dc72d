"""A run's config as the start-up checks read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy

from medserl_agentloop.core.config import SelfPlayConfig

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"

FSDP = ("fsdp", "fsdp2")
"""Strategies whose forward pass reads a restart of ``position_ids`` as a new sequence."""


@dataclass(frozen=True)
class Run:
    """A run's whole config, read by dotted key, and its ``selfplay`` node."""

    config: DictConfig
    selfplay: SelfPlayConfig

    def __getitem__(self, key: str) -> Any:
        """The value of a key; None where it is absent, null or still ``???``."""
        return OmegaConf.select(self.config, key)

    def names(self, key: str) -> list[str]:
        """The names in the value of a key: none, one, or a list; ``rollout_rs`` has commas between them."""
        value = self[key]
        if value is None:
            return []
        if key.endswith(".rollout_rs"):
            return [name.strip() for name in str(value).split(",") if name.strip()]
        return [str(name) for name in value] if isinstance(value, ListConfig) else [str(value)]

    @property
    def trained(self) -> dict[str, str]:
        """The engines that are trained, each with the key of its model."""
        return {ACTOR: MODEL} | ({CRITIC: f"{CRITIC}.model"} if self[f"{CRITIC}.enable"] else {})

    @property
    def engines(self) -> dict[str, str]:
        """All engines that read games, each with the key of its model."""
        # With LoRA, verl's reference policy is the actor without its adapter (trainer_base.py, ref_in_actor).
        rank = self[f"{MODEL}.lora.rank"] or self[f"{MODEL}.lora_rank"]
        in_actor = rank or self[f"{MODEL}.lora_adapter_path"] is not None
        return self.trained | ({REF: MODEL} if self.has_reference and not in_actor else {})

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference policy."""
        return bool(need_reference_policy(self.config))

    @property
    def gpus(self) -> int:
        """Training workers of the run."""
        return int(self["trainer.nnodes"] * self["trainer.n_gpus_per_node"])

    def ulysses(self, engine: str) -> int:
        """Workers of an FSDP engine that share a row; 1 without sequence parallelism."""
        # verl/workers/config: actor.py takes either key, critic.py reads only that of its engine.
        keys = [f"{engine}.fsdp_config.ulysses_sequence_parallel_size", f"{engine}.ulysses_sequence_parallel_size"]
        if engine == CRITIC:
            keys = [f"{engine}.fsdp.ulysses_sequence_parallel_size"]
        return max(self[key] or 1 for key in keys)
