"""Models in folders: whatever folder a model is in, its very weights are what plays."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from support import extra_info
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

from medserl_agentloop.core.config import ADAPTERS_FOLDER
from medserl_agentloop.core.encoding import Message
from medserl_agentloop.core.interaction import Prompt, Reply, Turn
from medserl_agentloop.evaluation.local_models import (
    facts_of,
    find_weights,
    load_model,
    load_player,
)
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(map(torch.equal, ours.values(), theirs.values()))


def with_adapter(std: float = 0.1) -> Any:
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_model(len(TOKENIZER)), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=std)
    return model


def saved(folder: Path, seed: int = 0) -> Any:
    """A whole model in a Hugging Face folder, with its tokenizer."""
    model = tiny_model(len(TOKENIZER), seed=seed)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def save_shards(model: Any, tokenizer: Any, folder: Path, ranks: int) -> Path:
    """Write ``folder`` as ``FSDPCheckpointManager`` does: a file per rank, and config and tokenizer
    beside.
    """
    (folder / "huggingface").mkdir(parents=True)
    model.config.architectures = ["Qwen3ForCausalLM"]  # as in a model that was read from a folder
    model.config.save_pretrained(folder / "huggingface")
    model.generation_config.save_pretrained(folder / "huggingface")
    tokenizer.save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for rank in range(ranks):
            shards = {}
            for name, weight in model.state_dict().items():
                chunks = weight.chunk(ranks)
                part = chunks[rank] if rank < len(chunks) else weight[:0]
                sizes = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
                shards[name] = DTensor.from_local(part.clone(), mesh, [Shard(0)], **sizes)
            torch.save(shards, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    finally:
        dist.destroy_process_group()
    return folder


def merge(shards: Path, target: Path) -> None:
    """As ``python -m verl.model_merger`` does it."""
    places = {"local_dir": str(shards), "hf_model_config_path": str(shards / "huggingface")}
    places["target_dir"] = str(target)
    FSDPModelMerger(ModelMergerConfig(operation="merge", backend="fsdp", **places)).merge_and_save()


def drawn(
    player: Any, turn: Turn, conversation: Sequence[Message] | None = None, budget: int = 9
) -> Reply:
    """A greedy turn of a player, after its prompt alone or after a conversation."""
    options: Any = {"number": 0, "budget": budget, "temperature": 0.0, "seed": 0}
    read = turn.prompt.filled() if conversation is None else conversation
    return asyncio.run(player.sample(turn, read, **options))


def loaded(folder: Path) -> Any:
    model, tokenizer = load_model(find_weights(folder))
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert model.dtype is torch.float32 and not model.training
    return model


@pytest.mark.parametrize("place", ["", "actor/huggingface"])
def test_a_hugging_face_folder_or_a_checkpoint_of_the_whole_model_alone(
    tmp_path: Path, place: str
) -> None:
    assert same(saved(tmp_path / place), loaded(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_merge_exactly_and_a_merged_folder_is_read_too(tmp_path: Path, ranks: int) -> None:
    model = tiny_model(len(TOKENIZER))
    shards = save_shards(model, TOKENIZER, tmp_path / "shards", ranks)
    assert same(loaded(shards), model)
    merge(shards, tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), model.bfloat16().float())  # verl's merger rounds


def sharded(folder: Path) -> None:
    """Write a LoRA run's weights as verl's engine does: the base under its PEFT names, the adapter,
    and its alpha.
    """
    model = with_adapter()
    base = tiny_model(len(TOKENIZER))
    model.config, model.generation_config = base.config, base.generation_config
    save_shards(model, TOKENIZER, folder, 2)
    (folder / "lora_train_meta.json").write_text(
        '{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}'
    )


def beside_its_base(folder: Path) -> None:
    """Write the same weights as verl's merger does."""
    sharded(folder / "shards")
    merge(folder / "shards", folder)


def adapter_alone(folder: Path) -> None:
    saved(folder / "base")
    save_adapter(with_adapter(), folder / "base", folder)
    TOKENIZER.save_pretrained(folder)


def save_adapter(model: Any, base: Path, folder: Path) -> None:
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)


