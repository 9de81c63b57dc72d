"""The record of one game. A game's own record is a subclass with its facts and turns.

The agent loop creates it, the game fills it turn by turn and scores it, and the trainer writes it
as one JSON line. Many records form one table; one record is shown in sections.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.terminal import visible

Rewards = dict[str, dict[str, float]]
"""For each role that is rewarded, its components by name; a role's reward is their sum."""

LARGEST_REWARD = 1e15  # its square is still finite in float32, and so is a sum of many squares


class OpponentRecord(BaseModel):
    """The untrained role's player; ``version`` is its model, if it answered."""

    model_config = ConfigDict(extra="forbid")

    role: str
    kind: str
    version: str | None


class TurnRecord(BaseModel):
    """One turn."""

    role: str
    messages: list[dict[str, str]] = []  # that were new to the role
    response: str = ""
    tokens: int = 0  # of the response
    truncated: bool = False


class GameRecord(BaseModel):
    """One game.

    A role's reward is on the last token of its last turn. If a game sets ``turn_rewards`` (by turn,
    from 0), the tokens get those, and ``rewards`` are only shown.
    """

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    left_out: ClassVar[tuple[str, ...]] = ("turns", "turn_rewards", "finished", "seconds")
    """Fields that JSON omits if empty."""

    # as they were played, unless a record has its own fields for them
    turns: list[TurnRecord] = []
    rewards: Rewards = {}  # empty until scored and in void games
    turn_rewards: dict[int, dict[str, float]] = {}
    void: str | None = None  # why the game does not count for anyone
    context: str = ""
    step: int = -1  # training step that used the game, -1 before it is known
    uid: str = ""  # of the prompt group; ``session`` numbers its games
    session: int = 0
    policy_version: int | None = None  # training step after which its weights were pushed
    players: dict[str, str] = {}  # models in roles that the policy in training did not play
    opponent: OpponentRecord | None = None  # who took the other role's turn, if not the live policy
    finished: datetime | None = None  # when the last turn was over, in UTC
    seconds: list[float] = []  # how long each turn took, one without an answer included

    @property
    def kind(self) -> str:
        """The kind of the game, for statistics by kind."""
        return ""

    @property
    def is_void(self) -> bool:
        return self.void is not None

    @property
    def reading_rank(self) -> int:
        """The rank for choosing the game to show first; the latest wins ties."""
        return int(not self.is_void)

    def reward(self, role: str) -> float | None:
        """The role's reward: the sum of its components, None if the role is not rewarded."""
        components = self.rewards.get(role)
        return None if components is None else sum(components.values())

    def check_rewards(self, roles: Sequence[str], turns: Sequence[str]) -> None:
        """Raise ValueError for rewards of a role or a turn that the game lacks."""
        if not set(self.rewards) <= set(roles):
            raise ValueError(f"the game rewards {list(self.rewards)}, but its roles are {roles}")
        for number in self.turn_rewards:
            if not (0 <= number < len(turns) and turns[number] in self.rewards):
                raise ValueError(
                    f"the game has turn_rewards for turn {number}, but its turns, counted from 0, "
                    f"belong to {turns}; rewarded are {list(self.rewards)}"
                )
        self.void_unless_rewards_are_numbers()

    def void_unless_rewards_are_numbers(self) -> None:
        """Make the game void, without rewards, if one would spoil all advantages of its step."""
        for parts in (*self.rewards.values(), *self.turn_rewards.values()):
            for name, value in parts.items():
                if not abs(value) <= LARGEST_REWARD and self.void is None:
                    self.void = f"reward {name!r} is no number within {LARGEST_REWARD:g}: {value}"
        if self.is_void:
            self.rewards, self.turn_rewards = {}, {}

    def reward_of_turns(self, roles: Mapping[int, str]) -> dict[int, float]:
        """Return the rewards by turn, of those in ``roles`` (by turn) that earn something."""
        if self.turn_rewards:
            return {n: sum(self.turn_rewards[n].values()) for n in roles if n in self.turn_rewards}
        last = {role: number for number, role in sorted(roles.items())}
        paid = [role for role in self.rewards if role in last]
        return {last[role]: sum(self.rewards[role].values()) for role in paid}

    def turn_rewards_of(self, role: str) -> list[float]:
        """Return the rewards of the role's turns, in order."""
        turns = {number: role for number, turn in enumerate(self.turns) if turn.role == role}
        return list(self.reward_of_turns(turns).values())

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for transport and for the games file."""
        empty = {name for name in self.left_out if not getattr(self, name)}
        return self.model_dump(mode="json", exclude=empty)


R = TypeVar("R", bound=GameRecord)


def read_games(path: str | Path, record: type[R]) -> Iterator[R]:
    """The game records of a file, in order; ValueError names the first invalid line."""
    # Not model_validate_json: it refuses the lone surrogates that a model's text may hold.
    for number, row in enumerate(StepFile(path).read(), start=1):
        try:
            yield record.model_validate(row)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not a game record: {error}") from None


# -- how games are shown ---------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table of games."""

    dtype: str  # of pandas: Int64, Float64 and boolean hold missing values
    meaning: str
    value: Callable[[Any], Any] = lambda record: None  # in a game's record


