"""MockSGLangEngine answers as verl's server client does."""

import asyncio
import inspect
from typing import Any

import pytest
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.testing import MockReply, MockSGLangEngine, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


YES = [*ids("yes"), TOKENIZER.eos_token_id]


def generate(engine: MockSGLangEngine, prompt: str = "hi", **params: Any) -> TokenOutput:
    return asyncio.run(engine.generate("game", prompt_ids=ids(prompt), sampling_params=params))


def test_generate_accepts_what_verls_client_accepts() -> None:
    verls = inspect.signature(LLMServerClient.generate).parameters
    ours = inspect.signature(MockSGLangEngine.generate).parameters
    assert list(ours)[:2] == list(verls)[:2] == ["self", "request_id"]
    for name, parameter in verls.items():
        assert name in ours or parameter.default is None or name == "kwargs"


@pytest.mark.parametrize(
    ("reply", "params", "token_ids", "stop_reason"),
    [
        ("yes", {"max_tokens": 4}, YES, "stop"),
        ("yes", {"max_tokens": 2}, YES[:2], "length"),
        ([7, 8], {}, [7, 8], "stop"),
        ([7, 8], {"max_new_tokens": 2}, [7, 8], "length"),
        (MockReply("yes", stop_reason="abort"), {}, YES[:3], "abort"),
    ],
)
def test_a_reply_is_answered_as_verls_server_would(
    reply: Any, params: dict[str, Any], token_ids: list[int], stop_reason: str
) -> None:
    engine = MockSGLangEngine([reply], TOKENIZER)
    output = generate(engine, "hello", **params)
    assert (output.token_ids, output.stop_reason) == (token_ids, stop_reason)
    assert output.log_probs == [-1.0] * len(token_ids) and output.extra_fields["global_steps"] == 0
    output.token_ids.append(99)  # does not reach the record
    (call,) = engine.calls
    assert call[:3] == ("game", ids("hello"), params)
    assert call.output is not None and call.output.token_ids == token_ids
