"""Files of JSON lines that each belong to a training step: the games and the metrics of a run.

Written by the trainer. A resumed run cuts off the steps it plays again, so a file holds every step
once whatever killed the run (verl's own ``file`` logger starts from nothing on a resume).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

GAMES_FILE = "games.jsonl"
METRICS_FILE = "metrics.jsonl"


class StepFile:
    """An append-only file of JSON objects that have a ``step``, in the order of their steps."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def cut_after(self, step: int) -> int:
        """Remove what belongs to steps after ``step``, and a half-written last line; return how many lines that were.

        Raises:
            ValueError: A whole line is not an object with a step; names file and line.
        """
        if not self.path.exists():
            return 0
        kept = removed = 0
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, start=1):
                if removed == 0 and line.endswith(b"\n") and self._step(line, number) <= step:
                    kept += len(line)
                else:
                    removed += 1
            file.truncate(kept)
        return removed

    def _step(self, line: bytes, number: int) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{self.path}, line {number} has no step, so the run cannot be resumed with this file: "
                "mend the line, or move the file away"
            ) from None

    def append(self, objects: Iterable[dict[str, Any]]) -> None:
        """Write one line per object and wait until they are on disk."""
        lines = b"".join(map(to_line, objects))
        with self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Iterator[dict[str, Any]]:
        """The objects, in order."""
        with self.path.open("rb") as file:
            yield from map(json.loads, file)


def to_line(values: dict[str, Any]) -> bytes:
    """A JSON object as a line of a file."""
    # A lone surrogate in a model's text must not lose the game.
    return (json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8", errors="backslashreplace")
