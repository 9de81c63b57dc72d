"""Notes are text in a prompt whose structure they cannot touch, and a turn begins with the prompt's
prefill.

What any note may hold is the target ``templates`` of ``fuzz/targets.py``.
"""

from pathlib import Path
from typing import Any

import pytest
from fuzz.targets import CONTROL_TEXTS, PAIRS, encoder
from rollout.families import ALWAYS_THINKS, FAMILIES, QWEN3, WITHOUT_SYSTEM, qwen3
from support import NOTE, REWRITTEN, extra_info, run_game, run_with
from test_prompting import profile_in

from medserl_agentloop.core.encoding import ChatEncoder, place
from medserl_agentloop.core.interaction import Prompt, Turn
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.medical.case import Category, ErrorType, Label, Role
from medserl_agentloop.games.medical.edit import number_sentences
from medserl_agentloop.games.medical.parsing import load_parser
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import (
    AssessmentRecord,
    AttackRecord,
    MedicalRecord,
    SentenceEdit,
)
from medserl_agentloop.testing import MockSGLangEngine

TEXT = "".join(CONTROL_TEXTS)


@pytest.mark.parametrize(("family", "profile"), PAIRS)
@pytest.mark.parametrize("role", Role)
def test_the_constant_parts_are_the_chat_template_s(family: str, profile: str, role: Role) -> None:
    tokenizer, note = FAMILIES[family], "He has gout."
    messages = load_profile(profile).messages(role, Category.ADVERSARIAL_BENIGN, note)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prefix = load_profile(profile).settings.assistant_prefix
    turn = load_profile(profile).turn(role, Category.ADVERSARIAL_BENIGN, note)
    prompt = encoder(family).opening(turn)
    assert tokenizer.decode(prompt.ids) == rendered + prefix


def test_added_tokens_that_are_no_markers_stay_tokens_in_a_note() -> None:
    ids = ChatEncoder(FAMILIES["gemma"]).encode_text("a\n\nb")
    assert FAMILIES["gemma"].convert_tokens_to_ids("\n\n") in ids


@pytest.mark.parametrize("family", sorted(WITHOUT_SYSTEM))
def test_a_chat_template_without_system_messages_is_named_with_what_to_do(family: str) -> None:
    turn = load_profile("classic").turn(Role.ASSESSOR, Category.VANILLA_BENIGN, "n")
    with pytest.raises(ValueError, match=r"\(system, user\).*supported.*Use a prompt profile"):
        ChatEncoder(FAMILIES[family]).opening(turn)


@pytest.mark.parametrize(
    "content",
    ["m.content if m.role == 'user' else ''", "m.content | e", "m.content.split('</think>')[-1]"],
)
def test_a_chat_template_that_loses_a_part_of_the_prompt_is_refused(content: str) -> None:
    """Also one that was meant for what the assistant says, as Qwen3's is."""
    user = " Think in <think> and </think>." * 20 + place("note")
    asked = (("system", "You assess."), ("user", user))
    messages = tuple({"role": role, "content": text} for role, text in asked)
    turn = Turn("assessor", Prompt(messages, {"note": "He has gout."}), 9)
    assert ChatEncoder(qwen3()).opening(turn).data_tokens
    with pytest.raises(ValueError, match="chat template drops or changes text"):
        ChatEncoder(qwen3(QWEN3.replace("m.content", content, 1))).opening(turn)


def test_continuation_puts_the_system_message_into_the_user_message() -> None:
    for family in ("qwen3", "gemma"):
        encoder = ChatEncoder(FAMILIES[family])
        turn = load_profile("classic").turn(Role.ASSESSOR, Category.VANILLA_BENIGN, "He has gout.")
        text = FAMILIES[family].decode(encoder.continuation(turn, None).ids)
        assert "system\n" not in text and text.count("You check clinical notes") == 1


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_continuation_follows_the_turn_as_the_chat_template_would(family: str) -> None:
    tokenizer, note = FAMILIES[family], "He has gout."
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "my turn"}]
    second = load_profile("medserl").messages(Role.ASSESSOR, Category.ADVERSARIAL_BENIGN, note)
    rendered = tokenizer.apply_chat_template(
        [*first, *second], tokenize=False, add_generation_prompt=True
    )
    opening = tokenizer.apply_chat_template(first[:1], tokenize=False, add_generation_prompt=True)
    spoken = [*tokenizer.encode("my turn", add_special_tokens=False), tokenizer.eos_token_id]
    turn = load_profile("medserl").turn(Role.ASSESSOR, Category.ADVERSARIAL_BENIGN, note)
    prompt = encoder(family).continuation(turn, spoken[-1])
    conversation = [*tokenizer.encode(opening, add_special_tokens=False), *spoken, *prompt.ids]
    assert tokenizer.decode(conversation) == rendered


