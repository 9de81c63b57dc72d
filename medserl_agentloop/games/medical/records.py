"""The record of one game, one JSON line: all that is needed to read, judge and score it again.

W&B, the page and the frames for notebooks show a table of records, one row each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, computed_field, model_validator

from medserl_agentloop.core import records
from medserl_agentloop.core.records import COLUMNS, Column, GameRecord, TurnRecord
from medserl_agentloop.games.medical.canonical import quotes_error
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role
from medserl_agentloop.games.medical.edit import SentenceEdit, numbered_text, starts_of

SCHEMA_VERSION = 1
"""Increased by a release that changes the fields. Older records are read, newer ones refused."""

# Reasons of void games. The text after the first one says why there was no answer.
JUDGE_FAILED, JUDGE_ABSTAINED = "judge failed", "judge abstained"

LABELS_JUDGE = "labels"
"""The judge that does not read notes: a valid attack counts as what its row asks for."""

Reason = Annotated[str, AfterValidator(lambda words: words[:10_000])]
"""A judge's own words, cut to what a record holds."""

Rewards = dict[Role, dict[str, float]]
"""For each role that is rewarded, its components by name; a role's reward is their sum."""


class InvalidAttack(str, Enum):
    TRUNCATED = "truncated"
    UNPARSED = "unparsed"
    UNCHANGED = "unchanged"
    TOO_MANY_SENTENCES = "too_many_sentences"
    TOO_MANY_WORDS = "too_many_words"
    ERROR_REMOVED = "error_removed"
    ERROR_NOT_TOUCHED = "error_not_touched"
    CUT_SHORT = "note_cut_short"
    HIDDEN_TEXT = "hidden_text"
    INSTRUCTS_READER = "instructs_reader"
    NOT_COPIED = "not_copied"  # in older records, when attackers could copy untouched notes
    CONTROL_TOKENS = "control_tokens"
    TOO_MANY_TOKENS = "too_many_tokens"
    NOTHING_REWRITTEN = "nothing_rewritten"
    NO_SUCH_SENTENCE = "no_such_sentence"
    # the blind gate's readers do not find the error in the note alone
    NOT_KNOWABLE = "not_knowable"


class Outcome(str, Enum):
    VOID = "void"
    INVALID_ATTACK = "invalid_attack"
    UNREADABLE = "unreadable_assessment"
    CORRECT_DETECTION = "correct_detection"
    MISSED_ERROR = "missed_error"
    CORRECT_REJECTION = "correct_rejection"
    FALSE_POSITIVE = "false_positive"

    @property
    def is_right(self) -> bool | None:
        """True if the assessor's verdict was right; None where no verdict counts."""
        return (FOUND | CLEARED).get(self)


FOUND = {Outcome.CORRECT_DETECTION: True, Outcome.MISSED_ERROR: False}
CLEARED = {Outcome.CORRECT_REJECTION: True, Outcome.FALSE_POSITIVE: False}
"""Right and wrong verdicts, for harmful notes and for safe ones."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class _Turn(_Record):
    """One role's turn as parsed; the game adds text, tokens and whether it was truncated."""

    response: str = ""
    tokens: int = 0
    truncated: bool = False  # whether the token budget cut the turn off
    reasoning: str = ""  # what stood before the answer; never shown to the other role
    violations: list[str] = []  # departures from the output format

    @property
    def format_kept(self) -> bool:
        return not self.violations


class AttackRecord(_Turn):
    """The attacker's turn: parsed fields, then what the rules measured."""

    note: str | None  # the rewritten one; None where no note can be told apart from the rest
    edit: SentenceEdit | None = None  # what it changes, also where a whole note was written
    changed_sentences: list[str] = []  # of the rewritten note, that the seed note does not have
    changed_words: int = 0  # 0 where the note is too long to be compared
    edit_share: float = 0.0  # ``changed_words`` as a share of what the limits allow
    similarity: float | None = None  # share of the note's words left alone; None without a note
    injections: list[str] = []  # look-alikes of the machine's own text that the note adds
    invalid: InvalidAttack | None = None  # why the attack does not count

    @property
    def valid(self) -> bool:
        return self.invalid is None

    @property
    def readable(self) -> bool:
        return self.note is not None


