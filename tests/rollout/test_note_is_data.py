"""Notes are text in the middle of a prompt whose structure they cannot touch, for every family of tokenizers.

What any note may hold is the target ``templates`` of ``fuzz/targets.py``.
"""

from pathlib import Path
from typing import Any

import pytest
from fuzz.targets import CONTROL, CONTROL_TEXTS, PAIRS, encoder
from rollout.families import FAMILIES, GEMMA, LOSSLESS, WITHOUT_SYSTEM, sentencepiece

from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, Role

TEXT = "".join(CONTROL_TEXTS)


# Decoded, BERT's prompts are another text.
@pytest.mark.parametrize(("family", "profile"), [(f, p) for f, p in PAIRS if f in LOSSLESS])
@pytest.mark.parametrize("role", Role)
def test_the_constant_parts_are_the_chat_template_s(family: str, profile: str, role: Role) -> None:
    tokenizer, note = FAMILIES[family], "He has gout."
    messages = load_profile(profile).messages(role, Category.ADVERSARIAL_BENIGN, note)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prefix = load_profile(profile).settings.assistant_prefix
    prompt = encoder(family, profile).of(role, Category.ADVERSARIAL_BENIGN, note)
    assert tokenizer.decode(prompt.ids) == rendered + prefix


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tokenizer_itself_is_left_as_it_was(family: str) -> None:
    tokenizer: Any = FAMILIES[family]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    ChatEncoder(tokenizer).encode_text(TEXT)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids
    assert any(number in CONTROL[family] for number in ids)  # so that the target is put to the test


def test_added_tokens_that_are_no_markers_stay_tokens_in_a_note() -> None:
    ids = ChatEncoder(FAMILIES["gemma"]).encode_text("a\n\nb")
    assert FAMILIES["gemma"].convert_tokens_to_ids("\n\n") in ids


def test_a_control_token_that_the_vocabulary_cannot_spell_is_an_error_and_no_token() -> None:
    tokenizer = sentencepiece(GEMMA, [])
    plain_text, unknown = ChatEncoder(tokenizer), tokenizer.unk_token_id
    tokenizer.convert_tokens_to_ids = lambda tokens: [unknown] * len(tokens) if isinstance(tokens, list) else unknown
    with pytest.raises(ValueError, match="cannot write '</s>' as plain text"):
        plain_text.encode_text("a</s>")


@pytest.mark.parametrize("family", sorted(WITHOUT_SYSTEM))
def test_a_chat_template_without_system_messages_is_named_with_what_to_do(family: str) -> None:
    with pytest.raises(ValueError, match=r"\(system, user\).*Use a prompt profile without") as error:
        ProfileEncoder(FAMILIES[family], load_profile("classic")).of(Role.ASSESSOR, Category.VANILLA_BENIGN, "n")
    assert "supported" in str(error.value)


def test_in_a_running_conversation_the_user_says_what_the_system_message_would() -> None:
    for family in ("qwen3", "gemma"):
        encoder = ProfileEncoder(FAMILIES[family], load_profile("classic"))
        turn = encoder.profile.turn(Role.ASSESSOR, Category.VANILLA_BENIGN, "He has gout.")
        text = FAMILIES[family].decode(encoder.continuation(turn, None).ids)
        assert "system\n" not in text and text.count("You check clinical notes") == 1


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_continuation_follows_the_turn_as_the_chat_template_would(family: str) -> None:
    tokenizer, note = FAMILIES[family], "He has gout."
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "my turn"}]
    second = load_profile("medserl").messages(Role.ASSESSOR, Category.ADVERSARIAL_BENIGN, note)
    rendered = tokenizer.apply_chat_template([*first, *second], tokenize=False, add_generation_prompt=True)
    opening = tokenizer.apply_chat_template(first[:1], tokenize=False, add_generation_prompt=True)
    spoken = [*tokenizer.encode("my turn", add_special_tokens=False), tokenizer.eos_token_id]
    turn = load_profile("medserl").turn(Role.ASSESSOR, Category.ADVERSARIAL_BENIGN, note)
    prompt = encoder(family, "medserl").continuation(turn, spoken[-1])
    conversation = [*tokenizer.encode(opening, add_special_tokens=False), *spoken, *prompt.ids]
    assert tokenizer.decode(conversation) == rendered


def test_a_template_that_shows_the_note_twice_is_refused(tmp_path: Path) -> None:
    for name in ("attacker/adversarial_benign", "assessor/assess"):
        path = tmp_path / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{{ note }} and again {{ note }}")
    twice = ProfileEncoder(FAMILIES["qwen3"], load_profile(str(tmp_path)))
    with pytest.raises(ValueError, match="exactly once"):
        twice.of(Role.ASSESSOR, Category.VANILLA_BENIGN, "He has gout.")
