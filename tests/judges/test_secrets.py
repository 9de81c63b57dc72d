"""API keys and passwords reach the server they are for, and neither a record nor a screen."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from judges.clients import CLIENTS, ask
from judges.local_server import by_index, harmful, serving
from judges.test_llm import PRESENT
from serving import completion
from support import extra_info, run_with
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.paths import resource

KEY = "sk-TOPSECRET-0123"


@pytest.mark.parametrize("client", [c for c in CLIENTS if c != "medical_team"])
def test_a_key_that_the_server_repeats_is_in_no_record(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", KEY)

    def reply(number: int, body: Any) -> Any:
        words = f"you sent {KEY}"
        if "queries" in body:
            return by_index(body, lambda query: harmful(judge_reasoning=words))
        return completion(json.dumps({**json.loads(PRESENT), "reason": words}))

    with serving(reply) as server:
        (answer,) = ask(client, server.url, key_env="JUDGE_TEST_KEY")
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert "you sent ***" in answer and KEY not in answer


@pytest.mark.parametrize("url", ["http://anna:hunter2@host:8001", "http://hunter2@host/v1"])
@pytest.mark.parametrize("node", ["judge_server", "opponent"])
def test_a_password_in_the_config_which_verl_prints_is_refused_and_not_repeated(url: str, node: str) -> None:
    changes = {"selfplay__judge": "http"}
    if node == "opponent":
        changes = {"selfplay__train": "assessor", "selfplay__opponent__kind": "endpoint"}
    with pytest.raises(ConfigError, match=f"{node}.url holds a user name or a password.*{node}.api_key_env") as error:
        check_run(run_with(**changes, **{f"selfplay__{node}__url": url}))
    assert "hunter2" not in str(error.value)


NOTES = str(resource("data_prep/sample/medserl_sample.csv"))
COMMANDS = {
    "play": "play {url} --model m --data {rows} --games 1",
    "probe": "probe {url} --model m --data {rows} --notes 2 --output {rows}.jsonl",
    "evaluate": "evaluate {url} --model m --notes {notes} --output {rows}.answers",
    "evaluate a folder": "evaluate {url} --notes {notes} --output {rows}.answers",
    "tournament": "tournament m@{url} --data {rows} --games 2 --output {rows}.games",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "url", ["http://{}@127.0.0.1:9", "{}@127.0.0.1:9", "ftp://{}@127.0.0.1", "http://{}/@127.0.0.1", "http://{}@[::1:9"]
)
def test_no_command_prints_the_password_of_an_address_that_cannot_be_used(
    command: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pa.Table.from_pylist([{"extra_info": extra_info("adversarial_benign")}] * 2)
    pq.write_table(rows, tmp_path / "rows.parquet")
    places = {"url": url.format("anna:hunter2"), "rows": tmp_path / "rows.parquet", "notes": NOTES}
    result = CliRunner().invoke(app, COMMANDS[command].format(**places).split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "hunter2" not in result.output
