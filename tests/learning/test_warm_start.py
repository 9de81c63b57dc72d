"""What the warm start imitates is, token for token, what self-play shows and asks for."""

import itertools
from typing import Any

import pytest
from transformers import AutoTokenizer

from experiments.learning.transcripts import CURRICULA, Transcript, transcripts
from experiments.learning.warm_start import PromptCodec
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category
from medserl_agentloop.paths import resource

PROFILE = "brief"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resource("assets/novice"))


def _conversation(tokenizer: Any, turns: list[Transcript]) -> str:
    profile, messages = load_profile(PROFILE), []
    for turn in turns:
        messages += profile.messages(turn.role, turn.category, turn.note)
        messages.append({"role": "assistant", "content": turn.answer})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text.removesuffix("\n")  # the template's, after the end-of-turn token


@pytest.mark.parametrize("shared", [False, True])
def test_an_example_is_the_conversation_that_self_play_has(tokenizer: Any, shared: bool) -> None:
    codec = PromptCodec(tokenizer, PROFILE)
    stream = (t for t in transcripts(1, CURRICULA["novice"][1]) if (t.attack is not None) == shared)
    for transcript in itertools.islice(stream, 40):
        turns = [transcript.attack, transcript] if transcript.attack else [transcript]
        example = codec.example(transcript)
        ids = [*codec.instructions(turns[0].role, turns[0].category), *example.ids]
        assert tokenizer.decode(ids) == _conversation(tokenizer, turns)
        answer = tokenizer.decode(example.ids[-example.answer_tokens :])
        assert answer == transcript.answer + tokenizer.eos_token
        assert tokenizer.decode(example.ids[: example.note_tokens]) == turns[0].note
    assert not shared or turns[0].category in (Category.ADVERSARIAL_BENIGN, Category.DECOY_BENIGN)
