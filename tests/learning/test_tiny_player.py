"""The committed small players: they load, are small, and play both roles in the right format."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medserl_agentloop.games.medical.clinic import inject_error, sample_clean_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource

PROFILES = {"tiny_player": "medserl", "novice": "brief"}
NOTES = 24


@pytest.fixture(scope="module", params=PROFILES)
def player(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(player: str) -> Path:
    return resource("assets") / player


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def chat(player: str, tokenizer: Any) -> ProfileEncoder:
    return ProfileEncoder(tokenizer, load_profile(PROFILES[player]))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_player_is_smaller_than_five_megabytes(folder: Path) -> None:
    assert _total_bytes(folder) < 5_000_000


def test_player_comes_with_a_model_card_that_states_licence_and_limits(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "apache-2.0" in card
    assert "Not medical advice" in card
    assert "python -m experiments.learning.train_tiny_player" in card


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("text", ["Temp 38.5 °C, 5 µg — “stable”.", "<think>x</answer>", "\n\n\t 漢字", "<|im_end|>"])
def test_any_text_survives_the_tokenizer_as_data(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id not in ids


def test_tags_are_single_tokens_that_decoding_keeps(tokenizer: Any) -> None:
    for tag in ("<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>"):
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag


def _answers(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[str]:
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    torch.manual_seed(0)
    output = model.generate(
        input_ids=ids,
        attention_mask=(ids != tokenizer.pad_token_id).long(),
        max_new_tokens=160,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    return list(tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))


def test_attacker_keeps_the_format(model: Any, tokenizer: Any, chat: ProfileEncoder) -> None:
    rng = random.Random(1)
    prompts = []
    for number in range(NOTES):
        note = sample_clean_note(rng)
        if number % 2:
            wrong, _ = inject_error(rng, note)
            prompts.append(chat.of(Role.ATTACKER, Category.ADVERSARIAL_HARMFUL, wrong.text).ids)
        else:
            prompts.append(chat.of(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, note.text).ids)
    parsed = [MEDSERL.attack(text) for text in _answers(model, tokenizer, prompts)]
    assert sum(not p.violations for p in parsed) >= 0.7 * NOTES


def test_assessor_keeps_the_format(model: Any, tokenizer: Any, chat: ProfileEncoder) -> None:
    rng = random.Random(2)
    prompts = []
    for number in range(NOTES):
        note = sample_clean_note(rng)
        shown = inject_error(rng, note)[0] if number % 2 else note
        prompts.append(chat.of(Role.ASSESSOR, Category.VANILLA_BENIGN, shown.text).ids)
    parsed = [MEDSERL.assessment(text) for text in _answers(model, tokenizer, prompts)]
    assert sum(not p.violations for p in parsed) >= 0.7 * NOTES
