"""A judge's server that answers with malice: it costs the games it was asked about, and nothing else.

Each test asks by every client there is: the judges ``http`` and ``llm``, ``medical_team`` and ``chat``.
"""

import json
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from judges.clients import NO_ANSWER, ask
from judges.local_server import Status, by_index, harmful, serving
from judges.test_llm import PRESENT
from serving import completion

# --- a note that the server refuses ---


@pytest.mark.parametrize("client", ["http", "medical_team"])
@pytest.mark.parametrize(("status", "refused"), [(400, {5}), (413, {0, 15}), (422, set(range(16)))])
def test_a_refused_note_costs_its_own_game(client: str, status: int, refused: set[int]) -> None:
    def reply(number: int, body: Any) -> Any:
        if any(str(1000 + n) in query["medical_note"] for query in body["queries"] for n in refused):
            raise Status(status)
        return by_index(body)

    with serving(reply) as server:
        answers = ask(client, server.url, games=16)
        assert len(server.requests) <= (2 * 4 * len(refused) + 1 if len(refused) < 16 else 31)
    assert {n for n, said in enumerate(answers) if said.startswith(NO_ANSWER)} == refused


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_refuses_everybody_is_asked_once(status: int) -> None:
    def reply(number: int, body: Any) -> Any:
        raise Status(status)

    with serving(reply) as server:
        assert all(said.startswith(NO_ANSWER) for said in ask("http", server.url, games=16))
        assert len(server.requests) == 1


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
        body[at:to] = draw(
            st.sampled_from([b"", b"null", b"{}", b"1e999", b'"\\ud800"', bytes(body[at:to]) * 2])
            | st.binary(max_size=20)
        )
    return bytes(body)


@pytest.mark.parametrize("client", ["http", "llm", "medical_team"])
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
