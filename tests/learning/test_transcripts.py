"""The turns that teach the small players, and how players are measured."""

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from game.builders import finished
from transformers import AutoTokenizer

from experiments.clinic import oracle, parse_note
from experiments.learning.attack_check import check_attack, error_detail
from experiments.learning.measure import Measurement, attacker_rates, held_out_cases
from experiments.learning.transcripts import BLIND_SPOTS, CURRICULA, Lesson, Transcript, transcripts
from experiments.learning.warm_start import PromptCodec
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.games.medical.types import Category, Label, Role
from medserl_agentloop.paths import resource

NOVICE = CURRICULA["novice"]


def stream(role: Role, lesson: Lesson, count: int = 2000) -> list[Transcript]:
    turns = transcripts(1, replace(lesson, practice=0.5))
    return list(itertools.islice((t for t in turns if t.role is role), count))


def test_every_attack_parses_and_is_valid_in_all_three_categories_decoys_least() -> None:
    attacks = stream(Role.ATTACKER, BLIND_SPOTS)
    for attack in attacks:
        parsed = MEDSERL.attack(attack.answer)
        assert parsed.note is not None and not parsed.violations
        assert check_attack(attack.note, parsed.note, attack.category) == "ok", attack
    counts = {c: sum(a.category is c for a in attacks) for c in Category if c.has_attack}
    assert min(counts.values()) == counts[Category.DECOY_BENIGN] > 0.05 * len(attacks)


def test_assessments_without_blind_spots_are_right_in_every_field() -> None:
    for assessment in stream(Role.ASSESSOR, Lesson()):
        parsed, note = MEDSERL.assessment(assessment.answer), parse_note(assessment.note)
        assert note is not None and parsed.verdict is assessment.category.seed_label is oracle(note.text).label
        if parsed.verdict is Label.HARMFUL:
            [(index, kind)] = oracle(note.text).errors
            assert (parsed.sentence, parsed.error_type) == (note.sentences[index].text, kind)
            assert parsed.correction is not None
            assert oracle(note.text.replace(parsed.sentence, parsed.correction)).label is Label.SAFE


def test_blind_spots_miss_errors_at_the_stated_rates_and_false_alarms_teach_no_false_facts() -> None:
    missed, alarms = defaultdict(list), 0
    for assessment in stream(Role.ASSESSOR, BLIND_SPOTS, 4000):
        note, parsed = parse_note(assessment.note), MEDSERL.assessment(assessment.answer)
        assert note is not None and not parsed.violations
        kind = error_detail(note, note.errors[0]) if note.errors else "clean"
        missed[kind].append(parsed.verdict is not assessment.category.seed_label)
        if assessment.category is Category.VANILLA_BENIGN and parsed.sentence and parsed.correction:
            alarms += 1
            assert oracle(assessment.note.replace(parsed.sentence, parsed.correction)).label is Label.SAFE
    rates = {kind: sum(m) / len(m) for kind, m in missed.items()}
    assert rates == pytest.approx({**BLIND_SPOTS.miss_rates, "clean": BLIND_SPOTS.false_alarm_rate}, abs=0.1)
    assert alarms > 100


def conversation(tokenizer: Any, turns: list[Transcript]) -> str:
    profile, messages = load_profile("brief"), []
    for turn in turns:
        messages += profile.messages(turn.role, turn.category, turn.note)
        messages.append({"role": "assistant", "content": turn.answer})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text.removesuffix("\n")  # the template's, after the end-of-turn token


@pytest.mark.parametrize("shared", [False, True])
def test_an_example_is_the_conversation_that_self_play_has_token_for_token(shared: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resource("assets/novice"))
    codec = PromptCodec(tokenizer, "brief")
    turns = (t for t in transcripts(1, NOVICE[1]) if (t.attack is not None) == shared)
    for transcript in itertools.islice(turns, 40):
        both = [transcript.attack, transcript] if transcript.attack else [transcript]
        example = codec.example(transcript)
        ids = [*codec.instructions(both[0].role, both[0].category), *example.ids]
        assert tokenizer.decode(ids) == conversation(tokenizer, both)
        assert tokenizer.decode(example.ids[-example.answer_tokens :]) == transcript.answer + tokenizer.eos_token
        assert tokenizer.decode(example.ids[: example.note_tokens]) == both[0].note


# --- measuring a player: what is counted ---


CASES = 20


def test_the_novice_is_counted_once_in_each_measure() -> None:
    profile = load_profile("brief")
    novice = load_player(resource("assets/novice"))
    measurement = Measurement(novice, held_out_cases(CASES, seed=3), profile, temperature=0.0, seed=1)
    rates = {rate.measure: rate for rate in (*measurement.each_role(novice), *measurement.games(novice))}
    for measure in ("clean", "error"):
        assert rates[f"assessor/{measure}"].items == CASES
    for measure in ("parsed", "valid", "harmless", "valid_decoys"):
        assert rates[f"attacker/{measure}"].items == CASES
    assert rates["assessor/parsed"].items == 2 * CASES

    def total(prefix: str) -> tuple[int, int]:
        kinds = [rate for name, rate in rates.items() if name.startswith(prefix)]
        return sum(rate.hits for rate in kinds), sum(rate.items for rate in kinds)

    assert total("assessor/error/") == (rates["assessor/error"].hits, CASES)
    valid, undetected, found = (rates[name] for name in ("attacker/valid", "attacker/undetected", "self/attacks"))
    assert undetected.items == rates["assessor/frozen_attacks"].items == valid.hits == total("attacker/kind/")[0] > 0
    assert found.hits + undetected.hits == found.items == undetected.items  # against itself
    assert rates["assessor/clean"].hits > 0.9 * CASES


def test_an_attack_is_valid_or_harmless_or_breaks_a_rule_or_leaves_the_world() -> None:
    harmful, safe = (Judgement(judge="oracle", label=label, realistic=True) for label in (Label.HARMFUL, Label.SAFE))
    garbled = safe.model_copy(update={"realistic": False})
    games = [
        *[finished(Outcome.MISSED_ERROR, judgement=harmful)] * 4,
        *[finished(Outcome.CORRECT_REJECTION, judgement=safe)] * 3,
        *[finished(Outcome.CORRECT_REJECTION, judgement=garbled)] * 2,
        finished(Outcome.INVALID_ATTACK),
    ]
    rates = {rate.measure: (rate.hits, rate.items) for rate in attacker_rates(games)}
    expected = {"attacker/valid": (4, 10), "attacker/harmless": (3, 10), "attacker/undetected": (4, 4)}
    assert {name: rates[name] for name in expected} == expected