@pytest.mark.parametrize("save", [sharded, beside_its_base, adapter_alone])
def test_a_lora_adapter_is_in_the_weights(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    found, expected = loaded(tmp_path).state_dict(), with_adapter().merge_and_unload().state_dict()
    coarse = 0.02 if save is beside_its_base else 1e-6
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=coarse) for name in expected)
    assert not same(loaded(tmp_path), tiny_model(len(TOKENIZER)))


def test_an_adapter_saved_without_its_base_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    for file in tmp_path.glob("model_world_size_*"):
        parts = torch.load(file, weights_only=False)
        torch.save({name: part for name, part in parts.items() if "lora_" in name}, file)
    with pytest.raises(ValueError, match="a LoRA adapter without its model"):
        load_model(find_weights(tmp_path))


def test_a_folder_with_a_part_of_the_weights_is_refused(tmp_path: Path) -> None:
    """As verl writes it for LoRA with hf_model:

    Transformers would fill the rest with random numbers.
    """
    model = tiny_model(len(TOKENIZER))
    weights = model.state_dict().items()
    state = {name.replace("layers.0.", "renamed."): weight for name, weight in weights}
    model.save_pretrained(tmp_path, state_dict=state)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights"):
        load_model(find_weights(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model: expected a Hugging Face folder"):
        find_weights(tmp_path)


def test_facts_of_a_model_differ_by_weights_tokenizer_and_base_of_the_adapter(
    tmp_path: Path,
) -> None:
    def of(name: str) -> str:
        return str(facts_of(tmp_path / name)["sha256"])

    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        saved(tmp_path / name, seed)
    assert of("a") == of("b") != of("c")
    for file in ("chat_template.jinja", "vocab.txt", "merges.txt", "tokenizer.model"):
        before = of("b")
        (tmp_path / "b" / file).write_text("{{ messages }}")
        assert of("b") != before, file
    adapter_alone(tmp_path)
    before = facts_of(tmp_path)
    tiny_model(len(TOKENIZER), seed=1).save_pretrained(tmp_path / "base")
    after = facts_of(tmp_path)
    assert before["base"] == after["base"] == str(tmp_path / "base")
    assert before["sha256"] != after["sha256"]


def test_checkpoint_with_role_adapters_plays_each_role_with_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    alone = {}
    for role, std in zip(Role, (0.1, 0.2), strict=True):
        folder = tmp_path / "actor" / ADAPTERS_FOLDER / role.value
        save_adapter(with_adapter(std), tmp_path / "base", folder)
        alone[role] = load_model(folder)[0]
    sharded(tmp_path / "actor")
    player = load_player(tmp_path)
    game = MedicalGameInteraction(MedicalConfig(judge="labels", profile="brief"))
    for turn in game.sample_turns(extra_info("adversarial_benign")):
        role = Role(turn.role)
        drawn(player, turn, budget=2)
        ids = torch.tensor([player.encoder.opening(turn).ids])
        with torch.inference_mode():
            found = player.model(ids).logits
            assert (found - alone[role](ids).logits).abs().max() < 1e-4
            others = [alone[other](ids).logits for other in Role if other is not role]
        assert all((found - other).abs().max() > 1e-2 for other in others)


def test_decoded_turn_drops_end_ids_of_the_generation_config(tmp_path: Path) -> None:
    shutil.copytree(resource("assets/tiny_player"), tmp_path, dirs_exist_ok=True)
    said = []
    for eos in ("<|im_end|>", "<|endoftext|>"):
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": eos}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        player = load_player(tmp_path)
        turn = Turn("first", Prompt(({"role": "user", "content": "You hold the king."},)), 99)
        said.append(drawn(player, turn, budget=99))
    assert player.tokenizer.eos_token_id == 0
    assert said[0] == said[1] and not said[0].truncated


def test_a_later_turn_is_answered_after_the_whole_conversation(tmp_path: Path) -> None:
    player = load_player(resource("assets/tiny_player"))
    words = (("user", "You hold the king."), ("assistant", "check"), ("user", "The other bets."))
    messages = [{"role": role, "content": content} for role, content in words]
    later = Turn("first", Prompt((messages[-1],)), 9)
    whole = drawn(player, replace(later, prompt=Prompt(tuple(messages))), messages)
    assert drawn(player, later, messages) == whole != drawn(player, later, messages[-1:])
