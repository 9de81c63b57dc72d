"""The medical game as an interaction: turns, judge and rewards."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from medserl_agentloop.core.chat import BaseModelChat
from medserl_agentloop.core.interaction import Interaction, PlannedRow, Turn
from medserl_agentloop.core.liveness import limited
from medserl_agentloop.games.medical.case import Category, GameSpec, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import (
    GatedJudge,
    ask_judge,
    build_judge,
    take_judgement,
)
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.rewards import RewardScheme, load_scheme, reward_game
from medserl_agentloop.games.medical.rules import MedicalGame
from medserl_agentloop.games.medical.view import MedicalView

REWARD_LIMIT_S = 60.0  # for the rewards of one game by a user's scheme


class MedicalGameInteraction(Interaction[MedicalGame, MedicalRecord]):
    """Attacker and assessor on a clinical note."""

    roles = (Role.ATTACKER.value, Role.ASSESSOR.value)
    Config = MedicalConfig
    Record = MedicalRecord
    metrics = staticmethod(role_metrics)
    View = MedicalView

    def __init__(self, config: MedicalConfig, tokens: Any = None) -> None:
        super().__init__(config, tokens)
        self._profile = load_profile(config.profile, config.error_types)
        self._reward_model: tuple[str | None, str | None] = (None, None)
        self._base: BaseModelChat | None = None

    def new_game(self, facts: Mapping[str, Any]) -> MedicalGame:
        return self.start(GameSpec.from_extra_info(facts, self.config.error_types), facts)

    def start(self, spec: GameSpec, facts: Mapping[str, Any] = {}) -> MedicalGame:
        """Start a game; ``facts`` are its row's, if any."""
        config = self.config.for_row(facts)
        game = MedicalGame(
            spec,
            config.edits,
            self._profile.parser,
            special_tokens=() if self.tokens is None else self.tokens.special_tokens,
            count=None if self.tokens is None else self.tokens.count,
            room=config.budget.attacker,  # as planned; as text a note can have more tokens
            assessments=config.assessments,
        )
        game.record.profile = config.profile
        return game

    def next_turn(self, game: MedicalGame) -> Turn | None:
        if game.next_role is None:
            return None
        turn = self._turn(game.next_role, game.spec.task, game.note, game.text_to_rewrite)
        # Each further assessment has its own conversation.
        number = len(game.record.assessments)
        return replace(turn, conversation=str(number)) if number else turn

    def next_turns(self, game: MedicalGame) -> Sequence[Turn]:
        """All assessments of a note at once."""
        turn = self.next_turn(game)
        if turn is None or turn.role != Role.ASSESSOR:
            return super().next_turns(game)
        further = range(1, game.assessments)
        return [turn, *(replace(turn, conversation=str(number)) for number in further)]

    @property
    def repeated_roles(self) -> Sequence[str]:
        return (Role.ASSESSOR.value,) if self.config.assessments > 1 else ()

    def _turn(self, role: Role, category: Category, note: str, rewritten: str) -> Turn:
        budget = self.config.budget
        if role is Role.ASSESSOR:
            return self._profile.turn(role, category, note, budget.assessor)
        tokens = 0 if self.tokens is None else self.tokens.count(rewritten)
        return self._profile.turn(role, category, note, budget.attacker(tokens))

    @property
    def stop_strings(self) -> list[str]:
        return [string for role in Role for string in self._profile.settings.stop.get(role, [])]

    @cached_property
    def _judge(self) -> GatedJudge:
        return build_judge(self.config, *self._reward_model, base=self._base)

    @cached_property
    def _scheme(self) -> RewardScheme:
        return load_scheme(self.config.reward, self.config.reward_terms)

    def use_reward_model(self, address: str, model: str) -> None:
        self._reward_model = (address, model)

    def use_base_model(self, base: BaseModelChat) -> None:
        self._base = base

    def question(self, record: MedicalRecord) -> Coroutine[Any, Any, Judgement | str] | None:
        """Ask the judge as soon as the note is presented, while the assessor reads it."""
        return None if record.presented_note is None else ask_judge(self._judge, record)

    def take_answer(self, record: MedicalRecord, answer: Judgement | str) -> None:
        take_judgement(record, answer)

    async def score(self, record: MedicalRecord) -> None:
        record.scheme = self.config.scheme_name
        if type(self._scheme).__module__.startswith("medserl_agentloop."):
            reward_game(record, self._scheme)
            return
        try:
            await limited(partial(reward_game, record, self._scheme), REWARD_LIMIT_S)
        except TimeoutError:
            raise TimeoutError(
                f"selfplay.reward={self.config.reward} gave no rewards in {REWARD_LIMIT_S:g} s"
            ) from None

    def settle(self, records: Sequence[MedicalRecord], counts: dict[str, dict[str, float]]) -> None:
        self._scheme.settle(records, counts)

    def plan(self, facts: Mapping[str, Any]) -> PlannedRow:
        """Plan the attack, and for each assessment the prompt with the longest note and the turn.

        An opponent's turns take no room.
        """
        game, profile, encoder = self.new_game(facts), self._profile, self.tokens
        budget, plays = self.config.budget, self.config.plays
        spec, note = game.spec, game.record.note_for(Role.ATTACKER)
        if spec.task is Category.DECOY_BENIGN and self.config.judge == "labels":
            raise ValueError(
                "decoy_benign games need a judge that reads the note: selfplay.judge=labels cannot "
                "see a real error in a decoy. Remove the category from the data or set a judge."
            )
        rewritten = encoder.count(game.text_to_rewrite)
        assess = encoder.opening(profile.turn(Role.ASSESSOR, spec.category, note))
        turns = []  # prompt and response of each
        longest = assess.data_tokens
        if spec.category.has_attack:
            # A replaced sentence is added to the note.
            kept = longest if profile.parser.numbered else 0
            longest = kept + budget.rewritten_note(rewritten)
            if plays(Role.ATTACKER):  # every token of the policy's turn could belong to the note
                attack = encoder.opening(profile.turn(Role.ATTACKER, spec.task, note))
                turns = [(len(attack.ids), budget.attacker(rewritten))]
                longest = kept + budget.attacker(rewritten)
        if plays(Role.ASSESSOR):
            assessed = (len(assess.ids) - assess.data_tokens + longest, budget.assessor)
            turns += [assessed] * game.assessments
        if not turns:
            return PlannedRow(spec.category.value, 1, 1)
        return PlannedRow(spec.category.value, turns[0][0], sum(map(sum, turns)) - turns[0][0])

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        """An attack on the row's note, and an assessment of the same note."""
        game, category = self.new_game(facts), Category.ADVERSARIAL_BENIGN
        note = game.record.note_for(Role.ATTACKER)
        return [self._turn(role, category, note, game.text_to_rewrite) for role in Role]

    def prompts(self) -> list[dict[str, Any]]:
        return self._profile.templates()
