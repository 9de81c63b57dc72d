"""Whatever folder a model is in, its very weights are what is evaluated."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.shards import save_shards
from peft import LoraConfig, get_peft_model
from support import extra_info
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

from medserl_agentloop.backends.role_adapters import ADAPTERS_FOLDER
from medserl_agentloop.core.interaction import Message, Prompt, Reply, Turn
from medserl_agentloop.evaluation.local_models import facts_of, find_weights, fingerprint, load_model, load_player
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def with_adapter(std: float = 0.1) -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
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


def merge(shards: Path, target: Path) -> None:
    """As ``python -m verl.model_merger`` does it."""
    places = {"local_dir": str(shards), "hf_model_config_path": str(shards / "huggingface"), "target_dir": str(target)}
    FSDPModelMerger(ModelMergerConfig(operation="merge", backend="fsdp", **places)).merge_and_save()


def loaded(folder: Path) -> Any:
    model, tokenizer = load_model(find_weights(folder))
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert model.dtype is torch.float32 and not model.training
    return model


@pytest.mark.parametrize("place", ["", "actor/huggingface"])
def test_a_hugging_face_folder_or_a_checkpoint_of_the_whole_model_alone(tmp_path: Path, place: str) -> None:
    assert same(saved(tmp_path / place), loaded(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_are_merged_without_losing_a_bit_and_a_merged_folder_is_read_too(tmp_path: Path, ranks: int) -> None:
    model = tiny_model(len(TOKENIZER))
    shards = save_shards(model, TOKENIZER, tmp_path / "shards", ranks)
    assert same(loaded(shards), model)
    merge(shards, tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), model.bfloat16().float())  # verl's merger rounds


def sharded(folder: Path) -> None:
    """What verl's engine leaves of a run with LoRA: the base under its PEFT names, the adapter, and its alpha."""
    model = with_adapter()
    base = tiny_model(len(TOKENIZER))
    model.config, model.generation_config = base.config, base.generation_config
    save_shards(model, TOKENIZER, folder, 2)
    (folder / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')


def beside_its_base(folder: Path) -> None:
    """What verl's merger leaves of that."""
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
    """As verl writes it for LoRA with hf_model: Transformers would fill the rest with random numbers."""
    model = tiny_model(len(TOKENIZER))
    state = {name.replace("layers.0.", "renamed."): weight for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights"):
        load_model(find_weights(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model: expected a Hugging Face folder"):
        find_weights(tmp_path)


def test_other_weights_another_template_or_an_adapter_s_other_base_have_another_fingerprint(tmp_path: Path) -> None:
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        saved(tmp_path / name, seed)
    a, b, c = (fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(tmp_path / "b") != a
    adapter_alone(tmp_path)
    before = facts_of(tmp_path)
    tiny_model(len(TOKENIZER), seed=1).save_pretrained(tmp_path / "base")
    after = facts_of(tmp_path)
    assert before["base"] == after["base"] == str(tmp_path / "base") and before["sha256"] != after["sha256"]


def test_a_checkpoint_with_an_adapter_for_each_role_plays_each_role_with_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    alone = {}
    for role, std in zip(Role, (0.1, 0.2), strict=True):
        folder = tmp_path / "actor" / ADAPTERS_FOLDER / role.value
        save_adapter(with_adapter(std), tmp_path / "base", folder)
        alone[role] = load_model(folder)[0]
    sharded(tmp_path / "actor")
    player = load_player(tmp_path)
    game = MedicalGameInteraction(MedicalConfig(profile="brief"))
    for turn in game.sample_turns(extra_info("adversarial_benign")):
        role = Role(turn.role)
        asyncio.run(player.sample(turn, turn.prompt.filled(), number=0, budget=2, temperature=0.0, seed=0))
        ids = torch.tensor([player.encoder.opening(turn).ids])
        with torch.inference_mode():
            found = player.model(ids).logits
            assert (found - alone[role](ids).logits).abs().max() < 1e-4
            others = [alone[other](ids).logits for other in Role if other is not role]
        assert all((found - other).abs().max() > 1e-2 for other in others)


def test_a_later_turn_is_answered_after_the_whole_conversation(tmp_path: Path) -> None:
    def answer(turn: Turn, conversation: list[Message]) -> Reply:
        drawn: Any = {"number": 0, "budget": 9, "temperature": 0.0, "seed": 0}
        return asyncio.run(player.sample(turn, conversation, **drawn))

    player = load_player(resource("assets/tiny_player"))
    words = (("user", "You hold the king."), ("assistant", "check"), ("user", "The other bets."))
    messages = [{"role": role, "content": content} for role, content in words]
    later = Turn("first", Prompt((messages[-1],)), 9)
    whole = answer(replace(later, prompt=Prompt(tuple(messages))), messages)
    assert answer(later, messages) == whole != answer(later, messages[-1:])
