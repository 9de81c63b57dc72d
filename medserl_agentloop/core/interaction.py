"""The seam between the core and a game: what a game says of itself, and how it is played between any players.

A game is a subclass of :class:`Interaction`. ``selfplay.game`` names it: a package or module of
``medserl_agentloop/games``, or ``package.module:Class`` of a user's own. :func:`play_game` and :func:`play_in_step`
play it, with models behind a server, models in this process, or people; the reward manager and the trainer ask the same
class for scores, metrics and checks. It knows no tokens but their number.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from omegaconf import DictConfig

from medserl_agentloop.core.alarms import Rule, common_rules
from medserl_agentloop.core.chat import as_data
from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.metrics import game_metrics
from medserl_agentloop.core.records import GameRecord

AGENT_NAME = "medserl_selfplay"
"""``agent_name`` of the rows that the self-play agent loop plays."""

NO_ROLE_ID = 0
"""What ``role_ids`` holds on tokens of nobody."""

Message = dict[str, str]

# Private-use characters: no template holds them, and chat templates that strip white space keep them.
_PLACE = re.compile("\ue000(\\w+)\ue000")


def place(name: str) -> str:
    """Where a prompt has room for the untrusted text ``name``."""
    return f"\ue000{name}\ue000"


def split_at_places(text: str) -> list[str]:
    """``text`` cut at its places: text, the name of a place, text, and so on."""
    return _PLACE.split(text)


@dataclass(frozen=True)
class Prompt:
    """Chat messages, with untrusted text kept apart from them.

    ``place(name)`` stands in ``messages`` where a text of ``data`` belongs. No control token comes out of these texts:
    neither of the encoder, nor of a chat server that gets them filled in.
    """

    messages: tuple[Message, ...]
    data: Mapping[str, str] = field(default_factory=dict)

    def filled(self, shown: Callable[[str], str] = as_data) -> list[Message]:
        """The messages with the texts in their places, each as it is ``shown``: for a chat server."""
        return [
            {**message, "content": _PLACE.sub(lambda found: shown(self.data[found[1]]), message["content"])}
            for message in self.messages
        ]


@dataclass(frozen=True)
class Turn:
    """Whose turn it is and what they read.

    Attributes:
        role: One of the game's roles.
        prompt: What is new to them: the opening messages of a conversation, or the next ones.
        max_tokens: The turn's token budget.
        conversation: Which conversation of the game the turn belongs to; None for the role's only one.
        prefix: How the prompt begins the player's turn, after the chat template's generation prompt.
        stop: Strings that end the turn besides the end-of-turn token.
    """

    role: str
    prompt: Prompt
    max_tokens: int
    conversation: str | None = None
    prefix: str = ""
    stop: tuple[str, ...] = ()


class Tokens(Protocol):
    """What a game may know of the run's tokenizer."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Strings that the tokenizer has special tokens for."""

    def count(self, text: str) -> int:
        """Tokens that an untrusted text takes in a prompt."""


class Game(Protocol):
    """One game in progress."""

    record: Any

    def play(self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False) -> None:
        """Take the turn of whoever's turn it is."""

    def make_void(self, reason: str) -> None:
        """End the game without a result: nobody is rewarded, nothing is trained on."""


G = TypeVar("G", bound=Game)
R = TypeVar("R", bound=GameRecord)


