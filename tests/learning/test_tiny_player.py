"""The committed small players: they load, and play both roles in the right format."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.clinic import inject_error, sample_clean_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource

NOTES = 24


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("name", "profile"), [("tiny_player", "medserl"), ("novice", "brief")])
def test_a_player_keeps_the_format_of_both_roles(name: str, profile: str, role: Role) -> None:
    torch.set_num_threads(1)
    folder, rng = resource("assets") / name, random.Random(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
