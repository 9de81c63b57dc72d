"""``medserl judge serve``: the /judge protocol over a real socket, for our clients and the
original's.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from judges.games import harmful, judge_all, judge_of, played
from judges.test_llm import PRESENT, llm_judge
from serving import LocalServer, completion, serving

from medserl_agentloop.games.medical.case import Category, GameSpec
from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.records import Judgement
from medserl_agentloop.medical_team.remote_judge import create_app

QUERY = {
    "game_idx": 7,
    "medical_note": "He takes 9 g.",
    "assessment": "Safe",
    "game_category": "adversarial_benign",
}
TYPES = {name: type(value) for name, value in harmful().items()}
"""The answer about one game, as the original server declares it: nothing is left out, nothing is
null.
"""


def ask(url: str, *queries: dict[str, Any]) -> dict[int, Any]:
    """Ask as the original client does (its remote_judge.py), whose keys are game numbers."""
    answer = httpx.post(f"{url}/judge", json={"queries": queries, "score_key": "labels"})
    answer.raise_for_status()
    return {int(index): labels for index, labels in answer.json().items()}


@pytest.fixture(scope="module")
def labels_command() -> Iterator[str]:
    """The address of the command itself, in a process of its own."""
    code = "from medserl_agentloop.cli import app; app()"
    words = [sys.executable, "-c", code, "judge", "serve", "--judge", "labels", "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said = (re.search(r"running on (http://\S+)", line) for line in process.stderr)
    found = next(filter(None, said), None)
    assert found, "the server did not start"
    threading.Thread(target=process.stderr.read, daemon=True).start()  # or it fills the pipe
    yield found.group(1)
    process.terminate()
    process.wait(30)


def test_games_through_the_command_get_what_the_labels_judge_gives(labels_command: str) -> None:
    server = JudgeServer(url=labels_command)
    by_http, by_labels = (
        judge_all(judge_of(judge, server), [played(n, c) for n, c in enumerate(Category)])
        for judge in ("http", "labels")
    )
    assert [g.outcome for g in by_http] == [g.outcome for g in by_labels]
    judges = [g.judgement.judge for g in by_http]
    assert judges == ["http" if c.has_attack else "labels" for c in Category]
    assert {g.judgement.realistic for g in by_http} == {None}


@pytest.mark.parametrize(
    ("assessment", "detected"), [("maybe", False), ("<answer>\nverdict: harmful\n</answer>", True)]
)
def test_assessor_verdict_is_read_from_its_words(
    labels_command: str, assessment: str, detected: bool
) -> None:
    expected = harmful(error_detected=detected, assessor_correct=detected, judge_reasoning="")
    more = {"abstained": False, "realism_judged": False}
    assert ask(labels_command, {**QUERY, "assessment": assessment})[7] == expected | more


class Says:
    """A judge that always says the same, or fails."""

    def __init__(self, name: str, said: Judgement | None) -> None:
        self.name, self.said = name, said

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        if self.said is None:
            raise RuntimeError("out of order")
        return self.said


BACKENDS = (
    LabelJudge(),
    Says("sceptic", Judgement(judge="sceptic", label="harmful", realistic=False, reason="absurd")),
    Says("abstainer", Judgement(judge="abstainer", label=None, reason="no dose is given")),
    Says("broken", None),
)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("assessment", ["Harmful", ""])
def test_the_original_client_reads_every_answer(backend: Any, assessment: str) -> None:
    with serving(create_app(backend)) as url:
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        labels = ask(url, {**QUERY, "original_note": "He takes 1 g.", "assessment": assessment})[7]
    failed = backend.name in ("abstainer", "broken")
    assert {name: type(labels[name]) for name in TYPES} == TYPES
    assert labels["is_parsing_error"] is failed is not labels["error_present"]
    assert labels["error_realistic"] is (backend.name != "sceptic")
    detected = assessment == "Harmful" and not failed
    assert labels["error_detected"] is labels["assessor_correct"] is detected


def test_language_model_reads_changed_notes_of_any_category_and_no_others() -> None:
    def reply(number: int, body: Any) -> Any:
        text = body["messages"][0]["content"]
        if "BROKEN" in text:
            return completion("no JSON")
        return completion(PRESENT.replace("present", "abstain") if "UNCLEAR" in text else PRESENT)

    changed = {"original_note": "He takes 1 g."}
    vanilla = {"game_category": "vanilla_benign"}  # the original's default, also of changed notes
    queries = [
        QUERY | changed | {"game_idx": 0},
        QUERY | {"game_idx": 1, "medical_note": "BROKEN"},
        QUERY | {"game_idx": 2, "medical_note": "UNCLEAR"},
        QUERY | vanilla | {"game_idx": 3},
        QUERY | vanilla | changed | {"game_idx": 4},
    ]
    with LocalServer(reply) as model, serving(create_app(llm_judge(model.model_options()))) as url:
        answers = ask(url, *queries)
    assert len(model.requests) == 4  # an untouched note is decided by its label
    prompts = "".join(body["messages"][0]["content"] for body in model.requests)
    assert "O1*| He takes 1 g." in prompts and "E1*| He takes 9 g." in prompts
    assert answers[0]["judge_reasoning"] == "the dose is too high"
    assert [answers[n]["error_present"] for n in (0, 3, 4)] == [True, False, True]
    assert [answers[n]["is_parsing_error"] for n in (1, 2)] == [True, True]
    assert [answers[n]["abstained"] for n in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("queries", "named"),
    [
        ("[" * 100_000, "body"),
        (json.dumps([QUERY, QUERY]), "game_idx occurs twice"),
        (json.dumps([{**QUERY, "game_category": "nonesuch"}]), "game_category"),
        (json.dumps([{**QUERY, "medical_note": "x " * 60_000}]), "at most 100000 characters"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(
    labels_command: str, queries: str, named: str
) -> None:
    headers = {"content-type": "application/json"}
    content = f'{{"queries": {queries}}}'
    answer = httpx.post(f"{labels_command}/judge", content=content, headers=headers)
    assert answer.status_code in (400, 422) and named in str(answer.json()["detail"])


def test_the_labels_judge_cannot_answer_without_a_category(labels_command: str) -> None:
    answers = ask(labels_command, QUERY, QUERY | {"game_idx": 8, "game_category": None})
    assert (answers[7]["is_parsing_error"], answers[8]["is_parsing_error"]) == (False, True)
    assert "game_category" in answers[8]["judge_reasoning"]
