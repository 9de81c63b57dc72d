"""Models that think and models that do not: how the prompt begins the turn, and that the turn is read with it."""

import asyncio
from typing import Any

import pytest
from rollout.families import ALWAYS_THINKS, FAMILIES, qwen3
from support import NOTE, REWRITTEN, ROW, extra_info, run_with

from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.parsing import PARSERS
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord, MedicalRecord
from medserl_agentloop.games.medical.types import Category, ErrorType, Label, Role
from medserl_agentloop.testing.mock_engine import MockSGLangEngine
from medserl_agentloop.testing.tiny import build_agent_loop

PROFILES = pytest.mark.parametrize("profile", ["medserl", "classic", "baseline"])
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
OPENED = "<think>\n"


def opening(tokenizer: Any, profile: str, **kwargs: Any) -> tuple[str, str]:
    """End of the prompt and prefill of an assessor's turn."""
    encoder = ProfileEncoder(tokenizer, load_profile(profile), kwargs)
    prompt = encoder.of(Role.ASSESSOR, Category.VANILLA_BENIGN, NOTE)
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
    turns = PARSERS[profile]
    prefill = opening(FAMILIES["qwen3"], profile, enable_thinking=thinking)[1]
    # Where thinking is off and the profile opens no thought of its own, the model answers at once.
    thought = "" if prefill == EMPTY_THOUGHT else "it reads oddly"
    assessment = AssessmentRecord(verdict=Label.HARMFUL, reasoning=thought, sentence="Culture grew giardia.",
                                  error_type=ErrorType.CAUSAL_ORGANISM, correction="Culture grew candida.")  # fmt: skip
    said = (AttackRecord(note=REWRITTEN, reasoning=thought), assessment)
    answers = [turns.write(turn, Label.HARMFUL, prefill) for turn in said]
    run = run_with(selfplay__profile=profile, selfplay__context=context)
    run.data.apply_chat_template_kwargs = {"enable_thinking": thinking}
    engine = MockSGLangEngine(answers, FAMILIES["qwen3"])
    loop = build_agent_loop(engine, FAMILIES["qwen3"], run)
    output = asyncio.run(loop.run({"temperature": 1.0}, extra_info=extra_info("adversarial_benign"), **ROW))
    record = MedicalRecord.model_validate(output.extra_fields[GAME_KEY])
    assert record.attack is not None and record.assessment is not None
    assert record.attack.violations == record.assessment.violations == []
    assert (record.attack.reasoning, record.assessment.reasoning) == (thought, thought)
    assert record.presented_note == REWRITTEN
    assert record.assessment.verdict is Label.HARMFUL
    for call in engine.calls:
        assert FAMILIES["qwen3"].decode(call.prompt_ids).endswith("assistant\n" + prefill)
