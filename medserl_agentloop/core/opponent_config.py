"""The ``selfplay.opponent`` node: who plays the role that is not trained.

Read by ``config.py``, the agent loop and the trainer; imports no framework.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.client import HttpClient, ServerOptions


class OpponentSampling(BaseModel):
    """How the opponent's turns are sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling.")


class OpponentConfig(ServerOptions):
    """Who plays the role that is not trained."""

    node: ClassVar[str] = "selfplay.opponent"

    kind: Literal["live", "endpoint", "pool"] = Field(
        default="live",
        description="live: the policy itself. endpoint: a frozen model behind an OpenAI-compatible server. "
        "pool: earlier checkpoints of this run, served by one SGLang server whose weights are swapped.",
    )
    url: str | None = Field(
        default=None, description="OpenAI-compatible server, e.g. http://host:30000; SGLang for a pool."
    )
    model: str | None = Field(default="default", description="Model name in the requests; SGLang takes any.")
    concurrency: int = Field(default=64, ge=1, description="Requests in flight from one agent-loop worker.")
    sampling: OpponentSampling = Field(default=OpponentSampling(), description="Sampling of the opponent's turns.")
    rule: Literal["latest", "uniform", "win_rate"] = Field(
        default="uniform",
        description="Which checkpoint of the pool plays a step. win_rate prefers those that the trained role "
        "beats least.",
    )
    seed: int = Field(default=0, description="Seed of that choice; the same seed and step choose the same.")
    swap_timeout_s: float = Field(default=600.0, gt=0, description="Seconds the server may take to load a checkpoint.")

    def client(self, path: str = "", timeout_s: float | None = None) -> HttpClient:
        """A client of the server.

        Args:
            path: Base of the requests, under the server's root. ``url`` may or may not name the API's version.
            timeout_s: As in :meth:`ServerOptions.client`.
        """
        root = (self.url or "").rstrip("/").removesuffix("/v1")
        return ServerOptions.client(self.model_copy(update={"url": root + path}), timeout_s=timeout_s)


def check_opponent(opponent: OpponentConfig, *, train: str, context: str, run: DictConfig) -> None:
    """Check that the run can play against this opponent.

    Raises:
        ValueError: Says which key is wrong, why, and what to write instead.
    """
    if opponent.kind == "live":
        return
    kind = f"selfplay.opponent.kind={opponent.kind}"
    if train == "both":
        raise ValueError(
            f"{kind} plays the role that is not trained, but selfplay.train=both trains both. Set selfplay.train to "
            "the name of one role, or selfplay.opponent.kind=live."
        )
    if context == "shared":
        raise ValueError(
            f"{kind} keeps the opponent's turn out of the trajectory, but selfplay.context=shared is one "
            "conversation of both roles. Set selfplay.context=isolated."
        )
    opponent.check_address()
    opponent.api_key()
    if opponent.kind == "pool":
        _check_checkpoints(kind, run)


def _check_checkpoints(kind: str, run: DictConfig) -> None:
    if run.trainer.save_freq <= 0:
        raise ValueError(
            f"{kind} plays against checkpoints, but trainer.save_freq={run.trainer.save_freq} saves none. "
            "Set it to the number of steps between two opponents."
        )
    contents = run.actor_rollout_ref.actor.checkpoint.save_contents
    if "hf_model" not in contents:
        raise ValueError(
            f"{kind} needs checkpoints that a server can load. Set actor_rollout_ref.actor.checkpoint."
            f"save_contents=[{','.join([*contents, 'hf_model'])}]."
        )
    if run.actor_rollout_ref.model.get("lora_rank", 0) > 0:
        raise ValueError(
            f"{kind} needs checkpoints of the whole model, and those of a LoRA run are not. Set "
            "actor_rollout_ref.model.lora_rank=0, or serve one frozen model with selfplay.opponent.kind=endpoint."
        )
