"""The reward ``optimism``: what a kind of error pays by how often it was shown and found."""

import pytest
from game.builders import finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.case import Label, Role
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import (
    Counts,
    Medserl,
    Optimism,
    reward_game,
)


def attack(kind: str | None, found: bool, **changes: object) -> MedicalRecord:
    """A valid attack of a kind, assessed once and rewarded."""
    judgement = Judgement(judge="oracle", label=Label.HARMFUL, error_type=kind)
    outcome = Outcome.CORRECT_DETECTION if found else Outcome.MISSED_ERROR
    record = finished(outcome, category="adversarial_benign", judgement=judgement, **changes)
    reward_game(record, Optimism())
    return record


def paid(record: MedicalRecord) -> float:
    return record.rewards[Role.ATTACKER]["optimism"]


@pytest.mark.parametrize(
    ("shown", "found", "right", "reward"),
    [
        (0, 0, False, 1.0),  # a new kind pays what a zero-sum game does
        (0, 0, True, -1.0),
        (200, 0, False, 0.5 - 2 * 0.5),  # L = 10 / (10 + 10)
        (200, 0, True, -0.5 - 2 * 0.5),
        (400, 0, False, -1.0),  # as little as an attack of a live kind that is caught
        (1800, 0, False, 0.1 - 2 * 0.9),
        (400, 20, False, 1.0),  # found as often as a kind that is alive
        (400, 380, True, -1.0),
    ],
)
def test_reward_by_shown_and_found(shown: int, found: int, right: bool, reward: float) -> None:
    counts: Counts = {"shown": {"dose": float(shown)}, "found": {"dose": float(found)}}
    game = attack("dose", right)
    Optimism().settle([game], counts)
    assert paid(game) == pytest.approx(reward)
    assert counts["shown"]["dose"] == shown + 1 and counts["found"]["dose"] == found + right


def test_games_of_a_step_are_paid_by_the_counts_before_it() -> None:
    together, counts = [attack("dose", False) for _ in range(300)], Counts()
    Optimism().settle(together, counts)
    assert {paid(game) for game in together} == {1.0}
    assert counts == {"shown": {"dose": 300.0}, "found": {"dose": 0.0}}


@given(
    st.lists(st.tuples(st.sampled_from(["dose", "drug"]), st.booleans()), max_size=30), st.randoms()
)
def test_order_of_a_step_changes_nothing(games: list[tuple[str, bool]], random: object) -> None:
    shuffled = list(games)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    results = []
    for order in (games, shuffled):
        counts: Counts = {"shown": {"dose": 700.0}, "found": {"dose": 3.0}}
        records = [attack(kind, found) for kind, found in order]
        Optimism().settle(records, counts)
        results.append((counts, sorted(map(paid, records))))
    assert results[0] == results[1]


def test_what_no_kind_can_be_said_of_earns_what_medserl_pays() -> None:
    decoy = finished(Outcome.FALSE_POSITIVE, category="decoy_benign")
    invalid = finished(Outcome.INVALID_ATTACK, category="adversarial_benign")
    for record in (decoy, invalid):
        reward_game(record, Optimism(decoy=1.0))
        counts = Counts()
        Optimism(decoy=1.0).settle([record], counts)
        assert record.rewards == Medserl(decoy=1.0).rewards(record) and not counts


def test_row_s_type_stands_where_the_judge_names_none() -> None:
    game, counts = attack(None, False), Counts()
    Optimism().settle([game], counts)
    assert set(counts["shown"]) == {game.spec.error_type or "unknown"}
