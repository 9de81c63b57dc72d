"""The toy clinic: its oracle against notes whose truth is known, and the committed sample."""

from __future__ import annotations

import collections
import random
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from note_files import SAMPLE

from experiments import clinic_sample as sample
from experiments.clinic import (
    DISEASES,
    Note,
    OracleVerdict,
    Split,
    held_out_kind,
    held_out_template,
    inject_error,
    oracle,
    parse_note,
    reworded,
    sample_clean_note,
    with_error,
)
from experiments.learning.attack_check import check_attack, error_detail
from experiments.learning.measure import held_out_cases
from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.types import Category, ErrorType, Label

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


def test_attack_check_names_the_broken_rule() -> None:
    rng = random.Random(5)
    clean = sample_clean_note(rng)
    one_error = with_error(rng, clean, 1)
    two_errors = with_error(rng, one_error, 2)
    shorter = Note(clean.sentences[:-1])
    other_finding = next(d for d in DISEASES if d is not clean.disease).findings[0]
    finding_changed = clean.text.replace(clean.sentences[0].value, other_finding)
    benign, harmful, decoy = Category.ADVERSARIAL_BENIGN, Category.ADVERSARIAL_HARMFUL, Category.DECOY_BENIGN
    expected = {
        (clean.text, clean.text, benign): "unchanged",
        (clean.text, two_errors.text, benign): "too_many_edits",
        (clean.text, shorter.text, benign): "sentence_count",
        (clean.text, finding_changed, benign): "finding_changed",
        (clean.text, "It rained.", benign): "not_a_note",
        (clean.text, reworded(rng, clean, 1).text, benign): "no_error",
        (one_error.text, two_errors.text, benign): "many_errors",
        (one_error.text, two_errors.text, harmful): "ok",
        (one_error.text, clean.text, harmful): "no_error",
        (clean.text, one_error.text, decoy): "error_added",
    }
    assert {case: check_attack(*case) for case in expected} == expected
    with pytest.raises(ValueError, match="not a note of the toy clinic"):
        check_attack("A real note.", "A real note.", benign)
    for change in (with_error, reworded):
        with pytest.raises(ValueError, match="finding"):
            change(rng, clean, 0)


def held_out_wordings(note: Note) -> set[bool]:
    return {s.template == held_out_template(note.disease, s.kind) for s in note.sentences if s.kind is not None}


def states_what_is_held_out(note: Note) -> bool:
    return held_out_kind(note.sentences[0].value) in {s.kind for s in note.sentences}


def test_notes_and_cases_hold_out_wordings_and_facts_and_errors_are_of_all_kinds() -> None:
    rng = random.Random(2)
    for split in (Split.SEEN, Split.HELD_OUT):
        for _ in range(200):
            assert held_out_wordings(sample_clean_note(rng, split)) == {split is Split.HELD_OUT}
            assert states_what_is_held_out(sample_clean_note(rng, facts=split)) == (split is Split.HELD_OUT)
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
        assert (wrong.sentences[index].text, error_detail(wrong, index)) == (case.wrong_sentence, case.detail)


def test_a_sample_of_seen_notes_can_be_of_any_size_and_repeats_none(tmp_path: Path) -> None:
    output = tmp_path / "seen.csv"
    sample.write_sample(output, cases=400, split=Split.SEEN, overlap=1.0)
    notes = [parse_note(note or "") for case in read_files([output]).cases for note in case.notes[:2]]
    assert len({note.text for note in notes if note}) == len(notes) == 800
    assert not any(note is None or states_what_is_held_out(note) or True in held_out_wordings(note) for note in notes)


def test_committed_sample_is_what_the_script_writes_pairs_with_one_error_of_all_types(tmp_path: Path) -> None:
    sample.write_sample(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == SAMPLE.read_bytes()
    cases = read_files([SAMPLE]).cases
    assert collections.Counter(case.error_type for case in cases) == dict.fromkeys(ErrorType, 32)
    for case in cases:
        assert case.error_note and case.clean_note and case.edit_tag is EditTag.LOCAL and case.error_type
        assert oracle(case.error_note).errors == ((case.error_sentence_id, case.error_type),)
        assert oracle(case.clean_note).label is Label.SAFE
