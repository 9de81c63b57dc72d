"""API keys and passwords reach the server they are for, and neither a log, a record, an exception nor a screen."""

import asyncio
import json
import logging
from base64 import b64encode
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from judges.clients import CLIENTS, NO_ANSWER, ask, good, http_answer, raw_server
from judges.local_server import harmful, serving
from judges.test_llm import PRESENT
from serving import completion
from support import extra_info, run_with
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.client import NoAnswer, ServerOptions
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.medical_team import test_judge_connection
from medserl_agentloop.paths import resource

KEY, USER, PASSWORD = "sk-TOPSECRET-0123", "anna", "p@ss/w:rd?#"
QUOTED = "p%40ss%2Fw%3Ard%3F%23"
BASIC = b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def echoes(secret: str) -> dict[str, bytes]:
    """Ways in which a server can repeat what it was sent."""
    words = json.dumps(f"you sent {secret} to us")[1:-1]
    hidden = "".join(f"\\u{ord(c):04x}" for c in secret)
    end = "\r\ncontent-length: 0\r\n\r\n"
    head = b"content-type: text/plain\r\ncontent-length: "
    body = f"you sent {secret} to us".encode()

    def error(status: str) -> bytes:
        return f"HTTP/1.1 {status}\r\n".encode() + head + str(len(body)).encode() + b"\r\n\r\n" + body

    told = json.dumps({**json.loads(PRESENT), "reason": f"you sent {secret} to us"})
    return {
        "refused": error("400 Bad Request"),
        "unauthorized": error("401 Unauthorized"),
        "down": error("503 Unavailable"),
        "status line": error(f"404 {secret}"),
        "redirect": f"HTTP/1.1 302 {secret}\r\nlocation: http://127.0.0.1:9/{secret}{end}".encode(),
        "bad redirect": f"HTTP/1.1 302 X\r\nlocation: http://[{secret}{end}".encode(),
        "no http": body,
        "packing": http_answer(b"{}", f"content-encoding: {secret}"),
        "no json": http_answer(body),
        "cut": http_answer(b"x" * 190 + body),
        "reasoning": http_answer(
            f'{{"0": {json.dumps(harmful())[:-1]}, "judge_reasoning": "{words}"}}}}'.replace(
                '"judge_reasoning": "the dose is ten times too high", ', ""
            ).encode()
        ),
        "escaped": http_answer(f'{{"0": {{"error_present": "{hidden}", "{hidden}": 1}}, "{hidden}": 3}}'.encode()),
        "completion": http_answer(json.dumps(completion(told)).encode()),
        "no completion": http_answer(f'{{"error": "{hidden}"}}'.encode()),
        "finish": http_answer(json.dumps(completion(PRESENT, finish=secret)).encode()),
        "no verdict": http_answer(json.dumps(completion(f"you sent {secret} to us")).encode()),
    }


