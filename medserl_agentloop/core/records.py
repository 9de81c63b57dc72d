"""The record of one game, with the fields of any game. A game's own record is a subclass with its
facts and turns.

The agent loop makes it, the game fills it turn by turn and scores it, the trainer writes it as one
JSON line. Many of them are one table, and one is shown in sections.
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

LARGEST_REWARD = 1e15  # in float32 its square is a number still, and so is the sum of many of them


class OpponentRecord(BaseModel):
    """The player of the untrained role; ``version`` is its model, if it answered."""

    model_config = ConfigDict(extra="forbid")

    role: str
    kind: str
    version: str | None


class TurnRecord(BaseModel):
    """One turn: the ``messages`` that were new to the role, and the ``response`` with its length in
    tokens.
    """

    role: str
    messages: list[dict[str, str]] = []
    response: str = ""
    tokens: int = 0
    truncated: bool = False


class GameRecord(BaseModel):
    """One game.

    A role's reward stands on the last token of its last turn. Where a game gives ``turn_rewards``,
    by turn from 0, they are what the tokens get, and ``rewards`` are for reading.
    """

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    left_out: ClassVar[tuple[str, ...]] = (
        "turns",
        "turn_rewards",
        "finished",
        "seconds",
    )
    """Fields that JSON leaves out where they are empty, so that records of before they existed look
    the same.
    """

    turns: list[
        TurnRecord
    ] = []  # as they were played, unless a record has fields of its own for them
    rewards: Rewards = {}  # empty until scored and in void games
    turn_rewards: dict[int, dict[str, float]] = {}
    void: str | None = None  # why the game does not count for anyone
    context: str = ""
    step: int = -1  # training step that used the game, -1 before it is known
    uid: str = ""  # of the prompt group; ``session`` numbers its games
    session: int = 0
    # weights of the live policy: the training step they were pushed after
    policy_version: int | None = None
    players: dict[
        str, str
    ] = {}  # the model that played a role, where it was not the policy in training
    opponent: OpponentRecord | None = None  # who took the other role's turn, if not the live policy
    finished: datetime | None = None  # when the last turn was over, in UTC
    seconds: list[float] = []  # how long each turn took, one without an answer included

    @property
    def kind(self) -> str:
        """The kind of the game, for statistics within a kind; games of one kind have the same name
        here.
        """
        return ""

    @property
    def is_void(self) -> bool:
        return self.void is not None

    @property
    def reading_rank(self) -> int:
        """The rank used to pick the game shown first; ties go to the latest."""
        return int(not self.is_void)

    def reward(self, role: str) -> float | None:
        """The role's reward: the sum of its components, None if the role is not rewarded."""
        components = self.rewards.get(role)
        return None if components is None else sum(components.values())

    def check_rewards(self, roles: Sequence[str], turns: Sequence[str]) -> None:
        """Raise ValueError for rewards of a role or a turn that the game lacks; ``turns`` are the
        roles of the turns as they were played.
        """
        if not set(self.rewards) <= set(roles):
            raise ValueError(f"the game rewards {list(self.rewards)}, and its roles are {roles}")
        for number in self.turn_rewards:
            if not (0 <= number < len(turns) and turns[number] in self.rewards):
                raise ValueError(
                    f"the game has turn_rewards for turn {number}, and its turns, counted from 0, "
                    f"are of {turns}; rewarded are {list(self.rewards)}"
                )
        self.void_unless_rewards_are_numbers()

    def void_unless_rewards_are_numbers(self) -> None:
        """Make the game void if a reward would spoil all advantages of its step; a void game has no
        rewards.
        """
        for parts in (*self.rewards.values(), *self.turn_rewards.values()):
            for name, value in parts.items():
                if not abs(value) <= LARGEST_REWARD and self.void is None:
                    self.void = f"reward {name!r} is no number within {LARGEST_REWARD:g}: {value}"
        if self.is_void:
            self.rewards, self.turn_rewards = {}, {}

    def reward_of_turns(self, roles: Mapping[int, str]) -> dict[int, float]:
        """Return the reward of each turn by its number, for the given roles; turns that earn
        nothing are left out.
        """
        if self.turn_rewards:
            return {n: sum(self.turn_rewards[n].values()) for n in roles if n in self.turn_rewards}
        last = {role: number for number, role in sorted(roles.items())}
        return {
            last[role]: sum(parts.values()) for role, parts in self.rewards.items() if role in last
        }

    def turn_rewards_of(self, role: str) -> list[float]:
        """Return the reward of each turn that the role took, in order."""
        turns = {number: role for number, turn in enumerate(self.turns) if turn.role == role}
        return list(self.reward_of_turns(turns).values())

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for transport and for the games file."""
        return self.model_dump(
            mode="json", exclude={name for name in self.left_out if not getattr(self, name)}
        )


R = TypeVar("R", bound=GameRecord)


def read_games(path: str | Path, record: type[R]) -> Iterator[R]:
    """The game records of a file, in order, as :meth:`StepFile.read` has them; a ValueError names
    what is none.
    """
    # Not model_validate_json: it refuses the lone surrogates that a model's text may hold.
    for number, row in enumerate(StepFile(path).read(), start=1):
        try:
            yield record.model_validate(row)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not a game record: {error}") from None


# -- how games are shown ---------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table of games: its pandas dtype, its meaning, and its value in a game's
    record.
    """

    dtype: str  # Int64, Float64 and boolean hold missing values
    meaning: str
    value: Callable[[Any], Any] = lambda record: None


