"""Which numbers of a step are health alarms in any game, from when on, and what to look at first.

A game adds its own: thresholds in a subclass of :class:`Alarms`, rules in ``Interaction.rules``. ``core.health``
applies them; docs/metrics.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


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
    no_signal: float | None = Field(
        default=0.8,
        gt=0.0,
        lt=1.0,
        description="Share of prompt groups whose rewards are all equal. They give group estimators no gradient; "
        "up to half of them is usual in the quickstart.",
    )
    voids: float | None = Field(
        default=0.15, gt=0.0, lt=1.0, description="Share of games without a result. They cost time and bias the rest."
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
    role: str | None = None
    above: bool = True
    limit: Callable[[float, float], float] = lambda setting, reference: setting
    compares: bool = False
    at_once: bool = False


def common_rules(roles: Sequence[str]) -> tuple[Rule, ...]:
    """The alarms of any game with these roles.

    Those of lengths watch ``selfplay/<role>/tokens`` and ``turns``, which a game's own metrics have to give.
    """
    return (*(rule for role in roles for rule in _rules_of(role)), *_RULES)


def _rules_of(role: str) -> Iterator[Rule]:
    own = f"selfplay/{role}/"
    yield Rule(
        name=f"{role}_no_signal",
        metric=own + "no_signal_rate",
        setting="no_signal",
        advice="Raise rollout.n or the temperature, or give the rows of this role more variety.",
        games=own + "groups",
        role=role,
    )
    yield Rule(
        name=f"{role}_longer",
        metric=own + "tokens",
        setting="length_factor",
        advice=f"Look at truncation_rate and at what the {role} pads its turns with.",
        games=own + "turns",
        role=role,
        limit=lambda factor, reference: reference * factor,
        compares=True,
    )
    yield Rule(
        name=f"{role}_shorter",
        metric=own + "tokens",
        setting="length_factor",
        advice=f"Read a few games: a {role} that stops reasoning often collapses next.",
        games=own + "turns",
        role=role,
        above=False,
        limit=lambda factor, reference: reference / factor,
        compares=True,
    )


_RULES = (
    Rule(
        name="void_games",
        metric="selfplay/void_rate",
        setting="voids",
        advice="See selfplay/void/<class>: no_room is a plan of lengths that is too tight, timed_out an engine that is "
        "stuck or overloaded.",
    ),
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
        advice="A role is trained on a context that holds the other's turn. Run `medserl certify`.",
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
