"""``medserl judge serve`` and the clients of the OpenRLHF system, over a real socket: the original's and ours."""

from typing import Any

import httpx
import pytest
from judges.local_server import harmful, serving
from judges.test_llm import PAIR, PRESENT
from medical_team.openrlhf import CLEAN, WRONG
from serving import completion
from serving import serving as serving_app

from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.protocol import create_app
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.medical_team import create_medical_judge_remote_function

TYPES = {name: type(value) for name, value in harmful().items()}
"""The answer about one game, as the original server declares it: nothing is left out, nothing is null."""

QUERY = {
    "game_idx": 3,
    "medical_note": WRONG,
    "original_note": CLEAN,
    "assessment": "Safe",
    "game_category": "adversarial_benign",
}


class Says:
    """A judge that always says the same, or fails."""

    def __init__(self, name: str, said: Judgement | None) -> None:
        self.name, self.said = name, said

    async def judge(self, record: MedicalRecord) -> Judgement:
        if self.said is None:
            raise RuntimeError("out of order")
        return self.said


BACKENDS = (
    LabelJudge(),
    Says("sceptic", Judgement(judge="sceptic", label=Label.HARMFUL, realistic=False, reason="absurd")),
    Says("abstainer", Judgement(judge="abstainer", label=None, reason="no dose is given")),
    Says("broken", None),
)


def original_client(url: str, *queries: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What the original client does with an answer (its remote_judge.py): its keys are game numbers."""
    answer = httpx.post(f"{url}/judge", json={"queries": queries, "score_key": "labels"})
    answer.raise_for_status()
    return {int(index): labels for index, labels in answer.json().items()}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("assessment", ["Harmful", ""])
def test_the_original_client_reads_every_answer(backend: Any, assessment: str) -> None:
    with serving_app(create_app(backend)) as url:
        labels = original_client(url, {**QUERY, "assessment": assessment})[3]
    failed = backend.name in ("abstainer", "broken")
    assert {name: type(labels[name]) for name in TYPES} == TYPES
    assert labels["is_parsing_error"] is failed
    assert labels["error_present"] is not failed
    assert labels["error_realistic"] is (backend.name != "sceptic")
    assert labels["error_detected"] is labels["assessor_correct"] is (assessment == "Harmful" and not failed)


@pytest.mark.parametrize("nulls", [("error_realistic",), ("error_realistic", "error_detected")])
def test_nulls_of_an_older_server_are_read(nulls: tuple[str, ...]) -> None:
    older = harmful(abstained=False, **dict.fromkeys(nulls))
    with serving(lambda number, body: {"labels": {"3": older}}) as server:
        labels = create_medical_judge_remote_function(server.url)("", [QUERY])[3]
    assert {name: type(labels[name]) for name in TYPES} == TYPES
    assert not labels["is_parsing_error"] and labels["error_realistic"]
    assert labels["error_detected"] is ("error_detected" not in nulls)


def test_a_changed_note_is_read_by_the_judge_whatever_its_category_says() -> None:
    """The original's default is vanilla_benign, whose label would be the answer without a look at the note."""
    with serving(lambda number, body: completion(PRESENT)) as model:
        untouched = {**QUERY, "game_idx": 4, "medical_note": CLEAN, "game_category": "vanilla_benign"}
        with serving_app(create_app(LlmJudge(model.model_options(), PAIR))) as url:
            labels = original_client(url, {**QUERY, "game_category": "vanilla_benign"}, untouched)
        assert (labels[3]["error_present"], labels[4]["error_present"]) == (True, False)
        assert len(model.requests) == 1


def test_a_note_without_a_category_is_no_question_for_labels() -> None:
    with serving_app(create_app(LabelJudge())) as url:
        labels = original_client(url, {k: v for k, v in QUERY.items() if k != "game_category"})[3]
    assert labels["is_parsing_error"] and "game_category" in labels["judge_reasoning"]
