"""The record of one game: what every game's has. A game's own record is a subclass with its facts and turns.

The agent loop makes it, the game fills it turn by turn and scores it, the trainer writes it as one JSON line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

Rewards = dict[str, dict[str, float]]
"""For each role that is rewarded, its components by name; a role's reward is their sum."""


class OpponentRecord(BaseModel):
    """Who played the role that is not trained, where it was not the live policy: an ``endpoint`` or a ``pool``.

    ``version`` is the served model's name, or the checkpoint in a pool; None if it never answered.
    """

    model_config = ConfigDict(extra="forbid")

    role: str
    kind: str
    version: str | None


class GameRecord(BaseModel):
    """One game.

    Attributes:
        rewards: Reward components by role; empty until scored and in void games. A role's reward stands on the last
            token of its last turn.
        turn_rewards: Reward components by turn, counted from 0 in the order of play; where a game gives them, they
            are what the tokens get, and ``rewards`` are for reading.
        void: Why the game does not count for anyone; None if it does.
        context: ``isolated`` or ``shared``.
        step: Training step that used the game, -1 before it is known.
        uid: Identifier of the prompt group.
        session: Number of the game within its group.
        policy_version: Weights of the live policy: the training step they were pushed after.
        versions: The oldest and the newest weights of each of its turns, where they were not all the same in the game:
            in asynchronous training. A turn with two was stopped for new weights and went on.
        players: Who played a role, where it was not the policy in training: a model's name.
        opponent: Who took the other role's turn; None where the live policy did, or nobody.
        finished: When the last turn was over, in UTC, before the game was scored; None in records of before it existed.
        seconds: How long each turn took, in the order of play, as the game waited for it; of a void game, the one
            without an answer too.
    """

    model_config = ConfigDict(extra="ignore")

    left_out: ClassVar[tuple[str, ...]] = ("turn_rewards", "versions", "finished", "seconds")
    """Fields that JSON has only where they hold something: records of before they existed look the same."""

    rewards: Rewards = {}
    turn_rewards: dict[int, dict[str, float]] = {}
    void: str | None = None
    context: str = ""
    step: int = -1
    uid: str = ""
    session: int = 0
    policy_version: int | None = None
    versions: list[tuple[int, int]] = []
    players: dict[str, str] = {}
    opponent: OpponentRecord | None = None
    finished: datetime | None = None
    seconds: list[float] = []

    @property
    def kind(self) -> str:
        """The kind of the game, for statistics within a kind; games of one kind have the same name here."""
        return ""

    @property
    def is_void(self) -> bool:
        """Whether the game has no result."""
        return self.void is not None

    def reward(self, role: str) -> float | None:
        """The role's reward: the sum of its components, None if the role is not rewarded."""
        components = self.rewards.get(role)
        return None if components is None else sum(components.values())

    def void_unless_rewards_are_numbers(self) -> None:
        """Make the game void if a reward is NaN or infinite, which would spread to all advantages of its step."""
        rewards = [item for parts in (*self.rewards.values(), *self.turn_rewards.values()) for item in parts.items()]
        if wrong := [f"reward {name!r} is no number: {value}" for name, value in rewards if not math.isfinite(value)]:
            self.void, self.rewards, self.turn_rewards = self.void or wrong[0], {}, {}

    def reward_of_turns(self, roles: Mapping[int, str]) -> dict[int, float]:
        """What each turn earns, by its number, of those whose roles are given; turns that earn nothing are left out."""
        if self.turn_rewards:
            return {n: sum(self.turn_rewards[n].values()) for n in roles if n in self.turn_rewards}
        last = {role: number for number, role in sorted(roles.items())}
        return {last[role]: sum(parts.values()) for role, parts in self.rewards.items() if role in last}

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for transport and for the games file."""
        return self.model_dump(mode="json", exclude={name for name in self.left_out if not getattr(self, name)})
