"""Supervised turns of both roles in the toy clinic, in the output format of the ``medserl`` profile.

Called by ``data_prep/train_tiny_player.py`` for the warm start of the tiny player. The warm start
is imperfect on purpose: some errors are taught as safe, so that self-play has something to learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from medserl_agentloop.game.types import Category, ErrorType, Label, Role
from medserl_agentloop.toy.clinic import (
    Note,
    Sentence,
    Wording,
    error_detail,
    inject_error,
    reworded,
    sample_clean_note,
    with_error,
)

# How often an error of this kind is answered "safe" when blind_spots is 1.
MISS_RATE: dict[str, float] = {
    "diagnosis": 0.15,
    "causalOrganism": 0.30,
    "management": 0.55,
    "treatment": 0.70,
    "drug": 0.45,
    "dose": 0.90,
}
# How often a correct note is answered "harmful" when blind_spots is 1.
FALSE_ALARM_RATE = 0.12

ASSESSOR_SHARE = 0.45
_ATTACK_SHARES = {
    Category.ADVERSARIAL_BENIGN: 0.45,
    Category.ADVERSARIAL_HARMFUL: 0.40,
    Category.DECOY_BENIGN: 0.15,
}
_REWORD_SHARE = 0.3  # of the attacks on a wrong note; the others change what is wrong
_SCRAMBLED_FACTS = 0.75  # share of the facts that are wrong in a note for copying practice


@dataclass(frozen=True)
class Transcript:
    """One turn to imitate.

    Attributes:
        role: Who speaks.
        category: Kind of game the turn comes from.
        note: Note shown in the prompt.
        answer: What the player writes, without the end-of-turn token.
    """

    role: Role
    category: Category
    note: str
    answer: str


def transcripts(seed: int, *, blind_spots: float = 1.0, practice: float = 0.0) -> Iterator[Transcript]:
    """An endless, reproducible stream of turns of both roles; arguments of :func:`sample_transcript`."""
    rng = random.Random(seed)
    while True:
        yield sample_transcript(rng, blind_spots=blind_spots, practice=practice)


def sample_transcript(rng: random.Random, *, blind_spots: float = 1.0, practice: float = 0.0) -> Transcript:
    """One turn of either role.

    Args:
        rng: Source of all choices.
        blind_spots: Scale of ``MISS_RATE`` and ``FALSE_ALARM_RATE``; 0 gives true labels only.
        practice: Share of the ``adversarial_harmful`` turns that start from a note with many
            errors. Such a note cannot be recited from memory: it teaches the player to copy.
    """
    note = sample_clean_note(rng, Wording.SEEN)
    if rng.random() < ASSESSOR_SHARE:
        return _assessment(rng, note, blind_spots)
    [category] = rng.choices(list(_ATTACK_SHARES), list(_ATTACK_SHARES.values()))
    if category is Category.ADVERSARIAL_HARMFUL and rng.random() < practice:
        return _attack_on_scrambled_note(rng, note)
    return _attack(rng, note, category)


def _assessment(rng: random.Random, clean: Note, blind_spots: float) -> Transcript:
    if rng.random() < 0.5:
        shown, index = inject_error(rng, clean)
        missed = rng.random() < blind_spots * MISS_RATE[error_detail(shown, index)]
        answer = _safe_answer(shown) if missed else _harmful_answer(shown, index, clean.sentences[index])
        return Transcript(Role.ASSESSOR, Category.VANILLA_HARMFUL, shown.text, answer)
    answer = _safe_answer(clean)
    if rng.random() < blind_spots * FALSE_ALARM_RATE:
        index = rng.randrange(1, len(clean.sentences))
        # The needless correction keeps the content: a false alarm must not teach false facts.
        answer = _harmful_answer(clean, index, reworded(rng, clean, index, Wording.SEEN).sentences[index])
    return Transcript(Role.ASSESSOR, Category.VANILLA_BENIGN, clean.text, answer)


def _implications(note: Note) -> str:
    """The reasoning: which disease each sentence implies, and whether that fits the finding.

    A model of this size learns to compare only when it says the result of every comparison.
    """
    words = [f"finding {note.disease.name}; facts"]
    for index, sentence in enumerate(note.sentences[1:], start=1):
        words += [sentence.implied_disease.name, _fit(note, index)]
    return " ".join(words)


def _fit(note: Note, index: int) -> str:
    if index not in note.errors:
        return "fits"
    return "dose" if error_detail(note, index) == "dose" else "differs"


def _safe_answer(note: Note) -> str:
    return f"<think>{_implications(note)}; no sentence wrong</think>\n<answer>\nverdict: {Label.SAFE.value}\n</answer>"


def _harmful_answer(note: Note, index: int, correction: Sentence) -> str:
    sentence = note.sentences[index]
    return (
        f"<think>{_implications(note)}; {_place(note, index)}</think>\n<answer>\n"
        f"verdict: {Label.HARMFUL.value}\n"
        f"sentence: {sentence.text}\n"
        f"error_type: {_kind(sentence).value}\n"
        f"correction: {correction.text}\n</answer>"
    )


def _attack(rng: random.Random, clean: Note, category: Category) -> Transcript:
    if category is Category.ADVERSARIAL_BENIGN:
        rewritten, index = inject_error(rng, clean)
        plan = f"finding {clean.disease.name}; {_change(clean, rewritten, index)}"
        return _attack_turn(category, clean, plan, rewritten)
    if category is Category.ADVERSARIAL_HARMFUL:
        shown, index = inject_error(rng, clean)
        return _attack_on_wrong_note(rng, shown, index)
    index = rng.randrange(1, len(clean.sentences))
    rewritten = reworded(rng, clean, index, Wording.SEEN)
    return _attack_turn(category, clean, _change(clean, rewritten, index), rewritten)


def _attack_on_wrong_note(rng: random.Random, shown: Note, index: int) -> Transcript:
    if rng.random() < _REWORD_SHARE:
        rewritten = reworded(rng, shown, index, Wording.SEEN)
    else:
        rewritten = with_error(rng, shown, index)
    plan = f"{_implications(shown)}; {_change(shown, rewritten, index)}"
    return _attack_turn(Category.ADVERSARIAL_HARMFUL, shown, plan, rewritten)


def _attack_on_scrambled_note(rng: random.Random, clean: Note) -> Transcript:
    shown, index = inject_error(rng, clean)
    for other in range(1, len(clean.sentences)):
        if other != index and rng.random() < _SCRAMBLED_FACTS:
            shown = with_error(rng, shown, other)
    return _attack_on_wrong_note(rng, shown, index)


def _attack_turn(category: Category, shown: Note, plan: str, rewritten: Note) -> Transcript:
    answer = f"<think>{plan}</think>\n<note>{rewritten.text}</note>"
    return Transcript(Role.ATTACKER, category, shown.text, answer)


def _place(note: Note, index: int) -> str:
    """Number (from 1) and type of a sentence."""
    return f"sentence {index + 1}, {_kind(note.sentences[index]).value}"


def _change(shown: Note, rewritten: Note, index: int) -> str:
    """The plan of an attack: the sentence, and what becomes of what it says."""
    old, new = _content(shown.sentences[index]), _content(rewritten.sentences[index])
    return f"{_place(shown, index)}: {old} {'in other words' if old == new else f'becomes {new}'}"


def _content(sentence: Sentence) -> str:
    return f"{sentence.value} {sentence.dose} mg" if sentence.dose else sentence.value


def _kind(sentence: Sentence) -> ErrorType:
    """Type of a fact sentence."""
    if sentence.kind is None:
        raise ValueError(f"{sentence.text!r} is the finding; only facts are changed or corrected")
    return sentence.kind
