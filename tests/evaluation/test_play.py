"""``medserl play``, from their options to the records, and the chat server that they ask."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation.conftest import run_at
from game.builders import CLEAN_NOTE, ERROR_NOTE, HARMFUL_ANSWER, SAFE_ANSWER, attack_text
from invoking import invoke
from note_files import SAMPLE
from serving import MODEL, ChatServer
from typer.testing import Result

from medserl_agentloop.core.interaction import Reply
from medserl_agentloop.evaluation.play import can_play, suggested_budget
from medserl_agentloop.games.kuhn_poker import KuhnRecord
from medserl_agentloop.games.kuhn_poker import rows as kuhn_rows
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import Outcome, read_games
from medserl_agentloop.games.medical.rewards import Medserl

WORSE_NOTE = ERROR_NOTE.replace("warfarin", "aspirin")


def good_player(role: Role, prompt: str) -> str:
    if role is Role.ATTACKER:
        return attack_text(WORSE_NOTE if "contains one medical error" in prompt else ERROR_NOTE)
    return SAFE_ANSWER if CLEAN_NOTE in prompt else HARMFUL_ANSWER


def run(server: ChatServer, data: Path, output: Path, *more: str) -> Result:
    judge = () if {"--judge", "game=kuhn_poker"} & set(more) else ("--judge", "labels")
    return invoke(
        "play", server.url, "--model", MODEL, "--data", data, "--output", output, *judge, *more
    )


def test_a_batch_is_played_judged_scored_and_written(
    server: ChatServer, rows: Path, tmp_path: Path
) -> None:
    server.answer = good_player
    output = tmp_path / "games.jsonl"
    result = run(server, rows, output, "--games", "12")
    assert result.exit_code == 0 and "selfplay/assessor/accuracy" in result.output
    assert f"games: {output}" in result.output and "this model can play" in result.output
    records = list(read_games(output))
    assert sorted(r.spec.index for r in records) == list(range(12))
    for record in records:
        assert record.outcome in (Outcome.CORRECT_DETECTION, Outcome.CORRECT_REJECTION)
        assert record.rewards == Medserl().rewards(record) != {}
        assert (record.scheme, record.profile, record.step) == ("medserl", "medserl", 0)
        roles = {Role.ATTACKER, Role.ASSESSOR} if record.category.has_attack else {Role.ASSESSOR}
        assert record.players == dict.fromkeys(roles, MODEL)
        assert record.assessment is not None and record.assessment.tokens == 12
    assert len(server.requests) == 12 + 6


def test_several_games_on_a_row_are_a_group(server: ChatServer, rows: Path, tmp_path: Path) -> None:
    server.answer = good_player
    result = run(server, rows, tmp_path / "games.jsonl", "--games", "4", "--samples", "3")
    assert result.exit_code == 0 and "selfplay/assessor/no_signal_rate" in result.output, (
        result.output
    )
    records = list(read_games(tmp_path / "games.jsonl"))
    assert len(records) == 12 and len({(record.uid, record.spec.index) for record in records}) == 4


def test_a_server_without_answers_makes_games_void(
    server: ChatServer, rows: Path, tmp_path: Path
) -> None:
    server.answer = lambda role, prompt: (
        400 if role is Role.ASSESSOR and CLEAN_NOTE in prompt else good_player(role, prompt)
    )
    result = run(server, rows, tmp_path / "games.jsonl", "--games", "12")
    assert result.exit_code == 0, result.output
    records = list(read_games(tmp_path / "games.jsonl"))
    void = [r for r in records if r.void is not None]
    assert {r.category.value for r in void} == {"vanilla_benign"} and len(void) == 3
    assert all(r.rewards == {} and r.assessment is None for r in void)
    assert "void: 3 x assessor: HTTP 400" in result.output
    server.answer = lambda role, prompt: 400
    assert (
        run(server, rows, tmp_path / "nothing.jsonl", "--games", "3").exit_code == 1
    )  # all are void


def turns(cut: int, *lengths: int) -> list[Reply]:
    return [Reply("", length, number < cut) for number, length in enumerate(lengths)]


def test_thresholds_are_those_of_the_page() -> None:
    heard = {"attacker": turns(2, *range(1, 101)), "assessor": turns(3, *range(1, 101))}
    names = ("parse_rate", "valid_rate", "no_signal_rate")
    for values, count in (((0.9, 0.5, 0.8), 0), ((0.62, 0.4, 0.9), 3)):
        rates = {f"selfplay/attacker/{name}": v for name, v in zip(names, values, strict=True)}
        *said, last = can_play(rates, heard, 100)
        assert len(said) == count and "3 % of the assessor's turns were cut" in last
    assert said[0].startswith("a warm start first: 62 % of the attacker's turns can be read")
    assert suggested_budget(heard["attacker"]) == 128  # 1.1 * 99, in steps of 64
    assert suggested_budget(heard["assessor"]) is None  # 3 % are cut


def test_scheme_edit_limits_and_key_come_from_the_options(
    server: ChatServer, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_KEY", "sk-1")
    server.answer = lambda role, prompt: (
        attack_text(f"{ERROR_NOTE} She may go. And come.") + SAFE_ANSWER
    )
    settings = ("reward=zero_sum", "edits.max_changed_sentences=4")
    options = ("--api-key-env", "TOY_KEY", *(f"--set={setting}" for setting in settings))
    assert run(server, rows, tmp_path / "games.jsonl", "--games", "12", *options).exit_code == 0
    records = list(read_games(tmp_path / "games.jsonl"))
    attacks = [r.attack for r in records if r.category.value == "adversarial_benign"]
    assert [a and a.invalid for a in attacks] == [None] * 3
    assert {r.scheme for r in records} == {"zero_sum"}
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-1"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--games", "13"], "holds 12 rows; --games can be at most that"),
        (["--data", __file__], "cannot be read as parquet"),
        (["--extra-body", "max_tokens"], "--extra-body max_tokens: expected KEY=VALUE"),
        (["--set", "edits.max_changed_word=3"], "edits.max_changed_word is not a key"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "an environment variable that is not set"),
        (["--output", __file__], "exists already"),
    ],
)
def test_play_refuses_bad_options_before_any_request(
    server: ChatServer, rows: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    result = run(server, rows, tmp_path / "games.jsonl", "--games", "2", *options)
    assert result.exit_code == 2
    assert re.search(says, result.output), result.output
    assert not (tmp_path / "games.jsonl").exists() and not server.requests


def test_run_plays_its_own_game_and_rows_and_keeps_the_games_beside_it(
    rows: Path, tmp_path: Path
) -> None:
    run = run_at(
        tmp_path / "run",
        selfplay={"reward": "zero_sum", "judge": "labels"},
        data={"val_files": [str(rows)]},
    )
    result = invoke("play", run, "--games", 2, "--max-tokens", 60)
    assert result.exit_code == 0, result.output
    records = list(read_games(run / "play" / "global_step_1.jsonl"))
    assert [record.scheme for record in records] == ["zero_sum"] * 2
    assert {name for record in records for name in record.players.values()} == {"run"}
    again = invoke("play", run, "--games", 2)
    assert again.exit_code == 2 and "global_step_1.jsonl exists already" in again.output


def test_another_game_is_played_with_each_players_own_conversation(
    server: ChatServer, tmp_path: Path
) -> None:
    server.answer = lambda role, prompt: (
        "call" if "fold or call" in prompt else "bet" if "says check" in prompt else "check"
    )
    kuhn, output = tmp_path / "kuhn.parquet", tmp_path / "games.jsonl"
    pq.write_table(pa.Table.from_pylist(kuhn_rows()), kuhn)
    result = run(server, kuhn, output, "--games", "6", "--set", "game=kuhn_poker")
    assert result.exit_code == 0 and "selfplay/first/reward" in result.output, result.output
    records = [KuhnRecord.model_validate_json(line) for line in output.read_text().splitlines()]
    assert {record.moves for record in records} == {("check", "bet", "call")}
    later = [
        body["messages"]
        for body in server.requests
        if "fold or call" in body["messages"][-1]["content"]
    ]
    assert {tuple(message["content"] for message in chat[1:]) for chat in later} == {
        ("check", "The other says bet. fold or call?")
    }
    assert all(chat[0]["content"].startswith("You hold") for chat in later)
    assert all(record.players == {"first": MODEL, "second": MODEL} for record in records)


def test_an_interrupt_leaves_the_games_that_have_ended(
    server: ChatServer, rows: Path, tmp_path: Path
) -> None:
    def answer(role: Role, prompt: str) -> str:
        if len(server.requests) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return SAFE_ANSWER

    server.answer = answer
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a test run in the background may ignore it
    try:
        result = run(server, rows, tmp_path / "games.jsonl", "--games", "12", "--concurrency", "1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130 and "stopped; the games finished so far are in" in result.output
    assert len(list(read_games(tmp_path / "games.jsonl"))) in (2, 3)


@pytest.mark.slow
def test_served_model_commands_and_the_medical_game_load_no_framework() -> None:
    code = """
