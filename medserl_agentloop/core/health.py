"""Health: a run watches its own metrics and says when something is wrong, and when it is over.

:class:`HealthMonitor` is fed the metrics of every training step by the trainer; the alarms
come from the game.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.alarms import Alarms, Rule

METRIC_PREFIX = "selfplay/alarm/"


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
    """What one step gave.

    Attributes:
        firing: Alarms that fire in this step.
        lines: One line per alarm that begins or ends with this step.
    """

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


class _Reference(BaseModel):
    """Sum of a number over the run's first steps, and how many there were."""

    model_config = ConfigDict(extra="forbid")

    total: float = Field(default=0.0, allow_inf_nan=False)
    steps: int = Field(default=0, ge=0)


class _State(BaseModel):
    """By alarm: steps in a row beyond its limit and, of those that are on, within it. By metric: its reference."""

    model_config = ConfigDict(extra="forbid")

    streaks: dict[str, int] = {}
    calm: dict[str, int] = {}
    references: dict[str, _Reference] = {}


class HealthMonitor:
    """Watches the metrics of a run, step by step.

    An alarm begins after ``patience`` steps in a row beyond its limit (some at once) and is over after as many within
    it; in between it fires in the steps that are beyond. A number that a step lacks, or that rests on
    too few games, changes nothing.

    Args:
        thresholds: The ``selfplay.alarms`` node.
        rules: The game's alarms.
    """

    def __init__(self, thresholds: Alarms, rules: Sequence[Rule]) -> None:
        self._thresholds = thresholds
        self._rules = rules
        self._state = _State()

    def observe(self, metrics: Mapping[str, float]) -> HealthReport:
        """Take in the metrics of one step."""
        references = self._known_references()
        firing: list[Alarm] = []
        lines: list[str] = []
        learned: set[str] = set()
        for rule in self._rules:
            setting = getattr(self._thresholds, rule.setting)
            value = metrics.get(rule.metric, math.nan)
            if setting is None or not math.isfinite(value) or not self._rests_on_enough(rule, metrics):
                continue
            if rule.compares and rule.metric not in references:
                if rule.metric not in learned:  # several rules may share a number
                    learned.add(rule.metric)
                    reference = self._state.references.setdefault(rule.metric, _Reference())
                    reference.total += value
                    reference.steps += 1
                continue
            limit = rule.limit(setting, references.get(rule.metric, math.nan))
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

    def to_dict(self) -> dict[str, Any]:
        """The state between two steps, JSON-able, for the checkpoint."""
        return self._state.model_dump()

    def load_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as :meth:`to_dict` left it.

        Raises:
            ValueError: This is not such a state.
        """
        self._state = _State.model_validate(dict(state))

    def _known_references(self) -> dict[str, float]:
        return {
            metric: reference.total / reference.steps
            for metric, reference in self._state.references.items()
            if reference.steps >= self._thresholds.reference_steps
        }

    def _rests_on_enough(self, rule: Rule, metrics: Mapping[str, float]) -> bool:
        return rule.games is None or metrics.get(rule.games, 0.0) >= self._thresholds.min_games
