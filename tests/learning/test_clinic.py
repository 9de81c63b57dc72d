"""The toy clinic: its oracle, the committed sample, the turns that teach players, and how players
are measured.
"""

from __future__ import annotations

import collections
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from note_files import SAMPLE
from transformers import AutoTokenizer

from experiments.learning.attack_check import check_attack
from experiments.learning.measure import Measurement, held_out_cases
from experiments.learning.train_tiny_player import PROFILES
from experiments.learning.transcripts import (
    BLIND_SPOTS,
    CURRICULA,
    Lesson,
    Transcript,
    reworded,
    transcripts,
)
from experiments.learning.warm_start import PromptCodec
from medserl_agentloop.data import sample
from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.clinic import (
    DISEASES,
    Note,
    OracleVerdict,
    Split,
    error_detail,
    held_out_kind,
    held_out_template,
    inject_error,
    oracle,
    parse_note,
    sample_clean_note,
    with_error,
)
from medserl_agentloop.games.medical.case import Category, ErrorType, Label, Role
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.paths import resource

seeds = st.integers(min_value=0, max_value=2**32)


@given(seeds)
@examples(300)
def test_the_oracle_reads_clean_wrong_and_reworded_notes_as_they_were_made(seed: int) -> None:
    rng = random.Random(seed)
    clean = sample_clean_note(rng)
    assert parse_note(clean.text) == clean
    assert oracle(clean.text) == OracleVerdict(Label.SAFE)
    wrong, index = inject_error(rng, clean)
    kind = clean.sentences[index].kind
    assert kind is not None and oracle(wrong.text) == OracleVerdict(Label.HARMFUL, ((index, kind),))
    assert check_attack(clean.text, wrong.text, Category.ADVERSARIAL_BENIGN) == "ok"
    for note, category in ((clean, Category.DECOY_BENIGN), (wrong, Category.ADVERSARIAL_HARMFUL)):
        other = reworded(rng, note, index)
        assert other.text != note.text and oracle(other.text) == oracle(note.text)
        assert check_attack(note.text, other.text, category) == "ok"
    worse = with_error(rng, wrong, index)
    assert worse.text != wrong.text and worse.errors == (index,)


CYSTITIS = "A 42-year-old man has dysuria. Prescribed nitrofurantoin 50 mg. This fits cystitis."
OTHER_DIGITS = [CYSTITIS.replace("50", digits) for digits in ("\uff15\uff10", "\u0665\u0660")]
ELSEWHERE = [".", "This fits malaria.", "A 42-year-old man has malaria.", *OTHER_DIGITS]


@given(st.text(max_size=200) | st.sampled_from(ELSEWHERE))
@examples(200)
def test_the_oracle_is_silent_outside_its_world(text: str) -> None:
    assert oracle(text) == OracleVerdict(None)
    assert oracle(CYSTITIS) == OracleVerdict(Label.SAFE)


def held_out_wordings(note: Note) -> set[bool]:
    facts = [(s.template, s.kind) for s in note.sentences if s.kind is not None]
    return {template == held_out_template(note.disease, kind) for template, kind in facts}


def states_what_is_held_out(note: Note) -> bool:
    return held_out_kind(note.sentences[0].value) in {s.kind for s in note.sentences}


def test_clinic_holds_out_wordings_and_facts_and_has_errors_of_all_kinds() -> None:
    rng = random.Random(2)
    for split in (Split.SEEN, Split.HELD_OUT):
        for _ in range(200):
            assert held_out_wordings(sample_clean_note(rng, split)) == {split is Split.HELD_OUT}
            stated = states_what_is_held_out(sample_clean_note(rng, facts=split))
            assert stated == (split is Split.HELD_OUT)
    for disease in DISEASES:  # what is held out of one finding is stated of the other
        first, second = disease.findings
        assert held_out_kind(first) is not held_out_kind(second)
    kinds = {error_detail(*inject_error(rng, sample_clean_note(rng))) for _ in range(300)}
    assert kinds == {"diagnosis", "causalOrganism", "management", "treatment", "drug", "dose"}
    for case in held_out_cases(100, seed=4):
        clean, wrong = parse_note(case.clean), parse_note(case.wrong)
        assert clean is not None and wrong is not None and not oracle(case.clean).errors
        assert states_what_is_held_out(clean) and held_out_wordings(clean) == {True}
        [(index, _)] = oracle(case.wrong).errors
        assert wrong.sentences[index].text == case.wrong_sentence
        assert error_detail(wrong, index) == case.detail


