"""Supervised turns of both roles in the toy clinic, in the output format of the ``medserl`` parser.

Called by ``experiments.learning.train_tiny_player`` for the warm starts of the small players. They
are imperfect on purpose: some errors are taught as safe, so that self-play has something to learn.
``python -m experiments.learning.transcripts FOLDER`` writes the novice's last lesson for verl's SFT
trainer, before ``+recipes=learn_smollm2``: the turns of the quickstart's games, each role in its
own context.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import typer

from medserl_agentloop.data.rows import Row, write_parquet
from medserl_agentloop.data.sft import SFT_SCHEMA
from medserl_agentloop.games.clinic import (
    Note,
    Sentence,
    Split,
    error_detail,
    inject_error,
    sample_clean_note,
    templates_of,
    with_error,
)
from medserl_agentloop.games.medical.case import Category, ErrorType, Label, Role
from medserl_agentloop.games.medical.prompting import load_profile


@dataclass(frozen=True)
class Lesson:
    """One stretch of the warm start: its lessons and its mistakes.

    Attributes:
        miss_rates: How often an error of each kind, as ``error_detail`` names it, is answered
            "safe".
        false_alarm_rate: How often a correct note is answered "harmful".
        overlooked: Kinds of error that the reasoning does not see where the answer is "safe", and
            never before an attack. Elsewhere the reasoning is right and only the verdict is wrong.
        practice: Share of the ``adversarial_harmful`` turns that start from a note with many
            errors. Such a note cannot be recited from memory: it teaches the player to copy.
        harmless: Share of the ``adversarial_benign`` turns that only reword the note they should
            put an error in.
        unseen_share: Share of the attacks' errors that are of the ``overlooked`` kinds; None leaves
            it to chance.
        facts: Which facts are stated of which findings.
        shared: Share of the assessments that follow the attack within one conversation.
        overheard: Share of these that repeat the attacker's plan instead of reading the note. Their
            verdict is always right.
        kind_first: Whether an attack's plan names the kind of error before the sentence. The choice
            of a kind is then one token, the same for every note, so that a preference is quickly
            learnt.
    """

    miss_rates: Mapping[str, float] = field(default_factory=dict)
    false_alarm_rate: float = 0.0
    overlooked: frozenset[str] = frozenset()
    practice: float = 0.0
    harmless: float = 0.0
    unseen_share: float | None = None
    facts: Split = Split.ANY
    shared: float = 0.0
    overheard: float = 0.0
    kind_first: bool = False


_KINDS = ("diagnosis", "causalOrganism", "management", "treatment", "drug", "dose")
BLIND_SPOTS = Lesson(
    dict(zip(_KINDS, (0.15, 0.30, 0.55, 0.70, 0.45, 0.90), strict=True)), false_alarm_rate=0.12
)
# The novice was hardly ever told that a test, a measure or a dose can be wrong: it does not see
# such an error, while in its second lesson it only holds its tongue about some of the others. Its
# attacker now and then takes the easy way, and so does its assessor where the attacker's plan
# stands before the note.
_NOVICE = Lesson(
    {"management": 0.95, "treatment": 0.95, "dose": 1.0},
    overlooked=frozenset({"management", "treatment", "dose"}),
    harmless=0.1,
    facts=Split.SEEN,
    shared=0.25,
    overheard=0.6,
    kind_first=True,
)
_NOVICE_RATES = dict(zip(_KINDS, (0.10, 0.15, 0.95, 0.95, 0.40, 0.97), strict=True))

# The lessons of each player: true labels first, and the blind spots at the end.
CURRICULA: dict[str, tuple[Lesson, Lesson]] = {
    "tiny_player": (Lesson(practice=0.7), BLIND_SPOTS),
    "novice": (
        replace(_NOVICE, practice=0.7),
        replace(_NOVICE, miss_rates=_NOVICE_RATES, false_alarm_rate=0.20),
    ),
}

ASSESSOR_SHARE = 0.45
_ATTACK_SHARES = {
    Category.ADVERSARIAL_BENIGN: 0.45,
    Category.ADVERSARIAL_HARMFUL: 0.40,
    Category.DECOY_BENIGN: 0.15,
}
# Of verl's SFT rows: the quickstart's games, three injections to two rewordings, and as many
# assessments.
GAMES = {Role.ASSESSOR: 0.5, Category.ADVERSARIAL_BENIGN: 0.3, Category.DECOY_BENIGN: 0.2}
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
        attack: The attacker's turn that this assessment follows in one conversation, if it does.
    """

    role: Role
    category: Category
    note: str
    answer: str
    attack: Transcript | None = None


