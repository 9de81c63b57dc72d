"""The medical game as an interaction: text in, next observation out, and what the run asks of its
games.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medserl_agentloop.core.alarms import Rule, common_rules
from medserl_agentloop.core.chat import BASE, BaseModelChat
from medserl_agentloop.core.interaction import Interaction, PlannedRow, Prompt, Turn
from medserl_agentloop.core.records import Pieces, Section, as_text
from medserl_agentloop.games.medical.case import EVAL_SPLIT, Category, GameSpec, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import (
    UNREAD_WARNING,
    GatedJudge,
    build_judge,
    judge_game,
)
from medserl_agentloop.games.medical.judges.report import judge_lines, judge_problems
from medserl_agentloop.games.medical.metrics import (
    RULES,
    UNREAD_RATE,
    role_metrics,
    trained_role_won,
    validation_numbers,
)
from medserl_agentloop.games.medical.prompting import load_profile, template_name
from medserl_agentloop.games.medical.records import (
    GAMES,
    AssessmentRecord,
    AttackRecord,
    MedicalRecord,
    marked_changes,
    marked_quote,
)
from medserl_agentloop.games.medical.rewards import RewardScheme, load_scheme, reward_game
from medserl_agentloop.games.medical.rules import MedicalGame
from medserl_agentloop.scoring.metrics import NotesBySet, notes_by_set, scores_by_set
from medserl_agentloop.scoring.notes import TEXTS

if TYPE_CHECKING:
    from omegaconf import DictConfig


TOY_PLAYERS = {"novice": "brief", "tiny_player": "medserl"}
"""The players in ``assets``, and the prompt profile that each was taught."""


class MedicalGameInteraction(Interaction[MedicalGame, MedicalRecord]):
    """Attacker and assessor on a clinical note."""

    roles = (Role.ATTACKER.value, Role.ASSESSOR.value)
    Config = MedicalConfig
    Record = MedicalRecord
    metrics = staticmethod(role_metrics)
    trained_role_won = staticmethod(trained_role_won)
    validation_numbers = staticmethod(validation_numbers)
    check_run = staticmethod(judge_problems)
    columns = GAMES
    gains = (("errors found", "recall"), ("false alarms", "false_positive_rate"))
    headline = (
        "selfplay/attacker/undetected_rate",
        "selfplay/attacker/effective_kinds",
        "selfplay/assessor/recall",
        "selfplay/assessor/false_positive_rate",
        "selfplay/shortcut/index",
        "selfplay/attacker/parse_rate",
        "selfplay/assessor/parse_rate",
    )
    shown = (
        ("valid", "selfplay/attacker/valid_rate"),
        ("undetected", "selfplay/attacker/undetected_rate"),
        ("accuracy", "selfplay/assessor/accuracy"),
    )

    @classmethod
    def folders(cls, selfplay: MedicalConfig) -> dict[str, Path]:
        return {"profile": load_profile(selfplay.profile, selfplay.error_types).folder}

    @classmethod
    def caveats(cls, config: DictConfig, selfplay: MedicalConfig) -> Iterator[str]:
        model = Path(config.actor_rollout_ref.model.path)
        taught = TOY_PLAYERS.get(model.name) if model.parent.name == "assets" else None
        if taught and taught != selfplay.profile:
            yield (
                f"the player {model.name} was taught the profile {taught} only: few of its answers "
                f"to the prompts of {selfplay.profile} can be read"
            )
        if selfplay.judge == "labels":
            toy = ", and its player knows only the toy clinic" * bool(taught)
            yield (
                f"selfplay.judge=labels reads no note{toy}: this run tests data and commands, and "
                "its rewards say nothing about medicine"
            )

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: MedicalConfig) -> Iterator[str]:
        yield from judge_lines(config, selfplay)
        if selfplay.reward == "optimism":
            yield (
                "reward optimism: the kind of an error is what the judge names; where it names "
                "none, the type of error in the row"
            )
        for role, normalization in selfplay.credit.normalize.items():
            if (
                normalization == "kind"
                and len({template_name(Role(role), category) for category in Category}) == 1
            ):
                yield (
                    f"credit: the {role} reads the same prompt in all kinds of games, and with "
                    "selfplay.credit."
                    f"normalize.{role}=kind its answers about kinds with few mistakes weigh more. "
                    "batch and mean weigh "
                    "all answers alike"
                )

    def __init__(self, config: MedicalConfig, tokens: Any = None) -> None:
        super().__init__(config, tokens)
        self._profile = load_profile(config.profile, config.error_types)
        self._reward_model: tuple[str | None, str | None] = (None, None)
        self._base: BaseModelChat | None = None
        self._notes: NotesBySet = {}

    def new_game(self, facts: Mapping[str, Any]) -> MedicalGame:
        return self.start(GameSpec.from_extra_info(facts, self.config.error_types), facts)

    def start(self, spec: GameSpec, facts: Mapping[str, Any] = {}) -> MedicalGame:
        """Start a game; ``facts`` are those of its row, if it has one."""
        config = self.config.for_row(facts)
        game = MedicalGame(
            spec,
            config.edits,
            self._profile.parser,
            special_tokens=() if self.tokens is None else self.tokens.special_tokens,
            count=None if self.tokens is None else self.tokens.count,
            # The start-up check plans a prompt in which every token of the attacker's turn is one
            # of the note. The note as text can have more: a control token has as many as
            # characters.
            room=config.budget.attacker,
            assessments=config.assessments,
        )
        game.record.profile = config.profile
        return game

    def next_turn(self, game: MedicalGame) -> Turn | None:
        if game.next_role is None:
            return None
        turn = self._turn(game.next_role, game.spec.task, game.note, game.rewritten)
        # A conversation of its own for each further assessment; the first is as if it were the only
        # one.
        number = len(game.record.assessments)
        return replace(turn, conversation=str(number)) if number else turn

    def next_turns(self, game: MedicalGame) -> Sequence[Turn]:
        """All assessments of a note at once."""
        turn = self.next_turn(game)
        if turn is None or turn.role != Role.ASSESSOR:
            return super().next_turns(game)
        return [
            turn,
            *(replace(turn, conversation=str(number)) for number in range(1, game.assessments)),
        ]

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

    def use_reward_model(self, address: str | None, model: str | None) -> None:
        self._reward_model = (address, model)

    async def ask_base_model(self, record: MedicalRecord, base: BaseModelChat) -> None:
        """Have the game judged, where the base model judges."""
        if self.config.asks_base:
            self._base = base
            await judge_game(self._judge, record)

    async def score(self, record: MedicalRecord) -> None:
        """Have the game judged, unless the base model has done it, and rewarded."""
        if not self.config.asks_base:
            await judge_game(self._judge, record)
        elif record.judgement is None and record.void is None and record.assessment is not None:
            raise ValueError(
                f"selfplay.judge_server.url={BASE}: only a run can ask its base model about this "
                "game"
            )
        record.scheme = self.config.scheme_name
        reward_game(record, self._scheme)

    def settle(self, records: Sequence[MedicalRecord], counts: dict[str, dict[str, float]]) -> None:
        self._scheme.settle(records, counts)

    def plan(self, facts: Mapping[str, Any]) -> PlannedRow:
        """Plan the attacker's turn and, for each assessment, the assessor's prompt with the longest
        note and its turn.

        What an opponent plays takes no room.
        """
        game, profile, encoder = self.new_game(facts), self._profile, self.tokens
        budget, plays = self.config.budget, self.config.plays
        spec, note = game.spec, game.record.note_for(Role.ATTACKER)
        if spec.task is Category.DECOY_BENIGN and self.config.judge == "labels":
            raise ValueError(
                "decoy_benign games need a judge that reads the note, because "
                "selfplay.judge=labels "
                "cannot see a real error in a decoy. Take the category out of the data or set "
                "another judge."
            )
        rewritten = encoder.count(game.rewritten)
        assess = encoder.opening(profile.turn(Role.ASSESSOR, spec.category, note))
        kept = (
            assess.data_tokens if profile.parser.numbered else 0
        )  # a replaced sentence comes on top of the note
        turns = []  # prompt and response of each
        if game.next_role is Role.ATTACKER and plays(Role.ATTACKER):
            attack = encoder.opening(profile.turn(Role.ATTACKER, spec.task, note))
            turns = [(len(attack.ids), budget.attacker(rewritten))]
        longest = assess.data_tokens
        if spec.category.has_attack:  # every token of the policy's turn could be note
            longest = kept + (
                budget.attacker(rewritten) if turns else budget.rewritten_note(rewritten)
            )
        if plays(Role.ASSESSOR):
            turns += [
                (len(assess.ids) - assess.data_tokens + longest, budget.assessor)
            ] * game.assessments
        if not turns:
            return PlannedRow(spec.category.value, 1, 1)
        return PlannedRow(spec.category.value, turns[0][0], sum(map(sum, turns)) - turns[0][0])

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        """An attack on the row's note, and an assessment of the same note."""
        game = self.new_game(facts)
        note = game.record.note_for(Role.ATTACKER)
        return [
            self._turn(role, Category.ADVERSARIAL_BENIGN, note, game.rewritten) for role in Role
        ]

    def prompts(self) -> list[dict[str, Any]]:
        return self._profile.templates()

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        return (*RULES, *common_rules(cls.roles))

    def notices(self, numbers: Mapping[str, float]) -> Iterator[str]:
        if numbers.get(UNREAD_RATE):
            yield UNREAD_WARNING

    def read_validation_set(self, dataset: Any) -> None:
        rows = zip(dataset.dataframe["data_source"], dataset.dataframe["extra_info"], strict=True)
        self._notes = notes_by_set(
            (source, facts) for source, facts in rows if facts.get("split") == EVAL_SPLIT
        )

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        return scores_by_set(self._notes, sources, facts) if facts.keys() >= set(TEXTS) else ()

    @classmethod
    def sections(
        cls, record: MedicalRecord, prompts: Sequence[Mapping[str, Any]] = ()
    ) -> list[Section]:
        """Both turns with changes and quotes marked, and what the judge said."""
        seed, presented = record.spec.seed_note, record.presented_note or ""
        sections = [
            Section("no attack: the note is shown as it is in the data", "note", text=[("", seed)])
        ]
        if (attack := record.attack) is not None:
            standing = f"invalid: {attack.invalid.value}" if attack.invalid else "valid"
            note: Pieces = [("", attack.response)]
            edit = attack.edit
            if edit is not None and edit.start is not None:
                end = edit.start + len(edit.old)
                changed = marked_changes(edit.old, edit.new)
                note = [("", seed[: edit.start]), *changed, ("", seed[end:])]
            elif attack.note is not None:
                note = marked_changes(seed, attack.note)
            sections = [
                _turn(Role.ATTACKER, standing, attack, note, _read(record, prompts, Role.ATTACKER))
            ]
        for each in (
            game.assessment for game in record.by_assessment if game.assessment is not None
        ):
            verdict = each.verdict.value if each.verdict else "unreadable"
            read = _read(record, prompts, Role.ASSESSOR)
            sections.append(
                _turn(Role.ASSESSOR, verdict, each, marked_quote(presented, each.sentence), read)
            )
        if (judgement := record.judgement) is not None:
            wrong = " | ".join(record.error_sentences)
            facts = {"intended": record.spec.target_label.value, "wrong in this note": wrong}
            facts |= judgement.model_dump(
                mode="json", exclude={"judge", "label", "cached", "seconds"}
            )
            label = judgement.label.value if judgement.label else "abstains"
            sections.append(Section(f"judge {judgement.judge}: {label}", "judge", facts=facts))
        return sections


def _turn(
    role: Role, result: str, turn: AttackRecord | AssessmentRecord, text: Pieces, read: str
) -> Section:
    title = f"{role}: {result} · {turn.tokens} tokens{', cut off' if turn.truncated else ''}"
    elsewhere = "response tokens truncated reasoning note edit changed_sentences verdict invalid"
    facts = turn.model_dump(mode="json", exclude=set(elsewhere.split()))
    folded = {f"what the {role} read": read, "answer as written": turn.response}
    return Section(title, role.value, turn.reasoning or "no reasoning", text, facts, folded)


def _read(record: MedicalRecord, prompts: Sequence[Mapping[str, Any]], role: Role) -> str:
    """Return the text that the role read: as the run recorded it, else as the profile is now."""
    note, wanted = record.note_for(role), (role.value, template_name(role, record.spec.task))
    for row in prompts:
        if (row.get("role"), row.get("template")) == wanted and row["step"] <= record.step:
            return as_text(Prompt(tuple(row["messages"]), {"note": note}).filled(str))
    try:
        return as_text(load_profile(record.profile).messages(role, record.spec.task, note))
    except ValueError:  # a user's own folder, which is not here
        return ""
