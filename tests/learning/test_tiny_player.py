"""The committed small players: they load, are small, and play both roles in the right format."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.clinic import inject_error, sample_clean_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource

NOTES = 24


@pytest.fixture(scope="module", params=[("tiny_player", "medserl"), ("novice", "brief")], ids=lambda both: both[0])
def player(request: pytest.FixtureRequest) -> tuple[Path, str]:
    name, profile = request.param
    return resource("assets") / name, profile


@pytest.fixture(scope="module")
def tokenizer(player: tuple[Path, str]) -> Any:
    return AutoTokenizer.from_pretrained(player[0])


def test_a_player_is_small_and_its_card_states_licence_and_limits(player: tuple[Path, str]) -> None:
    folder, _ = player
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 5_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("apache-2.0", "Not medical advice", "python -m experiments.learning.train_tiny_player"):
        assert words in card


def test_the_chat_template_is_chatml_and_tags_are_single_tokens(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for tag in ("<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>"):
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == tag


@pytest.mark.parametrize("role", Role)
def test_a_player_keeps_the_format_of_both_roles(player: tuple[Path, str], tokenizer: Any, role: Role) -> None:
    torch.set_num_threads(1)
    folder, profile = player
    model, rng = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), random.Random(1)
    encoder, prompts = ProfileEncoder(tokenizer, load_profile(profile)), []
    for number in range(NOTES):
        note = sample_clean_note(rng)
        shown = inject_error(rng, note)[0] if number % 2 else note
        category = Category.ADVERSARIAL_HARMFUL if number % 2 else Category.ADVERSARIAL_BENIGN
        prompts.append(encoder.of(role, category, shown.text).ids)
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    torch.manual_seed(0)
    mask = (ids != tokenizer.pad_token_id).long()
    sampling = {"max_new_tokens": 160, "do_sample": True, "temperature": 1.0, "top_k": 0}
    output = model.generate(input_ids=ids, attention_mask=mask, **sampling)
    parse = MEDSERL.attack if role is Role.ATTACKER else MEDSERL.assessment
    parsed = [parse(text) for text in tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)]
    assert sum(not turn.violations for turn in parsed) >= 0.7 * NOTES
