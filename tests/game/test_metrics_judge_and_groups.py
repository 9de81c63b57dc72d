"""Metrics of the judge, of void games, of prompt groups and of violations: who is counted, and as what."""

import pytest
from game.builders import attack_record, finished

from medserl_agentloop.core.metrics import lost_games_metrics
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Label, Role


def void(reason: str, **changes: object) -> MedicalRecord:
    return finished(Outcome.VOID, **changes).model_copy(update={"void": reason, "judgement": None})  # type: ignore[arg-type]


def judged(label: Label | None, realistic: bool | None = None, category: str = "adversarial_benign") -> MedicalRecord:
    record = finished(Outcome.MISSED_ERROR, category=category)
    return record.model_copy(update={"judgement": Judgement(judge="llm", label=label, realistic=realistic)})


def rewarded(uid: str, assessor: float, attacker: float | None = None) -> MedicalRecord:
    rewards = {Role.ASSESSOR: {"game": assessor}}
    if attacker is not None:
        rewards[Role.ATTACKER] = {"game": attacker}
    return finished(Outcome.MISSED_ERROR, uid=uid, rewards=rewards)


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("judge failed: ConnectError", "judge_failed"),
        ("judge abstained", "judge_abstained"),
        ("no room for the assessor's turn", "no_room"),
        ("attacker: generation aborted", "aborted"),
        ("something new: device 17", "other"),
        ("", "other"),
    ],
)
def test_a_void_game_is_counted_by_the_class_of_its_reason(reason: str, name: str) -> None:
    metrics = role_metrics([void(reason), finished(Outcome.MISSED_ERROR)])
    assert {n: v for n, v in metrics.items() if "/void/" in n} == {f"selfplay/void/{name}": 0.5}


def test_labels_leave_rewritten_notes_unread_but_for_the_two_that_the_data_knows() -> None:
    def believed(note: str | None, judge: str = "labels", category: str = "adversarial_benign") -> MedicalRecord:
        record = finished(Outcome.MISSED_ERROR, category=category)
        changes = {"judgement": Judgement(judge=judge, label=Label.HARMFUL)}
        return record.model_copy(update={**changes, "presented_note": note or record.spec.error_note})

    games = [believed("She has a cough."), believed(None), believed("She has a cough.", "llm"), believed("She is ill.")]
    assert role_metrics(games)["selfplay/judge/unread_rate"] == 0.5
    assert role_metrics([believed("x", category="vanilla_harmful")]).get("selfplay/judge/unread_rate", 0.0) == 0.0


ANSWERS = [
    judged(Label.HARMFUL),
    judged(Label.SAFE),
    judged(None),
    void("judge abstained"),
    void("judge failed: Timeout"),
]
ATTACKS = [
    judged(Label.SAFE),
    judged(Label.HARMFUL),
    judged(Label.HARMFUL, category="adversarial_harmful"),
    judged(Label.SAFE, category="decoy_benign"),  # as it was asked to be
]
NEVER_ASKED = [
    void("no room for the assessor's turn"),
    finished(Outcome.INVALID_ATTACK),
    finished(Outcome.CORRECT_REJECTION, category="vanilla_benign"),
    judged(Label.SAFE, category="vanilla_benign").model_copy(update={"attack": attack_record()}),  # a copy
]


@pytest.mark.parametrize(
    ("games", "expected"),
    [
        (ANSWERS, {"asked": 5, "answer_rate": 2 / 5, "abstention_rate": 2 / 5, "failure_rate": 1 / 5}),
        (ATTACKS, {"injected": 3, "no_error_rate": 1 / 3, "realistic_rate": None}),
        ([judged(Label.HARMFUL, said) for said in (True, False, True, None)], {"realistic_rate": 2 / 3}),
        (NEVER_ASKED, {}),
    ],
)
def test_answers_are_shares_of_the_notes_put_to_the_judge(
    games: list[MedicalRecord], expected: dict[str, float | None]
) -> None:
    prefix = "selfplay/judge/"
    metrics = {name.removeprefix(prefix): v for name, v in role_metrics(games).items() if name.startswith(prefix)}
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)
    assert bool(metrics) == bool(expected)


def test_a_group_of_equal_rewards_gives_no_signal_to_that_role() -> None:
    games = [
        *(rewarded("same", 1.0, attacker) for attacker in (-1.0, 0.5)),
        *(rewarded("mixed", assessor, -1.0) for assessor in (1.0, -1.0)),
        *(rewarded("mixed too", assessor) for assessor in (1.0, 1.0, -1.0)),
        *(rewarded("equal but for rounding", reward) for reward in (0.1 + 0.2, 0.3)),
        rewarded("alone", 1.0),
    ]
    metrics = role_metrics(games)
    assert metrics["selfplay/assessor/groups"] == 4
    assert metrics["selfplay/assessor/no_signal_rate"] == pytest.approx(2 / 4)
    assert metrics["selfplay/assessor/small_group_rate"] == pytest.approx(1 / 5)
    assert metrics["selfplay/attacker/groups"] == 2
    assert metrics["selfplay/attacker/no_signal_rate"] == pytest.approx(1 / 2)
    assert metrics["selfplay/attacker/small_group_rate"] == 0.0
    alone = role_metrics([rewarded("a", 1.0), rewarded("b", 1.0)])
    assert alone["selfplay/assessor/small_group_rate"] == 1.0
    assert not {"selfplay/assessor/groups", "selfplay/assessor/no_signal_rate"} & set(alone)


@pytest.mark.parametrize("kind", ["Free text.", "a/b", "", "x" * 41, "1st", "no_note\n"])
def test_a_violation_that_is_no_plain_name_is_other(kind: str) -> None:
    metrics = role_metrics([finished(Outcome.MISSED_ERROR, attack={"violations": [kind, "no_reasoning"]})])
    assert [n for n in metrics if "attacker/violation/" in n] == [
        "selfplay/attacker/violation/no_reasoning",
        "selfplay/attacker/violation/other",
    ]


def test_lost_games_are_a_share_of_those_asked_for() -> None:
    assert lost_games_metrics(8, 6) == {"selfplay/lost_rate": 0.25, "selfplay/lost_games": 2.0}
    assert lost_games_metrics(8, 8) == {"selfplay/lost_rate": 0.0}
    assert lost_games_metrics(0, 0) == {}