def _leader(record: GameRecord) -> str:
    """Return the role that earned most, as the outcome of a game that names none itself."""
    earned = {role: round(sum(parts.values()), 9) for role, parts in record.rewards.items()}
    first = [role for role, reward in earned.items() if reward == max(earned.values())]
    return (
        "void"
        if record.is_void
        else f"{first[0]} earned more"
        if len(first) < len(earned)
        else "equal rewards"
    )


COLUMNS = {
    "step": Column("Int64", "training step that used the game", lambda g: g.step),
    "uid": Column("string", "prompt group", lambda g: g.uid),
    "session": Column("Int64", "number of the game within its group", lambda g: g.session),
    "outcome": Column("string", "how it ended", _leader),
    "void": Column("string", "why the game does not count", lambda g: g.void),
    "signal": Column(
        "boolean", "whether the rewards of a role differ within the group"
    ),  # by medserl_agentloop.report
    "policy_version": Column(
        "Int64", "step after which the weights were pushed", lambda g: g.policy_version
    ),
    "finished": Column("datetime64[s, UTC]", "when its last turn was over", lambda g: g.finished),
}
"""The facts of any game, without its texts.

Each role has ``<role>_reward``, ``_tokens`` and ``_truncated`` besides.
"""


Pieces = Sequence[tuple[str, str]]
"""A text in pieces, each with its mark:

``del`` and ``ins`` for changes, ``mark`` for a quote, or none.
"""


class Section(NamedTuple):
    """A part of a game as ``medserl show``, the page and W&B show it."""

    title: str
    owner: str = ""  # a role, or another name, which gives it its colour
    reasoning: str | None = None
    text: Pieces = ()
    facts: Mapping[str, Any] = {}
    folded: Mapping[str, str] = {}  # texts that the page opens on a click, and nothing else shows

    def known(self) -> dict[str, str]:
        held = (
            (name, value) for name, value in self.facts.items() if value not in (None, "", [], {})
        )
        shown = (
            (name, round(value, 4) if isinstance(value, float) else value) for name, value in held
        )
        return {
            name: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
            for name, v in shown
        }

    def as_text(self) -> str:
        """All but title and what is folded, with changes as ``[-…-]`` and ``{+…+}``, for people to
        read.
        """
        shapes = {"del": "[-{}-]{}", "ins": "{{+{}+}}{}"}
        split = ((mark, text.rstrip(), text[len(text.rstrip()) :]) for mark, text in self.text)
        text = "".join(shapes.get(mark, "{}{}").format(text, space) for mark, text, space in split)
        known = "\n".join(f"{name}: {value}" for name, value in self.known().items())
        return visible("\n\n".join(filter(None, (self.reasoning, text.strip(), known))))


def as_text(messages: Iterable[Mapping[str, str]]) -> str:
    """Chat messages as one text, each behind who says it."""
    return "\n\n".join(f"[{message['role']}] {message['content']}" for message in messages)
