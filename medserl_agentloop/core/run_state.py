"""What a self-play run remembers beside its weights, kept in each of verl's checkpoints.

Baselines, alarms and opponents have a little state of their own; a resumed run must go on with it
as it was. Called by the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from medserl_agentloop.paths import replacing

STATE_FILE = "selfplay_state.json"


class HasState(Protocol):
    """Something that can be written as JSON and read again."""

    def to_dict(self) -> dict[str, Any]:
        """Its state, JSON-able."""
        ...

    def load_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that ``to_dict`` gave."""
        ...


def save_state(folder: str | Path, parts: Mapping[str, HasState]) -> None:
    """Write the state of all parts into a checkpoint folder; whole or not at all."""
    with replacing(Path(folder) / STATE_FILE) as file:
        file.write(json.dumps({name: part.to_dict() for name, part in parts.items()}, indent=1).encode())


def load_state(folder: str | Path, parts: Mapping[str, HasState]) -> list[str]:
    """Give each part the state it had in a checkpoint, and return the names of those that it holds no state of.

    Raises:
        ValueError: The file is not what ``save_state`` wrote; names it.
    """
    path = Path(folder) / STATE_FILE
    if not path.exists():
        return sorted(parts)
    try:
        states = json.loads(path.read_text(encoding="utf-8"))
        for name in parts.keys() & states.keys():
            parts[name].load_dict(states[name])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not hold the state of a self-play run: {error}") from error
    return sorted(parts.keys() - states.keys())
