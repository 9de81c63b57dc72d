"""verl's SGLang server with adapters: each request gets its own, the base gets none, and no prefix
is shared.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_sglang import LiveSGLang
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from real_runs import AGREEMENT, log_probs
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.backends.engines import write_adapter
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import compose_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ADAPTERS = ("attacker", "assessor", None)
PROMPT = list(range(5, 70))


def tiny_player() -> Any:
    path = resource("assets/tiny_player")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for seed, name in enumerate(filter(None, ADAPTERS)):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(tiny_player(), config)
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                weight.data.normal_(std=0.05)
        folders[name] = tmp_path_factory.mktemp(name)
        write_adapter(folders[name], get_peft_model_state_dict(model), model.peft_config["default"])
    return folders


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[LiveSGLang]:
    recipes = "+recipes=[own_notes,sglang_cpu,adapter_per_role]"
    server = LiveSGLang(compose_run(recipes, "actor_rollout_ref.model.lora_rank=4"))
    for name, folder in folders.items():
        load(server, name, folder)
    yield server
    server.close()


def load(server: LiveSGLang, name: str, folder: Path) -> None:
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

    request = LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(folder))
    loaded = server.call(server.server.tokenizer_manager.load_lora_adapter(request))
    assert loaded.success, loaded.error_message


def ask(engine: LiveSGLang, adapter: str | None, **params: Any) -> TokenOutput:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, **params}
    sampling |= {"max_tokens": 24, "ignore_eos": True}
    if adapter is not None:
        sampling["adapter"] = adapter
    name = f"{adapter}-{ask.__name__}"
    return engine.call(engine.generate(name, prompt_ids=PROMPT, sampling_params=sampling))


def of_answer(output: TokenOutput, folder: Path | None) -> torch.Tensor:
    model = tiny_player()
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).eval()
    return log_probs(model, torch.tensor([*PROMPT, *output.token_ids]))[len(PROMPT) - 1 :]


def test_each_request_gets_its_own_adapter_and_none_gets_the_base(
    engine: LiveSGLang, folders: dict[str, Path]
) -> None:
    for adapter in ADAPTERS:
        output = ask(engine, adapter)
        said = torch.tensor(output.log_probs)
        for other in ADAPTERS:
            difference = (said - of_answer(output, folders.get(other or ""))).abs().max()
            assert difference < AGREEMENT if other == adapter else difference > 100 * AGREEMENT


def test_the_prefix_cache_never_crosses_adapters(engine: LiveSGLang) -> None:
    engine.empty_prefix_cache()
    first = [ask(engine, adapter).extra_fields["cached_tokens"] for adapter in ADAPTERS]
    second = [ask(engine, adapter).extra_fields["cached_tokens"] for adapter in ADAPTERS]
    assert first == [0, 0, 0]  # the same prompt, which another adapter has just read
    assert all(cached >= len(PROMPT) - 1 for cached in second)


def test_new_adapter_takes_nothing_from_the_cache_of_the_one_it_replaces(
    engine: LiveSGLang, folders: dict[str, Path]
) -> None:
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    ask(engine, "attacker")
    request = UnloadLoRAAdapterReqInput(lora_name="attacker")
    assert engine.call(engine.server.tokenizer_manager.unload_lora_adapter(request)).success
    load(engine, "attacker", folders["assessor"])
    output = ask(engine, "attacker")
    assert output.extra_fields["cached_tokens"] == 0
    difference = torch.tensor(output.log_probs) - of_answer(output, folders["assessor"])
    assert difference.abs().max() < AGREEMENT
