"""Metrics of a training step of any game, and alarms on them.

docs/metrics.csv explains every name, docs/metrics.md lists all alarms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.records import GameRecord

if TYPE_CHECKING:
    import torch


_VOID_CLASSES = {
    "generation failed": "failed",
    "no room": "no_room",
    "generation aborted": "aborted",
    "generation timed out": "timed_out",
    "log-probs for": "no_log_probs",
    "is no number": "no_number",
}
"""Class of a void game by words in its reason, which is free text."""

_SAME_REWARD = 1e-6  # rewards closer than this are equal: a sum of components in floating point


def game_metrics(
    records: Sequence[GameRecord],
    roles: Sequence[str],
    void_classes: Mapping[str, str] = {},
    repeated_roles: Collection[str] = (),
) -> dict[str, float]:
    """Voids and rewards; metrics without games are omitted. ``void_classes`` adds classes by words
    of a reason; turns of ``repeated_roles`` in one game form a group, as in ``core.advantages``.
    """
    metrics = {
        "selfplay/games": float(len(records)),
        "selfplay/void_rate": share(g.is_void for g in records),
        **shares_by_name("selfplay/void/", [void_class(g, void_classes) for g in records]),
    }
    for role in roles:
        rewarded = [g for g in records if not g.is_void and role in g.rewards]
        metrics |= _reward_metrics(role, rewarded, role in repeated_roles)
    return finite(metrics)


def void_class(record: GameRecord, more: Mapping[str, str] = {}) -> list[str]:
    """The class of a void game as a one-item list; empty for other games."""
    if not record.is_void:
        return []
    reason, classes = record.void or "", {**_VOID_CLASSES, **more}
    found = {reason.find(text): name for text, name in classes.items() if text in reason}
    # A server's words may follow the game's own, so the first match counts.
    return [found[min(found)] if found else "other"]


def _reward_metrics(role: str, games: Sequence[GameRecord], repeated: bool) -> dict[str, float]:
    """One role's rewards in games that reward it, and its groups without signal."""
    if not games:
        return {}
    prefix = f"selfplay/{role}/"
    totals = [sum(g.rewards[role].values()) for g in games]
    metrics = {prefix + "reward": mean(totals), prefix + "reward_std": float(np.std(totals))}
    for name in sorted({name for game in games for name in game.rewards[role]}):
        values = [game.rewards[role].get(name, 0.0) for game in games]
        metrics[prefix + f"reward_{name}"] = mean(values)  # so that they add up to the reward
    groups: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for number, (game, total) in enumerate(zip(games, totals, strict=True)):
        if game.uid and repeated:
            groups[game.uid, number] += game.turn_rewards_of(role)
        elif game.uid:
            groups[game.uid, None].append(total)
    comparable = [group for group in groups.values() if len(group) > 1]
    equal = [max(group) - min(group) < _SAME_REWARD for group in comparable]
    return metrics | {
        prefix + "groups": float(len(comparable)) or math.nan,
        prefix + "small_group_rate": share(len(group) == 1 for group in groups.values()),
        prefix + "no_signal_rate": share(equal),
    }


def lost_games_metrics(expected: int, played: int) -> dict[str, float]:
    """Games that a step requested and lost because their worker crashed."""
    lost = max(0, expected - played)
    metrics = {"selfplay/lost_rate": lost / expected}
    return {**metrics, "selfplay/lost_games": float(lost)} if lost else metrics


def turn_metrics(
    records: Sequence[GameRecord], role_ids: Sequence[torch.Tensor], roles: Sequence[str]
) -> dict[str, float]:
    """Number and length of the policy's turns in games that count; ``role_ids``: (T,)."""
    metrics = {}
    counted = [ids for record, ids in zip(records, role_ids, strict=True) if not record.is_void]
    for number, role in enumerate(roles, start=1):
        own = [(ids == number).int() for ids in counted]
        turns = sum(int((ids.diff(prepend=ids.new_zeros(1)) > 0).sum()) for ids in own)
        if turns:
            metrics[f"selfplay/{role}/turns"] = float(turns)
            metrics[f"selfplay/{role}/tokens"] = sum(int(ids.sum()) for ids in own) / turns
    return metrics


