"""The rewards of the studies: what half-solved attacks and kinds never found earn."""

from typing import Any

import pytest
from game.builders import assessment_record, finished
from hypothesis import given
from hypothesis import strategies as st

from experiments.rewards import Learnable, Optimism
from medserl_agentloop.games.medical.case import Label, Role
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import Counts, Medserl, reward_game

# --- learnable ---

VERDICTS = {"find": Label.HARMFUL, "miss": Label.SAFE}
# Assessments that find the error, that miss it, that nobody can read (-), and that were cut off.
LEARNABLE = {
    "miss miss miss miss": -1.0, "find miss miss miss": 0.0, "find find miss miss": 1.0,
    "find find find find": -1.0, "- -": 0.0, "find -": 0.0, "find miss - -": 1.0,
    "cut cut cut cut": -1.0, "find cut": -0.5, "find miss miss cut": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(("answers", "worth"), LEARNABLE.items())
def test_attack_is_learnable_where_half_of_readable_assessments_find_it(
    answers: str, worth: float
) -> None:
    said = [
        assessment_record(verdict=VERDICTS.get(word), truncated=word == "cut")
        for word in answers.split()
    ]
    record = finished(Outcome.MISSED_ERROR)
    record.assessment, record.further_assessments = said[0], said[1:]
    reward_game(record, Learnable())
    attacker = dict(record.rewards[Role.ATTACKER])
    assert attacker.pop("learnable") == pytest.approx(worth)
    reward_game(record, Medserl())
    assert attacker.items() < record.rewards[Role.ATTACKER].items()  # all but game


def test_learnable_needs_several_assessments() -> None:
    with pytest.raises(ValueError, match=r"selfplay\.assessments"):
        reward_game(finished(Outcome.MISSED_ERROR), Learnable())


# --- optimism ---


def attack(kind: str | None, found: bool) -> MedicalRecord:
    """A valid attack of a kind, assessed once and rewarded."""
    judgement = Judgement(judge="oracle", label=Label.HARMFUL, error_type=kind)
    outcome = Outcome.CORRECT_DETECTION if found else Outcome.MISSED_ERROR
    record = finished(outcome, judgement=judgement)
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


@given(st.lists(st.tuples(st.sampled_from(["dose", "drug"]), st.booleans())), st.randoms())
def test_a_step_is_paid_by_the_counts_before_it_in_any_order(
    games: list[tuple[str, bool]], random: Any
) -> None:
    shuffled = list(games)
    random.shuffle(shuffled)
    results = []
    for order in (games, shuffled):
        counts: Counts = {"shown": {"dose": 700.0}, "found": {"dose": 3.0}}
        records = [attack(kind, found) for kind, found in order]
        Optimism().settle(records, counts)
        results.append((counts, sorted(map(paid, records))))
    assert results[0] == results[1]
    assert len(set(results[0][1])) <= 4  # by kind and answer alone


def test_what_no_kind_can_be_said_of_earns_what_medserl_pays() -> None:
    decoy = finished(Outcome.FALSE_POSITIVE, category="decoy_benign")
    for record in (decoy, finished(Outcome.INVALID_ATTACK)):
        reward_game(record, Optimism(decoy=1.0))
        counts = Counts()
        Optimism(decoy=1.0).settle([record], counts)
        assert record.rewards == Medserl(decoy=1.0).rewards(record) and not counts


def test_row_s_type_stands_where_the_judge_names_none() -> None:
    game, counts = attack(None, False), Counts()
    Optimism().settle([game], counts)
    assert set(counts["shown"]) == {game.spec.error_type or "unknown"}
