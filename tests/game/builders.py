"""Small builders for tests of the game core: a note, the facts of a row, turns as text, finished
records.
"""

from typing import Any

from hypothesis import strategies as st

from medserl_agentloop.games.medical.case import Category, ErrorType, GameSpec, Label
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import (
    AssessmentRecord,
    AttackRecord,
    InvalidAttack,
    Judgement,
    MedicalRecord,
    Outcome,
)
from medserl_agentloop.games.medical.rewards import Medserl, RewardScheme, reward_game
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame

CLEAN_NOTE = (
    "A 52-year-old woman has a cough. She receives heparin 500 units. Discharge is planned."
)
ERROR_NOTE = CLEAN_NOTE.replace("heparin", "warfarin")
CORRECTED_SENTENCE = "She receives heparin 500 units."
ERROR_SENTENCE = "She receives warfarin 500 units."

DECIDED = [
    Outcome.CORRECT_DETECTION,
    Outcome.MISSED_ERROR,
    Outcome.CORRECT_REJECTION,
    Outcome.FALSE_POSITIVE,
]
"""Outcomes with a readable verdict."""


def spec(category: Category | str = Category.VANILLA_HARMFUL, **changes: Any) -> GameSpec:
    category = Category(category)
    facts: dict[str, Any] = {
        "category": category,
        "target_label": category.default_target_label,
        "seed_note": ERROR_NOTE if category.seed_label is Label.HARMFUL else CLEAN_NOTE,
        "error_note": ERROR_NOTE,
        "clean_note": CLEAN_NOTE,
        "error_sentence": ERROR_SENTENCE,
        "corrected_sentence": CORRECTED_SENTENCE,
    }
    return GameSpec(**{**facts, **changes})


def attack_text(note: str, reasoning: str = "swap the drug") -> str:
    return f"<think>{reasoning}</think>\n<note>{note}</note>"


def assessment_text(*lines: str, reasoning: str = "reads oddly") -> str:
    return f"<think>{reasoning}</think>\n<answer>\n" + "\n".join(lines) + "\n</answer>"


HARMFUL_ANSWER = assessment_text(
    "verdict: harmful",
    f"sentence: {ERROR_SENTENCE}",
    "error_type: pharmacotherapy",
    f"correction: {CORRECTED_SENTENCE}",
)
SAFE_ANSWER = assessment_text("verdict: safe")


def game(
    category: Category | str, *, max_sentences: int = 1, max_words: int = 24, **changes: Any
) -> MedicalGame:
    """A game at its start; keywords replace facts of the row."""
    limits = EditLimits(max_changed_sentences=max_sentences, max_changed_words=max_words)
    return MedicalGame(spec(category, **changes), limits, MEDSERL)


def attack_record(**changes: Any) -> AttackRecord:
    fields = {"tokens": 10, "note": "rewritten", "reasoning": "plan", "changed_words": 2}
    return AttackRecord(**{**fields, "edit_share": 0.5, **changes})


def assessment_record(**changes: Any) -> AssessmentRecord:
    fields = {"tokens": 20, "verdict": Label.SAFE, "reasoning": "thoughts"}
    return AssessmentRecord(**{**fields, **changes})


def finished(
    outcome: Outcome,
    *,
    category: Category | str = Category.ADVERSARIAL_BENIGN,
    attack: dict[str, Any] | None = None,
    assessment: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **changes: Any,
) -> MedicalRecord:
    """The judged record of a game that ended with ``outcome``; keywords replace parts of it."""
    facts_of_row = spec(category, **(facts or {}))
    attacked = facts_of_row.category.has_attack
    if outcome is Outcome.INVALID_ATTACK:
        invalid = {"invalid": InvalidAttack.UNPARSED, "note": None, **(attack or {})}
        return MedicalRecord(spec=facts_of_row, attack=attack_record(**invalid), **changes)
    verdict, label = {
        Outcome.CORRECT_DETECTION: (Label.HARMFUL, Label.HARMFUL),
        Outcome.MISSED_ERROR: (Label.SAFE, Label.HARMFUL),
        Outcome.CORRECT_REJECTION: (Label.SAFE, Label.SAFE),
        Outcome.FALSE_POSITIVE: (Label.HARMFUL, Label.SAFE),
        Outcome.UNREADABLE: (None, facts_of_row.target_label),
        Outcome.VOID: (Label.SAFE, facts_of_row.target_label),
    }[outcome]
    record = MedicalRecord(
        spec=facts_of_row,
        attack=attack_record(**(attack or {})) if attacked else None,
        assessment=assessment_record(**{"verdict": verdict, **(assessment or {})}),
        judgement=Judgement(judge="labels", label=label),
        void="judge failed" if outcome is Outcome.VOID else None,
    ).model_copy(update=changes)
    assert record.outcome is outcome
    return record


PAY = Medserl()


def paid(outcome: Outcome, pay: RewardScheme = PAY, **changes: Any) -> MedicalRecord:
    """A finished game with its rewards."""
    record = finished(outcome, **changes)
    reward_game(record, pay)
    return record


@st.composite
def any_game(draw: st.DrawFn) -> MedicalRecord:
    """Any finished game, with an attack or without, whatever the judge says of it."""
    category = draw(st.sampled_from(Category))
    invalid = [Outcome.INVALID_ATTACK] if category.has_attack else []
    outcome = draw(st.sampled_from([*DECIDED, Outcome.UNREADABLE, Outcome.VOID, *invalid]))
    names = st.sampled_from(["no_reasoning", "truncated", "text_after_note"])
    violations, share = st.lists(names, max_size=2), draw(st.floats(0, 1))
    attack: dict[str, Any] = {"violations": draw(violations), "edit_share": share}
    attack["changed_words"] = round(24 * share)
    if outcome is Outcome.INVALID_ATTACK:
        attack["invalid"] = draw(st.sampled_from(InvalidAttack))
    assessment = {
        "violations": draw(violations),
        "sentence": draw(st.sampled_from([None, ERROR_SENTENCE, "She is well."])),
        "error_type": draw(st.sampled_from([None, *ErrorType])),
    }
    facts = {"error_type": draw(st.sampled_from([None, *ErrorType]))}
    record = finished(outcome, category=category, attack=attack, assessment=assessment, facts=facts)
    judgement = record.judgement
    if judgement is not None:
        realistic = draw(st.sampled_from([None, True, False]))
        label = draw(st.sampled_from(Label)) if outcome is Outcome.UNREADABLE else judgement.label
        judgement = judgement.model_copy(update={"realistic": realistic, "label": label})
    sentences = draw(st.sampled_from([[], [ERROR_SENTENCE]]))
    return record.model_copy(update={"error_sentences": sentences, "judgement": judgement})


SUBTLE_NOTE = CLEAN_NOTE.replace("500", "5000")
"""A valid attack on the clean note."""
WORSENED_NOTE = ERROR_NOTE.replace("500", "5000")
"""A valid attack on the error note."""


def rewrite_of(category: Category) -> str:
    """A note that is a valid attack in ``category``."""
    return WORSENED_NOTE if category.seed_label is Label.HARMFUL else SUBTLE_NOTE


def attacked(category: Category, note: str, **limits_and_facts: Any) -> MedicalGame:
    """A game whose attacker wrote ``note``."""
    played = game(category, **limits_and_facts)
    played.play(attack_text(note))
    return played


def invalid_of(played: MedicalGame) -> InvalidAttack | None:
    """Why the game's attack does not count."""
    return played.record.attack.invalid
