"""The interface between the core and a game, and the loop that plays a game between any players.

An :class:`Interaction` is a kind of game, named in ``selfplay.game``; a :class:`Game` is one of
them being played. :func:`play_game` plays it, with models behind a server or in this process; the
reward manager and the trainer ask the interaction for scores and metrics. It sees only the number
of tokens.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from omegaconf import DictConfig

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.encoding import Message
from medserl_agentloop.core.encoding import Prompt as Prompt  # for games, as Turn is
from medserl_agentloop.core.metrics import Rule, common_rules, game_metrics
from medserl_agentloop.core.records import COLUMNS, Column, GameRecord, Section, TurnRecord, as_text

AGENT_NAME = "medserl_selfplay"  # ``agent_name`` of the rows that the self-play agent loop plays

NO_ROLE_ID = 0  # ``role_ids`` of tokens that no role wrote, such as prompts


@dataclass(frozen=True)
class Turn:
    """The next turn: its role, and the prompt that the role reads."""

    role: str
    prompt: Prompt  # what is new to them: the opening messages of a conversation, or the next ones
    max_tokens: int  # the turn's token budget
    conversation: str | None = None  # the turn's conversation; None if the role has only one
    prefix: str = ""  # how the prompt begins the turn, after the template's generation prompt
    stop: tuple[str, ...] = ()  # strings that end the turn besides the end-of-turn token
    number: int = 0  # in the game, from 0; :func:`play_game` counts


class PlannedRow(NamedTuple):
    """Token lengths that a row's game needs."""

    kind: str  # of its record
    prompt: int  # tokens of its first prompt
    response: int  # the most tokens that its response can take as verl counts it


LIMITS = ("max_prompt_length", "max_response_length")
"""Keys of verl's ``data`` that limit the tokens of a :class:`PlannedRow`."""


def overlong(planned: PlannedRow, data: Mapping[str, Any]) -> list[str]:
    """Limits of verl's ``data`` that the planned row exceeds."""
    return [key for key, tokens in zip(LIMITS, planned[1:], strict=True) if tokens > data[key]]


class Game(Protocol):
    """One game being played; its :class:`Interaction` starts it and says whose turn it is."""

    record: Any

    def play(
        self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False
    ) -> None:
        """Take the next turn; ``prefill`` is what the chat template has written of it."""

    def make_void(self, reason: str) -> None:
        """End the game without a result; no role is rewarded or trained."""


G = TypeVar("G", bound=Game)
R = TypeVar("R", bound=GameRecord)


