"""A pool of earlier checkpoints of the run, of which one plays each training step.

The trainer chooses (:meth:`CheckpointPool.prepare`) before a step's games start and swaps the
weights of the one server that plays them, so all games of a step meet the same opponent. Agent-loop
workers need not be told: every answer of the server names its weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medserl_agentloop.core.client import BadAnswer, NoAnswer
from medserl_agentloop.core.opponent import POOL_VERSION
from medserl_agentloop.core.opponent_config import OpponentConfig
from medserl_agentloop.core.records import GameRecord

OPPONENT_STEP = "selfplay/opponent/step"
POOL_METRICS = ("selfplay/opponent/swap_failed", "selfplay/opponent/pool_size", OPPONENT_STEP)
_ASK_TIMEOUT_S = 10.0
WIN_RATE_POWER = 2
"""Of the weights of rule ``win_rate``, AlphaStar's value for its hard opponents."""


class CheckpointPool:
    """The opponents of a run, their results, and the server that plays one of them.

    The pool is the model the run started from and the checkpoints of earlier steps.

    Args:
        config: The run's ``selfplay.opponent`` node.
        folder: ``trainer.default_local_dir``; the server must see it under the same path.
        first_model: ``actor_rollout_ref.model.path``: what the run started from.
        keep: ``trainer.max_actor_ckpt_to_keep``: the pool holds the last so many checkpoints.
    """

    def __init__(self, config: OpponentConfig, folder: str | Path, first_model: str, keep: int | None = None) -> None:
        self.config = config
        # verl forgets at a resume which checkpoints it meant to delete. What the pool holds, and so
        # whom a resumed run meets, must not depend on that.
        self._keep = keep or None
        self.folder = Path(folder).resolve()
        self._first_model = str(Path(first_model).resolve()) if Path(first_model).is_dir() else first_model
        self._current: str | None = None
        self._games: dict[str, int] = {}
        self._wins: dict[str, int] = {}

    def entries(self, step: int) -> dict[str, str]:
        """Version and model path of every opponent that ``step`` may meet, oldest first.

        Checkpoints of ``step`` and later are left over from a run that was taken back.
        """
        found: dict[int, str] = {}
        for folder in self.folder.glob(f"{POOL_VERSION}*/actor/huggingface"):
            number = folder.parent.parent.name.removeprefix(POOL_VERSION)
            if number.isdigit() and 0 < int(number) < step and any(folder.glob("*.safetensors")):
                found[int(number)] = str(folder)
        kept = sorted(found)[-self._keep :] if self._keep else sorted(found)
        first = {f"{POOL_VERSION}0": self._first_model}
        return first | {f"{POOL_VERSION}{number}": found[number] for number in kept}

    def choose(self, step: int) -> str:
        """Version of the opponent of ``step``; the same one however often it is asked for."""
        versions = list(self.entries(step))
        if self.config.rule == "latest":
            return versions[-1]
        weights = [self._weight(version) for version in versions] if self.config.rule == "win_rate" else None
        return random.Random(f"{self.config.seed}/{step}").choices(versions, weights)[0]

    def _weight(self, version: str) -> float:
        """Prioritised fictitious self-play (Vinyals et al. 2019, AlphaStar): (1 - P[trained role wins])^2.

        The win rate starts at 1/2 and one game of each result (Laplace), so that an opponent never met
        is neither skipped nor preferred for good.
        """
        win_rate = (self._wins.get(version, 0) + 1) / (self._games.get(version, 0) + 2)
        return float((1.0 - win_rate) ** WIN_RATE_POWER)

    def prepare(self, step: int) -> dict[str, float]:
        """Have the opponent of ``step`` served.

        Returns:
            Metrics of the step: ``selfplay/opponent/step`` (the checkpoint), ``swap_failed``, ``pool_size``.

        Raises:
            RuntimeError: The first opponent of a process cannot be served: nothing would be played. A
                later failure leaves the server with what it has, which every record names.
        """
        entries = self.entries(step)
        version = self.choose(step)
        failed = False
        if version != self._current or self._served() != version:
            try:
                self._swap(version, entries[version])
            except NoAnswer as error:
                text = f"selfplay.opponent.url={self.config.url} could not load {entries[version]}: {error}"
                if self._current is None:
                    raise RuntimeError(f"{text}. It must be an SGLang server that sees this path.") from error
                print(f"[medserl] warning: {text}; step {step} meets what it has loaded", flush=True)
                failed = True
            else:
                print(f"[medserl] step {step}: the opponent is {version} (of {len(entries)})", flush=True)
                self._current = version
        numbers = (float(failed), float(len(entries)), float(version.removeprefix(POOL_VERSION)))
        metrics = dict(zip(POOL_METRICS, numbers, strict=True))
        if failed:
            del metrics[OPPONENT_STEP]
        return metrics

    def record(self, games: Sequence[GameRecord], results: Sequence[bool | None]) -> None:
        """Count the results of finished games for the opponents that played them.

        Args:
            games: The games.
            results: Of each, whether the trained role won; None where nothing was decided.
        """
        for game, won in zip(games, results, strict=True):
            if won is None or game.opponent is None or game.opponent.version is None:
                continue
            version = game.opponent.version
            self._games[version] = self._games.get(version, 0) + 1
            self._wins[version] = self._wins.get(version, 0) + won

    def to_dict(self) -> dict[str, Any]:
        """Results so far, JSON-able: per version games and games that the trained role won."""
        return {"results": {v: {"games": n, "wins": self._wins[v]} for v, n in sorted(self._games.items())}}

    def load_dict(self, state: dict[str, Any]) -> None:
        """Take up the results of :meth:`to_dict`.

        Raises:
            ValueError: It is not such a state.
        """
        try:
            games = {str(v): int(r["games"]) for v, r in state["results"].items()}
            wins = {str(v): int(r["wins"]) for v, r in state["results"].items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not the state of an opponent pool: {error!r}") from error
        self._games, self._wins = games, wins

    def _served(self) -> str | None:
        """Version the server says it plays; None if it does not answer, e.g. while it restarts."""
        client = self.config.client(timeout_s=_ASK_TIMEOUT_S)
        try:
            return str(client.blocking(client.get("/model_info"))["weight_version"])
        except (NoAnswer, KeyError, TypeError):
            return None

    def _swap(self, version: str, model_path: str) -> None:
        client = self.config.client(timeout_s=self.config.swap_timeout_s)
        body = {"model_path": model_path, "weight_version": version}
        said = client.blocking(client.post("/update_weights_from_disk", body))
        if not (isinstance(said, dict) and said.get("success") is True):
            raise BadAnswer(f"the server answered {client.shown(str(said))}")
        if (served := self._served()) != version:
            raise BadAnswer(f"after loading {version} the server says it plays {served!r}")


def build_pool(config: OpponentConfig, run: Any) -> CheckpointPool | None:
    """The pool of a run that plays against one, else None.

    Args:
        config: The run's ``selfplay.opponent`` node.
        run: The whole run's config.
    """
    if config.kind != "pool":
        return None
    return CheckpointPool(
        config,
        run.trainer.default_local_dir,
        first_model=run.actor_rollout_ref.model.path,
        keep=run.trainer.max_actor_ckpt_to_keep,
    )
