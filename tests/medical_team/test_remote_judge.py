"""A judge over HTTP: both shapes of its answer, and every way in which it can fail."""

from typing import Any

import pytest
from judges.local_server import LocalServer
from medical_team.openrlhf import CLEAN, WRONG, verdicts

from medserl_agentloop.medical_team import remote_judge
from medserl_agentloop.medical_team.remote_judge import create_medical_judge_remote_function, wait_for_judge_server

QUERIES = [
    {"game_idx": 0, "medical_note": WRONG, "assessment": "Harmful"},
    {"game_idx": 7, "medical_note": CLEAN, "assessment": "Harmful"},
]


def ask(judge: LocalServer, route: str = "") -> dict[int, dict[str, Any]]:
    return create_medical_judge_remote_function(judge.url + route)("", QUERIES, score_key="labels")


@pytest.mark.parametrize("route", ["", "/judge/"])
@pytest.mark.parametrize("under_labels", [False, True])
@pytest.mark.parametrize("shape", [dict, lambda found: list(found.values())], ids=["an object", "a list"])
def test_every_shape_of_the_answer_is_read(judge: LocalServer, shape: Any, under_labels: bool, route: str) -> None:
    judge.reply = lambda number, body: {"labels": shape(verdicts(body))} if under_labels else shape(verdicts(body))
    labels = ask(judge, route)
    assert set(labels) == {0, 7}
    assert [(one["error_present"], one["error_detected"]) for one in labels.values()] == [(True, True), (False, True)]
    said = {"error_detected": True, "error_present": False, "error_realistic": True, "assessor_correct": False}
    assert labels[7] == {**said, "is_parsing_error": False, "judge_reasoning": "read it", "actual_harm": "Safe"}


HALVES = (None, {"error_detected": "false", "error_present": True}, {"error_present": True}, {"is_parsing_error": True})


@pytest.mark.parametrize(
    ("answer", "lost"),
    [*((answer, {0, 7}) for answer in (b"<html>", [], "text", {"labels": "none"}, {})), *((h, {7}) for h in HALVES)],
)
def test_what_cannot_be_used_leaves_its_games_out(judge: LocalServer, answer: Any, lost: set[int]) -> None:
    judge.reply = lambda number, body: answer if 0 in lost else {**verdicts(body), "7": answer}
    labels = ask(judge)
    assert set(labels) == {0, 7}
    assert {game for game, one in labels.items() if one["is_parsing_error"] and one["judge_reasoning"]} == lost
    assert create_medical_judge_remote_function(judge.url)("", []) == {}  # no games, no request
    assert len(judge.requests) == 1


def test_a_judge_is_connected_and_waited_for_until_it_is_healthy(judge: LocalServer) -> None:
    assert remote_judge.test_judge_connection(judge.url)
    assert wait_for_judge_server(judge.url, max_wait=1, check_interval=0.01)
    judge.healthy = False
    assert not remote_judge.test_judge_connection(judge.url)
    assert not remote_judge.test_judge_connection("http://127.0.0.1:9")
    assert not wait_for_judge_server(judge.url, max_wait=0.1, check_interval=0.02)