def test_committed_sample_is_what_the_script_writes_with_all_error_types(tmp_path: Path) -> None:
    sample.write_sample(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == SAMPLE.read_bytes()
    cases = read_files([SAMPLE]).cases
    assert collections.Counter(case.error_type for case in cases) == dict.fromkeys(ErrorType, 32)
    for case in cases:
        assert case.error_note and case.clean_note and case.error_type
        assert case.edit_tag is EditTag.LOCAL
        assert oracle(case.error_note).errors == ((case.error_sentence_id, case.error_type),)
        assert oracle(case.clean_note).label is Label.SAFE


# --- the turns that teach the small players, and how players are measured ---


NOVICE = CURRICULA["novice"]


def stream(role: Role, lesson: Lesson, count: int = 2000) -> list[Transcript]:
    turns = transcripts(1, replace(lesson, practice=0.5))
    return list(itertools.islice((t for t in turns if t.role is role), count))


def test_clinic_attacks_parse_and_are_valid_in_every_category() -> None:
    attacks = stream(Role.ATTACKER, BLIND_SPOTS)
    for attack in attacks:
        parsed = MEDSERL.attack(attack.answer)
        assert parsed.note is not None and not parsed.violations
        assert check_attack(attack.note, parsed.note, attack.category) == "ok", attack
    counts = {c: sum(a.category is c for a in attacks) for c in Category if c.has_attack}
    assert min(counts.values()) == counts[Category.DECOY_BENIGN] > 0.05 * len(attacks)


def conversation(tokenizer: Any, profile: PromptProfile, turns: list[Transcript]) -> str:
    messages = []
    for turn in turns:
        messages += profile.messages(turn.role, turn.category, profile.shown(turn.note, {}))
        messages.append({"role": "assistant", "content": turn.answer})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text.removesuffix("\n")  # the template's, after the end-of-turn token


@pytest.mark.parametrize("shared", [False, True])
def test_an_example_is_the_conversation_that_self_play_has_token_for_token(shared: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resource("assets/novice"))
    codec = PromptCodec(tokenizer, PROFILES["novice"])
    profile = codec.profile
    turns = (t for t in transcripts(1, NOVICE[1]) if (t.attack is not None) == shared)
    for transcript in itertools.islice(turns, 40):
        both = [transcript.attack, transcript] if transcript.attack else [transcript]
        example = codec.example(transcript)
        ids = [*codec.instructions(both[0].role, both[0].category), *example.ids]
        assert tokenizer.decode(ids) == conversation(tokenizer, profile, both)
        answer = tokenizer.decode(example.ids[-example.answer_tokens :])
        assert answer == transcript.answer + tokenizer.eos_token
        note = tokenizer.decode(example.ids[: example.note_tokens])
        assert note == profile.shown(both[0].note, {})


# --- measuring a player: what is counted ---

CASES = 20


def test_the_novice_is_counted_once_in_each_measure() -> None:
    profile, cases = load_profile("brief"), held_out_cases(CASES, seed=3)
    novice = load_player(resource("assets/novice"))
    measurement = Measurement(novice, cases, profile, temperature=0.0, seed=1)
    measured = (*measurement.each_role(novice), *measurement.games(novice))
    rates = {rate.measure: rate for rate in measured}
    for measure in ("clean", "error"):
        assert rates[f"assessor/{measure}"].items == CASES
    for measure in ("parsed", "valid", "harmless", "valid_decoys"):
        assert rates[f"attacker/{measure}"].items == CASES
    assert rates["assessor/parsed"].items == 2 * CASES

    def total(prefix: str) -> tuple[int, int]:
        kinds = [rate for name, rate in rates.items() if name.startswith(prefix)]
        return sum(rate.hits for rate in kinds), sum(rate.items for rate in kinds)

    assert total("assessor/error/") == (rates["assessor/error"].hits, CASES)
    names = ("attacker/valid", "attacker/undetected", "self/attacks")
    valid, undetected, found = (rates[name] for name in names)
    counts = {undetected.items, rates["assessor/frozen_attacks"].items, total("attacker/kind/")[0]}
    assert counts == {valid.hits} != {0}
    assert found.hits + undetected.hits == found.items == undetected.items  # against itself
    assert rates["assessor/clean"].hits > 0.9 * CASES