class Interaction(ABC, Generic[G, R]):
    """A kind of game. Subclasses say the roles, start a game on a row, and say whose turn it is.

    Args:
        config: The run's ``selfplay`` node, as ``Config`` reads it.
        tokens: The run's tokenizer; None where games are only scored and counted.
    """

    roles: ClassVar[tuple[str, ...]]
    """Names of the roles. Their order gives the ids in the column ``role_ids``, from 1."""

    Config: ClassVar[type[SelfPlayConfig]] = SelfPlayConfig
    """The ``selfplay`` node, with the game's own keys."""

    Record: ClassVar[type[GameRecord]] = GameRecord
    """The record of one game."""

    shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The game's own numbers on the line that every step prints: label and metric."""

    def __init__(self, config: Any, tokens: Tokens | None = None) -> None:
        self.config = config
        self.tokens = tokens

    @property
    def stop_strings(self) -> list[str]:
        """All strings that end a turn of the game besides the end-of-turn token."""
        return []

    @property
    def repeated_roles(self) -> Sequence[str]:
        """Roles whose conversations of one game all answer the same prompt: baselines compare these with each other."""
        return ()

    # -- what a game must say ------------------------------------------------------------------------------------

    @abstractmethod
    def new_game(self, facts: Mapping[str, Any]) -> G:
        """Start a game on the facts of a row, its ``extra_info``; ValueError if they are incomplete."""

    @abstractmethod
    def next_turn(self, game: G) -> Turn | None:
        """Whose turn it is; None if the game is over."""

    # -- what a game may say -------------------------------------------------------------------------------------

    async def score(self, record: R) -> None:
        """Complete the record of a finished game; nothing to do for games that reward themselves as they go."""

    async def ask_base_model(self, record: R, base: Any) -> None:
        """Ask the base model what the score will need: a ``core.agent_loop.BaseModelChat``, after the last turn.

        It answers only where the rollout serves it, with ``selfplay.adapters=per_role``.
        """

    def use_reward_model(self, address: str | None, model: str | None) -> None:
        """Learn where verl serves a reward model (``host:port`` and name), before the first game is scored."""

    @classmethod
    def kind(cls, facts: Mapping[str, Any]) -> str:
        """The kind of a row's game, for ``selfplay.mix``; as :attr:`GameRecord.kind` afterwards."""
        return ""

    def plan(self, facts: Mapping[str, Any], prompt: Sequence[Message], encoder: Any) -> tuple[int, int]:
        """Check one row of a data set, its ``extra_info`` and its column ``prompt``, with the run's ``ChatEncoder``.

        Returns the tokens of the first prompt, and the most that the response can take as verl counts it.

        Raises:
            ValueError: The row cannot be played; says why and what to do.
        """
        turns = self.sample_turns(facts)
        prompts = [len(encoder.opening(turn).ids) for turn in turns]
        return prompts[0], sum(turn.max_tokens for turn in turns) + sum(prompts[1:])

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        """The first turn of each conversation that a game on this row may have; for checks and the certificate."""
        turn = self.next_turn(self.new_game(facts))
        return [] if turn is None else [turn]

    def prompts(self) -> list[dict[str, Any]]:
        """What the roles read, for the run's ``prompts.jsonl``: ``role``, ``template`` and ``messages`` with places."""
        return []

    def metrics(self, records: Sequence[R]) -> dict[str, float]:
        """Metrics of a step's games by name, ``selfplay/…``."""
        return game_metrics(records, self.roles)

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        """The alarms, with thresholds in ``selfplay.alarms``."""
        return common_rules(cls.roles)

    def remarks(self, numbers: Mapping[str, float]) -> Iterator[str]:
        """What a step's numbers give reason to say; each sentence is said once in a run."""
        return iter(())

    def trained_role_won(self, record: R) -> bool | None:
        """Whether the trained role beat its opponent; None for games that decide nothing between them."""
        return None

    def validation_numbers(self, record: R) -> dict[str, float | str | None]:
        """One game as numbers for verl's validation metrics, and texts for :meth:`validation_scores`."""
        return {f"{role}_reward": record.reward(role) for role in self.roles}

    def read_validation_set(self, dataset: Any) -> None:
        """See the rows of ``data.val_files`` before the first validation."""

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        """Scores of a whole validation that are no averages of single games: metrics, and a line that says them.

        ``sources`` is the ``data_source`` of every game's row, ``facts`` what :meth:`validation_numbers` gave, a list
        per name.
        """
        return ()

    def table(self, records: Sequence[R], count: int) -> tuple[Sequence[str], list[list[Any]]] | None:
        """Columns and rows of up to ``count`` games to read in W&B; None for no table."""
        return None

    @classmethod
    def check_run(cls, run: Any) -> Iterator[str]:
        """What of a run's config, a ``core.run_check.run.Run``, cannot work with this game, one sentence for each."""
        return iter(())

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """What a run says once before it starts; warnings begin with ``warning:``."""
        return iter(())


class NoReplyError(Exception):
    """A player gave no answer; says who and why."""


@dataclass(frozen=True)
class Reply:
    """A player's turn.

    Attributes:
        text: What the player wrote.
        tokens: Its length in tokens; 0 where nobody counted.
        truncated: Whether a token budget cut it off.
        prefill: How the prompt began the turn for the player, e.g. ``<think>``.
    """

    text: str
    tokens: int = 0
    truncated: bool = False
    prefill: str = ""


class Player(Protocol):
    """Takes turns in a role. ``name`` goes into the record; it is empty for the policy in training."""

    name: str

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """Take a turn, or raise :class:`NoReplyError`. ``messages`` is its whole conversation so far."""
        ...


async def play_game(interaction: Interaction[Any, Any], game: Any, players: Mapping[str, Player]) -> None:
    """Play a game that ``interaction`` has started; ``players`` by role. One without an answer makes it void."""
    conversations: dict[tuple[str, str | None], list[Message]] = defaultdict(list)
    while (turn := interaction.next_turn(game)) is not None:
        player = players[turn.role]
        if player.name:
            game.record.players[turn.role] = player.name
        messages = conversations[turn.role, turn.conversation]
        messages += turn.prompt.filled()
        started = time.monotonic()
        try:
            reply = await player.reply(turn, messages)
        except NoReplyError as reason:
            game.make_void(str(reason))
            return
        finally:
            _clock(game, started)
        messages.append({"role": "assistant", "content": reply.prefill + reply.text})
        _take(game, reply)


async def play_in_step(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    answer: Callable[[str, Mapping[int, Turn]], Awaitable[Sequence[Reply | NoReplyError]]],
) -> None:
    """Play games side by side: a role answers at once in all games that wait for it, which suits models in batches.

    ``answer`` gets the role and its turns by the number of the game, and returns a reply to each, or why there is none:
    that game is void.
    """
    while waiting := {n: turn for n, game in enumerate(games) if (turn := interaction.next_turn(game)) is not None}:
        role = min((turn.role for turn in waiting.values()), key=interaction.roles.index)
        turns = {n: turn for n, turn in waiting.items() if turn.role == role}
        started = time.monotonic()
        for number, reply in zip(turns, await answer(role, turns), strict=True):
            _clock(games[number], started)
            _take(games[number], reply)


def _clock(game: Any, started: float) -> None:
    game.record.seconds.append(round(time.monotonic() - started, 3))
    game.record.finished = datetime.now(UTC).replace(microsecond=0)


def _take(game: Any, reply: Reply | NoReplyError) -> None:
    if isinstance(reply, NoReplyError):
        game.make_void(str(reply))
    else:
        game.play(reply.text, prefill=reply.prefill, tokens=reply.tokens, truncated=reply.truncated)