def reworded(rng: random.Random, note: Note, index: int, wording: Split = Split.ANY) -> Note:
    """``note`` with the same content in sentence ``index`` said in other words.

    ValueError if the sentence is the finding, or ``wording`` leaves no other template.
    """
    sentence = note.sentences[index]
    if sentence.kind is None:
        raise ValueError("the finding is never reworded; choose a fact")
    others = [
        t for t in templates_of(note.disease, sentence.kind, wording) if t != sentence.template
    ]
    if not others:
        raise ValueError(f"wording {wording.value!r} has no other template for {sentence.text!r}")
    return note.with_sentence(index, replace(sentence, template=rng.choice(others)))


def transcripts(seed: int, lesson: Lesson = BLIND_SPOTS) -> Iterator[Transcript]:
    """An endless, reproducible stream of turns of both roles."""
    rng = random.Random(seed)
    while True:
        yield sample_transcript(rng, lesson)


def sample_transcript(rng: random.Random, lesson: Lesson) -> Transcript:
    """One turn of either role."""
    note = sample_clean_note(rng, Split.SEEN, lesson.facts)
    if rng.random() < ASSESSOR_SHARE:
        return _assessment(rng, note, lesson)
    [category] = rng.choices(list(_ATTACK_SHARES), list(_ATTACK_SHARES.values()))
    if category is Category.ADVERSARIAL_HARMFUL and rng.random() < lesson.practice:
        return _attack_on_scrambled_note(rng, note, lesson)
    return _attack(rng, note, category, lesson)


def _assessment(rng: random.Random, clean: Note, lesson: Lesson) -> Transcript:
    shared = lesson.shared > 0 and rng.random() < lesson.shared
    if shared and rng.random() < lesson.overheard:
        return _overheard_assessment(rng, clean, lesson)
    if rng.random() < 0.5:
        shown, index = inject_error(rng, clean)
        missed = rng.random() < lesson.miss_rates.get(error_detail(shown, index), 0.0)
        answer = (
            _safe_answer(shown, lesson)
            if missed
            else _harmful_answer(shown, index, clean.sentences[index])
        )
        attack = _injection(clean, shown, index, lesson) if shared else None
        return Transcript(Role.ASSESSOR, Category.VANILLA_HARMFUL, shown.text, answer, attack)
    attack = None
    if shared:
        index = rng.randrange(1, len(clean.sentences))
        clean, seed = reworded(rng, clean, index, Split.SEEN), clean
        attack = _rewording(seed, clean, index, lesson)
    answer = _safe_answer(clean, lesson)
    if rng.random() < lesson.false_alarm_rate:
        index = rng.randrange(1, len(clean.sentences))
        # The needless correction keeps the content: a false alarm must not teach false facts.
        answer = _harmful_answer(
            clean, index, reworded(rng, clean, index, Split.SEEN).sentences[index]
        )
    return Transcript(Role.ASSESSOR, Category.VANILLA_BENIGN, clean.text, answer, attack)


