"""Health alarms: a run watches its own metrics and says when something is wrong, and when it is over.

Here are the numbers that are alarms in any game, from when on, and what to look at first. A game adds its own:
thresholds in a subclass of :class:`Alarms`, rules in ``Interaction.rules``. The trainer feeds the metrics of every step
to :class:`HealthMonitor`. docs/metrics.md lists all alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

METRIC_PREFIX = "selfplay/alarm/"


Share = Annotated[float | None, Field(gt=0.0, lt=1.0)]
Factor = Annotated[float | None, Field(gt=1.0)]


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
    no_signal: Share = Field(
        default=0.8,
        description="Share of prompt groups whose rewards are all equal. They give group estimators no gradient; "
        "up to half of them is usual in the quickstart.",
    )
    voids: Share = Field(default=0.15, description="Share of games without a result. They cost time and bias the rest.")
    length_factor: Factor = Field(
        default=2.0,
        description="Mean tokens of a role's turn against the run's first steps, this many times more or fewer.",
    )
    probs_diff: Share = Field(
        default=0.05,
        description="training/rollout_probs_diff_mean: the mean, because the largest difference over half a million "
        "tokens in bf16 says nothing. One implementation measures 1e-6 in fp32 and 5e-4 in bf16.",
    )
    context_leak: Factor = Field(
        default=5.0,
        description="How many times further rollout and actor are apart in later contexts than in the first. 1 in the "
        "quickstart, in fp32 and bf16; 200 and more where the contexts leak.",
    )
    lost_games: Annotated[float | None, Field(ge=0.0, lt=1.0)] = Field(
        default=0.02,
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
    above: bool = True
    limit: Callable[[float, float], float] = lambda setting, reference: setting
    compares: bool = False
    at_once: bool = False


def common_rules(roles: Sequence[str]) -> tuple[Rule, ...]:
    """The alarms of any game with these roles."""
    return (*(rule for role in roles for rule in _rules_of(role)), *_RULES)


def _rules_of(role: str) -> Iterator[Rule]:
    own = f"selfplay/{role}/"
    yield Rule(
        name=f"{role}_no_signal",
        metric=own + "no_signal_rate",
        setting="no_signal",
        advice="Raise rollout.n or the temperature, or give the rows of this role more variety.",
        games=own + "groups",
    )
    longer = Rule(
        name=f"{role}_longer",
        metric=own + "tokens",
        setting="length_factor",
        advice=f"Look at truncation_rate and at what the {role} pads its turns with.",
        games=own + "turns",
        limit=lambda factor, reference: reference * factor,
        compares=True,
    )
    yield longer
    yield replace(
        longer,
        name=f"{role}_shorter",
        advice=f"Read a few games: a {role} that stops reasoning often collapses next.",
        above=False,
        limit=lambda factor, reference: reference / factor,
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


@dataclass(frozen=True)
class Alarm:
    """An alarm that fires in a step: the number, and the limit it is beyond."""

    rule: Rule
    value: float
    limit: float
    steps: int

    def __str__(self) -> str:
        side = "above" if self.rule.above else "below"
        return (
            f"{self.rule.name}: {self.rule.metric} is {self.value:.3g}, {side} {self.limit:.3g} "
            f"(selfplay.alarms.{self.rule.setting}), steps in a row: {self.steps}. {self.rule.advice}"
        )


@dataclass(frozen=True)
class HealthReport:
    """The alarms that fire in a step, and a line for each alarm that begins or ends with it."""

    firing: tuple[Alarm, ...]
    lines: tuple[str, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """1.0 for each alarm that fires; the others are left out."""
        return {METRIC_PREFIX + alarm.rule.name: 1.0 for alarm in self.firing}


class HealthError(RuntimeError):
    """A run with ``selfplay.on_alarm=stop`` has an alarm."""


def stop_message(alarms: tuple[Alarm, ...], step: int) -> str:
    """Why the run stopped after ``step``, and how to go on."""
    settings = ", ".join(dict.fromkeys(f"selfplay.alarms.{a.rule.setting}" for a in alarms))
    return (
        f"stopped after step {step} (selfplay.on_alarm=stop). {' '.join(map(str, alarms))} To go on from the last "
        f"checkpoint, start the same command with selfplay.on_alarm=warn, or change {settings} (null switches a "
        "threshold off)."
    )


class _State(BaseModel):
    """By alarm: steps in a row beyond its limit and, of those that are on, within it. By metric: its first values."""

    model_config = ConfigDict(extra="forbid")

    streaks: dict[str, int] = {}
    calm: dict[str, int] = {}
    references: dict[str, list[float]] = {}


class HealthMonitor:
    """Watches the metrics of a run, step by step, by the ``selfplay.alarms`` node and the game's rules.

    An alarm begins after ``patience`` steps in a row beyond its limit (some at once) and is over after as many within
    it; in between it fires in the steps that are beyond. A number that a step lacks, or that rests on
    too few games, changes nothing.
    """

    def __init__(self, thresholds: Alarms, rules: Sequence[Rule]) -> None:
        self._thresholds = thresholds
        self._rules = rules
        self._state = _State()

    def observe(self, metrics: Mapping[str, float]) -> HealthReport:
        """Take in the metrics of one step."""
        firing: list[Alarm] = []
        lines: list[str] = []
        learning = self._learn(metrics)
        for rule in self._rules:
            if not self._can_tell(rule, metrics) or (rule.compares and rule.metric in learning):
                continue
            value = metrics[rule.metric]
            reference = fmean(self._state.references[rule.metric]) if rule.compares else math.nan
            limit = rule.limit(getattr(self._thresholds, rule.setting), reference)
            streak = self._state.streaks.pop(rule.name, 0)
            on = rule.name in self._state.calm
            if value > limit if rule.above else value < limit:
                self._state.streaks[rule.name] = streak + 1
                if on or rule.at_once or streak + 1 >= self._thresholds.patience:
                    firing.append(Alarm(rule, value, limit, streak + 1))
                    self._state.calm[rule.name] = 0
                    if not on:
                        lines.append(str(firing[-1]))
            elif on:
                self._state.calm[rule.name] += 1
                if self._state.calm[rule.name] >= self._thresholds.patience:
                    del self._state.calm[rule.name]
                    lines.append(f"{rule.name} is over: {rule.metric} is {value:.3g}")
        return HealthReport(tuple(firing), tuple(lines))

    def _can_tell(self, rule: Rule, metrics: Mapping[str, float]) -> bool:
        games = math.inf if rule.games is None else metrics.get(rule.games, 0.0)
        known = math.isfinite(metrics.get(rule.metric, math.nan)) and games >= self._thresholds.min_games
        return known and getattr(self._thresholds, rule.setting) is not None

    def _learn(self, metrics: Mapping[str, float]) -> set[str]:
        """The numbers that this step still adds to the reference, which several rules may share."""
        compared = {rule.metric for rule in self._rules if rule.compares and self._can_tell(rule, metrics)}
        references = self._state.references
        learning = {name for name in compared if len(references.get(name, ())) < self._thresholds.reference_steps}
        for name in learning:
            references.setdefault(name, []).append(metrics[name])
        return learning

    def to_dict(self) -> dict[str, Any]:
        """The state between two steps for the checkpoint, JSON-able."""
        return self._state.model_dump()

    def load_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as :meth:`to_dict` left it; ValueError if this is not such a state."""
        self._state = _State.model_validate(dict(state))
