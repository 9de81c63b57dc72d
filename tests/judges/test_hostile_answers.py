"""Answers full of malice and addresses with a password: nothing spreads, nothing shows.

Servers are asked by every client there is: the judges ``http`` and ``llm``, and ``medical_team``.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from invoking import invoke
from judges.games import CLIENTS, NO_ANSWER, ask
from judges.local_server import Status, by_index, harmful, serving
from judges.test_llm import PRESENT
from note_files import SAMPLE
from serving import completion
from support import extra_info, run_with

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run

EVERY = set(range(16))


@pytest.mark.parametrize("client", ["http", "medical_team"])
@pytest.mark.parametrize(
    ("status", "refused", "requests"),
    [(400, {5}, 9), (413, {0, 15}, 17), (422, EVERY, 31), (401, EVERY, 1), (404, EVERY, 1)],
)
def test_a_refused_note_costs_its_own_game_and_who_refuses_everybody_is_asked_once(
    client: str, status: int, refused: set[int], requests: int
) -> None:
    def reply(number: int, body: Any) -> Any:
        if any(str(1000 + n) in query["medical_note"] for query in body["queries"] for n in refused):
            raise Status(status)
        return by_index(body)

    with serving(reply) as server:
        answers = ask(client, server.url, games=16)
        assert len(server.requests) <= requests
    assert {n for n, said in enumerate(answers) if said.startswith(NO_ANSWER)} == refused


# --- any bytes at all ---

_ANSWER = json.dumps({"labels": {"0": harmful()}}).encode()
_COMPLETION = json.dumps(completion(PRESENT)).encode()


@st.composite
def spoilt(draw: Any) -> bytes:
    """Bytes, or a good answer with some of them replaced, cut out or repeated."""
    body = bytearray(draw(st.sampled_from([_ANSWER, _COMPLETION, b"{}"])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body)))
        to = draw(st.integers(at, min(len(body), at + 40)))
        replaced = st.sampled_from([b"", b"null", b"{}", b"1e999", b'"\\ud800"', bytes(body[at:to]) * 2])
        body[at:to] = draw(replaced | st.binary(max_size=20))
    return bytes(body)


@pytest.mark.parametrize("client", CLIENTS)
def test_any_bytes_are_an_answer_or_none(client: str) -> None:
    content = b""

    @examples(150, suppress_health_check=[HealthCheck.too_slow])
    @given(spoilt() | st.binary(max_size=300))
    def check(given_bytes: bytes) -> None:
        nonlocal content
        content = given_bytes
        (said,) = ask(client, server.url)
        said.encode()  # what no file takes, stays out of records

    with serving(lambda number, body: content) as server:
        check()


@pytest.mark.parametrize("url", ["http://anna:hunter2@host:8001", "http://hunter2@host/v1"])
@pytest.mark.parametrize("node", ["judge_server", "opponent"])
def test_a_password_in_the_config_which_verl_prints_is_refused_and_not_repeated(url: str, node: str) -> None:
    changes = {"selfplay__judge": "http"}
    if node == "opponent":
        changes = {"selfplay__train": "assessor", "selfplay__opponent__kind": "endpoint"}
    with pytest.raises(ConfigError, match=f"{node}.url holds a user name or a password.*{node}.api_key_env") as error:
        check_run(run_with(**changes, **{f"selfplay__{node}__url": url}))
    assert "hunter2" not in str(error.value)


COMMANDS = [
    "play {url} --model m --data {rows} --games 1",
    "probe {url} --model m --data {rows} --notes 2 --output {rows}.jsonl",
    "evaluate {url} --model m --notes {notes} --output {rows}.answers",
    "evaluate {url} --notes {notes} --output {rows}.answers",  # as a folder
    "tournament m@{url} --data {rows} --games 2 --output {rows}.games",
]


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
    places = {"url": url.format("anna:hunter2"), "rows": tmp_path / "rows.parquet", "notes": SAMPLE}
    result = invoke(*command.format(**places).split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "hunter2" not in result.output