class AssessmentRecord(_Turn):
    """The assessor's turn."""

    verdict: Label | None  # None where there is no readable one
    sentence: str | None = None  # called wrong: as copied, or the one of the ``number``
    number: int | None = None  # where sentences have numbers
    error_type: str | None = None
    correction: str | None = None  # the sentence as the assessor would write it

    @property
    def readable(self) -> bool:
        return self.verdict is not None


class Reading(_Record):
    """What a blind reader found; None if it abstained or ``failed``."""

    found: bool | None
    reason: Reason = ""
    cached: bool = False
    failed: str | None = None


class Judgement(_Record):
    """A judge's answer about the presented note."""

    # Records of earlier versions may hold votes. A user's judge may have set a field to anything.
    model_config = ConfigDict(extra="ignore", revalidate_instances="always")

    judge: str
    label: Label | None  # None if the judge abstains
    realistic: bool | None = None  # whether the change is; None if the judge does not say
    reason: Reason = ""
    error_type: str | None = None  # the kind of the error, from a judge that names it
    cached: bool = False  # whether the answer was given before, about the same notes
    seconds: float = 0.0  # until the answer came, including waiting and retries
    readings: list[Reading] = []  # of those who saw the presented note alone
    knowable: bool | None = None  # whether enough of them found the error; None if none was asked


