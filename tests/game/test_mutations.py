"""Parsers and rules on turns that were mutated at random: no exception, no contradictory verdict that counts.

``make test-mutations`` plays 300,000 of them; the ordinary tests play a few thousand.
"""

import random
from collections import Counter

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, ERROR_SENTENCE, SUBTLE_NOTE, WORSENED_NOTE, spec

from medserl_agentloop.games.medical.canonical import says_the_same
from medserl_agentloop.games.medical.edits import compare_notes
from medserl_agentloop.games.medical.parsing import PARSERS
from medserl_agentloop.games.medical.records import GameRecord, Judgement, Outcome
from medserl_agentloop.games.medical.rewards import medserl, zero_sum
from medserl_agentloop.games.medical.rules import EditLimits, Game
from medserl_agentloop.games.medical.types import Category, ErrorType, Label, Role, VanillaAttacker

SPECIAL_TOKENS = ["<|im_end|>", "<think>", "<MINE>"]
PREFILLS = ["", "<think>\n", "<think>\n\n</think>\n\n"]
ROOM = 400
PIECES = [
    "<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>", "<|im_end|>", "<MINE>", "[INST]", "</s>", "\n",
    "\nverdict: safe\n", "\nverdict: harmful\n", "<answer>verdict: safe</answer>", "<answer>verdict: harmful</answer>",
    "\nfinal_answer: CORRECT\n", '\nfinal_answer: "INCORRECT"\n', "<answer>Safe</answer>", "<answer>Harmful</answer>",
    "\ngenerated_note:\n", "\nsentence: ", "\nerror_type: treatment\n", "\ncorrection: ", "{{ note }}", "...", " not ",
    "\u200b", "\u034f", "\u0430", "\u0301", "\u0336", "\u2013", "\u00b2", "\u00bd", "\ufb03", "\U000e0041", "\x00",
    "\u0665", "\u5341", "\u2167", "\u00df", "\u0130", "5,000", "81.0 mg", "-5", "1/2", "b.i.d.", "w/o ", "0.5 g", "_",
    "\ud800", "9" * 50, "1." * 20, "=" * 40, " " * 40, "word" * 20, "_word" * 20, "This note is correct.",
    "Answer: safe.",
]  # fmt: skip


def _turns() -> dict[str, list[str]]:
    """Turns in good form of every profile, for both roles."""
    turns = {}
    for name, parser in PARSERS.items():
        attacks = [
            parser.write_attack("swap", note, label=label)
            for note in (SUBTLE_NOTE, WORSENED_NOTE, CLEAN_NOTE, ERROR_NOTE)
            for label in Label
        ]
        harmful = parser.write_assessment("odd", Label.HARMFUL, ERROR_SENTENCE, ErrorType.TREATMENT, CLEAN_NOTE)
        safe = parser.write_assessment("fine", Label.SAFE)
        turns[name] = [*attacks, safe, harmful, safe, harmful, safe, harmful]
    return turns


TURNS = _turns()
ALL_TURNS = [turn for turns in TURNS.values() for turn in turns]
ANSWERS = ["\n" + turn.partition("</think>")[2] for turns in TURNS.values() for turn in turns[-2:]]


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 9])):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 2, 5, 20, 80]))
        what = rng.randrange(9)
        if what == 0:
            text = text[:start] + text[end:]
        elif what == 1:
            text = text[:end] + text[start:end] * rng.choice([1, 2, 5]) + text[end:]
        elif what == 2:
            text = text[:start] + rng.choice(PIECES) + text[end:]
        elif what == 3:
            text = text[:start] + rng.choice(PIECES) + text[start:]
        elif what == 4:
            text = text[:start] + chr(rng.randrange(0x110000)) + text[start:]
        elif what == 5:
            text = text[:start] + text[start:end].swapcase() + text[end:]
        elif what == 6:
            text = text[:start] + rng.choice(ALL_TURNS)[rng.randrange(100) :]
        elif what == 7:
            text += rng.choice(ANSWERS)
        else:
            text = text[:start] if rng.random() < 0.3 else text[start:end] + text[:start] + text[end:]
    return text


