"""Opponents: models other than the live policy that play the role that is not trained (``selfplay.opponent``).

Its tokens are never part of a trajectory. With a :class:`CheckpointPool` one earlier checkpoint plays each training
step: the trainer swaps the weights of its server before the games start, and every answer names its weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, ServerOptions, blocking, shown
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.terminal import announce

POOL_VERSION = "global_step_"  # how the versions of a checkpoint pool begin; verl names its checkpoint folders so

POOL_METRICS = ("selfplay/opponent/swap_failed", "selfplay/opponent/pool_size", "selfplay/opponent/step")
SWAP_FAILED, POOL_SIZE, OPPONENT_STEP = POOL_METRICS
_ASK_TIMEOUT_S = 10.0
_SWAP_TIMEOUT_S = 600.0  # a checkpoint is loaded from a disk
WIN_RATE_POWER = 2  # of the weights of rule ``win_rate``, AlphaStar's value for its hard opponents


class _OpponentSampling(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(default=1.0, ge=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling.")


class OpponentConfig(ServerOptions):
    """The player of the role that is not trained."""

    node: ClassVar[str] = "selfplay.opponent"

    url: str | None = Field(
        default=None, description="OpenAI-compatible server, e.g. http://host:30000; SGLang for a pool."
    )
    model: str | None = Field(default="default", description="Model name in the requests; SGLang takes any.")
    concurrency: int = Field(default=64, ge=1, description="Requests in flight from one agent-loop worker.")
    sampling: _OpponentSampling = Field(default=_OpponentSampling(), description="Sampling of the opponent's turns.")
    kind: Literal["live", "endpoint", "pool"] = Field(
        default="live",
        description="live: the policy itself. endpoint: a frozen model behind an OpenAI-compatible server. "
        "pool: earlier checkpoints of this run, served by one SGLang server whose weights are swapped.",
    )
    rule: Literal["latest", "uniform", "win_rate"] = Field(
        default="uniform",
        description="Which checkpoint plays a step. win_rate prefers those that the trained role beats least.",
    )
    seed: int = Field(default=0, description="Seed of that choice; the same seed and step choose the same.")

    def client(self, path: str = "", timeout_s: float | None = None) -> HttpClient:
        """A client of the server, requests starting at ``path``. ``url`` may or may not name the API's version."""
        root = (self.url or "").rstrip("/").removesuffix("/v1")
        return ServerOptions.client(self.model_copy(update={"url": root + path}), timeout_s=timeout_s)

    def version(self, model: str, weights: str | None) -> str:
        """Return the ``model`` that an answer names, or a pool's checkpoint; BadAnswer for ``weights`` of no pool."""
        if self.kind != "pool":
            return model or str(self.model)
        if weights is None or not weights.startswith(POOL_VERSION):
            raise BadAnswer(f"the server played with weights {weights!r}, which are not of the pool")
        return weights


class CheckpointPool:
    """The opponents of a run, their results, and the server that plays one of them.

    They are ``first_model``, which the run started from, and the last ``keep`` checkpoints of earlier steps in
    ``folder``, which the server must see under the same path.
    """

    def __init__(self, config: OpponentConfig, folder: str | Path, first_model: str, keep: int | None = None) -> None:
        self.config = config
        # verl forgets at a resume which checkpoints it meant to delete; whom a resumed run meets must not depend on it.
        self._keep = keep or 0
        self.folder = Path(folder).resolve()
        self._first_model = str(Path(first_model).resolve()) if Path(first_model).is_dir() else first_model
        self._current: str | None = None
        self.state: dict[str, dict[str, dict[str, int]]] = {"results": {}}  # by version: games, and wins of the role

    def entries(self, step: int) -> dict[str, str]:
        """Version and model path of every opponent that ``step`` may meet, oldest first; none is of a later step."""
        checkpoints: dict[int, str] = {}
        for folder in self.folder.glob(f"{POOL_VERSION}*/actor/huggingface"):
            number = folder.parent.parent.name.removeprefix(POOL_VERSION)
            if number.isdigit() and 0 < int(number) < step and any(folder.glob("*.safetensors")):
                checkpoints[int(number)] = str(folder)
        kept = {0: self._first_model} | {number: checkpoints[number] for number in sorted(checkpoints)[-self._keep :]}
        return {f"{POOL_VERSION}{number}": path for number, path in kept.items()}

    def choose(self, step: int) -> str:
        """Return the version of the opponent of ``step``; the same one on every call."""
        versions = list(self.entries(step))
        if self.config.rule == "latest":
            return versions[-1]
        weights = [self._weight(version) for version in versions] if self.config.rule == "win_rate" else None
        return random.Random(f"{self.config.seed}/{step}").choices(versions, weights)[0]

    def _weight(self, version: str) -> float:
        """Prioritised self-play (Vinyals et al. 2019): (1 - P[trained role wins])^2, the rate Laplace-smoothed."""
        result = self.state["results"].get(version, {"games": 0, "wins": 0})
        return float((1.0 - (result["wins"] + 1) / (result["games"] + 2)) ** WIN_RATE_POWER)

    def prepare(self, step: int) -> dict[str, float]:
        """Have the opponent of ``step`` served and return its metrics; RuntimeError if a process gets no first one."""
        entries, version = self.entries(step), self.choose(step)
        metrics = {SWAP_FAILED: 0.0, POOL_SIZE: float(len(entries))}
        if version != self._current or self._served() != version:
            try:
                self._swap(version, entries[version])
            except NoAnswer as error:
                text = f"selfplay.opponent.url={self.config.url} could not load {entries[version]}: {error}"
                if self._current is None:
                    raise RuntimeError(f"{text}. It must be an SGLang server that sees this path.") from error
                announce(f"warning: {text}; step {step} meets what it has loaded")
                return {**metrics, SWAP_FAILED: 1.0}
            announce(f"step {step}: the opponent is {version} (of {len(entries)})")
            self._current = version
        return {**metrics, OPPONENT_STEP: float(version.removeprefix(POOL_VERSION))}

    def record(self, games: Sequence[GameRecord], results: Sequence[bool | None]) -> None:
        """Count, for the opponents of finished games, whether the trained role won; None where nothing was decided."""
        for game, won in zip(games, results, strict=True):
            if won is not None and game.opponent is not None and game.opponent.version is not None:
                result = self.state["results"].setdefault(game.opponent.version, {"games": 0, "wins": 0})
                result["games"] += 1
                result["wins"] += won

    def _served(self) -> str | None:
        """Version the server says it plays; None if it does not answer, e.g. while it restarts."""
        client = self.config.client(timeout_s=_ASK_TIMEOUT_S)
        try:
            return str(blocking(client.get("/model_info"))["weight_version"])
        except (NoAnswer, KeyError, TypeError):
            return None

    def _swap(self, version: str, model_path: str) -> None:
        client = self.config.client(timeout_s=_SWAP_TIMEOUT_S)
        body = {"model_path": model_path, "weight_version": version}
        answer = blocking(client.post("/update_weights_from_disk", body))
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise BadAnswer(f"the server answered {shown(str(answer))}")
        if (served := self._served()) != version:
            raise BadAnswer(f"after loading {version} the server says it plays {served!r}")