class MedicalRecord(GameRecord):
    """One game from seed note to rewards."""

    model_config = ConfigDict(extra="forbid")

    left_out: ClassVar[tuple[str, ...]] = (*GameRecord.left_out, "further_assessments")

    schema_version: int = Field(default=SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)
    turns: list[TurnRecord] = Field(default=[], exclude=True)  # attack and assessments hold them
    spec: GameSpec
    error_sentences: list[str] = Field(default=[])  # of the presented note, known to be wrong
    attack: AttackRecord | None = None
    assessment: AssessmentRecord | None = None  # the first of several
    further_assessments: list[AssessmentRecord] = Field(default=[])  # ``selfplay.assessments``
    judgement: Judgement | None = None
    rewards: Rewards = Field(default={})  # type: ignore[assignment]  # a Role is a str
    scheme: str = ""  # of rewards
    profile: str = ""  # of the prompts

    @property
    def presented_note(self) -> str | None:
        """The note that the assessor reads; None before it is known, or if there is none."""
        if self.attack is None:
            return None if self.category.has_attack else self.spec.seed_note
        # A reader of the presented note found that its error cannot be known.
        shown = self.attack.invalid in (None, InvalidAttack.NOT_KNOWABLE)
        return self.attack.note if shown else None

    @property
    def edit(self) -> SentenceEdit | None:
        """The attacker's edit; None for an untouched note."""
        return self.attack.edit if self.attack is not None and self.category.has_attack else None

    @property
    def sentences(self) -> Mapping[int, str]:
        """The presented note's, or before that the seed's; empty without numbers."""
        shown, edit = self.spec.sentences, self.edit
        if not shown or edit is None or edit.number is None or self.presented_note is None:
            return shown
        return {**shown, edit.number: edit.new}

    def note_for(self, role: Role) -> str:
        """The note as ``role`` reads it."""
        attacks = role is Role.ATTACKER
        if self.spec.sentences:
            return numbered_text(self.spec.sentences if attacks else self.sentences)
        return self.spec.seed_note if attacks else self.presented_note or ""

    @property
    def category(self) -> Category:
        return self.spec.category

    @property
    def kind(self) -> str:
        return self.spec.category.value

    @property
    def label(self) -> Label | None:
        """The judge's label of the presented note, or None."""
        return None if self.judgement is None else self.judgement.label

    @property
    def is_void(self) -> bool:
        return self.outcome is Outcome.VOID

    @property
    def reading_rank(self) -> int:
        """Attacks that fooled the assessor first, then those it found; best with clean turns."""
        found = FOUND.get(self.outcome)
        if self.attack is None or self.assessment is None or found is None:
            return 0
        turns = (self.attack, self.assessment)
        legible = all(turn.reasoning and not turn.violations for turn in turns)
        return 2 * (2 - found) + legible

    @property
    def assessments(self) -> list[AssessmentRecord]:
        return [] if self.assessment is None else [self.assessment, *self.further_assessments]

    @property
    def by_assessment(self) -> list[MedicalRecord]:
        """The game once for each assessment, with that one's outcome and reward."""
        every = self.assessments
        if len(every) < 2:
            return [self]
        games = []
        for number, own in enumerate(every):
            fields: dict[str, Any] = {
                "assessment": own,
                "further_assessments": every[:number] + every[number + 1 :],
            }
            earned = self.turn_rewards.get(self.first_assessment + number)
            if earned is not None:
                fields |= {"rewards": {**self.rewards, Role.ASSESSOR: earned}, "turn_rewards": {}}
            games.append(self.model_copy(update=fields))
        return games

    @property
    def first_assessment(self) -> int:
        """Index of the assessor's first turn."""
        return 0 if self.attack is None else 1

    def names_error(self, quote: str) -> bool:
        """Return whether ``quote`` contains a wrong sentence's error and at most that sentence."""
        right = dict.fromkeys(self.error_sentences, self.spec.corrected_sentence)
        if (edit := self.edit) is not None and self.category.seed_label is Label.SAFE:
            right = {wrong: edit.old if edit.new == wrong else None for wrong in right}
        return any(quotes_error(quote, wrong, right[wrong]) for wrong in right)

    def turn_rewards_of(self, role: str) -> list[float]:
        """Return the rewards of the assessments, from their own fields: ``turns`` is not kept."""
        if role != Role.ASSESSOR:
            return super().turn_rewards_of(role)
        numbers = range(self.first_assessment, self.first_assessment + len(self.assessments))
        return list(self.reward_of_turns(dict.fromkeys(numbers, role)).values())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> Outcome:
        """The outcome, by the judge's label for the presented note and the first assessment."""
        if self.void is not None:
            return Outcome.VOID
        if self.attack is not None and self.attack.invalid is not None:
            return Outcome.INVALID_ATTACK
        if self.assessment is None or self.label is None:
            return Outcome.VOID
        if self.assessment.verdict is None:
            return Outcome.UNREADABLE
        right = self.assessment.verdict is self.label
        if self.label is Label.HARMFUL:
            return Outcome.CORRECT_DETECTION if right else Outcome.MISSED_ERROR
        return Outcome.CORRECT_REJECTION if right else Outcome.FALSE_POSITIVE

    @property
    def cut_off(self) -> bool:
        """True if the assessor was truncated before its verdict."""
        truncated = self.assessment is not None and self.assessment.truncated
        return truncated and self.outcome is Outcome.UNREADABLE

    @property
    def attack_failed(self) -> bool:
        """True if the judge contradicts a valid attack: no error, or a decoy with one."""
        valid = self.attack is not None and self.attack.valid and self.category.has_attack
        return valid and self.label not in (None, self.spec.target_label)

    # A line of games.jsonl holds a note once: the seed note, the starts of its sentences, the edit.

    def to_json(self) -> dict[str, Any]:
        """JSON-able form without the texts that follow from the seed note and the edit."""
        row, seed = super().to_json(), self.spec.seed_note
        spec, attack = row["spec"], self.attack
        if spec[own := _seed_key(spec)] == seed:
            del spec[own]
        if attack and attack.edit and attack.edit.applied(seed) == attack.note:
            del row["attack"]["note"]
        if (starts := starts_of(self.spec.sentences, seed)) is not None:
            spec["sentences"] = starts
        return row

    @model_validator(mode="before")
    @classmethod
    def _of_json(cls, fields: Any) -> Any:
        """Put back what :meth:`to_json` leaves out; drop what follows from other fields."""
        if not isinstance(fields, dict):
            return fields
        row = {name: v for name, v in fields.items() if name not in ("outcome", "presented_note")}
        if not isinstance(row.get("spec"), dict):
            return row
        seed, attack = str(row["spec"].get("seed_note")), row.get("attack")
        row["spec"] = spec = {_seed_key(row["spec"]): row["spec"].get("seed_note"), **row["spec"]}
        starts = spec.get("sentences")
        if isinstance(starts, dict) and starts and all(type(at) is int for at in starts.values()):
            ends = [*list(starts.values())[1:], None]
            places = zip(starts.items(), ends, strict=True)
            spec["sentences"] = {number: seed[at:end].strip() for (number, at), end in places}
        if isinstance(attack, dict) and isinstance(attack.get("edit"), dict):
            edit = SentenceEdit.model_validate(attack["edit"])
            row["attack"] = {"note": edit.applied(seed), **attack}
        return row


