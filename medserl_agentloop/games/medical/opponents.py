"""Games against an opponent that is not the live policy: who won, and their metrics.

Called by the checkpoint pool and by the trainer, from records alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from medserl_agentloop.games.medical.records import GameRecord, Outcome
from medserl_agentloop.games.medical.types import Role


def trained_role_won(record: GameRecord) -> bool | None:
    """Whether the trained role beat its opponent; None for games that decide nothing between them.

    These are games against the live policy, games in which the opponent took no turn, void ones and
    invalid attacks. An unreadable assessment is a win for neither.
    """
    if record.opponent is None or record.outcome in (Outcome.VOID, Outcome.INVALID_ATTACK):
        return None
    if record.attack is None:
        return None  # one player only
    assessor_won = record.outcome.is_right
    return assessor_won is not None and assessor_won is (record.opponent.role is Role.ATTACKER)


def opponent_metrics(records: Iterable[GameRecord]) -> dict[str, float]:
    """Metrics ``selfplay/opponent/…`` of a step; empty where the live policy plays both roles."""
    games = [record for record in records if record.opponent is not None]
    if not games:
        return {}
    failed = [g for g in games if g.opponent is not None and g.opponent.version is None]
    metrics = {"selfplay/opponent/games": float(len(games)), "selfplay/opponent/failed": float(len(failed))}
    won = [w for w in map(trained_role_won, games) if w is not None]
    if won:
        metrics["selfplay/opponent/trained_role_win_rate"] = sum(won) / len(won)
    return metrics