@pytest.mark.parametrize(
    ("client", "kind"), [*((c, "password") for c in CLIENTS), *((c, "key") for c in CLIENTS if c != "medical_team")]
)
@pytest.mark.parametrize("way", echoes(""))
def test_secrets_are_never_shown_whatever_a_server_repeats(
    client: str,
    way: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_TEST_KEY", KEY)
    for secret in [KEY] if kind == "key" else [PASSWORD, QUOTED, BASIC, f"{USER}:{PASSWORD}", f"{USER}:{QUOTED}"]:
        with raw_server(echoes(secret)[way]) as url:
            if kind == "password":
                url = url.replace("//", f"//{USER}:{QUOTED}@")
            said = ask(client, url, key_env="JUDGE_TEST_KEY" if kind == "key" else None)
            if client == "medical_team":
                test_judge_connection(url)
        out, err = capfd.readouterr()
        shown = "\n".join([*said, caplog.text, *map(repr, caplog.records), out, err]).lower()
        for hidden in (KEY, PASSWORD, QUOTED, BASIC):
            assert hidden.lower() not in shown and json.dumps(hidden)[1:-1].lower() not in shown


@pytest.mark.parametrize("client", CLIENTS)
def test_a_password_in_the_address_is_sent_as_the_server_wants_it(client: str) -> None:
    with serving(lambda number, body: good(body)) as server:
        url = server.url.replace("//", f"//{USER}:{QUOTED}@")
        assert not ask(client, url)[0].startswith(NO_ANSWER)
        assert server.headers[0]["authorization"] == f"Basic {BASIC}"


def test_a_key_with_its_scheme_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", f"Basic {BASIC}\n")
    with serving(lambda number, body: completion(f"{PASSWORD} {BASIC}")) as server:
        (said,) = ask("llm", server.url, key_env="JUDGE_TEST_KEY")
        assert server.headers[0]["authorization"] == f"Basic {BASIC}"
    assert PASSWORD not in said and BASIC not in said


@pytest.mark.parametrize(
    "url", [f"http://{USER}:p/w@host", "host:1", "http:///x", "http://[::1", "ftp://u:secret@host"]
)
def test_an_address_that_cannot_be_used_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port") as error:
        ServerOptions(url=url).client()
    assert url not in str(error.value) and "secret" not in str(error.value)


@pytest.mark.parametrize("key", ["sk-\nsecret", "sk-sécret"])
def test_a_key_that_no_header_can_hold_is_not_repeated(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", key)
    with pytest.raises(ValueError, match="no HTTP header can hold") as error:
        ServerOptions(url="http://host", api_key_env="JUDGE_TEST_KEY").client()
    assert "cret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://anna:hunter2@host:8001", "http://hunter2@host/v1"])
@pytest.mark.parametrize("node", ["judge_server", "opponent"])
def test_a_password_in_the_config_which_verl_prints_is_refused_and_not_repeated(url: str, node: str) -> None:
    changes = {"selfplay__judge": "http"}
    if node == "opponent":
        changes = {"selfplay__train": "assessor", "selfplay__opponent__kind": "endpoint"}
    with pytest.raises(ConfigError, match=f"{node}.url holds a user name or a password.*{node}.api_key_env") as error:
        check_run(run_with(**changes, **{f"selfplay__{node}__url": url}))
    assert "hunter2" not in str(error.value)


def test_a_short_key_is_no_reason_to_change_what_a_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local servers are often given a key such as "none", which is also a word."""
    monkeypatch.setenv("JUDGE_TEST_KEY", "none")
    with serving(lambda number, body: completion("none of it")) as server:
        assert ask("chat", server.url, key_env="JUDGE_TEST_KEY") == ["none of it"]


def test_the_exceptions_hold_no_secret_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", KEY)
    with raw_server(b"HTTP/1.1 400 X\r\ncontent-length: 17\r\n\r\n" + KEY.encode()) as url:
        client = ServerOptions(url=url, api_key_env="JUDGE_TEST_KEY").client()
        with pytest.raises(NoAnswer) as caught:
            asyncio.run(client.post("/judge", {}))
    assert KEY not in repr(caught.value) + str(caught.getrepr(style="short"))


NOTES = str(resource("data_prep/sample/medserl_sample.csv"))
COMMANDS = {
    "play": lambda url, rows: ["play", "--endpoint", url, "--model", "m", "--data", rows, "--games", "1"],
    "probe": lambda url, rows: [
        "probe",
        url,
        "--model",
        "m",
        "--data",
        rows,
        "--notes",
        "2",
        "--output",
        rows + ".jsonl",
    ],
    "evaluate": lambda url, rows: ["evaluate", url, "--model", "m", "--notes", NOTES, "--output", rows + ".answers"],
    "evaluate a folder": lambda url, rows: ["evaluate", url, "--notes", NOTES, "--output", rows + ".answers"],
    "tournament": lambda url, rows: [
        "tournament",
        f"m@{url}",
        "--data",
        rows,
        "--games",
        "2",
        "--output",
        rows + ".games",
    ],
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
    words = COMMANDS[command](url.format("anna:hunter2"), str(tmp_path / "rows.parquet"))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "hunter2" not in result.output
