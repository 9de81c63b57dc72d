"""MockSGLangEngine keeps every promise of its docstring."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.testing.mock_engine import MockReply, MockSGLangEngine
from medserl_agentloop.testing.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def generate(
    engine: MockSGLangEngine, prompt: str = "hi", request_id: str = "r", **params: Any
) -> TokenOutput:
    return asyncio.run(engine.generate(request_id, prompt_ids=ids(prompt), sampling_params=params))


def test_generate_accepts_what_verls_client_accepts() -> None:
    verls = inspect.signature(LLMServerClient.generate).parameters
    ours = inspect.signature(MockSGLangEngine.generate).parameters
    assert list(ours)[:2] == list(verls)[:2] == ["self", "request_id"]
    for name, parameter in verls.items():
        assert name in ours or parameter.default is None or name == "kwargs"
    assert all(
        ours[n].kind is verls[n].kind for n in ("request_id", "prompt_ids", "sampling_params")
    )


STEPS = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
YES = [*ids("yes"), EOS]


@pytest.mark.parametrize(
    ("reply", "params", "token_ids", "log_probs", "stop_reason"),
    [
        ("yes", {}, YES, [-1.0] * 4, "stop"),
        ("yes", {"max_tokens": 4}, YES, [-1.0] * 4, "stop"),
        ("yes", {"max_tokens": 2}, YES[:2], [-1.0] * 2, "length"),
        ("yes", {"max_new_tokens": 2}, YES[:2], [-1.0] * 2, "length"),
        ([7, 8], {}, [7, 8], [-1.0] * 2, "stop"),
        ([7, 8], {"max_tokens": 2}, [7, 8], [-1.0] * 2, "length"),
        (
            MockReply("yes", log_probs=[-0.1, -2, -3], stop_reason="odd"),
            {"max_tokens": 2},
            YES[:2],
            [-0.1, -2],
            "odd",
        ),
        (
            MockReply("yes", stop_reason="abort"),
            {},
            YES[:3],
            [-1.0] * 3,
            "abort",
        ),  # as verl's SGLang server has it
        (MockReply("", stop_reason="abort"), {}, [], [], "abort"),
    ],
)
def test_a_reply_is_answered_as_verls_server_would(
    reply: Any,
    params: dict[str, Any],
    token_ids: list[int],
    log_probs: list[float],
    stop_reason: str,
) -> None:
    engine = MockSGLangEngine([reply], TOKENIZER)
    output = generate(engine, "hello", "game-7", **params)
    assert isinstance(output, TokenOutput)
    assert (output.token_ids, output.log_probs, output.stop_reason) == (
        token_ids,
        log_probs,
        stop_reason,
    )
    assert output.extra_fields == STEPS
    output.token_ids.append(99)  # does not reach the record
    (call,) = engine.calls
    assert (call.request_id, call.sampling_params) == ("game-7", params)
    assert call.prompt_ids == ids("hello")
    assert call.output is not None and call.output.token_ids == token_ids


def test_replies_come_from_a_generator_a_function_or_an_async_function() -> None:
    def echo(prompt_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        return [*prompt_ids, int(sampling_params["temperature"])]

    async def slow_echo(prompt_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        await asyncio.sleep(0)
        return echo(prompt_ids, sampling_params)

    for replies in (echo, slow_echo, iter([[*ids("x"), 3]])):
        assert generate(MockSGLangEngine(replies, TOKENIZER), "x", temperature=3).token_ids == [
            *ids("x"),
            3,
        ]


def test_mock_engine_raises_exceptions_and_shows_the_prompt_at_its_end() -> None:
    engine = MockSGLangEngine([ConnectionError("server gone"), "fine"], TOKENIZER)
    with pytest.raises(ConnectionError, match="server gone"):
        generate(engine)
    assert generate(engine).stop_reason == "stop"
    assert [call.output is None for call in engine.calls] == [True, False]
    with pytest.raises(AssertionError, match=r"2 calls were served.*ends in '.*the last prompt'"):
        generate(engine, "x" * 500 + "the last prompt")


def test_wrong_kinds_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="for one reply write"):
        MockSGLangEngine("one string", TOKENIZER)
    with pytest.raises(TypeError, match="a reply must be a str"):
        generate(MockSGLangEngine([None], TOKENIZER))  # type: ignore[list-item]
    with pytest.raises(TypeError, match="prompt_ids must be a list of ints, not str"):
        asyncio.run(
            MockSGLangEngine([], TOKENIZER).generate("r", prompt_ids="hi", sampling_params={})
        )
    with pytest.raises(ValueError, match="2 log_probs for 3 tokens"):
        generate(MockSGLangEngine([MockReply("ab", log_probs=[-1.0, -1.0])], TOKENIZER))
    with pytest.raises(ValueError, match="text or token_ids"):
        MockReply()
