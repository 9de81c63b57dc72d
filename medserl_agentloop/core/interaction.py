"""The interface between the core and a game, and the loop that plays a game between any players.

A game is a subclass of :class:`Interaction`, which ``selfplay.game`` names. :func:`play_game` plays
it, with models behind a server or in this process; the reward manager and the trainer ask the same
class for scores and metrics. It knows no tokens but their number.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from omegaconf import DictConfig

from medserl_agentloop.core.alarms import Rule, common_rules
from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.control_text import as_data
from medserl_agentloop.core.metrics import game_metrics
from medserl_agentloop.core.records import COLUMNS, Column, GameRecord, Section, TurnRecord, as_text

AGENT_NAME = "medserl_selfplay"  # ``agent_name`` of the rows that the self-play agent loop plays

NO_ROLE_ID = 0  # ``role_ids`` of tokens that no role wrote, such as prompts

# Private-use characters: no template holds them, and chat templates that strip white space keep
# them.
PLACE = re.compile("\ue000(\\w+)\ue000")


def place(name: str) -> str:
    """Return the placeholder of the untrusted text ``name`` in a prompt."""
    return f"\ue000{name}\ue000"


Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """Chat messages, with untrusted text kept apart from them.

    ``place(name)`` stands in ``messages`` where a text of ``data`` belongs. Neither the encoder nor
    a chat server that gets them filled in finds control tokens in these texts.
    """

    messages: tuple[Message, ...]
    data: Mapping[str, str] = field(default_factory=dict)

    def filled(self, shown: Callable[[str], str] = as_data) -> list[Message]:
        """Return the messages for a chat server, with each text in its place as ``shown`` makes
        it."""
        return [
            {
                **message,
                "content": PLACE.sub(lambda match: shown(self.data[match[1]]), message["content"]),
            }
            for message in self.messages
        ]


def as_untrusted(messages: Sequence[Message]) -> Prompt:
    """Return a prompt that treats the text of every message as untrusted."""
    texts = {f"message_{number}": message["content"] for number, message in enumerate(messages)}
    asked = tuple(
        {**message, "content": place(name)} for message, name in zip(messages, texts, strict=True)
    )
    return Prompt(asked, texts)


@dataclass(frozen=True)
class Turn:
    """The next turn: its role, and the prompt that the role reads."""

    role: str
    prompt: Prompt  # what is new to them: the opening messages of a conversation, or the next ones
    max_tokens: int  # the turn's token budget
    # which one of the game the turn belongs to; None for the role's only one
    conversation: str | None = None
    # how the prompt begins the player's turn, after the chat template's generation prompt
    prefix: str = ""
    stop: tuple[str, ...] = ()  # strings that end the turn besides the end-of-turn token


class PlannedRow(NamedTuple):
    """Room that the game of a row needs."""

    kind: str  # of its record
    prompt: int  # tokens of its first prompt
    response: int  # the most tokens that its response can take as verl counts it


class Game(Protocol):
    """One game in progress."""

    record: Any

    def play(
        self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False
    ) -> None:
        """Take the next turn.

        ``prefill`` is the part of the answer that the chat template has written.
        """

    def make_void(self, reason: str) -> None:
        """End the game without a result: nobody is rewarded, nothing is trained on."""


G = TypeVar("G", bound=Game)
R = TypeVar("R", bound=GameRecord)


class Interaction(ABC, Generic[G, R]):
    """A kind of game: its roles, how it starts on a row, whose turn it is, and who earned what.

    Nine things make a game; only ``roles``, ``new_game`` and ``next_turn`` must be given. What else
    a run may ask of a game, such as alarms, validation or checks, follows in the order in which a
    run meets it, with defaults. ``config`` is the run's ``selfplay`` node, as ``Config`` reads it;
    ``tokens`` is a ``ChatEncoder``, or None where games are only scored.
    """

    roles: ClassVar[
        tuple[str, ...]
    ]  # names of the roles. Their order gives the ids in the column ``role_ids``, from 1
    # the ``selfplay`` node, with the game's own keys
    Config: ClassVar[type[SelfPlayConfig]] = SelfPlayConfig
    Record: ClassVar[type[GameRecord]] = GameRecord  # the record of one game

    def __init__(self, config: Any, tokens: Any = None) -> None:
        self.config, self.tokens = config, tokens

    @abstractmethod
    def new_game(self, facts: Mapping[str, Any]) -> G:
        """Start a game on the facts of a row, its ``extra_info``; ValueError if they are
        incomplete.
        """

    @abstractmethod
    def next_turn(self, game: G) -> Turn | None:
        """Return the next turn; None if the game is over."""

    def next_turns(self, game: G) -> Sequence[Turn]:
        """Return the turns that can be taken side by side: each in a conversation that reads none
        of the others.
        """
        turn = self.next_turn(game)
        return [] if turn is None else [turn]

    async def score(self, record: R) -> None:
        """Complete the record of a finished game; nothing to do for games that reward themselves as
        they go.
        """

    def metrics(self, records: Sequence[R]) -> dict[str, float]:
        """Metrics of a step's games by name, ``selfplay/…``."""
        return game_metrics(records, self.roles, repeated_roles=self.repeated_roles)

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        """The turns of the longest game on this row, to plan lengths; for the certificate, two
        conversations.
        """
        return list(self.next_turns(self.new_game(facts)))

    def plan(self, facts: Mapping[str, Any]) -> PlannedRow:
        """Plan one row of a data set, its ``extra_info``; a ValueError says why it cannot be played
        and what to do.
        """
        turns = self.sample_turns(facts)
        prompts = [len(self.tokens.opening(turn).ids) for turn in turns]
        kind = self.new_game(facts).record.kind
        return PlannedRow(
            kind, prompts[0], sum(turn.max_tokens for turn in turns) + sum(prompts[1:])
        )

    # -- before the first step ---------------------------------------------------------------------

    @classmethod
    def check_run(cls, run: Any) -> Iterator[str]:
        """Yield a sentence for each fault of the config, a ``core.run_check.RunConfig``, for this
        game.
        """
        return iter(())

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield the lines that a run prints once before it starts; warnings begin with
        ``warning:``.
        """
        return iter(())

    @classmethod
    def folders(cls, selfplay: Any) -> Mapping[str, Path]:
        """Return the folders that keys under ``selfplay`` name: a resumed run finds them as they
        were.
        """
        return {}

    def prompts(self) -> list[dict[str, Any]]:
        """Return the prompts for ``prompts.jsonl``:

        ``role``, ``template`` and ``messages`` with places.
        """
        return []

    @property
    def stop_strings(self) -> list[str]:
        """All strings that end a turn of the game besides the end-of-turn token."""
        return []

    def use_reward_model(self, address: str | None, model: str | None) -> None:
        """Learn where verl serves a reward model (``host:port`` and name), before the first game is
        scored.
        """

    # -- in a game ---------------------------------------------------------------------------------

    async def ask_base_model(self, record: R, base: Any) -> None:
        """Ask the base model, served with ``selfplay.adapters=per_role``, what the score needs,
        after the last turn.
        """

    # -- after a step's games ----------------------------------------------------------------------

    @property
    def repeated_roles(self) -> Sequence[str]:
        """Roles whose conversations of one game all answer the same prompt: baselines compare these
        with each other.
        """
        return ()

    def settle(self, records: Sequence[R], counts: dict[str, dict[str, float]]) -> None:
        """Complete the rewards of a training step that depend on the steps before it.

        The trainer calls it once a step, before advantages are computed. ``counts`` are numbers by
        group and name that the game keeps between steps; they go into checkpoints. Rewards of
        roles, not of single turns, reach the tokens.
        """

    def trained_role_won(self, record: R) -> bool | None:
        """Return whether the trained role beat its opponent; None for games that decide nothing
        between them.
        """
        return None

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        """The alarms; ``selfplay.alarms.limits`` may change their limits."""
        return common_rules(cls.roles)

    shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The game's own columns, label and metric, of the table of steps; it has the rewards of all
    roles anyway.
    """

    def notices(self, numbers: Mapping[str, float]) -> Iterator[str]:
        """Yield comments on the numbers of a step; the run prints each sentence once."""
        return iter(())

    # -- where games are looked at -----------------------------------------------------------------

    columns: ClassVar[Mapping[str, Column]] = COLUMNS
    """The table of games, a column for each fact; pages filter by those of words and draw those of
    numbers.
    """

    gains: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Labels and validation measures (``val-core/DATA_SET/MEASURE``), shares, that say what a run
    has gained.
    """

    @classmethod
    def caveats(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield what a run's numbers cannot show, a sentence each, by its config alone; the start
        and the page say it.
        """
        return iter(())

    headline: ClassVar[tuple[str, ...]] = ()
    """Metrics that ``medserl show`` prints besides rewards and those of :attr:`shown`."""

    @classmethod
    def sections(cls, record: R, prompts: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
        """Return the sections of a game's page, besides its rewards: the turns as played, and the
        game's own fields.

        ``prompts`` is the run's ``prompts.jsonl``, the latest first.
        """
        sections = []
        for number, turn in enumerate(record.turns):
            title = f"{turn.role} · {turn.tokens} tokens{', cut off' if turn.truncated else ''}"
            facts = {"earned": record.turn_rewards.get(number)}
            folded = {f"what {turn.role} read": as_text(turn.messages)}
            sections.append(
                Section(title, turn.role, text=[("", turn.response)], facts=facts, folded=folded)
            )
        own = {
            name: value
            for name, value in record.to_json().items()
            if name not in GameRecord.model_fields
        }
        return [*sections, Section("game", facts=own)] if own else sections

    # -- in validation -----------------------------------------------------------------------------

    def read_validation_set(self, dataset: Any) -> None:
        """See the rows of ``data.val_files`` before the first validation."""

    def validation_numbers(self, record: R) -> dict[str, float | str | None]:
        """One game as numbers for verl's validation metrics, and texts for
        :meth:`validation_scores`.
        """
        return {f"{role}_reward": record.reward(role) for role in self.roles}

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        """Scores of a whole validation that are no averages of single games: metrics, and a line
        that says them.

        ``sources`` is the ``data_source`` of every game's row; ``facts`` are lists of what
        ``validation_numbers`` gave.
        """
        return ()


LIMITS = ("max_prompt_length", "max_response_length")
"""Keys of verl's ``data`` that limit the tokens of a :class:`PlannedRow`."""


def overlong(planned: PlannedRow, data: Mapping[str, Any]) -> list[str]:
    """The limits of verl's ``data`` that a planned row exceeds."""
    return [
        limit for limit, tokens in zip(LIMITS, planned[1:], strict=True) if tokens > data[limit]
    ]


class NoReplyError(Exception):
    """A player gave no answer; says who and why."""


@dataclass(frozen=True)
class Reply:
    """A player's turn."""

    text: str  # what the player wrote, with the reasoning that a server split off in front
    tokens: int = 0  # 0 where nobody counted
    truncated: bool = False  # whether a token budget cut it off
    prefill: str = ""  # how the prompt began the turn for the player, e.g. ``<think>``
    model: str = ""  # by its server, where it says
    prompt_tokens: int = 0  # that the server says it read; 0 where it does not say


class Player(Protocol):
    """Takes turns in a role. ``name`` goes into the record; it is empty for the policy in
    training."""

    name: str

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """Take a turn, or raise :class:`NoReplyError`.

        ``messages`` is its whole conversation so far.
        """


async def play_game(
    interaction: Interaction[Any, Any], game: Any, players: Mapping[str, Player]
) -> None:
    """Play a game that ``interaction`` has started; ``players`` by role.

    A player without an answer makes it void.
    """
    conversations: dict[tuple[str, str | None], list[Message]] = defaultdict(list)
    record = game.record

    async def answer(number: int, turn: Turn, messages: list[Message]) -> Reply | NoReplyError:
        started = time.monotonic()
        try:
            return await players[turn.role].reply(turn, messages)
        except NoReplyError as reason:
            return reason
        finally:
            record.seconds[number] = round(time.monotonic() - started, 3)
            record.finished = datetime.now(UTC).replace(microsecond=0)

    while turns := interaction.next_turns(game):
        first, read = len(record.seconds), [turn.prompt.filled() for turn in turns]
        record.seconds += [0.0] * len(turns)
        for turn, asked in zip(turns, read, strict=True):
            if name := players[turn.role].name:
                record.players[turn.role] = name
            conversations[turn.role, turn.conversation] += asked
        histories = [conversations[turn.role, turn.conversation] for turn in turns]
        # In the order of the game, whoever answers first.
        answers = await asyncio.gather(
            *map(answer, range(first, first + len(turns)), turns, histories)
        )
        for turn, asked, messages, reply in zip(turns, read, histories, answers, strict=True):
            if isinstance(reply, NoReplyError):
                game.make_void(str(reply))
                return
            messages.append({"role": "assistant", "content": reply.prefill + reply.text})
            length: dict[str, Any] = {"tokens": reply.tokens, "truncated": reply.truncated}
            record.turns.append(
                TurnRecord(role=turn.role, messages=asked, response=reply.text, **length)
            )
            game.play(reply.text, prefill=reply.prefill, **length)
