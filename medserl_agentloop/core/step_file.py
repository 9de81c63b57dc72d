"""Files of a run, written so that a resumed run continues them exactly; used by the trainer.

Games and metrics are files of JSON lines that each belong to a training step. A resumed run cuts
off the steps it plays again, so a file holds every step once whatever killed the run. Baselines and
alarms have a little state.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
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
WANDB_RUN_FILE = "wandb_run_id"


def lock_folder(folder: str | Path, wait_s: float = 30.0) -> AbstractContextManager[Any]:
    """Make and lock ``folder``, waiting for a process that is being killed; ValueError if another
    one keeps it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(Path(folder) / LOCK_FILE).acquire(timeout=wait_s)
    except Timeout:
        raise ValueError(
            f"another process writes to {folder}: end it, or give this one a folder of its own"
        ) from None
    except (OSError, NotImplementedError) as error:  # a file system without locks
        announce(f"warning: {folder} cannot be locked ({error}): let no second run write to it")
        return nullcontext()


def resume_wandb_run(folder: Path, *, resumed: bool) -> None:
    """Have ``wandb.init`` go on with this folder's run, or begin one: verl names no id
    (utils/tracking.py).
    """
    file = folder / WANDB_RUN_FILE
    if not (resumed and file.is_file()):
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    os.environ.setdefault("WANDB_RUN_ID", file.read_text(encoding="utf-8").strip())
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_DIR", str(folder))  # or wandb/ is where the command runs


class StepFile:
    """An append-only file of JSON objects that have a ``step``, in the order of their steps."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield each line and its object, {} if it is half written; ValueError if a step is missing
        or goes back.
        """
        before, remedy = (
            0,
            "so the run cannot be resumed with this file: fix the line, or move the file away",
        )
        with self.path.open("rb") if self.path.exists() else BytesIO() as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    yield line, {}
                    return
                try:
                    row = from_line(line)
                    step = row["step"] = int(row["step"])
                except (ValueError, TypeError, KeyError, OverflowError):
                    raise ValueError(f"{self.path}, line {number} has no step, {remedy}") from None
                if step < before:
                    raise ValueError(
                        f"{self.path}, line {number} is of an earlier step than the one before, "
                        f"{remedy}"
                    )
                before = step
                yield line, row

    def cut_after(self, step: int) -> int:
        """Remove the lines of steps after ``step``, and a half-written last line; return their
        number.

        A file of which nothing would be left is moved aside, to the same name with a number. Raises
        as ``lines``.
        """
        kept = removed = 0
        for line, row in self.lines():
            if row and row["step"] <= step:
                kept += len(line)
            else:
                removed += 1
        if kept:
            os.truncate(self.path, kept)
        elif removed:
            names = (
                self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1)
            )
            self.path.rename(next(aside for aside in names if not aside.exists()))
            self.path.touch()
        return removed

    def append(self, objects: Iterable[dict[str, Any]]) -> None:
        """Write one line per object and wait until they are on disk; an OSError names the file."""
        lines = b"".join(map(to_line, objects))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(self.path)  # that of a write names none
            raise

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects in order; a ValueError names file and line of anything that is no JSON
        object.

        Half a last line, of a file that was copied while it was written, is left out with a line on
        stderr.
        """
        with regular_file(self.path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = from_line(line)
                except ValueError as error:
                    if number > 1 and not line.endswith(b"\n"):
                        print(
                            visible(f"{self.path} ends within line {number}: it is left out"),
                            file=sys.stderr,
                        )
                        return
                    raise ValueError(f"{self.path}, line {number} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{self.path}, line {number} is no JSON object")
                yield row


def to_line(values: dict[str, Any]) -> bytes:
    """Write a line that :func:`from_line` reads; ValueError for a number that is not finite."""
    # A lone surrogate in a model's text must not lose the game.
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode(errors="backslashreplace")


def from_line(line: bytes) -> Any:
    """Parse a line of a file; ValueError if it is no JSON, or has a number that no table takes."""
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
    """Write those ``Interaction.prompts`` of a run from ``step`` on that ``prompts.jsonl`` does not
    hold yet.
    """
    file = StepFile(Path(folder) / PROMPTS_FILE)
    file.cut_after(step - 1)
    held = (
        {(row["role"], row["template"]): row["messages"] for row in file.read()}
        if file.path.exists()
        else {}
    )
    if new := [
        prompt
        for prompt in prompts
        if held.get((prompt["role"], prompt["template"])) != prompt["messages"]
    ]:
        file.append({"step": step, **prompt} for prompt in new)


class RunFiles:
    """The files of one run: games and metrics by step, and its config.

    ``folder`` is ``selfplay.records``.
    """

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
        """Remove and report lines of steps after the checkpoint of ``step``, and report lines
        missing before it.
        """
        for missing in list(self.missing(step)):
            announce(f"warning: {missing}")
        for file in (self.games, self.metrics):
            if removed := file.cut_after(
                step or -1
            ):  # what was measured before the first step is measured anew
                done = "removed" if file.path.stat().st_size else "moved aside"
                announce(f"{file.path}: {done} {removed} lines of steps after {step}")

    def missing(self, step: int) -> Iterator[str]:
        """Yield a sentence for each gap in the files up to the checkpoint of ``step``; raises as
        ``lines``.
        """
        held = Counter(row["step"] for _, row in self.games.lines() if row)
        played = Counter[int]()
        for row in (
            row for _, row in self.metrics.lines() if row
        ):  # a step's validation has a line of its own
            played[row["step"]] += int(row.get("selfplay/games", 0))
        # The files of a run that began at another one's checkpoint begin later.
        steps = range(min([*played, *held], default=1), step + 1)
        if unknown := [str(number) for number in steps if number not in played]:
            yield f"{self.metrics.path} lacks steps that were trained: {_first(unknown)}"
        counts = [
            (n, held[n], count) for n, count in played.items() if n <= step and held[n] < count
        ]
        if fewer := [f"{left} of {count} of step {n}" for n, left, count in counts]:
            yield f"{self.games.path} lacks games that were played: it holds {_first(fewer)}"


def _first(texts: Sequence[str]) -> str:
    return ", ".join([*texts[:5], "..."] if len(texts) > 5 else texts)


State = dict[str, dict[str, int | float | dict[str, int]]]
"""The state that one part of a run keeps between two steps: numbers by name, in groups."""


def save_state(folder: str | Path, parts: Mapping[str, State]) -> None:
    """Write the state of all parts into a checkpoint folder; whole or not at all."""
    with replacing(Path(folder) / STATE_FILE) as file:
        file.write(json.dumps(parts, indent=1).encode())


def load_state(folder: str | Path, parts: Mapping[str, State]) -> list[str]:
    """Load each part's state from a checkpoint, and return the names it lacks; ValueError for a
    damaged file.
    """
    path = Path(folder) / STATE_FILE
    if not path.exists():
        return sorted(parts)
    try:
        states = TypeAdapter(dict[str, State]).validate_json(path.read_bytes())
        for name in parts.keys() & states.keys():
            if not parts[name].keys() <= states[name].keys():
                raise ValueError(f"the {name} lack {', '.join(parts[name])}")
            parts[name].update(states[name])
    except ValueError as error:
        raise ValueError(f"{path} does not hold the state of a self-play run: {error}") from error
    return sorted(parts.keys() - states.keys())
