"""The game as a multi-turn interaction: text in, next observation out.

The four methods have the shape that verl's interactions had up to 0.7.1, so that a game reads the
same whoever drives it. Called by the agent loop; knows no tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any
from uuid import uuid4

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.games.medical.judges import Judge, build_judge, judge_game
from medserl_agentloop.games.medical.prompting import Message, load_profile
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.games.medical.rules import Game
from medserl_agentloop.games.medical.types import GameSpec, Role


class MedicalGameInteraction:
    """Games in progress, by instance id.

    Args:
        config: The run's ``selfplay`` node.
    """

    def __init__(self, config: SelfPlayConfig) -> None:
        self.config = config
        self._profile = load_profile(config.profile)
        self._games: dict[str, Game] = {}

    @cached_property
    def _judge(self) -> Judge:
        return build_judge(self.config)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a game on the facts of one row.

        Args:
            instance_id: Name of the game; a new one if None.
            **kwargs: ``extra_info`` of the row. Where the run has a tokenizer, also ``special_tokens``, the
                strings that it has special tokens for, and ``note_tokens``, which counts those of a note.

        Returns:
            The instance id.

        Raises:
            ValueError: The facts are incomplete, or a game of that name is in progress.
        """
        instance_id = instance_id or uuid4().hex
        if instance_id in self._games:
            raise ValueError(f"a game named {instance_id!r} is in progress already")
        extra_info, note_tokens = kwargs["extra_info"], kwargs.get("note_tokens")
        spec = GameSpec.from_extra_info(extra_info)

        def fits(note: str) -> bool:
            # The start-up check plans a prompt in which every token of the attacker's turn is one of the note. The
            # note as text can have more: a control token has as many as characters.
            return note_tokens is None or note_tokens(note) <= self.config.budget.attacker(note_tokens(spec.seed_note))

        self._games[instance_id] = Game(
            spec,
            self.config.edits,
            self._profile.parser,
            vanilla_attacker=self.config.vanilla_attacker.on(extra_info),
            special_tokens=kwargs.get("special_tokens", ()),
            fits=fits,
        )
        return instance_id

    def turn(self, instance_id: str) -> tuple[Role, str] | None:
        """Whose turn it is and the note they read; None if the game is over."""
        game = self._games[instance_id]
        return None if game.next_role is None else (game.next_role, game.note)

    def messages(self, instance_id: str) -> list[Message]:
        """The chat messages that whoever's turn it is reads; empty if the game is over."""
        game = self._games[instance_id]
        if game.next_role is None:
            return []
        return self._profile.messages(game.next_role, game.record.spec.task, game.note)

    @property
    def assistant_prefix(self) -> str:
        """How the profile begins every turn for its player."""
        return self._profile.settings.assistant_prefix

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Take the turn that the last message holds and say what the next player reads.

        Args:
            messages: Chat messages; the last one is the player's.
            **kwargs: ``prefill``, ``tokens`` and ``truncated`` of the player's turn.

        Returns:
            Whether the game is over; the next player's prompt (empty if it is); 0.0, because rewards
            need the judge and come from the reward manager; and ``{"role": the next player's}``.
        """
        game = self._games[instance_id]
        game.play(messages[-1]["content"], **kwargs)
        if game.next_role is None:
            return True, "", 0.0, {"role": None}
        return False, self.messages(instance_id)[-1]["content"], 0.0, {"role": game.next_role}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Judge the game and return the sum of both roles' rewards; 0.0 for a void one."""
        record = self._games[instance_id].record
        await judge_game(self._judge, record)
        rewards = load_scheme(self.config.reward)(record)
        return sum(sum(components.values()) for components in rewards.values())

    def make_void(self, instance_id: str, reason: str) -> None:
        """End a game that cannot go on; it will count for nobody."""
        self._games[instance_id].make_void(reason)

    def record(self, instance_id: str) -> GameRecord:
        """The record of a game, finished or not."""
        return self._games[instance_id].record

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a game. Its record lives on with whoever holds it."""
        self._games.pop(instance_id, None)
