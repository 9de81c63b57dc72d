"""Facts of the real SGLang engine that the game relies on; verl's own server, no Ray."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from live_sglang import LiveSGLang
from real_runs import AGREEMENT, log_probs
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.backends.cpu_rollout import CpuRolloutServer
from medserl_agentloop.core.trajectory import RECORD_KEY, SelfPlayOutput
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import build_agent_loop, compose_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = compose_run("+recipes=[own_notes,sglang_cpu]")
MODEL = str(resource("assets/tiny_player"))
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
SAMPLED |= {"logprobs": True}
GREEDY = SAMPLED | {"temperature": 0.0}
GAMES = 48

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> Iterator[LiveSGLang]:
    server = LiveSGLang(RUN)
    yield server
    server.close()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model


@pytest.fixture(scope="module")
def rows(data: tuple[str, ...]) -> Rows:
    rows: Rows = pq.read_table(data[0].partition("=")[2]).to_pylist()
    return rows


class TransformersServer:
    """The embedded Transformers server in the place of the server client."""

    def __init__(self, model: torch.nn.Module) -> None:
        lengths = {"prompt_length": 2048, "response_length": 6144}
        config = RolloutConfig(name="cpu_hf", dtype="float32", **lengths)
        self.server = CpuRolloutServer(config, HFModelConfig(path=MODEL))
        self.state = model.state_dict()

    async def generate(self, request_id: str, **request: Any) -> TokenOutput:
        if self.server.global_steps is None:
            await self.server.update_weights(self.state, 0)
        return await self.server.generate(request_id=request_id, **request)


def play(server: Any, rows: Rows, sampling: dict[str, Any]) -> list[SelfPlayOutput]:
    """Play the games of the rows at the same time."""

    async def games() -> list[SelfPlayOutput]:
        loops = [build_agent_loop(server, TOKENIZER, RUN).run(sampling, **row) for row in rows]
        return await asyncio.gather(*loops)

    return asyncio.run(games())


def turns(output: SelfPlayOutput) -> list[list[int]]:
    """Token ids of each generated turn."""
    found: list[list[int]] = []
    previous = 0
    for token, mask in zip(output.response_ids, output.response_mask, strict=True):
        if mask and not previous:
            found.append([])
        if mask:
            found[-1].append(token)
        previous = mask
    return found


def generate(engine: LiveSGLang, prompt: list[int], **params: Any) -> TokenOutput:
    name = f"test-{generate.__name__}-{len(prompt)}"
    return engine.call(engine.server.generate(prompt, {**SAMPLED, **params}, name))


def forward_log_probs(
    model: torch.nn.Module, prompt: list[int], answer: list[int], temperature: float
) -> torch.Tensor:
    whole = log_probs(model, torch.tensor([*prompt, *answer]), temperature=temperature)
    return whole[len(prompt) - 1 :]


def test_greedy_games_are_the_same_on_transformers_and_on_sglang(
    engine: LiveSGLang, model: torch.nn.Module, rows: Rows
) -> None:
    ours = play(engine, rows[:GAMES], GREEDY)
    theirs = play(TransformersServer(model), rows[:GAMES], GREEDY)
    pairs: list[Any] = []
    for a, b in zip(ours, theirs, strict=True):
        pairs += zip(turns(a), turns(b), strict=False)
    same = sum(a == b for a, b in pairs)
    print(f"{same} of {len(pairs)} greedy turns are the same, token for token")
    assert len(pairs) > GAMES
    assert same >= 0.95 * len(pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_distribution_after_temperature(
    engine: LiveSGLang, model: torch.nn.Module, temperature: float
) -> None:
    prompt = list(range(5, 45))
    output = generate(engine, prompt, temperature=temperature, max_tokens=40)
    assert output.log_probs is not None and len(output.log_probs) == len(output.token_ids)
    expected = forward_log_probs(model, prompt, output.token_ids, temperature)
    assert (torch.tensor(output.log_probs) - expected).abs().max() < AGREEMENT


def test_a_turn_gets_the_tokens_that_were_planned_for_it(engine: LiveSGLang) -> None:
    output = generate(engine, [5, 6, 7], max_tokens=1500, ignore_eos=True)
    assert (len(output.token_ids), output.stop_reason) == (1500, "length")


def test_a_turn_ends_with_the_models_end_of_turn_and_keeps_its_token(
    engine: LiveSGLang, rows: Rows
) -> None:
    untouched = (row for row in rows if row["extra_info"]["category"] == "vanilla_benign")
    [output] = play(engine, [next(untouched)], GREEDY)
    assert output.response_ids[-1] == TOKENIZER.eos_token_id


def test_a_stop_token_ends_a_turn(engine: LiveSGLang) -> None:
    free = generate(engine, [5, 6, 7, 8], temperature=0.0, max_tokens=12, ignore_eos=True)
    stop = free.token_ids[3]
    output = generate(engine, [5, 6, 7, 8], temperature=0.0, max_tokens=12, stop_token_ids=[stop])
    assert output.stop_reason == "stop"
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_an_abort_by_the_engine_makes_its_games_void(engine: LiveSGLang, rows: Rows) -> None:
    async def aborted_games() -> list[SelfPlayOutput]:
        sampling, loop = SAMPLED | {"ignore_eos": True}, partial(build_agent_loop, engine)
        playing = asyncio.gather(
            *(loop(TOKENIZER, RUN).run(sampling, **row) for row in rows[:4]),
        )
        while not engine.server.tokenizer_manager.rid_to_state:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.abort_all)
        return await playing

    for output in asyncio.run(aborted_games()):
        record = MedicalRecord.model_validate(output.extra_fields[RECORD_KEY])
        assert record.void is not None and "aborted" in record.void
    assert generate(engine, [5, 6, 7], max_tokens=4).token_ids  # the engine goes on


def test_prompt_log_probs_do_not_end_the_engine(engine: LiveSGLang, model: torch.nn.Module) -> None:
    # They take the way through SGLang that pins memory, as requests do that the scheduler restarts.
    prompt = list(range(5, 25))
    output = generate(engine, prompt, max_tokens=1, prompt_logprobs=0)
    expected = forward_log_probs(model, prompt[:1], prompt[1:], 1.0)
    found = torch.tensor([row[0] for row in output.extra_fields["prompt_logprobs"][:-1]])
    assert (found - expected).abs().max() < AGREEMENT
