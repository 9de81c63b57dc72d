"""The report of a training step of any game: metrics from its records, a row on the screen, a table
in W&B.

docs/metrics.csv explains every name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
"""Class of a void game by what its reason contains. Reasons hold free text, metric names must not.
"""

_SAME_REWARD = 1e-6  # rewards closer than this are equal: a sum of components in floating point


def game_metrics(
    records: Sequence[GameRecord],
    roles: Sequence[str],
    void_classes: Mapping[str, str] = {},
    repeated_roles: Collection[str] = (),
) -> dict[str, float]:
    """Return voids and rewards; metrics without games are omitted. ``void_classes``: class by words
    of a reason.

    The turns of ``repeated_roles`` in one game are a group of their own, as in ``core.advantages``.
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
    """The class of a void game as a list of one; none for a game that counts."""
    if not record.is_void:
        return []
    # Words of a server may follow the game's own, so what is said first counts.
    reason = record.void or ""
    found = {
        reason.find(text): name
        for text, name in {**_VOID_CLASSES, **more}.items()
        if text in reason
    }
    return [found[min(found)] if found else "other"]


def _reward_metrics(role: str, games: Sequence[GameRecord], repeated: bool) -> dict[str, float]:
    """Rewards of one role in games that reward it: totals, components, and groups that teach
    nothing.
    """
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
    return metrics | {
        prefix + "groups": float(len(comparable)) or math.nan,
        prefix + "small_group_rate": share(len(group) == 1 for group in groups.values()),
        prefix + "no_signal_rate": share(
            max(group) - min(group) < _SAME_REWARD for group in comparable
        ),
    }


def lost_games_metrics(expected: int, played: int) -> dict[str, float]:
    """Games that a step asked for and did not get, because the worker that played them crashed."""
    lost = max(0, expected - played)
    return {"selfplay/lost_rate": lost / expected} | (
        {"selfplay/lost_games": float(lost)} if lost else {}
    )


def turn_metrics(
    records: Sequence[GameRecord], role_ids: Sequence[torch.Tensor], roles: Sequence[str]
) -> dict[str, float]:
    """Count the policy's turns as each role in games that count, and average their length;
    ``role_ids`` are (T,).
    """
    metrics = {}
    counted = [ids for record, ids in zip(records, role_ids, strict=True) if not record.is_void]
    for number, role in enumerate(roles, start=1):
        own = [(ids == number).int() for ids in counted]
        turns = sum(int((ids.diff(prepend=ids.new_zeros(1)) > 0).sum()) for ids in own)
        if turns:
            metrics[f"selfplay/{role}/turns"] = float(turns)
            metrics[f"selfplay/{role}/tokens"] = sum(int(ids.sum()) for ids in own) / turns
    return metrics


def opponent_metrics(records: Iterable[GameRecord], won: Iterable[bool | None]) -> dict[str, float]:
    """Metrics of the opponent, empty without one; ``won`` is whether the trained role won, None if
    undecided.
    """
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
    return {
        prefix + name: share(name in own for own in names)
        for name in sorted({n for own in names for n in own})
    }


def mean(values: Sequence[float]) -> float:
    """The mean; not a number where there is none."""
    return sum(values) / len(values) if values else math.nan


def share(flags: Iterable[bool]) -> float:
    """The share of flags that are true; not a number where there is none."""
    return mean([float(f) for f in flags])


def effective_number(counts: Sequence[int]) -> float:
    """As many kinds of equal counts have the same entropy; not a number without counts."""
    from scipy.stats import entropy  # not at the top: half a second of every command

    return float(np.exp(entropy(counts))) if counts else math.nan


def storable(cell: Any) -> Any:
    """Text with its lone surrogates spelt out, which a model may write and UTF-8 cannot hold."""
    return (
        cell.encode("utf-8", errors="backslashreplace").decode() if isinstance(cell, str) else cell
    )
