"""SGLang's OpenAI-compatible server on the CPU, started by one command."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from invoking import invoke
from note_files import SAMPLE
from verl.utils.net_utils import get_free_port

from medserl_agentloop.core.client import ServerOptions, Unreachable, blocking
from medserl_agentloop.paths import resource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VERDICT = {"type": "object", "properties": {"error": {"enum": ["present", "absent"]}}}
VERDICT |= {"required": ["error"], "additionalProperties": False}
QUESTION = {
    "model": "player",
    "max_tokens": 64,
    "temperature": 0.0,
    "messages": [{"role": "user", "content": "Is there an error?"}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT},
    },
}


PLAYER = str(resource("assets/tiny_player"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the tiny player's server."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    port, _ = get_free_port("127.0.0.1")
    command = f"{sys.executable} -m medserl_agentloop.backends.sglang_cpu --port {port} "
    command += f"--served-model-name player --model-path {PLAYER} "
    command += "--max-total-tokens 16384 --context-length 8192"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            command.split(), stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    try:
        client = ServerOptions(url=f"http://127.0.0.1:{port}/v1", timeout_s=120, retries=0).client()
        for _ in range(200):
            assert server.poll() is None, log.read_text()[-2000:]
            try:
                blocking(client.get("/models"))
                break
            except Unreachable:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()


def test_a_served_model_answers_in_the_schema_that_it_is_asked_for(url: str) -> None:
    client = ServerOptions(url=f"{url}/v1", timeout_s=120, retries=0).client()
    answer = blocking(client.post("/chat/completions", QUESTION))
    assert json.loads(answer["choices"][0]["message"]["content"])["error"] in ("present", "absent")


def test_evaluated_through_its_server_a_model_says_what_its_folder_says(
    url: str, tmp_path: Path
) -> None:
    with SAMPLE.open(newline="") as sample, (tmp_path / "notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(list(csv.reader(sample))[:25])
    answers = []
    for model, output in (([url, "--model", "player"], "server"), ([PLAYER], "folder")):
        files = ("--notes", tmp_path / "notes.csv", "--output", tmp_path / output)
        done = invoke("evaluate", *model, *files, "--max-tokens", 256)
        assert done.exit_code == 0, done.output
        answers.append((tmp_path / output / "answers.jsonl").read_text())
    served, local = answers
    assert served == local and len(served.splitlines()) == 24
