"""Health alarms: a run watches its own metrics and says when something is wrong.

An alarm is a row of a table: a number, its limit, and what to look at first. Here are the rows of
any game; a game adds its own in ``GameView.rules``. docs/metrics.md lists all alarms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

METRIC_PREFIX = "selfplay/alarm/"
MIN_GAMES = 8  # or prompt groups, before an alarm fires


class Alarms(BaseModel):
    """Settings that decide when a number becomes an alarm."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    patience: int = Field(
        default=3,
        ge=1,
        description="Steps in a row beyond its limit that make a number an alarm: one may be "
        "chance.",
    )
    limits: dict[str, float | None] = Field(
        default={},
        description="Limit by alarm, e.g. {void_games: 0.3}, in place of its own; null switches "
        "the alarm off.",
    )


@dataclass(frozen=True)
class Rule:
    """One alarm: ``metric`` is beyond ``limit``; ``selfplay.alarms.limits`` may give another
    limit."""

    name: str
    metric: str
    limit: float
    advice: str  # what to look at first
    # metric that counts what the number rests on; None: one token is enough
    games: str | None = "selfplay/games"
    above: bool = True  # whether it fires above its limit, not below
    of_first: bool = False  # whether the limit is a share of the number's first value in the run
    # whether one step is enough, whatever ``patience`` is: no chance explains the number
    at_once: bool = False


def common_rules(roles: Sequence[str]) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for role in roles:
        of = f"selfplay/{role}/"
        # Groups of equal rewards give group estimators no gradient; up to half of them is usual in
        # the quickstart.
        advice = "Raise rollout.n or the temperature, or give the rows of this role more variety."
        rules.append(Rule(f"{role}_no_signal", f"{of}no_signal_rate", 0.8, advice, f"{of}groups"))
        advice = (
            f"See {of}violation/<kind>, and read responses of this role: a special token at their "
            "end is missing from "
            "eos_token_id in the model's generation_config.json; other text is a format that the "
            "model does not know."
        )
        rules.append(
            Rule(
                f"{role}_format",
                f"{of}format_violation_rate",
                0.95,
                advice,
                f"{of}turns",
                at_once=True,
            )
        )
    return (*rules, *_RULES)


_RULES = (
    Rule(
        name="void_games",
        metric="selfplay/void_rate",
        limit=0.15,
        advice="See selfplay/void/<class>: no_room is a plan of lengths that is too tight, "
        "timed_out an engine that is "
        "stuck or overloaded.",
    ),
    Rule(
        name="rollout_mismatch",
        # The mean: the largest difference over half a million tokens in bf16 says nothing. One
        # implementation measures 1e-6 in fp32 and 5e-4 in bf16.
        metric="training/rollout_probs_diff_mean",
        limit=0.05,
        advice="Rollout and actor see different contexts or weights: train nothing more before you "
        "know why.",
        games=None,
    ),
    Rule(
        name="context_leak",
        # 1 in the quickstart, in fp32 and bf16; 200 and more where the contexts leak.
        metric="selfplay/context_leak",
        limit=5.0,
        advice="A role is trained on a context that holds the other's turn. Start the run with "
        "selfplay.certify=only.",
        games="selfplay/context_leak_games",
        at_once=True,
    ),
    Rule(
        name="no_update",
        metric="selfplay/no_update",
        limit=0.5,
        advice="No weight moved in this step: the gradient is zero or not finite (verl then skips "
        "the update), or the learning rate is 0. Look at actor/grad_norm and actor/lr, and for "
        "log-probs of the engine that are not finite.",
        games=None,
        at_once=True,
    ),
    Rule(
        name="lost_metrics",
        metric="selfplay/lost_metrics",
        limit=0.5,
        advice="A number of verl's that the first step had is missing or not finite; the log names "
        "it.",
        games=None,
        at_once=True,
    ),
    Rule(
        name="lost_games",
        metric="selfplay/lost_rate",
        limit=0.02,
        advice="Search the log for 'Error in _run_prompt': it says why the worker crashed.",
    ),
)


@dataclass(frozen=True)
class _Alarm:
    """An alarm that fires in a step: its number, its limit, and the count of steps in a row."""

    rule: Rule
    value: float
    limit: float
    steps: int

    def __str__(self) -> str:
        side = "above" if self.rule.above else "below"
        side += " its share of the first value," * self.rule.of_first
        return (
            f"{self.rule.name}: {self.rule.metric} is {self.value:.3g}, {side} {self.limit:.3g} "
            f"(selfplay.alarms.limits.{self.rule.name}), steps in a row: {self.steps}. "
            f"{self.rule.advice}"
        )


@dataclass(frozen=True)
class HealthReport:
    """The alarms that fire in a step, and a line for each alarm that begins or ends with it."""

    firing: tuple[_Alarm, ...]
    lines: tuple[str, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """1.0 for each alarm that fires; the others are left out."""
        return {METRIC_PREFIX + alarm.rule.name: 1.0 for alarm in self.firing}


class HealthError(RuntimeError):
    """A run with ``selfplay.on_alarm=stop`` has an alarm."""


def stop_message(alarms: tuple[_Alarm, ...], step: int) -> str:
    keys = ", ".join(f"selfplay.alarms.limits.{alarm.rule.name}" for alarm in alarms)
    return (
        f"stopped after step {step} (selfplay.on_alarm=stop). {' '.join(map(str, alarms))} To go "
        "on from "
        "the last checkpoint, start the same command with selfplay.on_alarm=warn, or change "
        f"{keys} (null switches an "
        "alarm off)."
    )


class HealthMonitor:
    """Watches the metrics of a run, step by step.

    An alarm fires from its ``patience``-th step in a row beyond its limit (some at once) to the
    last of that row. A number that a step lacks, or that rests on too few games, changes nothing.
    """

    def __init__(self, config: Alarms, rules: Sequence[Rule]) -> None:
        self._config, self._rules = config, rules
        # Steps in a row in which the number of an alarm was beyond its limit; from the first step
        # on that has one, the ``first`` value where a limit is a share of it.
        self.state: dict[str, dict[str, float]] = {"streaks": {}}

    def observe(self, metrics: Mapping[str, float]) -> HealthReport:
        firing: list[_Alarm] = []
        lines: list[str] = []
        streaks = self.state["streaks"]
        for rule in self._rules:
            value, limit = (
                metrics.get(rule.metric, math.nan),
                self._config.limits.get(rule.name, rule.limit),
            )
            games = math.inf if rule.games is None else metrics.get(rule.games, 0.0)
            if limit is None or not math.isfinite(value) or games < MIN_GAMES:
                continue
            if rule.of_first:
                limit *= self.state.setdefault("first", {}).setdefault(rule.name, value)
            patience = 1 if rule.at_once else self._config.patience
            before = int(streaks.pop(rule.name, 0))
            if value > limit if rule.above else value < limit:
                streaks[rule.name] = before + 1
                if before + 1 >= patience:
                    firing.append(_Alarm(rule, value, limit, before + 1))
                if before + 1 == patience:
                    lines.append(str(firing[-1]))
            elif before >= patience:
                lines.append(f"{rule.name} is over: {rule.metric} is {value:.3g}")
        return HealthReport(tuple(firing), tuple(lines))
