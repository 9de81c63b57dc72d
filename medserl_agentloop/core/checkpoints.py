"""Checkpoints that a run keeps: the newest ones, and the best by validation.

The trainer removes the others and stops when nothing gets better. ``medserl show`` names the best,
and ``medserl export`` writes one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import OmegaConf

from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, METRICS_FILE, StepFile
from medserl_agentloop.terminal import announce

_PREFIX = "global_step_"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be loaded."""

    step: int
    folder: Path
    score: float | None
    """Of its validation; None where its step had none."""
    newest: bool
    best: bool

    def __str__(self) -> str:
        marks = ["newest"] * self.newest + ["best"] * self.best
        marks += [] if self.score is None else [f"{self.score:.3f}"]
        return f"step {self.step}" + (f" ({', '.join(marks)})" if marks else "")


def validation_score(metrics: Mapping[str, Any], best_by: str | None) -> float | None:
    """Mean over the validation's data sets of the measure ``best_by``; None without one."""
    found = [
        value
        for name, value in metrics.items()
        if best_by and name.startswith("val-core/") and name.endswith(f"/{best_by}")
    ]
    return fmean(found) if found else None


def read_scores(records: str | Path, best_by: str | None) -> dict[int, float]:
    """Validation scores of a run by step, from its ``metrics.jsonl``; 0 is before training.

    ValueError for a line that is no JSON.
    """
    file = StepFile(Path(records) / METRICS_FILE)
    scores: dict[int, float] = {}
    for row in file.read() if file.path.is_file() else ():  # a step's validation has its own line
        if (score := validation_score(row, best_by)) is not None:
            scores[int(row["step"])] = score
    return scores


def best_step(scores: Mapping[int, float]) -> int | None:
    """The step of the highest score, the earliest of several; None if there is none."""
    return min(scores, key=lambda step: (-scores[step], step), default=None)


def evaluations_after_best(scores: Mapping[int, float]) -> int:
    """Validations since the best one."""
    best = best_step(scores)
    return 0 if best is None else sum(step > best for step in scores)


def saved_steps(folder: str | Path) -> list[int]:
    """Steps of verl's checkpoints in a folder that still have weights, in order."""
    found = (path.parent.name.removeprefix(_PREFIX) for path in Path(folder).glob("*/actor"))
    return sorted(map(int, filter(str.isdecimal, found)))


def latest_step(folder: str | Path) -> int | None:
    """The step that a run would resume from; None before the first checkpoint."""
    path = Path(folder) / LATEST
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def remove_old(
    folder: str | Path, step: int, keep: int | None, scores: Mapping[int, float] | None = None
) -> None:
    """Make room for the checkpoint of ``step``: leave ``keep`` with it, and the best by ``scores``.

    None keeps all. As verl does (utils/checkpoint/checkpoint_manager.py), which forgets those of
    before a resume: weights alone are removed, and one checkpoint stays whole until the new one is.
    """
    before = [number for number in saved_steps(folder) if number < step]
    scores = scores or {}
    best = best_step({number: scores[number] for number in before if number in scores})
    for number in before[: -max(keep - 1, 1)] if keep else ():
        # The one that a run would resume from may be an older one that was chosen.
        if number not in (latest_step(folder), best):
            announce(f"removing the checkpoint of step {number} (trainer.max_actor_ckpt_to_keep)")
            for engine in ("actor", "critic"):
                shutil.rmtree(Path(folder) / f"{_PREFIX}{number}" / engine, ignore_errors=True)


def checkpoints(run: str | Path) -> list[Checkpoint]:
    """The checkpoints of a run's folder, in order."""
    folder = Path(run)
    path = folder / CONFIG_FILE
    config = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
    scores = read_scores(run, OmegaConf.select(config, "selfplay.best_by"))
    steps, newest = saved_steps(folder), latest_step(folder)
    best = best_step({step: scores[step] for step in steps if step in scores})
    return [
        Checkpoint(
            step, folder / f"{_PREFIX}{step}", scores.get(step), step == newest, step == best
        )
        for step in steps
    ]


def choose(run: str | Path, wanted: str) -> Checkpoint:
    """The checkpoint that ``best``, ``newest`` or a step's number means; ValueError names those
    that there are.
    """
    found = checkpoints(run)
    for checkpoint in found:
        if wanted in (
            str(checkpoint.step),
            "newest" * checkpoint.newest,
            "best" * checkpoint.best,
        ):
            return checkpoint
    have = ", ".join(map(str, found)) or "no checkpoint"
    reason = "; no validation has a score (trainer.test_freq)" if wanted == "best" else ""
    raise ValueError(f"{run} has no checkpoint '{wanted}'{reason}: it has {have}")
