"""A script written against the OpenRLHF system, with both shapes of the game manager and a judge
over HTTP.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from medical_team.conftest import CLEAN, WRONG, Generator, assessor, attacker, turn, verdicts
from serving import LocalServer
from support import TOKENIZER

from medserl_agentloop import medical_team
from medserl_agentloop.medical_team import (
    MEDICAL_REWARD_COEFF_CONFIG,
    MedicalDialogueGameManager,
    create_medical_judge_remote_function,
    wait_for_judge_server,
)
from medserl_agentloop.medical_team import MedicalGameOutcome as Outcome
from medserl_agentloop.report.compare import read_side

NOTES = [WRONG, WRONG, CLEAN, CLEAN]
TYPES = ["vanilla_harmful", "adversarial_harmful", "vanilla_benign", "adversarial_benign"]


def manager(judge: LocalServer, **configs: Any) -> MedicalDialogueGameManager:
    games = MedicalDialogueGameManager(TOKENIZER, [judge.url], None, configs)
    games.initialize_games(NOTES, ["", "", "Safe", ""], TYPES)
    return games


def scored(games: MedicalDialogueGameManager, *generators: Generator) -> Any:
    games.play_games(*(generators or (attacker(), assessor())))
    return games.filter_and_compute_rewards(games.evaluate_game_outcomes())


def rewards(states: list[dict[str, Any]]) -> list[float]:
    return [state["reward"] for state in states]


def test_a_script_trains_on_what_the_manager_returns(judge: LocalServer) -> None:
    games, first, second = manager(judge), attacker(), assessor()
    games.play_games(first, second, temperature=0.7)
    labels = games.evaluate_game_outcomes()
    outputs, attacker_states, others, assessor_states, same = games.filter_and_compute_rewards(
        labels
    )
    assert same is labels and len(others) == 4
    earned = [{s["game_idx"]: s["reward"] for s in of} for of in (attacker_states, assessor_states)]
    assert earned == [dict.fromkeys((1, 3), -1.0 + 0.5 + 1.0), dict.fromkeys(range(4), 2.0)]
    reached = {Outcome.ATTACKER_ERROR_DETECTED, Outcome.ATTACKER_REALISTIC_ERROR}
    assert attacker_states[0]["game_outcomes"] == reached
    assert assessor_states[2]["game_outcomes"] == {Outcome.ASSESSOR_CORRECT_REJECTION}
    text = TOKENIZER.batch_decode([outputs[0].outputs[0].token_ids], skip_special_tokens=True)
    assert text == [turn(WRONG)]

    ((prompts, data_types, kwargs),) = first.calls
    assert data_types == ["adversarial_harmful", "adversarial_benign"]
    assert kwargs == {"temperature": 0.7}
    assert all(p.endswith("<|im_start|>assistant\n<think>") for p in prompts)
    assert [data_types for _, data_types, _ in second.calls] == [TYPES]
    (request,) = judge.requests  # one for the batch
    assert request["score_key"] == "labels"
    facts = {"game_idx": 3, "original_note": CLEAN, "game_category": "adversarial_benign"}
    assert request["queries"][3] == {**facts, "medical_note": WRONG, "assessment": "Harmful"}


def test_turn_states_as_json_lines_are_a_log_that_compare_reads(
    judge: LocalServer, tmp_path: Path
) -> None:
    _, attacker_states, _, assessor_states, _ = scored(manager(judge))
    with (tmp_path / "log.jsonl").open("w") as file:
        for state in attacker_states + assessor_states:
            outcomes = [outcome.value for outcome in state["game_outcomes"]]
            print(json.dumps({"step": 1, **state, "game_outcomes": outcomes}), file=file)
    (run,) = read_side(str(tmp_path / "log.jsonl"))
    assert list(run.games["error_found"].dropna()) == [True] * 3
    assert list(run.games["note_cleared"].dropna()) == [True]
    assert list(run.games["attacker_reward"].dropna()) == [0.5, 0.5]
    assert list(run.games["assessor_reward"]) == [2.0] * 4
    assert run.games["assessor_format_kept"].all() and run.games["assessor_tokens"].notna().all()


def test_a_game_and_a_turn_state_hold_what_the_interface_says(judge: LocalServer) -> None:
    games = manager(judge)
    game = games.play_games(attacker(), assessor())[3]
    assert (game["finished"], game["current_turn"], game["completion"]) == (True, 1, "")
    assert (game["attacker_output"], game["assessor_output"]) == (WRONG, "Harmful")
    said = [(turn["game_role"], turn["content"]) for turn in game["history"]]
    assert said == [("attacker", WRONG), ("assessor", "Harmful")]
    assert game["raw_history"][0]["content"] == turn(WRONG)
    assert len(game["processed_output_history"]) == 2
    _, states, *_ = games.filter_and_compute_rewards(games.evaluate_game_outcomes())
    facts: dict[str, Any] = {"game_role": "attacker", "turn": 0, "game_idx": 3, "finished": False}
    facts |= dict.fromkeys(("prompt_type", "data_type"), "adversarial_benign")
    facts |= {"is_generated_attack": True, "prompts": CLEAN, "completion": ""}
    facts |= {"cot_format_violation": False, "text_cot_and_answer": ("MY SECRET PLAN", WRONG)}
    facts |= {"length_cot_and_answer": (14, len(WRONG))}
    assert {k: v for k, v in states[1].items() if k not in ("reward", "game_outcomes")} == facts


@pytest.mark.parametrize(
    "response", ["MY SECRET PLAN", "MY SECRET PLAN</think>no tags", "x</think><answer></answer>"]
)
def test_attack_without_a_note_is_invalid_and_reaches_nobody(
    judge: LocalServer, response: str
) -> None:
    games, second = manager(judge), assessor()
    _, states, _, others, labels = scored(games, Generator(lambda prompt: response), second)
    assert second.calls[0][1] == ["vanilla_harmful", "vanilla_benign"]
    assert "SECRET" not in str(second.calls) + str(judge.requests)
    assert rewards(states) == [0.0 + 0.5 - 1.0] * 2
    assert [state["game_idx"] for state in others] == [0, 2]
    assert labels[1]["error_present"] is False and not labels[1]["is_parsing_error"]


def test_a_note_in_broken_form_is_still_played(judge: LocalServer) -> None:
    games, second = manager(judge), assessor()
    broken = f"MY SECRET PLAN <answer>{WRONG}</answer> so there"
    _, states, *_ = scored(games, Generator(lambda prompt: broken), second)
    assert games.active_games[1]["history"][0]["content"] == WRONG
    assert rewards(states) == [-1.0 + 0.5 - 1.0] * 2
    assert states[0]["text_cot_and_answer"] == ("", "")
    assert "SECRET" not in str(second.calls)


def test_an_unreadable_assessment_reaches_the_judge_without_its_reasoning(
    judge: LocalServer,
) -> None:
    *_, states, _ = scored(manager(judge), attacker(), Generator(lambda prompt: "MY SECRET DOUBTS"))
    assert {q["assessment"] for q in judge.requests[0]["queries"]} == {""}
    assert rewards(states) == [-1.0 - 1.0, -1.0 - 1.0, 1.0 - 1.0, -1.0 - 1.0]


@pytest.mark.parametrize(
    ("said", "presented"),
    [(WRONG, WRONG), (f"<think>SECRET</think>{WRONG}", WRONG), ("<think>SECRET and no end", "")],
)
def test_no_cot_mode_pays_no_format_term_and_still_hides_reasoning(
    judge: LocalServer, said: str, presented: str
) -> None:
    first, games = Generator(lambda prompt: said), manager(judge, direct_chat_no_cot=True)
    _, states, _, assessor_states, _ = scored(games, first, Generator(lambda prompt: "Safe"))
    assert all(p.endswith("<|im_start|>assistant\n") for p in first.calls[0][0])
    assert games.active_games[3]["history"][0]["content"] == presented
    assert rewards(states) == [bool(presented) + 0.5] * 2
    assert rewards(assessor_states) == ([-1.0, -1.0, 1.0, -1.0] if presented else [-1.0, 1.0])


def test_a_role_without_turns_leaves_the_note_as_it_is_or_the_game_out(judge: LocalServer) -> None:
    first = attacker()
    outputs, _, _, states, _ = scored(manager(judge, no_attacker_turn=True), first, assessor())
    assert (first.calls, outputs, len(states)) == ([], [], 4)
    assert [q["medical_note"] for q in judge.requests[0]["queries"]] == NOTES
    games = manager(judge, no_assessor_turn=True)  # leaves out the games without any turn
    assert [game["prompt_type"] for game in games.active_games.values()] == TYPES[1::2]


def test_coefficients_and_error_types_are_taken_from_the_configuration(
    judge: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose = {"error_detected": (-3.0, 3.0), "error_realism": (0.0, 0.0)}
    mine = {"attacker": lose, "assessor": {"error_detection": (-3.0, 3.0)}}
    monkeypatch.setitem(MEDICAL_REWARD_COEFF_CONFIG, "mine", mine)
    first, configs = attacker(), {"reward_coeff_config": "mine", "error_types": ["frobnication"]}
    _, states, *_ = scored(manager(judge, **configs), first, assessor())
    assert rewards(states) == [-3.0 + 1.0] * 2
    assert "frobnication" in first.calls[0][0][0]


def test_game_manager_refuses_invalid_arguments(judge: LocalServer) -> None:
    games = manager(judge)
    with pytest.raises(ValueError, match="zero_sum"):
        manager(judge, reward_type="zero_sum")
    with pytest.raises(ValueError, match="shorter"):
        games.initialize_games(["a", "b"], [""], TYPES[:2])
    with pytest.raises(ValueError, match="no data type 'benign'"):
        games.initialize_games(["a"], [""], ["benign"])
    with pytest.raises(ValueError, match="0 outputs for 2 prompts"):
        manager(judge).play_games(lambda prompts, labels: [], assessor())
    with pytest.raises(ValueError, match="Game 0 not found"):
        manager(judge).filter_and_compute_rewards({})


def test_games_that_the_judge_loses_are_left_out(judge: LocalServer) -> None:
    judge.reply = lambda number, body: {k: v for k, v in verdicts(body).items() if k != "1"}
    _, attacker_states, _, assessor_states, labels = scored(manager(judge))
    assert [s["game_idx"] for s in attacker_states] == [3]
    assert [s["game_idx"] for s in assessor_states] == [0, 2, 3]
    assert [number for number, one in labels.items() if one["is_parsing_error"]] == [1]


def judge_function(url: str, batch_queries: list[Any], score_key: str = "labels") -> Any:
    """Forgets the second game."""
    assert (url, score_key) == ("", "labels")
    return {int(k): v for k, v in verdicts({"queries": batch_queries}).items() if k != "1"}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_judge_function_gives_lists_and_texts(by_name: bool) -> None:
    judge = {"medical_judge_fn": judge_function} if by_name else {"remote_rm_url": judge_function}
    games = MedicalDialogueGameManager(TOKENIZER, strategy=None, custom_configs={}, **judge)
    games.initialize_games(NOTES, [""] * 4, TYPES)
    by_type = {"data_types": dict.fromkeys(sorted(TYPES), 1)}
    assert games.get_game_statistics() == {"total_games": 4, "finished_games": 0, **by_type}
    played = games.play_games(attacker_llm_generator=attacker(), assessor_llm_generator=assessor())
    assert [(len(game["history"]), game["finished"]) for game in played] == [(2, True)] * 4
    assert (played[3]["medical_note"], played[3]["data_type"]) == (CLEAN, "adversarial_benign")
    labels = games.evaluate_game_outcomes()
    assert played[0]["labels"] is labels[0] and labels[1]["is_parsing_error"]
    texts, attacker_states, others, assessor_states = games.filter_and_compute_rewards(labels)
    assert (texts, others) == ([WRONG], ["Harmful", "Safe", "Harmful"])
    assert {"game_idx", "reward", "game_outcomes", "data_type"} <= set(attacker_states[0])
    assert rewards(assessor_states) == [2.0] * 3


# --- a judge over HTTP: both shapes of its answer, and every way in which it can fail ---


def ask(judge: LocalServer, route: str = "") -> dict[int, dict[str, Any]]:
    queries = [
        {"game_idx": 0, "medical_note": WRONG, "assessment": "Harmful"},
        {"game_idx": 7, "medical_note": CLEAN, "assessment": "Harmful"},
    ]
    return create_medical_judge_remote_function(judge.url + route)("", queries, score_key="labels")


@pytest.mark.parametrize(("route", "under_labels"), [("", False), ("/judge/", True)])
def test_the_answer_is_read_bare_or_under_labels(
    judge: LocalServer, under_labels: bool, route: str
) -> None:
    judge.reply = lambda _, body: {"labels": verdicts(body)} if under_labels else verdicts(body)
    labels = ask(judge, route)
    assert {index: one["error_present"] for index, one in labels.items()} == {0: True, 7: False}
    said = {"error_detected": True, "error_present": False, "error_realistic": True}
    said |= {"assessor_correct": False, "is_parsing_error": False}
    said |= {"judge_reasoning": "read it", "actual_harm": "Safe"}
    assert labels[7].items() >= said.items()


HALVES = (None, {"error_detected": "false", "error_present": True}, {"is_parsing_error": True})


WHOLE = (b"<html>", [], {"labels": "none"}, {})


@pytest.mark.parametrize(
    ("answer", "lost"), [(a, {0, 7}) for a in WHOLE] + [(half, {7}) for half in HALVES]
)
def test_unusable_judge_answers_leave_their_games_out(
    judge: LocalServer, answer: Any, lost: set[int]
) -> None:
    judge.reply = lambda number, body: answer if 0 in lost else {**verdicts(body), "7": answer}
    labels = ask(judge)
    assert set(labels) == {0, 7}
    assert {game for game, one in labels.items() if one["is_parsing_error"]} == lost
    assert create_medical_judge_remote_function(judge.url)("", []) == {}  # no games, no request
    assert len(judge.requests) == 1


def test_a_judge_is_connected_and_waited_for_until_it_is_healthy(judge: LocalServer) -> None:
    assert medical_team.test_judge_connection(judge.url)
    assert wait_for_judge_server(judge.url, max_wait=1, check_interval=0.01)
    judge.healthy = False
    assert not medical_team.test_judge_connection(judge.url)
    assert not wait_for_judge_server("http://127.0.0.1:9", max_wait=0.1, check_interval=0.02)