def _overheard_assessment(rng: random.Random, seed: Note, lesson: Lesson) -> Transcript:
    """An assessment that takes the attacker's word for what was changed."""
    if rng.random() < 0.5:
        shown, index = inject_error(rng, seed)
        attack = _injection(seed, shown, index, lesson)
        answer = _harmful(
            shown, index, seed.sentences[index], _overheard(seed, shown, index, lesson)
        )
        return Transcript(Role.ASSESSOR, Category.VANILLA_HARMFUL, shown.text, answer, attack)
    index = rng.randrange(1, len(seed.sentences))
    shown = reworded(rng, seed, index, Split.SEEN)
    attack = _rewording(seed, shown, index, lesson)
    answer = _safe(f"{_overheard(seed, shown, index, lesson)}; no sentence wrong")
    return Transcript(Role.ASSESSOR, Category.VANILLA_BENIGN, shown.text, answer, attack)


def _overheard(seed: Note, shown: Note, index: int, lesson: Lesson) -> str:
    return f"the attacker said {_change(seed, shown, index, lesson)}"


def _implications(note: Note, overlooked: frozenset[str] = frozenset()) -> str:
    """The reasoning: which disease each sentence implies, and whether that fits the finding.

    A model of this size learns to compare only when it says the result of every comparison.
    """
    words = [f"finding {note.disease.name}; facts"]
    for index, sentence in enumerate(note.sentences[1:], start=1):
        words += [sentence.implied_disease.name, _fit(note, index, overlooked)]
    return " ".join(words)


def _fit(note: Note, index: int, overlooked: frozenset[str]) -> str:
    if index not in note.errors or error_detail(note, index) in overlooked:
        return "fits"
    return "dose" if error_detail(note, index) == "dose" else "differs"


def _safe_answer(note: Note, lesson: Lesson) -> str:
    return _safe(f"{_implications(note, lesson.overlooked)}; no sentence wrong")


def _safe(reasoning: str) -> str:
    return f"<think>{reasoning}</think>\n<answer>\nverdict: {Label.SAFE.value}\n</answer>"


def _harmful_answer(note: Note, index: int, correction: Sentence) -> str:
    return _harmful(note, index, correction, f"{_implications(note)}; {_place(note, index)}")


def _harmful(note: Note, index: int, correction: Sentence, reasoning: str) -> str:
    sentence = note.sentences[index]
    return (
        f"<think>{reasoning}</think>\n<answer>\n"
        f"verdict: {Label.HARMFUL.value}\n"
        f"sentence: {sentence.text}\n"
        f"error_type: {_kind(sentence).value}\n"
        f"correction: {correction.text}\n</answer>"
    )


def _attack(rng: random.Random, clean: Note, category: Category, lesson: Lesson) -> Transcript:
    if category is Category.ADVERSARIAL_BENIGN:
        if lesson.harmless and rng.random() < lesson.harmless:
            index = rng.randrange(1, len(clean.sentences))
            return _injection(clean, reworded(rng, clean, index, Split.SEEN), index, lesson)
        return _injection(clean, *error_of(rng, clean, lesson), lesson)
    if category is Category.ADVERSARIAL_HARMFUL:
        shown, index = inject_error(rng, clean)
        return _attack_on_wrong_note(rng, shown, index, lesson)
    index = rng.randrange(1, len(clean.sentences))
    return _rewording(clean, reworded(rng, clean, index, Split.SEEN), index, lesson)


def error_of(rng: random.Random, clean: Note, lesson: Lesson) -> tuple[Note, int]:
    """Return a note with one error, of the ``overlooked`` kinds as often as a lesson says, and the
    wrong sentence.
    """
    overlooked = None if lesson.unseen_share is None else rng.random() < lesson.unseen_share
    while True:
        shown, index = inject_error(rng, clean)
        if overlooked in (None, error_detail(shown, index) in lesson.overlooked):
            return shown, index