class GameView(Generic[R]):
    """The optional part of a kind of game: checks, alarms, tables and pages.

    A game names its own in ``Interaction.View``. The defaults show any game turn by turn.
    """

    shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Labels and metrics of the game's own columns in the table of steps."""
    headline: ClassVar[tuple[str, ...]] = ()
    """Metrics that ``medserl show`` prints in addition to rewards and :attr:`shown`."""
    gains: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Labels and validation measures (shares) that say what a run gained."""
    columns: ClassVar[Mapping[str, Column]] = COLUMNS
    """The table of games, a column for each fact."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = roles

    # -- before the first step

    @classmethod
    def check_run(cls, run: Any) -> Iterator[str]:
        """Yield a sentence for each problem of a ``core.run_check.RunConfig`` for this game."""
        return iter(())

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield lines to print before a run starts; warnings begin with ``warning:``."""
        return iter(())

    @classmethod
    def caveats(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield sentences on what a run with this config cannot show."""
        return iter(())

    @classmethod
    def folders(cls, selfplay: Any) -> Mapping[str, Path]:
        """Return the folders that ``selfplay`` keys name; a resume compares them."""
        return {}

    # -- after a step's games

    @classmethod
    def rules(cls, roles: Sequence[str]) -> tuple[Rule, ...]:
        """The alarms; ``selfplay.alarms.limits`` may change their limits."""
        return common_rules(roles)

    def notices(self, numbers: Mapping[str, float]) -> Iterator[str]:
        """Yield comments on a step's metrics; the run prints each one once."""
        return iter(())

    def trained_role_won(self, record: R) -> bool | None:
        """Return whether the trained role beat its opponent; None if undecided."""
        return None

    # -- in validation

    def read_validation_set(self, dataset: Any) -> None:
        """Receive the rows of ``data.val_files`` before the first validation."""

    def validation_numbers(self, record: R) -> dict[str, float | str | None]:
        """One game's numbers for verl's validation, and texts for :meth:`validation_scores`."""
        return {f"{role}_reward": record.reward(role) for role in self.roles}

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        """Scores of a complete validation: metrics, and a line to print.

        ``sources`` has the ``data_source`` of every game's row; ``facts`` has lists of the values
        of ``validation_numbers``.
        """
        return ()

    # -- where games are looked at

    @classmethod
    def sections(cls, record: R, prompts: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
        """Return the sections of a game's page: the turns as played, and the game's own fields.

        ``prompts`` is the run's ``prompts.jsonl``, the latest first.
        """
        sections = []
        for number, turn in enumerate(record.turns):
            title = f"{turn.role} · {turn.tokens} tokens{', cut off' if turn.truncated else ''}"
            facts = {"earned": record.turn_rewards.get(number)}
            read = {f"what {turn.role} read": as_text(turn.messages)}
            sections.append(Section(title, turn.role, None, [("", turn.response)], facts, read))
        own = {n: v for n, v in record.to_json().items() if n not in GameRecord.model_fields}
        return [*sections, Section("game", facts=own)] if own else sections


class Interaction(ABC, Generic[G, R]):
    """A kind of game: its roles, how it starts on a row, whose turn it is, and who earned what.

    Implement ``roles``, ``new_game`` and ``next_turn``; most games also give ``Record``, ``score``,
    ``metrics`` and ``sample_turns``. The rest has defaults. ``config`` is the run's ``selfplay``
    node, parsed by ``Config``; ``tokens`` is a ``ChatEncoder``, or None if games are only scored.
    """

    roles: ClassVar[tuple[str, ...]]
    """Names of the roles. Their order gives the ids in the column ``role_ids``, from 1."""
    Config: ClassVar[type[SelfPlayConfig]] = SelfPlayConfig
    """The ``selfplay`` node, with the game's own keys."""
    Record: ClassVar[type[GameRecord]] = GameRecord
    """The record of one game."""
    View: ClassVar[type[GameView[Any]]] = GameView
    """The game as checks, alarms, tables and pages see it."""

    def __init__(self, config: Any, tokens: Any = None) -> None:
        self.config, self.tokens = config, tokens
        self.view = self.View(self.roles)

    @abstractmethod
    def new_game(self, facts: Mapping[str, Any]) -> G:
        """Start a game on a row's ``extra_info``; ValueError if it is incomplete."""

    @abstractmethod
    def next_turn(self, game: G) -> Turn | None:
        """Return the next turn; None if the game is over."""

    def next_turns(self, game: G) -> Sequence[Turn]:
        """Return the turns that can be taken at the same time, in separate conversations."""
        turn = self.next_turn(game)
        return [] if turn is None else [turn]

    async def score(self, record: R) -> None:
        """Complete the record of a finished game; not needed if rewards are set during play."""

    def metrics(self, records: Sequence[R]) -> dict[str, float]:
        """Metrics of a step's games by name, ``selfplay/…``."""
        return game_metrics(records, self.roles, repeated_roles=self.repeated_roles)

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        """The turns of the row's longest game, to plan lengths; two for the certificate."""
        return list(self.next_turns(self.new_game(facts)))

    def plan(self, facts: Mapping[str, Any]) -> PlannedRow:
        """Plan a row's token lengths; ValueError says why it cannot be played and what to do."""
        turns = self.sample_turns(facts)
        first, *others = (len(self.tokens.opening(turn).ids) for turn in turns)
        response = sum(turn.max_tokens for turn in turns) + sum(others)
        return PlannedRow(self.new_game(facts).record.kind, first, response)

    def prompts(self) -> list[dict[str, Any]]:
        """Return ``role``, ``template`` and ``messages`` with places, for ``prompts.jsonl``."""
        return []

    @property
    def stop_strings(self) -> list[str]:
        """All strings that end a turn of the game besides the end-of-turn token."""
        return []

    def use_reward_model(self, address: str, model: str) -> None:
        """Learn where verl serves a reward model (``host:port``, name), before the first game."""

    def use_base_model(self, base: Any) -> None:
        """Learn of the base model, a ``BaseModelChat``, before the first game."""

    def question(self, record: R) -> Coroutine[Any, Any, Any] | None:
        """Return a coroutine that asks a third party for what the score needs, or None.

        :func:`play_game` calls this until there is one, and plays on while it waits for the answer.
        """
        return None

    def take_answer(self, record: R, answer: Any) -> None:
        """Complete the record with the answer to :meth:`question`, after the last turn."""

    @property
    def repeated_roles(self) -> Sequence[str]:
        """Roles whose conversations in a game all answer the same prompt and form a group."""
        return ()

    def settle(self, records: Sequence[R], counts: dict[str, dict[str, float]]) -> None:
        """Complete rewards that depend on earlier training steps.

        ``counts`` are numbers by group and name that the game keeps between steps, also in
        checkpoints. The tokens get the rewards of roles, not of single turns.
        """


class NoReplyError(Exception):
    """A player did not answer; the message says who and why. ``refused``: do not retry."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True)
class Reply:
    """A player's turn."""

    text: str  # what the player wrote, with the reasoning that a server split off in front
    tokens: int = 0  # 0 if not counted
    truncated: bool = False  # whether a token budget cut it off
    prefill: str = ""  # how the prompt began the turn for the player, e.g. ``<think>``
    model: str = ""  # by its server, where it says
    prompt_tokens: int = 0  # that the server says it read; 0 where it does not say


class Player(Protocol):
    """Takes turns in a role."""

    name: str  # for the record; empty for the policy in training

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """Take a turn of the conversation ``messages``, or raise :class:`NoReplyError`."""


async def play_game(
    interaction: Interaction[Any, Any], game: Any, players: Mapping[str, Player]
) -> None:
    """Play a game that ``interaction`` has started; ``players`` by role.

    The question is asked while turns are played, so a game takes as long as the slower of the two.
    If a player does not answer, the game becomes void and the question is cancelled.
    """
    conversations: dict[tuple[str, str | None], list[Message]] = defaultdict(list)
    record = game.record
    asking: asyncio.Task[Any] | None = None

    async def answer(turn: Turn, messages: list[Message]) -> Reply | NoReplyError:
        started = time.monotonic()
        try:
            return await players[turn.role].reply(turn, messages)
        except NoReplyError as reason:
            return reason
        finally:
            record.seconds[turn.number] = round(time.monotonic() - started, 3)
            record.finished = datetime.now(UTC).replace(microsecond=0)

    def ask() -> asyncio.Task[Any] | None:
        question = interaction.question(record)
        return None if question is None else asyncio.create_task(question)

    try:
        while turns := interaction.next_turns(game):
            asked: list[tuple[Turn, list[Message], list[Message]]] = []
            for number, turn in enumerate(turns, start=len(record.seconds)):
                if name := players[turn.role].name:
                    record.players[turn.role] = name
                read, history = turn.prompt.filled(), conversations[turn.role, turn.conversation]
                history += read
                asked.append((replace(turn, number=number), read, history))
            record.seconds += [0.0] * len(asked)
            answers = asyncio.gather(*(answer(turn, history) for turn, _, history in asked))
            asking = asking or ask()
            # In the order of the game, whoever answers first.
            for (turn, read, history), reply in zip(asked, await answers, strict=True):
                if isinstance(reply, NoReplyError):
                    game.make_void(str(reply))
                    return
                history.append({"role": "assistant", "content": reply.prefill + reply.text})
                length: dict[str, Any] = {"tokens": reply.tokens, "truncated": reply.truncated}
                played = TurnRecord(role=turn.role, messages=read, response=reply.text, **length)
                record.turns.append(played)
                game.play(reply.text, prefill=reply.prefill, **length)
        if (asking := asking or ask()) is not None:
            interaction.take_answer(record, await asking)
    finally:
        if asking is not None:
            asking.cancel()
