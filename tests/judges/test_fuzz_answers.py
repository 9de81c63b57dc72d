"""Mutated answers, read without a socket: only the errors that say so, and no verdict that contradicts itself."""

import json
import random
from collections import Counter
from contextlib import suppress

import pytest
from judges.local_server import harmful
from judges.test_llm import PRESENT, completion

from medserl_agentloop.core.chat import ChatClient
from medserl_agentloop.core.client import NoAnswer, ServerOptions, read_json
from medserl_agentloop.games.medical.judges.llm import Verdict, read_answer
from medserl_agentloop.games.medical.judges.protocol import JudgeAnswer, by_index
from medserl_agentloop.games.medical.types import Label

PASSWORD = "hunter2-hunter2"
HTTP = ServerOptions(url=f"http://anna:{PASSWORD}@localhost").client()
CHAT = ChatClient(HTTP, "m")
ANSWERS = [
    json.dumps(answer).encode()
    for answer in (
        {"labels": {"0": harmful()}},
        {"0": harmful(), "1": harmful(error_present=False, actual_harm="Safe")},
        [harmful()],
        completion(PRESENT),
        {**completion(f"<think>x</think>{PRESENT}"), "metadata": {"weight_version": "1"}},
    )
] + [PRESENT.encode(), f"<think>x</think>\n```json\n{PRESENT}\n```".encode()]
PARTS = [
    b"",
    b"null",
    b"true",
    b"false",
    b"{}",
    b"[]",
    b"1e999",
    b"NaN",
    b'"\\ud800"',
    b'"Safe"',
    b"absent",
    b"9" * 5000,
]
PARTS += [b'"error_present": false, ', b'"error": "absent", ', b"content_filter", PASSWORD.encode(), b"[" * 2000]


def mutated(draw: random.Random) -> bytes:
    body = bytearray(draw.choice(ANSWERS))
    for _ in range(draw.randint(0, 4)):
        at = draw.randint(0, len(body))
        to = min(len(body), at + draw.randint(0, 30))
        body[at:to] = draw.choice([draw.choice(PARTS), draw.randbytes(draw.randint(0, 6)), bytes(body[at:to]) * 2])
    return bytes(body)


def check_judge_answer(answer: object) -> str:
    try:
        said = JudgeAnswer.read(answer)
        judgement = said.to_judgement("fuzz")
    except ValueError:
        return "no judgement"
    assert PASSWORD not in judgement.model_dump_json()
    if judgement.label is not None:
        harm = judgement.label is Label.HARMFUL
        assert said.error_present in (None, harm) and said.actual_harm in (None, "Harmful" if harm else "Safe")
    return "judgement"


def check_verdict(text: str) -> str:
    try:
        read_answer(text, Verdict)
    except NoAnswer:
        return "no verdict"
    assert text.rpartition("</think>")[2].count('"error":') == 1
    return "verdict"


@pytest.mark.parametrize(
    "inputs", [5_000, pytest.param(300_000, marks=[pytest.mark.mutate, pytest.mark.timeout(1800)])]
)
def test_mutated_answers_are_read_or_refused(inputs: int) -> None:
    draw, seen = random.Random(14), Counter[str]()
    for _ in range(inputs):
        body = mutated(draw)
        seen[check_verdict(body.decode(errors="replace"))] += 1
        try:
            data = HTTP._credentials.taken_out_of_answer(read_json(body))
        except (ValueError, RecursionError):
            seen["no JSON"] += 1
            continue
        with suppress(NoAnswer):
            seen.update(map(check_judge_answer, by_index(data, ["0"]).values()))
        try:
            seen[f"chat, {check_verdict(CHAT._read(data, '').text)}"] += 1
        except NoAnswer as error:
            assert PASSWORD not in str(error)
            seen["no chat"] += 1
    assert min(seen.values()) > inputs / 1000 and len(seen) == 8, seen