def test_a_template_that_shows_the_note_twice_is_refused(tmp_path: Path) -> None:
    profile = profile_in(tmp_path, assessor__assess="{{ note }} and again {{ note }}")
    turn = profile.turn(Role.ASSESSOR, Category.VANILLA_BENIGN, "He has gout.")
    with pytest.raises(ValueError, match="exactly once"):
        ChatEncoder(FAMILIES["qwen3"]).opening(turn)


# --- models that think and models that do not ---


PROFILES = pytest.mark.parametrize("profile", ["medserl", "classic", "baseline", "edits"])
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
OPENED = "<think>\n"


def opening(tokenizer: Any, profile: str, **kwargs: Any) -> tuple[str, str]:
    """End of the prompt and prefill of an assessor's turn."""
    turn = load_profile(profile).turn(Role.ASSESSOR, Category.VANILLA_BENIGN, NOTE)
    prompt = ChatEncoder(tokenizer, kwargs).opening(turn)
    return tokenizer.decode(prompt.ids).rpartition("assistant\n")[2], prompt.prefill


@PROFILES
@pytest.mark.parametrize(
    ("template", "kwargs", "from_template"),
    [
        (None, {}, ""),
        (None, {"enable_thinking": True}, ""),
        (None, {"enable_thinking": False}, EMPTY_THOUGHT),
        (ALWAYS_THINKS, {}, OPENED),
    ],
)
def test_the_prefill_is_what_template_and_profile_begin_the_turn_with(
    profile: str, template: str | None, kwargs: dict[str, Any], from_template: str
) -> None:
    tokenizer = qwen3(template) if template else FAMILIES["qwen3"]
    prefix = load_profile(profile).settings.assistant_prefix
    assert (prefix == OPENED) == (profile == "baseline")
    if from_template == OPENED:
        prefix = ""  # opened already; a second tag would not be what the model knows
    assert opening(tokenizer, profile, **kwargs) == (from_template + prefix, from_template + prefix)


@PROFILES
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("context", ["isolated", "shared"])
def test_a_game_is_read_in_either_mode(profile: str, thinking: bool, context: str) -> None:
    turns, tokenizer = load_parser(profile), FAMILIES["qwen3"]
    prefill = opening(tokenizer, profile, enable_thinking=thinking)[1]
    # Where thinking is off and the profile opens no thought of its own, the model answers at once.
    thought = "" if prefill == EMPTY_THOUGHT else "it reads oddly"
    assessment = AssessmentRecord(
        verdict=Label.HARMFUL,
        reasoning=thought,
        sentence="Culture grew giardia.",
        error_type=ErrorType.CAUSAL_ORGANISM,
        correction="Culture grew candida.",
    )
    edit = SentenceEdit(number=1, old="Culture grew candida.", new="Culture grew giardia.")
    attack = AttackRecord(note=REWRITTEN, edit=edit, reasoning=thought)
    known = [number_sentences(NOTE), number_sentences(REWRITTEN)]
    if turns.numbered:
        assessment.number = 1
    pairs = zip((attack, assessment), known, strict=True)
    answers = [turns.write(turn, Label.HARMFUL, prefill, sentences) for turn, sentences in pairs]
    run = run_with(selfplay__profile=profile, selfplay__context=context)
    run.data.apply_chat_template_kwargs = {"enable_thinking": thinking}
    engine = MockSGLangEngine(answers, tokenizer)
    output = run_game(engine, extra_info("adversarial_benign"), run, tokenizer, logprobs=False)
    record = MedicalRecord.model_validate(output.extra_fields[RECORD_KEY])
    assert record.attack is not None and record.assessment is not None
    assert record.attack.violations == record.assessment.violations == []
    assert (record.attack.reasoning, record.assessment.reasoning) == (thought, thought)
    assert record.presented_note == REWRITTEN
    assert record.assessment.verdict is Label.HARMFUL
    for call in engine.calls:
        assert tokenizer.decode(call.prompt_ids).endswith("assistant\n" + prefill)
