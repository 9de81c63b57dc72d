"""The policy's base model judges: asked in tokens by the agent loop, after the last turn."""

import json
from typing import Any

import pytest
from support import TOKENIZER, assessment_text, attack_text, judge, play, run_with

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.games.medical.judges import build_judge
from medserl_agentloop.testing.mock_engine import MockReply

BASE = run_with(
    selfplay__adapters="per_role",
    selfplay__judge="llm",
    selfplay__judge_server__url="base",
    selfplay__judge_server__json_schema=False,
    selfplay__judge_server__max_tokens=300,
)
REASON = "the organism does not fit"
SAID = f"<think>hm</think>\n{json.dumps({'reason': REASON, 'error': 'present', 'realistic': True})}"
TURNS = [attack_text(), assessment_text()]


def test_the_base_judges_after_the_last_turn_and_the_reward_manager_takes_its_word() -> None:
    output, record, engine = play([*TURNS, SAID], run=BASE)
    attacker, assessor, asked = engine.calls
    assert [call.sampling_params.get("adapter") for call in engine.calls] == ["default", "assessor", None]
    assert asked.sampling_params["max_tokens"] == 300 and asked.sampling_params["temperature"] == 0
    shown = TOKENIZER.decode(asked.prompt_ids)
    assert "Culture grew giardia." in shown and "Culture grew candida." in shown
    assert record.judgement is not None
    assert (record.judgement.label, record.judgement.reason) == ("harmful", REASON)
    trained = len(attacker.output.token_ids) + len(assessor.output.token_ids)  # type: ignore[union-attr]
    assert sum(output.response_mask) == trained  # no token of the judge's
    columns = judge(output, BASE)
    assert output.reward_score is not None and columns["response_mask"].any()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I think that it is wrong.", "not the JSON that was asked for"),
        (MockReply(text='{"reason": "' + "so " * 400, stop_reason="length"), "cut off after 300 tokens"),
        (MockReply(token_ids=[], stop_reason="abort"), "the engine aborted the base model's answer"),
        (ValueError("Prompt length (9000) exceeds"), "the engine refuses the question: Prompt length (9000) exceeds"),
        (MockReply(text=SAID, latency=60), "the base model gave no answer in 0.5 s"),
    ],
)
def test_a_base_that_gives_no_answer_makes_the_game_void(reply: Any, reason: str) -> None:
    run = BASE.copy()
    if "0.5 s" in reason:
        run.selfplay.turn_timeout_s = 0.5
    output, record, _ = play([*TURNS, reply], run=run)
    assert record.void is not None and reason in record.void
    assert not judge(output, run)["response_mask"].any()


def test_nothing_is_asked_where_nothing_is_to_be_judged() -> None:
    output, record, engine = play(["no note at all"], run=BASE)
    assert len(engine.calls) == 1 and record.judgement is None
    assert judge(output, BASE)["response_mask"].any()  # an invalid attack is punished without a judge


def test_a_blind_reader_on_the_base_sees_the_note_alone() -> None:
    run = BASE.copy()
    run.selfplay.blind = {"readings": 2, "needed": 2}
    found = json.dumps({"reason": "no", "error": "present", "sentence": 2})
    missed = json.dumps({"reason": "no", "error": "absent", "sentence": None})
    _, record, engine = play([*TURNS, SAID, found, missed], run=run)
    assert len(engine.calls) == 5
    for call in engine.calls[3:]:
        assert "candida" not in TOKENIZER.decode(call.prompt_ids)
        assert call.sampling_params["temperature"] == 0.7 and "adapter" not in call.sampling_params
    assert record.void is not None and record.void.startswith("error not knowable")


def test_outside_a_run_there_is_no_base_to_ask() -> None:
    with pytest.raises(ValueError, match="the base model answers in a run only"):
        build_judge(SelfPlayConfig.from_run(BASE))  # type: ignore[arg-type]
