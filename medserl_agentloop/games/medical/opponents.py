"""Games against an opponent that is not the live policy: who won. From records alone."""

from __future__ import annotations

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
    return assessor_won is not None and assessor_won is (record.opponent.role == Role.ATTACKER)