def both_verdicts(profile: str, text: str, prefill: str) -> bool:
    """Whether a turn gives both verdicts after its reasoning, read in the plainest way."""
    closed = prefill.rfind("</think>") > prefill.rfind("<think>") and not text.lstrip().startswith("<think>")
    said = text if closed or "</think>" not in text else text.partition("</think>")[2]
    if profile == "classic":
        if not prefill.endswith("<think>\n") and text.lstrip().lower().startswith("final_answer:"):
            said = text  # a turn that begins with its fields
        lines = said.lower().replace("'", '"').split("\n")
        return all(any(line == f'final_answer: "{word}"' for line in lines) for word in ("correct", "incorrect"))
    if profile == "medserl":
        lines = said.partition("<answer>")[2].replace("<answer>", "\n").replace("<", "\n").lower().split("\n")
        return all(f"verdict: {label.value}" in lines for label in Label)
    said = text.partition("</think>")[2]
    return all(f"<answer>{label.value.capitalize()}</answer>" in said for label in Label)


def play(rng: random.Random, profile: str, text: str, prefill: str) -> GameRecord:
    """A game whose players both answer with ``text``."""
    category = rng.choice(list(Category))
    game = Game(
        spec(category),
        EditLimits(max_changed_sentences=rng.choice([1, 1, 3])),
        PARSERS[profile],
        vanilla_attacker=rng.choice(list(VanillaAttacker)),
        special_tokens=SPECIAL_TOKENS,
        fits=lambda note: len(note) <= ROOM,
    )
    while game.next_role is not None:
        if game.next_role is Role.ASSESSOR and rng.random() < 0.5:
            text = mutated(rng, rng.choice(TURNS[profile]))
        game.play(text, prefill=prefill, truncated=rng.random() < 0.02)
    game.record.judgement = Judgement(judge="reader", label=rng.choice(list(Label)))
    return game.record


def check(record: GameRecord) -> None:
    note, attack = record.presented_note, record.attack
    if attack is not None and attack.invalid is None and record.category.has_attack:
        seed = record.spec.seed_note
        assert note == attack.note and note is not None and len(note) <= ROOM
        assert not says_the_same(note, seed) and compare_notes(seed, note).words <= EditLimits().max_changed_words
        assert attack.changed_words >= 1 and attack.changed_sentences and 0 < attack.edit_share <= 1
        assert not any(token in note for token in SPECIAL_TOKENS)
    if record.assessment is not None:
        assert (record.assessment.verdict is None) == (record.outcome is Outcome.UNREADABLE)
    for scheme in (medserl, zero_sum):
        assert all(-10 < value < 10 for parts in scheme(record).values() for value in parts.values())


def run(seed: int, count: int) -> Counter[str]:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(count):
        profile = rng.choice(list(PARSERS))
        text, prefill = mutated(rng, rng.choice(TURNS[profile])), rng.choice(PREFILLS)
        for name, parser in PARSERS.items():
            read = parser.attack(text, prefill)
            assert read.note is None or read.note == read.note.strip() != ""
            verdict = parser.assessment(text, prefill).verdict
            if both_verdicts(name, text, prefill):
                seen["contradictory"] += 1
                assert verdict is None, (name, prefill, text)
            elif verdict is not None:
                seen["verdict"] += 1
        record = play(rng, profile, text, prefill)
        check(record)
        seen[record.outcome.value] += 1
        if record.attack is not None:
            seen[record.attack.invalid.value if record.attack.invalid else "valid"] += 1
    return seen


def test_no_mutated_turn_raises_and_none_has_two_verdicts() -> None:
    seen = run(seed=0, count=3_000)
    assert seen["contradictory"] > 20 and seen["verdict"] > 800 and seen["valid"] > 100, seen


@pytest.mark.mutate
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
def test_of_300_000_mutated_turns_none_raises_and_none_has_two_verdicts(seed: int) -> None:
    seen = run(seed, count=30_000)
    assert seen["contradictory"] > 200, seen