import importlib, pkgutil, sys, medserl_agentloop.games.medical as game
import medserl_agentloop.cli, medserl_agentloop.evaluation.evaluate, medserl_agentloop.medical_team
for module in pkgutil.walk_packages(game.__path__, f"{game.__name__}."):
    importlib.import_module(module.name)
frameworks = {"verl", "torch", "ray", "hydra", "transformers", "sklearn", "rouge", "pandas", \
"datasets"}
print(frameworks & {*sys.modules})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "set()", run.stdout + run.stderr


@pytest.mark.parametrize(
    "command", ["play --games 4", "tournament --games 12", f"evaluate --notes {SAMPLE}"]
)
def test_every_command_adds_fields_to_its_requests_and_takes_some_out(
    server: ChatServer, rows: Path, tmp_path: Path, command: str
) -> None:
    server.answer = good_player
    name, *options = command.split()
    place = (f"{MODEL}@{server.url}",) if name == "tournament" else (server.url, "--model", MODEL)
    data = () if name == "evaluate" else ("--data", rows, "--judge", "labels")
    added = ("max_tokens=null", "max_completion_tokens=9", "chat_template_kwargs.thinking=false")
    fields = [part for field in added for part in ("--extra-body", field)]
    done = invoke(name, *place, *options, *data, *fields, "--output", tmp_path / "out")
    assert done.exit_code == 0 and server.requests, done.output
    for body in server.requests:
        assert body["max_completion_tokens"] == 9 and "max_tokens" not in body
        assert body["chat_template_kwargs"] == {"thinking": False}
