"""A run's files, which a resumed run continues exactly, and its checkpoints.

Each line of the games and metrics files belongs to a training step. A resumed run removes the steps
that it plays again, so a file has every step once. A run keeps the newest checkpoints and the best
by validation, each with our own state.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from medserl_agentloop.paths import regular_file, replacing
from medserl_agentloop.terminal import announce, visible

GAMES_FILE = "games.jsonl"
METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "run_config.yaml"
PROMPTS_FILE = "prompts.jsonl"
STATE_FILE = "selfplay_state.json"
LOCK_FILE = ".lock"
LATEST = "latest_checkpointed_iteration.txt"  # where verl writes the step of the last checkpoint
_PREFIX = "global_step_"  # of verl's checkpoint folders


def lock_folder(folder: str | Path, wait_s: float = 30.0) -> AbstractContextManager[Any]:
    """Create and lock ``folder``; ValueError if another process still has it after ``wait_s``."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(Path(folder) / LOCK_FILE).acquire(timeout=wait_s)
    except Timeout:
        raise ValueError(
            f"another process writes to {folder}: stop it, or give this one its own folder"
        ) from None
    except (OSError, NotImplementedError) as error:  # a file system without locks
        announce(f"warning: {folder} cannot be locked ({error}): no second run may write to it")
        return nullcontext()


