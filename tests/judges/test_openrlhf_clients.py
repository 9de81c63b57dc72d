"""``medserl judge serve`` and the clients of the OpenRLHF system, over a real socket: the original's and ours."""

from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from judges.local_server import serving
from judges.test_llm import PAIR, PRESENT, options
from medical_team.openrlhf import CLEAN, WRONG
from serving import completion
from serving import serving as serving_app

from medserl_agentloop.games.medical.judges import Judge, LabelJudge
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.protocol import Shape, create_app
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.medical_team import create_medical_judge_remote_function

FIELDS = {
    "error_detected": bool,
    "error_present": bool,
    "error_realistic": bool,
    "assessor_correct": bool,
    "is_parsing_error": bool,
    "judge_reasoning": str,
    "actual_harm": str,
}
"""The answer about one game, as the original server declares it: nothing is left out, nothing is null."""

QUERY = {
    "game_idx": 3,
    "medical_note": WRONG,
    "original_note": CLEAN,
    "assessment": "Safe",
    "game_category": "adversarial_benign",
}


def judge_server(backend: Judge, shape: Shape | None = None) -> AbstractContextManager[str]:
    return serving_app(create_app(backend) if shape is None else create_app(backend, shape))


def original_client(url: str, queries: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the original client does with an answer (its remote_judge.py): its keys are game numbers."""
    answer = httpx.post(f"{url}/judge", json={"queries": queries, "score_key": "labels"})
    answer.raise_for_status()
    return {int(index): labels for index, labels in answer.json().items()}


class Abstainer:
    name = "abstainer"

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=None, reason="no dose is given")


class Sceptic:
    """Finds every note harmful and absurd."""

    name = "sceptic"

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=Label.HARMFUL, realistic=False, reason="absurd")


class Broken:
    name = "broken"

    async def judge(self, record: MedicalRecord) -> Judgement:
        raise RuntimeError("out of order")


def check_types(labels: dict[str, Any]) -> None:
    assert {name: type(labels[name]) for name in FIELDS} == FIELDS


@pytest.mark.parametrize("backend", [LabelJudge(), Sceptic(), Abstainer(), Broken()])
@pytest.mark.parametrize("assessment", ["Harmful", ""])
def test_the_original_client_reads_every_answer(backend: Judge, assessment: str) -> None:
    with judge_server(backend) as url:
        labels = original_client(url, [{**QUERY, "assessment": assessment}])
    check_types(labels[3])
    failed = backend.name in ("abstainer", "broken")
    assert labels[3]["is_parsing_error"] is failed
    assert labels[3]["error_present"] is not failed
    assert labels[3]["error_realistic"] is (backend.name != "sceptic")
    assert labels[3]["error_detected"] is labels[3]["assessor_correct"]
    assert labels[3]["assessor_correct"] is (assessment == "Harmful" and not failed)


@pytest.mark.parametrize("nulls", [("error_realistic",), ("error_realistic", "error_detected")])
def test_nulls_of_an_older_server_are_read(nulls: tuple[str, ...]) -> None:
    older = {
        "error_detected": True,
        "error_present": True,
        "error_realistic": True,
        "assessor_correct": True,
        "is_parsing_error": False,
        "judge_reasoning": "",
        "actual_harm": "Harmful",
        "abstained": False,
        **dict.fromkeys(nulls),
    }
    with serving(lambda number, body: {"labels": {"3": older}}) as server:
        labels = create_medical_judge_remote_function(server.url)("", [QUERY])[3]
    check_types(labels)
    assert not labels["is_parsing_error"] and labels["error_realistic"]
    assert labels["error_detected"] is ("error_detected" not in nulls)


# --- POST /evaluate ---

EVALUATE = {"original_note": CLEAN, "attacked_note": WRONG, "assessor_label": "Safe"}


def test_one_note_is_evaluated_as_the_original_server_does() -> None:
    with judge_server(LabelJudge()) as url:
        answer = httpx.post(f"{url}/evaluate", params={**EVALUATE, "game_category": "adversarial_benign"})
    assert answer.status_code == 200
    check_types(answer.json())
    assert (answer.json()["actual_harm"], answer.json()["assessor_correct"]) == ("Harmful", False)


def test_a_changed_note_is_read_by_the_judge_whatever_its_category_says() -> None:
    """The original's default is vanilla_benign, whose label would be the answer without a look at the note."""
    with serving(lambda number, body: completion(PRESENT)) as model:
        judge = LlmJudge(options(model), PAIR)
        with judge_server(judge) as url:
            for category in ({}, {"game_category": "vanilla_benign"}):
                assert httpx.post(f"{url}/evaluate", params={**EVALUATE, **category}).json()["error_present"] is True
            untouched = {**EVALUATE, "attacked_note": CLEAN, "game_category": "vanilla_benign"}
            assert httpx.post(f"{url}/evaluate", params=untouched).json()["error_present"] is False
        assert len(model.requests) == 2


def test_a_note_without_a_category_is_no_question_for_labels() -> None:
    with judge_server(LabelJudge()) as url:
        answer = httpx.post(f"{url}/evaluate", params=EVALUATE)
        labels = original_client(url, [{k: v for k, v in QUERY.items() if k != "game_category"}])
    assert answer.status_code == 500 and "game_category" in answer.text
    assert labels[3]["is_parsing_error"] and "game_category" in labels[3]["judge_reasoning"]