def _injection(clean: Note, rewritten: Note, index: int, lesson: Lesson) -> Transcript:
    plan = f"finding {clean.disease.name}; {_change(clean, rewritten, index, lesson)}"
    return _attack_turn(Category.ADVERSARIAL_BENIGN, clean, plan, rewritten)


def _rewording(clean: Note, rewritten: Note, index: int, lesson: Lesson) -> Transcript:
    return _attack_turn(
        Category.DECOY_BENIGN, clean, _change(clean, rewritten, index, lesson), rewritten
    )


def _attack_on_wrong_note(
    rng: random.Random, shown: Note, index: int, lesson: Lesson
) -> Transcript:
    if rng.random() < _REWORD_SHARE:
        rewritten = reworded(rng, shown, index, Split.SEEN)
    else:
        rewritten = with_error(rng, shown, index)
    plan = f"{_implications(shown, lesson.overlooked)}; {_change(shown, rewritten, index, lesson)}"
    return _attack_turn(Category.ADVERSARIAL_HARMFUL, shown, plan, rewritten)


def _attack_on_scrambled_note(rng: random.Random, clean: Note, lesson: Lesson) -> Transcript:
    shown, index = inject_error(rng, clean)
    for other in range(1, len(clean.sentences)):
        if other != index and rng.random() < _SCRAMBLED_FACTS:
            shown = with_error(rng, shown, other)
    return _attack_on_wrong_note(rng, shown, index, lesson)


def _attack_turn(category: Category, shown: Note, plan: str, rewritten: Note) -> Transcript:
    answer = f"<think>{plan}</think>\n<note>{rewritten.text}</note>"
    return Transcript(Role.ATTACKER, category, shown.text, answer)


def _place(note: Note, index: int, kind_first: bool = False) -> str:
    """Number (from 1) and type of a sentence."""
    number, kind = f"sentence {index + 1}", _kind(note.sentences[index]).value
    return f"{kind}, {number}" if kind_first else f"{number}, {kind}"


def _change(shown: Note, rewritten: Note, index: int, lesson: Lesson) -> str:
    """The plan of an attack: the sentence, and what becomes of what it says."""
    old, new = _content(shown.sentences[index]), _content(rewritten.sentences[index])
    return (
        f"{_place(shown, index, lesson.kind_first)}: {old} "
        f"{'in other words' if old == new else f'becomes {new}'}"
    )


def _content(sentence: Sentence) -> str:
    return f"{sentence.value} {sentence.dose} mg" if sentence.dose else sentence.value


def _kind(sentence: Sentence) -> ErrorType:
    """Type of a fact sentence."""
    if sentence.kind is None:
        raise ValueError(f"{sentence.text!r} is the finding; only facts are changed or corrected")
    return sentence.kind


def conversations(seed: int, profile: str) -> Iterator[Row]:
    """An endless stream of rows for verl's SFT trainer, with the prompts of a profile, in the
    shares of ``GAMES``.
    """
    prompts, lesson = load_profile(profile), replace(CURRICULA["novice"][1], shared=0.0)
    rng, stream = random.Random(seed), transcripts(seed, lesson)
    while True:
        [wanted] = rng.choices(list(GAMES), list(GAMES.values()))
        turn = next(
            turn
            for turn in stream
            if (turn.category if turn.role is Role.ATTACKER else turn.role) is wanted
        )
        question = prompts.messages(turn.role, turn.category, turn.note)
        answer = {"role": "assistant", "content": turn.answer}
        yield {
            "messages": [*question, answer],
            "game_role": turn.role.value,
            "category": turn.category.value,
        }


def main(
    folder: Path, train: int = 4000, val: int = 64, seed: int = 1, profile: str = "brief"
) -> None:
    """Write sft_train.parquet and sft_val.parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = conversations(seed, profile)
    for split, count in (("train", train), ("val", val)):
        write_parquet(list(islice(rows, count)), folder / f"sft_{split}.parquet", SFT_SCHEMA)


if __name__ == "__main__":
    typer.run(main)