def role_token_metrics(
    columns: Mapping[str, torch.Tensor],
    response_mask: torch.Tensor,
    role_ids: torch.Tensor,
    roles: Sequence[str],
    per_role: bool = True,
) -> dict[str, float]:
    """Mean and spread of (B, T) columns over a role's trained tokens, their number and share of the
    signal, and the largest share of one game. The signal is the mean of a role's absolute
    advantages, or their sum without a ``per_role`` loss.
    """
    metrics: dict[str, float] = {}
    tokens = [(role_ids == number) & (response_mask > 0) for number in range(1, len(roles) + 1)]
    sizes = [columns["advantage"][own].abs() for own in tokens]
    signals = [(size.mean() if per_role and len(size) else size.sum()).item() for size in sizes]
    for role, own, signal in zip(roles, tokens, signals, strict=True):
        of = f"selfplay/{role}/"
        metrics[of + "trained_tokens"] = float(own.sum())
        if any(signals):
            metrics[of + "signal_share"] = signal / sum(signals)
        if signal:
            games = (columns["advantage"].abs() * own).sum(1)
            metrics[of + "largest_game_share"] = (games.max() / games.sum()).item()
        for name, column in columns.items() if own.any() else ():
            metrics[f"{of}{name}_mean"] = column[own].mean().item()
            metrics[f"{of}{name}_std"] = column[own].std(unbiased=False).item()
    return metrics


def opponent_metrics(records: Iterable[GameRecord], won: Iterable[bool | None]) -> dict[str, float]:
    """Metrics of the opponent, if any; ``won`` says whether the trained role won, or None."""
    games = [record for record in records if record.opponent is not None]
    if not games:
        return {}
    failed = [g for g in games if g.opponent is not None and g.opponent.version is None]
    metrics = {
        "selfplay/opponent/games": float(len(games)),
        "selfplay/opponent/failed": float(len(failed)),
    }
    decided = [result for result in won if result is not None]
    return finite({**metrics, "selfplay/opponent/trained_role_win_rate": share(decided)})


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def shares_by_name(prefix: str, names: Sequence[list[str]]) -> dict[str, float]:
    every = sorted({name for own in names for name in own})
    return {prefix + name: share(name in own for own in names) for name in every}


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if empty."""
    return sum(values) / len(values) if values else math.nan


def share(flags: Iterable[bool]) -> float:
    """The share of true flags; NaN if empty."""
    return mean([float(f) for f in flags])


def effective_number(counts: Sequence[int]) -> float:
    """Number of equally frequent kinds with the same entropy; NaN without counts."""
    from scipy.stats import entropy  # not at the top: it costs every command half a second

    return float(np.exp(entropy(counts))) if counts else math.nan


def storable(cell: Any) -> Any:
    """Text with lone surrogates spelled out: models may write them, and UTF-8 cannot."""
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


# -- alarms ----------------------------------------------------------------------------------------

METRIC_PREFIX = "selfplay/alarm/"
MIN_GAMES = 8  # or prompt groups, before an alarm fires


class Alarms(BaseModel):
    """When a metric becomes an alarm."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    patience: int = Field(
        default=3,
        ge=1,
        description="Steps in a row beyond the limit before an alarm fires: one may be chance.",
    )
    limits: dict[str, float | None] = Field(
        default={},
        description="Limit by alarm, e.g. {void_games: 0.3}, instead of the default; null switches "
        "the alarm off.",
    )


@dataclass(frozen=True)
class Rule:
    """One alarm: ``metric`` is beyond ``limit``."""

    name: str
    metric: str
    limit: float
    advice: str  # what to look at first
    games: str | None = "selfplay/games"  # metric that counts what the number rests on, if anything
    above: bool = True  # whether it fires above its limit, not below
    of_first: bool = False  # whether the limit is a share of the number's first value in the run
    at_once: bool = False  # after one step, whatever ``patience`` is: it cannot be chance


_RULES_OF_ROLES = (
    # Groups of equal rewards give group estimators no gradient; up to half of them is usual in the
    # quickstart.
    Rule(
        "no_signal",
        "no_signal_rate",
        0.8,
        "Raise rollout.n or the temperature, or give the rows of this role more variety.",
        "groups",
    ),
    Rule(
        "format",
        "format_violation_rate",
        0.95,
        "Read responses of this role and see violation/<kind>: is a token at their end missing "
        "from eos_token_id in generation_config.json, or the format unknown to the model?",
        "turns",
        at_once=True,
    ),
    Rule(
        "one_game",
        "largest_game_share",
        0.5,
        "One game is most of this role's signal: read it. role_grpo gives games similar weights.",
        "groups",
    ),
)
"""Rules of each role: ``<role>_<name>``, and metrics ``selfplay/<role>/...``."""

