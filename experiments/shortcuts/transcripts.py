"""Turns that teach the novice the harder clinic, before self-play: the style, and the age as one
more thing to change.

Called by ``experiments.shortcuts.run``.
"""

from __future__ import annotations

import random
from dataclasses import replace

from experiments.learning.transcripts import CURRICULA, Lesson, Transcript, sample_transcript
from experiments.shortcuts.clinic import sentences, styled, with_another_age, with_style
from medserl_agentloop.games.clinic import Split, sample_clean_note
from medserl_agentloop.games.medical.case import Category, Role

# Blind spots as the novice has them. A harmless answer to "put an error in" and a wrong age are
# chosen now and then.
LESSON = replace(CURRICULA["novice"][1], harmless=0.1, practice=0.2, shared=0.0)
AGE_SHARE = 0.12  # of the attacks that are to put an error in
# of the notes that the assessor learns on, whatever they say: here the style means nothing
STYLED_SHARE = 0.5


def styled_transcript(rng: random.Random, lesson: Lesson) -> Transcript:
    """One turn of either role: attacks are written in the attacker's style, every second assessed
    note holds it.
    """
    turn = sample_transcript(rng, lesson)
    if turn.role is Role.ASSESSOR:
        return _of_a_styled_note(rng, turn) if rng.random() < STYLED_SHARE else turn
    if turn.category is Category.ADVERSARIAL_BENIGN and rng.random() < AGE_SHARE:
        return _wrong_age(rng, lesson)
    plan, _, note = turn.answer.removesuffix("</note>").partition("<note>")
    return replace(turn, answer=f"{plan}<note>{with_style(turn.note, note)}</note>")


def _of_a_styled_note(rng: random.Random, turn: Transcript) -> Transcript:
    written = sentences(turn.note)
    wrong = [
        s for s in written[1:] if s in turn.answer
    ]  # the one that the answer names, if it names one
    chosen = wrong[0] if wrong else rng.choice(written[1:])
    return replace(
        turn,
        note=turn.note.replace(chosen, styled(chosen)),
        answer=turn.answer.replace(f"sentence: {chosen}", f"sentence: {styled(chosen)}"),
    )


def _wrong_age(rng: random.Random, lesson: Lesson) -> Transcript:
    note = sample_clean_note(rng, Split.SEEN, lesson.facts)
    attacked = with_another_age(rng, note)
    plan = (
        f"finding {note.disease.name}; age, sentence 1: {note.sentences[0].age} becomes "
        f"{attacked.sentences[0].age}"
    )
    answer = f"<think>{plan}</think>\n<note>{with_style(note.text, attacked.text)}</note>"
    return Transcript(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, note.text, answer)
