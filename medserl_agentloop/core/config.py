"""The ``selfplay:`` node of a run: typed, documented, checked before anything starts.

What the rest of the run must be is checked by :mod:`medserl_agentloop.core.run_check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medserl_agentloop.core.credit import CreditSettings
from medserl_agentloop.core.opponent_config import OpponentConfig
from medserl_agentloop.games.medical.alarms import Alarms
from medserl_agentloop.games.medical.judges import judge_class
from medserl_agentloop.games.medical.judges.options import JudgeServer
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.games.medical.rules import EditLimits
from medserl_agentloop.games.medical.types import Category, Role, VanillaAttacker


class ConfigError(ValueError):
    """A run was configured in a way that cannot work; the message says what to write instead."""


class TokenBudget(BaseModel):
    """How many tokens each turn may have. Budgets follow the note, so that none is cut by planning.

    The attacker's turn may hold ``attacker_reasoning`` tokens and the note grown by
    ``note_growth``; the assessor's may hold ``assessor`` tokens. Start-up checks that every row's
    plan fits into ``data.max_response_length``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    attacker_reasoning: int = Field(default=512, ge=1, description="Tokens for the attacker's reasoning and tags.")
    note_growth: float = Field(default=1.25, ge=1.0, description="Longest rewritten note, as a multiple of the seed's.")
    assessor: int = Field(default=1024, ge=1, description="Tokens of the assessor's whole turn.")

    def attacker(self, note_tokens: int) -> int:
        """Most tokens of an attacker's turn on a note of ``note_tokens`` tokens."""
        return self.attacker_reasoning + self.rewritten_note(note_tokens)

    def rewritten_note(self, note_tokens: int) -> int:
        """Most tokens that a rewritten note is expected to have."""
        return int(note_tokens * self.note_growth) + 16  # 16: short notes grow by more than a share