class StepFile:
    """An append-only file of JSON objects that have a ``step``, in the order of their steps."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, objects: Iterable[dict[str, Any]]) -> None:
        """Append one line per object and sync to disk; an OSError names the file."""
        lines = b"".join(map(to_line, objects))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(self.path)  # an error from a write names no file
            raise

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects in order; ValueError names the file and line of anything else.

        An incomplete last line is skipped, with a warning on stderr.
        """
        with regular_file(self.path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{self.path}, line {number}"
                try:
                    row = from_line(line)
                except ValueError as error:
                    if number > 1 and not line.endswith(b"\n"):
                        ends = f"{self.path} ends within line {number}: the line is skipped"
                        print(visible(ends), file=sys.stderr)
                        return
                    raise ValueError(f"{where} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{where} is no JSON object")
                yield row

    def steps(self) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        """Yield step, text and object of each complete line; ValueError for a line without a step,
        or with an earlier one than the line before.
        """
        before = 0
        with self.path.open("rb") if self.path.exists() else BytesIO() as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = from_line(line)
                    step = int(row["step"])
                    if step < before:
                        raise ValueError
                except (ValueError, TypeError, KeyError, OverflowError):
                    raise ValueError(
                        f"{self.path}, line {number} has no step, or an earlier one than the line "
                        "before: fix the line, or move the file away to resume without it"
                    ) from None
                before = step
                yield step, line, row

    def cut_after(self, step: int) -> int:
        """Remove the lines of steps after ``step``, and a half-written last line; return their
        number. Raises as ``steps``.

        A file that would become empty is renamed with a number instead.
        """
        kept = [len(line) for of, line, _ in self.steps() if of <= step]
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            removed = sum(1 for _ in file) - len(kept)
        if kept:
            os.truncate(self.path, sum(kept))
        elif removed:
            aside = (self.path.with_name(f"{self.path.name}.{n}") for n in itertools.count(1))
            self.path.rename(next(path for path in aside if not path.exists()))
            self.path.touch()
        return removed


def to_line(values: dict[str, Any]) -> bytes:
    """Format a line for :func:`from_line`; ValueError for a non-finite number."""
    # A lone surrogate in a model's text must not lose the game.
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode(errors="backslashreplace")


def from_line(line: bytes) -> Any:
    """Parse a line; ValueError if it is not JSON or has a number that is too large."""
    try:
        return json.loads(line, parse_int=_number, parse_float=_number, parse_constant=_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _number(text: str) -> float:
    number = int(text) if text.lstrip("-").isdecimal() else float(text)
    if not abs(number) < (2**63 if isinstance(number, int) else math.inf):
        raise ValueError(f"{text[:20]} is no number, or too large")
    return number


def write_prompts(folder: str | Path, step: int, prompts: Iterable[dict[str, Any]]) -> None:
    """Append the ``Interaction.prompts`` from ``step`` on that the file lacks."""
    file = StepFile(Path(folder) / PROMPTS_FILE)
    file.cut_after(step - 1)
    held = {(row["role"], row["template"]): row["messages"] for _, _, row in file.steps()}
    new = [p for p in prompts if held.get((p["role"], p["template"])) != p["messages"]]
    if new:
        file.append({"step": step, **prompt} for prompt in new)


class RunFiles:
    """The files of one run in ``selfplay.records``: games and metrics by step, and its config."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.games = StepFile(self.folder / GAMES_FILE)
        self.metrics = StepFile(self.folder / METRICS_FILE)

    def open(self, config: str, checkpoints: str | Path) -> None:
        """Lock both folders and write ``config``."""
        folders = {self.folder.resolve(), Path(checkpoints).resolve()}
        self._locks = [lock_folder(folder) for folder in sorted(folders)]
        with replacing(self.folder / CONFIG_FILE) as file:
            file.write(config.encode())

    def resume_after(self, step: int) -> None:
        """Remove and report lines of steps after the checkpoint of ``step``."""
        for file in (self.games, self.metrics):
            # What was measured before the first step is measured again.
            if removed := file.cut_after(step or -1):
                done = "removed" if file.path.stat().st_size else "moved aside"
                announce(f"{file.path}: {done} {removed} lines of steps after {step}")


# -- checkpoints -----------------------------------------------------------------------------------

State = dict[str, dict[str, float]]
"""State that one part of a run keeps between steps: numbers by group and name."""


def save_state(folder: str | Path, parts: Mapping[str, State]) -> None:
    """Write the state of all parts into a checkpoint folder atomically."""
    with replacing(Path(folder) / STATE_FILE) as file:
        file.write(json.dumps(parts, indent=1).encode())


def load_state(folder: str | Path, parts: Mapping[str, State]) -> list[str]:
    """Load each part's state, and return the names it lacks; ValueError if it is damaged."""
    path = Path(folder) / STATE_FILE
    if not path.exists():
        return sorted(parts)
    try:
        states = TypeAdapter(dict[str, State]).validate_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} does not hold the state of a self-play run: {error}") from error
    for name in parts.keys() & states.keys():
        parts[name].update(states[name])
    return sorted(parts.keys() - states.keys())


@dataclass(frozen=True)
class Checkpoint:
    """A loadable checkpoint; ``score`` is its validation score, or None."""

    step: int
    folder: Path
    score: float | None
    newest: bool
    best: bool

    def __str__(self) -> str:
        marks = ["newest"] * self.newest + ["best"] * self.best
        marks += [] if self.score is None else [f"{self.score:.3f}"]
        return f"step {self.step}" + (f" ({', '.join(marks)})" if marks else "")


def read_scores(records: str | Path, best_by: str | None) -> dict[int, float]:
    """Means of ``best_by`` over the validation data sets by step, from a run's ``metrics.jsonl``;
    0 is before training.
    """
    scores: dict[int, float] = {}
    for step, _, row in StepFile(Path(records) / METRICS_FILE).steps() if best_by else ():
        names = (name for name in row if name.startswith("val-core/"))
        if found := [row[name] for name in names if name.endswith(f"/{best_by}")]:
            scores[step] = fmean(found)
    return scores


def best_step(scores: Mapping[int, float]) -> int | None:
    """The earliest step with the highest score, or None."""
    return min(scores, key=lambda step: (-scores[step], step), default=None)


def saved_steps(folder: str | Path) -> list[int]:
    """Steps of verl's checkpoints that still have weights, in order."""
    found = (path.parent.name.removeprefix(_PREFIX) for path in Path(folder).glob("*/actor"))
    return sorted(map(int, filter(str.isdecimal, found)))


def latest_step(folder: str | Path) -> int | None:
    """The step that a run would resume from; None before the first checkpoint."""
    path = Path(folder) / LATEST
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def remove_old(
    folder: str | Path, step: int, keep: int | None, scores: Mapping[int, float]
) -> None:
    """Remove old weights so that ``keep`` checkpoints (None: all) remain with that of ``step``, and
    the best by ``scores``.

    verl's own (utils/checkpoint/checkpoint_manager.py) forgets checkpoints from before a resume.
    Only weights are removed, and one checkpoint stays complete until the new one is.
    """
    before = [number for number in saved_steps(folder) if number < step]
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

    def saved(step: int) -> Checkpoint:
        place, score = folder / f"{_PREFIX}{step}", scores.get(step)
        return Checkpoint(step, place, score, newest=step == newest, best=step == best)

    return list(map(saved, steps))


def choose(run: str | Path, wanted: str) -> Checkpoint:
    """The checkpoint for ``best``, ``newest`` or a step; ValueError lists the existing ones."""
    found = checkpoints(run)
    for checkpoint in found:
        names = (str(checkpoint.step), "newest" * checkpoint.newest, "best" * checkpoint.best)
        if wanted in names:
            return checkpoint
    have = ", ".join(map(str, found)) or "no checkpoint"
    reason = "; no validation has a score (trainer.test_freq)" if wanted == "best" else ""
    raise ValueError(f"{run} has no checkpoint '{wanted}'{reason}: it has {have}")