def _seed_key(spec: Mapping[str, Any]) -> str:
    return "error_note" if str(spec.get("category")).endswith("harmful") else "clean_note"


read_games = partial(records.read_games, record=MedicalRecord)

# -- the table of games ----------------------------------------------------------------------------


def _of(path: str) -> Callable[[MedicalRecord], Any]:
    """Return a function that reads a nested field, or None if a part is missing."""

    def value(part: Any) -> Any:
        for name in path.split("."):
            part = None if part is None else getattr(part, name)
        return part

    return value


def _seeds_type(game: MedicalRecord) -> str | None:
    return game.spec.error_type if game.category.seed_label is Label.HARMFUL else None


_TURN_COLUMNS = {
    f"{role}_{name}": Column(dtype, meaning, _of(f"{turn}.{field}"))
    for name, dtype, meaning, field in (
        ("tokens", "Int64", "length of the turn", "tokens"),
        ("truncated", "boolean", "whether its token budget cut it off", "truncated"),
        ("readable", "boolean", "whether it has a note, or a verdict", "readable"),
        ("format_kept", "boolean", "no departure from the format", "format_kept"),
    )
    for role, turn in ((Role.ATTACKER, "attack"), (Role.ASSESSOR, "assessment"))
}

GAMES = {
    **COLUMNS,
    "category": Column("string", "kind of game", _of("kind")),
    "outcome": Column("string", "how it ended", _of("outcome.value")),
    "right": Column("boolean", "whether the verdict was right", _of("outcome.is_right")),
    "error_found": Column("boolean", "of harmful notes alone", lambda g: FOUND.get(g.outcome)),
    "note_cleared": Column("boolean", "of safe notes alone", lambda g: CLEARED.get(g.outcome)),
    "valid": Column("boolean", "whether the attack counts", _of("attack.valid")),
    "invalid": Column("string", "why the attack does not count", _of("attack.invalid.value")),
    "intended": Column("string", "label the row asks for", _of("spec.target_label.value")),
    "judged": Column("string", "label of the presented note", _of("label.value")),
    "judge": Column("string", "who gave it", _of("judgement.judge")),
    "verdict": Column("string", "missing if unreadable", _of("assessment.verdict.value")),
    "error_type": Column("string", "type of the seed note's error, not the attack's", _seeds_type),
    "text_id": Column("string", "source row", _of("spec.text_id")),
    "vignette_id": Column("string", "case", _of("spec.vignette_id")),
    "attacker_reward": Column("Float64", "sum of the components", lambda g: g.reward("attacker")),
    "assessor_reward": Column("Float64", "sum of the components", lambda g: g.reward("assessor")),
    "changed_words": Column("Int64", "words the attack changed", _of("attack.changed_words")),
    **_TURN_COLUMNS,
}
"""A game's facts without its texts: a run may have a million games."""
