"""SGLang's OpenAI-compatible server on the CPU: it starts with one command and binds answers to a JSON schema."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from verl.utils.net_utils import get_free_port

from medserl_agentloop.client import HttpClient, Unreachable
from medserl_agentloop.paths import resource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VERDICT = {
    "type": "object",
    "properties": {"error": {"enum": ["present", "absent"]}},
    "required": ["error"],
    "additionalProperties": False,
}
QUESTION = {
    "model": "player",
    "max_tokens": 64,
    "temperature": 0.0,
    "messages": [{"role": "user", "content": "Is there an error?"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT}},
}


def test_a_served_model_answers_in_the_schema_that_it_is_asked_for(tmp_path: Path) -> None:
    port, _ = get_free_port("127.0.0.1")
    command = [sys.executable, "-m", "medserl_agentloop.backends.sglang_cpu", "--served-model-name", "player"]
    command += ["--model-path", str(resource("assets/tiny_player")), "--port", str(port), "--max-total-tokens", "8192"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        client = HttpClient(f"http://127.0.0.1:{port}/v1", timeout_s=120)
        for _ in range(200):
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
            try:
                client.blocking(client.get("/models"))
                break
            except Unreachable:
                time.sleep(1)
        answer = asyncio.run(client.post("/chat/completions", QUESTION))
        assert json.loads(answer["choices"][0]["message"]["content"])["error"] in ("present", "absent")
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()
