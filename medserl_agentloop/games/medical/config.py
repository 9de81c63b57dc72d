"""The ``selfplay`` node of the medical game: its own keys and those of any game."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from medserl_agentloop.core.chat import BASE
from medserl_agentloop.core.client import ServerOptions
from medserl_agentloop.core.config import CreditSettings, Normalization, SelfPlayConfig, Share
from medserl_agentloop.games.medical.case import ERROR_TYPES, EVAL_SPLIT, Role, checked_types
from medserl_agentloop.games.medical.rewards import Medserl, load_scheme
from medserl_agentloop.games.medical.rules import EditLimits


class _TokenBudget(BaseModel):
    """Token budgets of the turns. Budgets depend on the note, so that planning truncates none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    attacker_reasoning: int = Field(
        default=512, ge=1, description="Tokens for the attacker's reasoning and tags."
    )
    assessor: int = Field(default=1024, ge=1, description="Tokens of the assessor's complete turn.")

    def attacker(self, note_tokens: int) -> int:
        return self.attacker_reasoning + self.rewritten_note(note_tokens)

    def rewritten_note(self, note_tokens: int) -> int:
        return int(note_tokens * 1.25) + 16  # 16: for short notes a share is too little


_CREDIT, _SELFPLAY = CreditSettings.model_fields, SelfPlayConfig.model_fields


class _MedicalCredit(CreditSettings):
    """Credit with the roles' names, so that each has a key."""

    role_weights: dict[str, Share] = Field(
        default={role.value: 1.0 for role in Role}, description=_CREDIT["role_weights"].description
    )
    normalize: dict[str, Normalization | None] = Field(
        default={role.value: None for role in Role}, description=_CREDIT["normalize"].description
    )


class JudgeServer(ServerOptions):
    """Settings for requests to a judge; a game waits at most ``(retries + 1) * timeout_s``."""

    node: ClassVar[str] = "selfplay.judge_server"
    lost_in_a_row: ClassVar[float] = 5

    url: str | None = Field(
        default=None,
        description="http: the server that offers /judge. llm: an OpenAI-compatible API, with its "
        "/v1; null is verl's own reward model; base is the base model (per_role adapters).",
    )
    model: str | None = Field(
        default=None,
        description="llm: name of the model; null is verl's own reward model, or the base model.",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a request may take, including the answer."
    )
    cache: str | None = Field(
        default=None, description="Folder of earlier answers, on a local disk; null keeps none."
    )
    max_tokens: int = Field(
        default=512, ge=1, description="llm: maximum tokens per answer, including reasoning."
    )
    json_schema: bool = Field(
        default=True, description="llm: enforce the JSON schema, if the server can."
    )


class BlindGate(BaseModel):
    """The blind reader, the judge's model, which must find the error in the note alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    readings: int = Field(
        default=0, ge=0, description="Times the presented note is read alone; 0: no gate."
    )
    needed: int = Field(
        default=1, ge=1, description="Readings that must find the error where it is."
    )

    @model_validator(mode="after")
    def _can_be_passed(self) -> BlindGate:
        if self.readings and self.needed > self.readings:
            raise ValueError(
                f"needed={self.needed} of readings={self.readings} can never be met: lower it"
            )
        return self


class MedicalConfig(SelfPlayConfig):
    """Everything the game needs to know that verl has no key for."""

    game: str = Field(default="medical", description=_SELFPLAY["game"].description)
    profile: str = Field(
        default="medserl", description="Prompt profile: a folder of prompts/, or a path."
    )
    error_types: Annotated[tuple[str, ...], BeforeValidator(checked_types)] = Field(
        default=ERROR_TYPES,
        description="Error types that prompts name, answers use and recall is reported for.",
    )
    train: Literal["both", "attacker", "assessor"] = Field(
        default="both", description="Whose tokens the loss sees. The other role still plays."
    )
    best_by: str | None = Field(
        default="sentence_accuracy", description=_SELFPLAY["best_by"].description
    )
    anchor: dict[str, Share] = Field(
        default={role.value: 0.0 for role in Role}, description=_SELFPLAY["anchor"].description
    )
    reward: str = Field(
        default="medserl", description="Reward scheme, or your own package.module:Class."
    )
    reward_terms: dict[str, float | None] = Field(
        default={field.name: None for field in fields(Medserl)},
        description="Constants of the scheme; null: its default.",
    )
    judge: str = Field(
        description="Who says whether a note holds an error: labels (reads none), http, llm or "
        "package.module:Class."
    )
    judge_server: JudgeServer = Field(
        default=JudgeServer(), description="How http and llm reach their server."
    )
    blind: BlindGate = Field(
        default=BlindGate(),
        description="An injected error counts only if a reader of the note alone also finds it.",
    )
    judge_report: str | None = Field(
        default=None,
        description="Report of 'medserl judge calibrate' on this judge; null: not measured.",
    )
    assessments: int = Field(
        default=1,
        ge=1,
        description="Times a presented note is assessed, each time in its own context.",
    )
    budget: _TokenBudget = Field(default=_TokenBudget(), description="Tokens per turn.")
    edits: EditLimits = Field(default=EditLimits(), description="How much an attack may change.")
    credit: _MedicalCredit = Field(default=_MedicalCredit(), description="Advantages of the roles.")

    @property
    def asks_base(self) -> bool:
        """True if the run's own base model judges, or reads the notes alone."""
        reads = self.judge == "llm" or self.blind.readings > 0
        return reads and self.judge_server.url == BASE

    @property
    def scheme_name(self) -> str:
        """The reward scheme's name in records, with changed constants."""
        terms = self.reward_terms.items()
        changed = [f"{term} {value:g}" for term, value in terms if value is not None]
        return ", ".join([self.reward, *changed])

    def for_row(self, facts: Mapping[str, Any]) -> MedicalConfig:
        """The settings for one row; an evaluation row is assessed once."""
        measures = facts.get("split") == EVAL_SPLIT
        return self.model_copy(update={"assessments": 1}) if measures else self

    def problems(self) -> Iterator[str]:
        try:
            load_scheme(self.reward, self.reward_terms)
        except ValueError as error:
            yield f"selfplay.reward: {error}"
        key = f"selfplay.assessments={self.assessments}"
        if self.assessments > 1 and self.context == "shared":
            yield (
                f"{key} with selfplay.context=shared would show each assessment those before it. "
                "Set selfplay.context=isolated, or selfplay.assessments=1."
            )
