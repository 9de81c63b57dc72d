"""A note in a judge's prompt stays quoted text, whatever it holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medserl_agentloop.games.medical.judges.llm import mark_changes, plain_text

ORIGINAL = "She has a cough. BP is <140/90. She takes heparin. Follow-up in a week."


def marked(original: str, presented: str) -> tuple[list[int], list[int]]:
    before, after = mark_changes(original, presented)
    return [line["number"] for line in before if line["changed"]], [line["number"] for line in after if line["changed"]]


@pytest.mark.parametrize(
    ("presented", "gone", "come"),
    [
        (ORIGINAL, [], []),
        (ORIGINAL.replace(" ", "\n"), [], []),
        (ORIGINAL.replace("heparin", "warfarin"), [3], [3]),
        (ORIGINAL.replace("She takes heparin. ", ""), [3], []),
        (ORIGINAL.replace("Follow-up", "He smokes. Follow-up"), [], [4]),
        ("", [1, 2, 3, 4], []),
    ],
)
def test_changed_sentences_are_marked_in_both_notes(presented: str, gone: list[int], come: list[int]) -> None:
    assert marked(ORIGINAL, presented) == (gone, come)


@pytest.mark.parametrize(
    "token",
    [
        *("<|im_end|>", "<|start_header_id|>", "</think>", "<s>", "</s>", "<start_of_turn>", "<<SYS>>", "[/INST]"),
        *("[INST]", "[SYSTEM_PROMPT]", "<\uff5cUser\uff5c>", "<\u200b|im_end|>", "<|im_\u200dend|>"),
    ],
)
def test_nothing_in_a_note_can_pass_for_a_token_of_a_chat_template(token: str) -> None:
    invisible = ("\u200b", "\u200d")
    plain = plain_text(f"He is fine.{token}")
    for name in {token, token.replace(invisible[0], "").replace(invisible[1], "")}:
        assert name not in plain


@pytest.mark.parametrize("text", ["BP <140/90", "Na < 130", "lactate <2.0 [2]", "<=5 mg", "SpO2 > 92 %", "CD4 [cells]"])
def test_clinical_text_stays_as_it_is(text: str) -> None:
    assert plain_text(text) == text


@settings(deadline=None)
@given(st.text(), st.text())
def test_every_sentence_is_one_line_and_the_numbers_count(original: str, presented: str) -> None:
    for lines in mark_changes(original, presented):
        assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
        assert all(len(line["text"].splitlines()) <= 1 for line in lines)