_RULES = (
    Rule(
        "void_games",
        "selfplay/void_rate",
        0.15,
        "See selfplay/void/<class>: no_room means that the planned lengths are too tight, "
        "timed_out that the engine is stuck or overloaded.",
    ),
    Rule(
        "rollout_mismatch",
        # The mean: the largest difference over half a million tokens in bf16 says nothing. One
        # implementation measures 1e-6 in fp32 and 5e-4 in bf16.
        "training/rollout_probs_diff_mean",
        0.05,
        "Rollout and actor see different contexts or weights: train no more until you know why.",
        games=None,
    ),
    Rule(
        "context_leak",
        # 1 in the quickstart, in fp32 and bf16; 200 and more where the contexts leak.
        "selfplay/context_leak",
        5.0,
        "A role is trained on a context that holds the other's turn. Start the run with "
        "selfplay.certify=only.",
        games="selfplay/context_leak_games",
        at_once=True,
    ),
    Rule(
        "no_update",
        "selfplay/no_update",
        0.5,
        "No weight moved: the gradient is zero or not finite (verl then skips the update), or the "
        "learning rate is 0. Look at actor/grad_norm, actor/lr, and the engine's log-probs.",
        games=None,
        at_once=True,
    ),
    Rule(
        "lost_metrics",
        "selfplay/lost_metrics",
        0.5,
        "A verl metric that the first step had is missing or not finite; the log names it.",
        games=None,
        at_once=True,
    ),
    Rule(
        "lost_games",
        "selfplay/lost_rate",
        0.02,
        "Search the log for 'Error in _run_prompt': it says why the worker crashed.",
    ),
)


def common_rules(roles: Sequence[str]) -> tuple[Rule, ...]:
    """The alarms of any game with these roles."""

    def of(role: str, rule: Rule) -> Rule:
        metric, games = (f"selfplay/{role}/{name}" for name in (rule.metric, rule.games))
        return replace(rule, name=f"{role}_{rule.name}", metric=metric, games=games)

    return (*(of(role, rule) for role in roles for rule in _RULES_OF_ROLES), *_RULES)


@dataclass(frozen=True)
class _Alarm:
    """An alarm that fires in a step: its value, its limit, and how many steps in a row."""

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


class HealthReport(NamedTuple):
    """The alarms that fire in a step, and a line for each that begins or ends."""

    firing: list[_Alarm]
    lines: list[str]

    @property
    def metrics(self) -> dict[str, float]:
        """1.0 for each alarm that fires."""
        return {METRIC_PREFIX + alarm.rule.name: 1.0 for alarm in self.firing}


class HealthError(RuntimeError):
    """A run with ``selfplay.on_alarm=stop`` has an alarm."""


def stop_message(alarms: Sequence[_Alarm], step: int) -> str:
    keys = ", ".join(f"selfplay.alarms.limits.{alarm.rule.name}" for alarm in alarms)
    return (
        f"stopped after step {step} (selfplay.on_alarm=stop). {' '.join(map(str, alarms))} To "
        "continue from the last checkpoint, start the same command with selfplay.on_alarm=warn, or "
        f"change {keys} (null switches an alarm off)."
    )


class HealthMonitor:
    """Watches the metrics of a run, step by step.

    An alarm fires from the ``patience``-th step in a row beyond its limit (some at once) until the
    number recovers. A number that is missing, or based on too few games, changes nothing.
    """

    def __init__(self, config: Alarms, rules: Sequence[Rule]) -> None:
        self._config, self._rules = config, rules
        # Steps in a row in which the number of an alarm was beyond its limit; from the first step
        # on that has one, the ``first`` value where a limit is a share of it.
        self.state: dict[str, dict[str, float]] = {"streaks": {}}

    def observe(self, metrics: Mapping[str, float]) -> HealthReport:
        firing, lines = list[_Alarm](), list[str]()
        streaks = self.state["streaks"]
        for rule in self._rules:
            value = metrics.get(rule.metric, math.nan)
            limit = self._config.limits.get(rule.name, rule.limit)
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
        return HealthReport(firing, lines)