def _leader(record: GameRecord) -> str:
    """Return the role that earned most: the default outcome of a game."""
    if record.is_void:
        return "void"
    earned = {role: round(sum(parts.values()), 9) for role, parts in record.rewards.items()}
    first = [role for role, reward in earned.items() if reward == max(earned.values())]
    return f"{first[0]} earned more" if len(first) < len(earned) else "equal rewards"


COLUMNS = {
    "step": Column("Int64", "training step that used the game", lambda g: g.step),
    "uid": Column("string", "prompt group", lambda g: g.uid),
    "session": Column("Int64", "number of the game within its group", lambda g: g.session),
    "outcome": Column("string", "how it ended", _leader),
    "void": Column("string", "why the game does not count", lambda g: g.void),
    # by medserl_agentloop.report
    "signal": Column("boolean", "whether the rewards of a role differ within the group"),
    "policy_version": Column("Int64", "step of the weights", lambda g: g.policy_version),
    "finished": Column("datetime64[s, UTC]", "when its last turn was over", lambda g: g.finished),
}
"""The facts of any game; each role also has ``<role>_reward``, ``_tokens``, ``_truncated``."""


Pieces = Sequence[tuple[str, str]]
"""A text in pieces, each with its mark: ``del`` or ``ins``, ``mark`` for a quote, or none."""


class Section(NamedTuple):
    """A part of a game as ``medserl show``, the page and W&B show it."""

    title: str
    owner: str = ""  # a role, or another name, which determines its color
    reasoning: str | None = None
    text: Pieces = ()
    facts: Mapping[str, Any] = {}
    folded: Mapping[str, str] = {}  # texts that only the page shows, after a click

    def known(self) -> dict[str, str]:
        """The facts that are set, as text."""
        held = {name: v for name, v in self.facts.items() if v not in (None, "", [], {})}
        shown = {name: round(v, 4) if isinstance(v, float) else v for name, v in held.items()}
        return {
            name: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
            for name, v in shown.items()
        }

    def as_text(self) -> str:
        """All text but the title and folded parts, with changes as ``[-…-]``, ``{+…+}``."""
        shapes = {"del": "[-{}-]{}", "ins": "{{+{}+}}{}"}
        split = ((mark, text.rstrip(), text[len(text.rstrip()) :]) for mark, text in self.text)
        text = "".join(shapes.get(mark, "{}{}").format(text, space) for mark, text, space in split)
        known = "\n".join(f"{name}: {value}" for name, value in self.known().items())
        return visible("\n\n".join(filter(None, (self.reasoning, text.strip(), known))))


def as_text(messages: Iterable[Mapping[str, str]]) -> str:
    """Chat messages as one text, each after its role."""
    return "\n\n".join(f"[{message['role']}] {message['content']}" for message in messages)