class AnchorSettings(BaseModel):
    """KL to the reference policy on each role's tokens, those of an untrained role included.

    Both roles share weights: an untrained assessor's parse rate fell from 1.00 to 0.88 within 80
    attacker-only steps without an anchor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    attacker: float = Field(default=0.0, ge=0.0, description="Coefficient on the attacker's tokens.")
    assessor: float = Field(default=0.0, ge=0.0, description="Coefficient on the assessor's tokens.")

    @property
    def per_role(self) -> dict[Role, float]:
        """The coefficients that are not 0."""
        return {role: value for role in Role if (value := getattr(self, role.value))}


class SelfPlayConfig(BaseModel):
    """Everything the game needs to know that verl has no key for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(default="medserl", description="Prompt profile: a folder of prompts/, or a path.")
    context: Literal["isolated", "shared"] = Field(
        default="isolated",
        description="isolated: each role has its own context. shared: one conversation, which lets the "
        "assessor read the attacker's turn; for comparison only.",
    )
    train: Literal["both", "attacker", "assessor"] = Field(
        default="both", description="Whose tokens the loss sees. The other role still plays."
    )
    reward: str = Field(default="medserl", description="Reward scheme, or package.module:function of a user's own.")
    anchor: AnchorSettings = Field(
        default=AnchorSettings(), description="KL to the reference policy per role; needs use_kl_loss of the actor."
    )
    judge: str = Field(
        default="labels",
        description="Who decides whether a rewritten note holds an error: labels (reads no note), http, llm, "
        "oracle (toy clinic), or package.module:Class.",
    )
    judge_server: JudgeServer = Field(default=JudgeServer(), description="How http and llm reach their server.")
    judge_report: str | None = Field(
        default=None, description="Report of 'medserl judge calibrate' on this run's judge; null: it was not measured."
    )
    judge_min_sensitivity: float = Field(
        default=0.75,
        ge=0,
        le=1,
        description="Least sensitivity of the report; 0 takes any, of any judge. At 0.75 half of what a correct catch "
        "should earn is left (2 * 0.75 - 1); a judge just below it, at 0.73, spoilt earlier runs.",
    )
    correct_judge: bool = Field(
        default=False,
        description="Correct rewards for the error rates in the report, so that they are right on average.",
    )
    vanilla_attacker: VanillaAttacker = Field(
        default=VanillaAttacker.SKIP,
        description="skip: vanilla games begin with the assessor. copy: the attacker first copies the note, "
        "as in the OpenRLHF system.",
    )
    mix: dict[Category, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(
        default=None,
        description="Share of each category in an epoch of training; null plays every row of the file once. "
        "Categories left out are not played.",
    )
    budget: TokenBudget = Field(default=TokenBudget(), description="Tokens per turn.")
    turn_timeout_s: float | None = Field(
        default=3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that one generated turn may take, queueing included; a longer one makes the game void. "
        "null: no limit.",
    )
    edits: EditLimits = Field(default=EditLimits(), description="How much an attack may change.")
    credit: CreditSettings = Field(default=CreditSettings(), description="Advantages of the roles.")
    opponent: OpponentConfig = Field(default=OpponentConfig(), description="Who plays the role that is not trained.")
    certify: Literal["stop", "warn", "only"] = Field(
        default="stop",
        description="What follows if isolation, credit or loss do not hold where they are measured at the start. stop: "
        "the run ends. warn: it goes on, for comparisons. only: nothing is trained in any case.",
    )
    records: str = Field(default="runs/selfplay", description="Folder that gets games.jsonl and metrics.jsonl.")
    alarms: Alarms = Field(default=Alarms(), description="When a number of a step becomes a health alarm.")
    on_alarm: Literal["warn", "stop"] = Field(
        default="warn", description="warn: print and log alarms. stop: also end the run, after the step is saved."
    )
    wandb_games: int = Field(
        default=8, ge=0, description="Games per step in W&B's table, if trainer.logger has wandb; 0 for no table."
    )

    def trains(self, role: Role) -> bool:
        """Whether the loss sees the tokens of ``role``."""
        return self.train in ("both", role.value)

    def plays(self, role: Role) -> bool:
        """Whether the live policy plays ``role``; an opponent does otherwise."""
        return self.opponent.kind == "live" or self.trains(role)

    @classmethod
    def from_run(cls, config: DictConfig) -> SelfPlayConfig:
        """Read and validate the ``selfplay`` node of a whole run's config.

        Raises:
            ConfigError: Names each wrong key and, where it is a slip, the nearest right one.
        """
        node = OmegaConf.select(config, "selfplay")
        if node is None:
            raise ConfigError(
                "the run has no 'selfplay' node. Start from a recipe, e.g. +recipes=quickstart, "
                "or add +selfplay.context=isolated for the defaults."
            )
        values = OmegaConf.to_container(node, resolve=True)
        try:
            parsed = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None
        for key, check, name in (
            ("selfplay.reward", load_scheme, parsed.reward),
            ("selfplay.judge", judge_class, parsed.judge),
            ("selfplay.profile", load_profile, parsed.profile),
        ):
            try:
                check(name)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from None
        return parsed


def selfplay_config(named: dict[str, str], settings: list[str]) -> SelfPlayConfig:
    """The ``selfplay`` node of a command that is no run, from its options and its ``--set KEY=VALUE``.

    Raises:
        ValueError: Names what is wrong.
    """
    for setting in settings:
        if "=" not in setting:
            raise ValueError(f"--set {setting}: expected key=value")
    node = OmegaConf.merge(named, OmegaConf.from_dotlist(settings))
    return SelfPlayConfig.from_run(OmegaConf.create({"selfplay": node}))


def _explain(error: Any) -> str:
    key = ".".join(["selfplay", *map(str, error["loc"])])
    if error["type"] != "extra_forbidden":
        return f"{key}={error['input']!r}: {error['msg']}"
    model: Any = SelfPlayConfig
    for part in error["loc"][:-1]:
        model = get_args(model)[0] if isinstance(part, int) else model.model_fields[part].annotation
    return (
        f"{key} is not a key of this node{did_you_mean(str(error['loc'][-1]), model.model_fields)}; "
        f"it has {', '.join(sorted(model.model_fields))}"
    )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The one of ``words`` that is likest to ``word``, as a question for the end of a message; empty if none is."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
