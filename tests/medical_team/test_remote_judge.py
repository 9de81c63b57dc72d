"""A judge over HTTP: both shapes of its answer, and every way in which it can fail."""

from typing import Any

import pytest
from medical_team.openrlhf import CLEAN, WRONG, JudgeServer, verdicts

from medserl_agentloop.medical_team import remote_judge
from medserl_agentloop.medical_team.remote_judge import create_medical_judge_remote_function, wait_for_judge_server

QUERIES = [
    {"game_idx": 0, "medical_note": WRONG, "assessment": "Harmful"},
    {"game_idx": 7, "medical_note": CLEAN, "assessment": "Harmful"},
]


def ask(judge: JudgeServer, **kwargs: Any) -> dict[int, dict[str, Any]]:
    return create_medical_judge_remote_function(judge.url, **kwargs)("", QUERIES, score_key="labels")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda found: found,
        lambda found: {"labels": found},
        lambda found: list(found.values()),
        lambda found: {"labels": list(found.values())},
    ],
    ids=["bare", "under labels", "a list", "a list under labels"],
)
def test_every_shape_of_the_answer_is_read(judge: JudgeServer, wrap: Any) -> None:
    judge.answer = lambda body: wrap(verdicts(body))
    labels = ask(judge)
    assert set(labels) == {0, 7}
    assert [(one["error_present"], one["error_detected"]) for one in labels.values()] == [(True, True), (False, True)]
    assert labels[7] == {
        "error_detected": True,
        "error_present": False,
        "error_realistic": True,
        "assessor_correct": False,
        "is_parsing_error": False,
        "judge_reasoning": "read it",
        "actual_harm": "Safe",
    }


def test_the_address_may_end_with_the_route(judge: JudgeServer) -> None:
    labels = create_medical_judge_remote_function(f"{judge.url}/judge/")("", QUERIES)
    assert not labels[0]["is_parsing_error"]


@pytest.mark.parametrize("answer", [500, 404, b"<html>", [], "text", {"labels": "none"}], ids=lambda a: repr(a)[:12])
def test_an_answer_that_cannot_be_used_leaves_all_games_out(judge: JudgeServer, answer: Any) -> None:
    judge.answer = lambda body: answer
    labels = ask(judge)
    assert set(labels) == {0, 7}
    assert all(one["is_parsing_error"] and one["judge_reasoning"] for one in labels.values())


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {"error_detected": "false", "error_present": True},
        {"error_present": True},
        {"is_parsing_error": True},
    ],
)
def test_a_game_that_the_answer_holds_in_another_shape_is_left_out_alone(judge: JudgeServer, broken: Any) -> None:
    judge.answer = lambda body: {**verdicts(body), "7": broken}
    labels = ask(judge)
    assert (labels[0]["is_parsing_error"], labels[7]["is_parsing_error"]) == (False, True)


def test_no_games_no_request(judge: JudgeServer) -> None:
    assert create_medical_judge_remote_function(judge.url)("", []) == {}
    assert judge.requests == []


def test_a_healthy_judge_is_connected_and_another_is_not(judge: JudgeServer) -> None:
    assert remote_judge.test_judge_connection(judge.url)
    judge.healthy = False
    assert not remote_judge.test_judge_connection(judge.url)
    assert not remote_judge.test_judge_connection("http://127.0.0.1:9")


def test_waiting_ends_when_the_judge_is_ready_or_time_is_up(judge: JudgeServer) -> None:
    assert wait_for_judge_server(judge.url, max_wait=1, check_interval=0.01)
    judge.healthy = False
    assert not wait_for_judge_server(judge.url, max_wait=0.1, check_interval=0.02)
