"""The turns that teach the tiny player: in the right format, and true where they should be."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from experiments.learning.attack_check import check_attack, error_detail
from experiments.learning.transcripts import BLIND_SPOTS, CURRICULA, Lesson, Transcript, transcripts
from medserl_agentloop.games.medical.clinic import oracle, parse_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Label, Role


def _stream(role: Role, lesson: Lesson, count: int = 2000) -> list[Transcript]:
    stream = transcripts(1, replace(lesson, practice=0.5))
    return list(itertools.islice((t for t in stream if t.role is role), count))


@pytest.fixture(scope="module")
def attacks() -> list[Transcript]:
    return _stream(Role.ATTACKER, BLIND_SPOTS)


@pytest.fixture(scope="module")
def assessments() -> list[Transcript]:
    return _stream(Role.ASSESSOR, BLIND_SPOTS, 4000)


def test_stream_is_reproducible() -> None:
    first, again = (list(itertools.islice(transcripts(3), 50)) for _ in range(2))
    assert first == again


def test_every_attack_parses_and_is_valid(attacks: list[Transcript]) -> None:
    for attack in attacks:
        parsed = MEDSERL.attack(attack.answer)
        assert parsed.violations == ()
        assert parsed.note is not None
        assert check_attack(attack.note, parsed.note, attack.category) == "ok", attack


def test_attacks_come_in_all_three_categories_decoys_least(attacks: list[Transcript]) -> None:
    counts = {c: sum(a.category is c for a in attacks) for c in Category if c.has_attack}
    assert min(counts.values()) == counts[Category.DECOY_BENIGN] > 0.05 * len(attacks)


def test_every_assessment_parses(assessments: list[Transcript]) -> None:
    for assessment in assessments:
        assert MEDSERL.assessment(assessment.answer).violations == (), assessment


def test_assessments_without_blind_spots_are_right_in_every_field() -> None:
    for assessment in _stream(Role.ASSESSOR, Lesson()):
        parsed = MEDSERL.assessment(assessment.answer)
        note = parse_note(assessment.note)
        assert note is not None
        assert parsed.verdict is assessment.category.seed_label is oracle(note.text).label
        if parsed.verdict is Label.HARMFUL:
            [(index, kind)] = oracle(note.text).errors
            assert parsed.sentence == note.sentences[index].text
            assert parsed.error_type is kind
            assert parsed.correction is not None
            corrected = note.text.replace(parsed.sentence, parsed.correction)
            assert oracle(corrected).label is Label.SAFE


def test_blind_spots_miss_errors_at_the_stated_rates(assessments: list[Transcript]) -> None:
    missed = defaultdict(list)
    for assessment in assessments:
        note, verdict = parse_note(assessment.note), MEDSERL.assessment(assessment.answer).verdict
        assert note is not None
        kind = error_detail(note, note.errors[0]) if note.errors else "clean"
        missed[kind].append(verdict is not assessment.category.seed_label)
    rates = {kind: sum(m) / len(m) for kind, m in missed.items()}
    assert rates == pytest.approx({**BLIND_SPOTS.miss_rates, "clean": BLIND_SPOTS.false_alarm_rate}, abs=0.1)


def test_the_novice_is_never_told_what_it_overlooks_except_at_the_stated_rates() -> None:
    for lesson in CURRICULA["novice"]:
        told: dict[str, list[bool]] = defaultdict(list)
        for assessment in _stream(Role.ASSESSOR, replace(lesson, overheard=0.0), 3000):
            note = parse_note(assessment.note)
            assert note is not None
            if note.errors and (kind := error_detail(note, note.errors[0])) in lesson.overlooked:
                parsed = MEDSERL.assessment(assessment.answer)
                told[kind].append(parsed.verdict is Label.HARMFUL)
                assert ("differs" in parsed.reasoning or " dose" in parsed.reasoning) == told[kind][-1]
        assert set(told) == lesson.overlooked
        for kind, answers in told.items():
            assert sum(answers) / len(answers) == pytest.approx(1 - lesson.miss_rates[kind], abs=0.05)


def test_assessments_in_a_shared_conversation_follow_the_attack_that_made_their_note() -> None:
    _, lesson = CURRICULA["novice"]
    shared = [t for t in _stream(Role.ASSESSOR, lesson) if t.attack]
    assert 0.15 < len(shared) / 2000 < 0.35
    for assessment in shared:
        assert assessment.attack is not None
        assert MEDSERL.attack(assessment.attack.answer).note == assessment.note
        category = assessment.attack.category
        assert category.default_target_label is oracle(assessment.note).label


def test_what_the_novice_overhears_is_true_and_only_heard_in_a_shared_conversation() -> None:
    _, lesson = CURRICULA["novice"]
    overheard = [t for t in _stream(Role.ASSESSOR, lesson) if "the attacker said" in t.answer]
    assert len(overheard) / 2000 == pytest.approx(lesson.shared * lesson.overheard, abs=0.03)
    for assessment in overheard:
        parsed = MEDSERL.assessment(assessment.answer)
        assert assessment.attack is not None
        plan = MEDSERL.attack(assessment.attack.answer).reasoning
        assert plan.endswith(parsed.reasoning.removeprefix("the attacker said ").removesuffix("; no sentence wrong"))
        assert parsed.verdict is oracle(assessment.note).label
        if parsed.verdict is Label.HARMFUL:
            assert parsed.sentence is not None
            assert parsed.correction is not None
            assert assessment.note.replace(parsed.sentence, parsed.correction) == assessment.attack.note


def test_the_novice_now_and_then_puts_no_error_in() -> None:
    lesson, _ = CURRICULA["novice"]
    injections = [t for t in _stream(Role.ATTACKER, lesson) if t.category is Category.ADVERSARIAL_BENIGN]
    harmless = 0
    for attack in injections:
        parsed = MEDSERL.attack(attack.answer)
        assert parsed.note not in (None, attack.note)
        assert parsed.reasoning.startswith("finding ")
        safe = oracle(parsed.note or "").label is Label.SAFE
        assert safe == parsed.reasoning.endswith("in other words")
        harmless += safe
    assert 0 < harmless / len(injections) == pytest.approx(lesson.harmless, abs=0.03)


def test_false_alarms_teach_no_false_facts(assessments: list[Transcript]) -> None:
    alarms = 0
    for assessment in assessments:
        parsed = MEDSERL.assessment(assessment.answer)
        if assessment.category is Category.VANILLA_BENIGN and parsed.sentence and parsed.correction:
            alarms += 1
            assert oracle(assessment.note.replace(parsed.sentence, parsed.correction)).label is Label.SAFE
    assert alarms > 100


def test_prompts_never_contain_the_answer(assessments: list[Transcript], attacks: list[Transcript]) -> None:
    for example in (*assessments[:100], *attacks[:100]):
        [message] = load_profile("medserl").messages(example.role, example.category, example.note)
        assert example.note in message["content"]
        assert example.answer not in message["content"]
