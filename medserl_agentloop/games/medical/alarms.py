"""Which numbers of a step are health alarms, from when on, and what to look at first.

To add an alarm, add its threshold to :class:`Alarms` and a line to ``RULES``; docs/metrics.md lists
them all. ``core.health`` applies the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.games.medical.types import Role


class Alarms(BaseModel):
    """When a number becomes an alarm. ``null`` switches a threshold off."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_games: int = Field(
        default=8, ge=1, description="Games (or prompt groups) that a number must rest on; fewer say nothing."
    )
    patience: int = Field(
        default=3,
        ge=1,
        description="Steps in a row beyond a threshold that begin an alarm, and within it that end it: one may be "
        "chance.",
    )
    reference_steps: int = Field(
        default=5, ge=1, description="First steps of the run that lengths and self-similarity are compared with."
    )
    win_rate: float | None = Field(
        default=0.95,
        gt=0.5,
        lt=1.0,
        description="Share of notes with an error that one role wins. Above it the loser rarely sees the reward "
        "it should learn from.",
    )
    no_signal: float | None = Field(
        default=0.8,
        gt=0.0,
        lt=1.0,
        description="Share of prompt groups whose rewards are all equal. They give group estimators no gradient; "
        "up to half of them is usual in the quickstart.",
    )
    invalid_attacks: float | None = Field(
        default=0.5,
        gt=0.0,
        lt=1.0,
        description="Share of attacks that do not count. Above one half most attackers' games end unassessed.",
    )
    voids: float | None = Field(
        default=0.15, gt=0.0, lt=1.0, description="Share of games without a result. They cost time and bias the rest."
    )
    judge_answers: float | None = Field(
        default=0.9, gt=0.0, lt=1.0, description="Share of rewritten notes that the judge must answer."
    )
    no_error: float | None = Field(
        default=0.15,
        gt=0.0,
        lt=1.0,
        description="Share of injected errors in which the judge sees no error: the attacker edits harmlessly, or "
        "the judge misses errors and settles games wrongly.",
    )
    self_similarity: float | None = Field(
        default=0.7,
        gt=0.0,
        lt=1.0,
        description="Mean likeness of what attacks insert into different notes. Unrelated error sentences measure "
        "0.33 to 0.42 in MEDEC, attacks 0.33 to 0.52 in the quickstart; one sentence written everywhere measures 1.",
    )
    self_similarity_rise: float | None = Field(
        default=0.2,
        gt=0.0,
        lt=1.0,
        description="Rise of that likeness over the run's first steps; no step of the quickstart's rises as far.",
    )
    length_factor: float | None = Field(
        default=2.0,
        gt=1.0,
        description="Mean tokens of a role's turn against the run's first steps, this many times more or fewer.",
    )
    probs_diff: float | None = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="training/rollout_probs_diff_mean: the mean, because the largest difference over half a million "
        "tokens in bf16 says nothing. One implementation measures 1e-6 in fp32 and 5e-4 in bf16.",
    )
    context_leak: float | None = Field(
        default=5.0,
        gt=1.0,
        description="How many times further rollout and actor are apart in later contexts than in the first. 1 in the "
        "quickstart, in fp32 and bf16; 200 and more where the contexts leak.",
    )
    lost_games: float | None = Field(
        default=0.02,
        ge=0.0,
        lt=1.0,
        description="Share of games whose worker crashed. It should be none; those that crash may be of one kind.",
    )


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Attributes:
        name: Name of the alarm, as in ``selfplay/alarm/<name>``.
        metric: The number it watches.
        setting: Field of :class:`Alarms` that holds its threshold.
        advice: What to look at first.
        games: Metric that counts what the number rests on; None where one token is enough.
        role: Whose number it is; None if it is nobody's.
        above: Whether it fires above its limit, not below.
        limit: The limit, from the setting and the reference.
        compares: Whether it needs the reference: the mean of the number over the run's first steps.
        at_once: Whether one step is enough, whatever ``patience`` is.
    """

    name: str
    metric: str
    setting: str
    advice: str
    games: str | None = "selfplay/games"
    role: Role | None = None
    above: bool = True
    limit: Callable[[float, float], float] = lambda setting, reference: setting
    compares: bool = False
    at_once: bool = False


_STALEMATE = "Train the loser alone for a while (selfplay.train), or check the games for a shortcut."


def _length_rules(role: Role) -> tuple[Rule, Rule]:
    own = f"selfplay/{role.value}/"
    longer = Rule(
        name=f"{role.value}_longer",
        metric=own + "tokens",
        setting="length_factor",
        advice=f"Look at truncation_rate and at what the {role.value} pads its turns with.",
        games=own + "turns",
        role=role,
        limit=lambda factor, reference: reference * factor,
        compares=True,
    )
    shorter = Rule(
        name=f"{role.value}_shorter",
        metric=own + "tokens",
        setting="length_factor",
        advice=f"Read a few games: a {role.value} that stops reasoning often collapses next.",
        games=own + "turns",
        role=role,
        above=False,
        limit=lambda factor, reference: reference / factor,
        compares=True,
    )
    return longer, shorter


def _no_signal_rule(role: Role) -> Rule:
    return Rule(
        name=f"{role.value}_no_signal",
        metric=f"selfplay/{role.value}/no_signal_rate",
        setting="no_signal",
        advice="Raise rollout.n or the temperature, or give the rows of this role more variety.",
        games=f"selfplay/{role.value}/groups",
        role=role,
    )


RULES = (
    Rule(
        name="attacker_wins",
        metric="selfplay/attacker/success_rate",
        setting="win_rate",
        advice=_STALEMATE,
        games="selfplay/attacker/decided",
        role=Role.ATTACKER,
    ),
    Rule(
        name="assessor_wins",
        metric="selfplay/attacker/success_rate",
        setting="win_rate",
        advice=_STALEMATE,
        games="selfplay/attacker/decided",
        role=Role.ASSESSOR,
        above=False,
        limit=lambda rate, reference: 1 - rate,
    ),
    _no_signal_rule(Role.ATTACKER),
    _no_signal_rule(Role.ASSESSOR),
    Rule(
        name="invalid_attacks",
        metric="selfplay/attacker/valid_rate",
        setting="invalid_attacks",
        advice="See selfplay/attacker/invalid/<reason>: truncated needs a larger selfplay.budget.attacker_reasoning, "
        "too_many_words a larger selfplay.edits, unparsed a model that knows the format.",
        games="selfplay/attacker/turns",
        role=Role.ATTACKER,
        above=False,
        limit=lambda share, reference: 1 - share,
    ),
    Rule(
        name="void_games",
        metric="selfplay/void_rate",
        setting="voids",
        advice="See selfplay/void/<class>: judge_failed is an outage, no_room a plan of lengths that is too tight, "
        "timed_out an engine that is stuck or overloaded.",
    ),
    Rule(
        name="judge_answers",
        metric="selfplay/judge/answer_rate",
        setting="judge_answers",
        advice="Check the judge's server and its timeout; the log names every failure.",
        games="selfplay/judge/asked",
        above=False,
    ),
    Rule(
        name="no_error_present",
        metric="selfplay/judge/no_error_rate",
        setting="no_error",
        advice="Read the judge's reasons in the games: the attacker edits harmlessly, or the judge misses errors.",
        games="selfplay/judge/injected",
        role=Role.ATTACKER,
    ),
    Rule(
        name="self_similar_attacks",
        metric="selfplay/attacker/self_similarity",
        setting="self_similarity",
        advice="The attacker repeats itself: raise the temperature or the entropy bonus, or stop training it.",
        games="selfplay/attacker/compared",
        role=Role.ATTACKER,
    ),
    Rule(
        name="attacks_growing_alike",
        metric="selfplay/attacker/self_similarity",
        setting="self_similarity_rise",
        advice="Diversity is going: raise the temperature, the KL or the entropy bonus before it is gone.",
        games="selfplay/attacker/compared",
        role=Role.ATTACKER,
        limit=lambda rise, reference: reference + rise,
        compares=True,
    ),
    *_length_rules(Role.ATTACKER),
    *_length_rules(Role.ASSESSOR),
    Rule(
        name="rollout_mismatch",
        metric="training/rollout_probs_diff_mean",
        setting="probs_diff",
        advice="Rollout and actor see different contexts or weights: train nothing more before you know why.",
        games=None,
    ),
    Rule(
        name="context_leak",
        metric="selfplay/context_leak",
        setting="context_leak",
        advice="The assessor is trained on a context that holds the attacker's turn. Run `medserl certify`.",
        games="selfplay/context_leak_games",
        at_once=True,
    ),
    Rule(
        name="lost_games",
        metric="selfplay/lost_rate",
        setting="lost_games",
        advice="Search the log for 'Error in _run_prompt': it says why the worker crashed.",
    ),
)
