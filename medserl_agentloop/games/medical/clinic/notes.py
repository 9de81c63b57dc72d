"""A closed clinical world: sample short notes, put one error in, judge any rewritten note exactly.

Called by the ``oracle`` judge, the synthetic sample, ``experiments/learning`` and tests. The facts (``clinic.world``)
are simplified for a game and are NOT medical advice.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from medserl_agentloop.games.medical.clinic.world import (
    AGES,
    ALL_DOSES,
    DISEASE_OF_FACT,
    DISEASE_OF_FINDING,
    DISEASES,
    DOSES_OF_DRUG,
    SEXES,
    TEMPLATES,
    Disease,
    held_out_kind,
    held_out_template,
)
from medserl_agentloop.games.medical.types import Category, ErrorType, Label

FACTS_PER_NOTE = 3
_SENTENCES_ALLOWED = range(3, 7)
_WRONG_DOSE_SHARE = 0.5  # of the errors in drug sentences; the rest name a wrong drug


class Split(str, Enum):
    """Which wordings, or facts, a sampled note may use: for teaching, for measuring, or any."""

    SEEN = "seen"
    HELD_OUT = "held_out"
    ANY = "any"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Sentence:
    """One sentence of a note.

    Attributes:
        kind: The error type that a wrong value here would be; None for the finding.
        value: The finding, disease, organism, test, measure or drug it names.
        template: Index of its wording in ``TEMPLATES[kind]``.
        dose: Dose in mg, in a drug sentence.
        age: Age in years, in the finding sentence.
        sex: ``man`` or ``woman``, in the finding sentence.
    """

    kind: ErrorType | None
    value: str
    template: int
    dose: str = ""
    age: str = ""
    sex: str = ""

    @property
    def text(self) -> str:
        """The sentence as it stands in a note."""
        return TEMPLATES[self.kind][self.template].format(value=self.value, dose=self.dose, age=self.age, sex=self.sex)

    @property
    def implied_disease(self) -> Disease:
        """The disease in which this sentence would be right, going by its value and not its dose."""
        if self.kind is None:
            return DISEASE_OF_FINDING[self.value]
        return DISEASE_OF_FACT[self.kind][self.value]

    def is_wrong_in(self, disease: Disease) -> bool:
        """Whether this sentence says something untrue about a patient with ``disease``."""
        if self.implied_disease is not disease:
            return True
        return self.kind is ErrorType.PHARMACOTHERAPY and self.dose not in DOSES_OF_DRUG[self.value]


@dataclass(frozen=True)
class Note:
    """A note: the finding, then facts of different kinds. The finding decides what is true."""

    sentences: tuple[Sentence, ...]

    @property
    def text(self) -> str:
        """The note as players see it."""
        return " ".join(s.text for s in self.sentences)

    @property
    def disease(self) -> Disease:
        """What the patient really has."""
        return self.sentences[0].implied_disease

    @property
    def errors(self) -> tuple[int, ...]:
        """Indices, from 0, of the sentences that are wrong."""
        return tuple(i for i, s in enumerate(self.sentences) if s.is_wrong_in(self.disease))

    def with_sentence(self, index: int, sentence: Sentence) -> Note:
        """This note with one sentence exchanged."""
        return Note((*self.sentences[:index], sentence, *self.sentences[index + 1 :]))


@dataclass(frozen=True)
class OracleVerdict:
    """What is true of a text.

    Attributes:
        label: safe or harmful; None where the text is not a note of this world.
        errors: Index from 0 and type of every wrong sentence.
    """

    label: Label | None
    errors: tuple[tuple[int, ErrorType], ...] = ()


@dataclass(frozen=True)
class AttackCheck:
    """Whether a rewritten note does what its category asked for.

    Attributes:
        reason: ``ok`` or the first rule it breaks.
        changed_sentence: Index of the changed sentence, where there is exactly one.
    """

    reason: str
    changed_sentence: int | None = None

    @property
    def valid(self) -> bool:
        """Whether no rule is broken."""
        return self.reason == "ok"


def _pattern(template: str) -> re.Pattern[str]:
    # Not \d, which takes the digits of every script: a true dose in full-width ones would count as a wrong one.
    groups = {"age": "[0-9]+", "sex": "|".join(SEXES), "value": "[a-z ]+", "dose": "[0-9]+"}
    pattern = re.escape(template)
    for name, allowed in groups.items():
        pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{allowed})")
    return re.compile(pattern)


_PATTERNS = [(kind, i, _pattern(t)) for kind, templates in TEMPLATES.items() for i, t in enumerate(templates)]


def split_sentences(text: str) -> list[str]:
    """The sentences of a note of this world, where a full stop always ends a sentence."""
    return re.split(r"(?<=\.)\s+", text.strip())


@lru_cache(maxsize=50_000)
def parse_sentence(text: str) -> Sentence | None:
    """Read one sentence back; None unless wording and value both belong to this world."""
    for kind, template, pattern in _PATTERNS:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        known = DISEASE_OF_FINDING if kind is None else DISEASE_OF_FACT[kind]
        sentence = Sentence(kind, template=template, **match.groupdict())
        if sentence.value in known and (kind is not None or sentence.age in AGES):
            return sentence
    return None


def parse_note(text: str) -> Note | None:
    """Read a note back; None unless it is a finding followed by facts of different kinds."""
    sentences = [parse_sentence(s) for s in split_sentences(text)]
    known = tuple(s for s in sentences if s is not None)
    kinds = [s.kind for s in known]
    well_formed = (
        len(known) == len(sentences)
        and len(known) in _SENTENCES_ALLOWED
        and kinds[0] is None
        and len(set(kinds)) == len(kinds)
    )
    return Note(known) if well_formed else None


def oracle(text: str) -> OracleVerdict:
    """The truth about any text: never wrong inside this world, silent outside it."""
    note = parse_note(text)
    if note is None:
        return OracleVerdict(None)
    kinds = ((i, note.sentences[i].kind) for i in note.errors)
    errors = tuple((i, kind) for i, kind in kinds if kind is not None)
    return OracleVerdict(Label.HARMFUL if errors else Label.SAFE, errors)


def check_attack(seed_text: str, rewritten_text: str, category: Category) -> AttackCheck:
    """Whether ``rewritten_text`` is a valid attack on ``seed_text``, a note of this world.

    Valid is: the same kinds of sentences in the same order, exactly one changed, not the finding,
    and afterwards no error for ``decoy_benign``, exactly one for ``adversarial_benign`` and at
    least one for ``adversarial_harmful``.

    Raises:
        ValueError: ``seed_text`` is not a note of this world.
    """
    seed, rewritten = parse_note(seed_text), parse_note(rewritten_text)
    if seed is None:
        raise ValueError(f"the seed note is not a note of the toy clinic: {seed_text!r}")
    if rewritten is None:
        return AttackCheck("not_a_note")
    if len(rewritten.sentences) != len(seed.sentences):
        return AttackCheck("sentence_count")
    pairs = enumerate(zip(seed.sentences, rewritten.sentences, strict=True))
    changed = [i for i, (old, new) in pairs if old != new]
    if len(changed) != 1:
        return AttackCheck("too_many_edits" if changed else "unchanged")
    [index] = changed
    if index == 0:
        return AttackCheck("finding_changed", index)
    if seed.sentences[index].kind is not rewritten.sentences[index].kind:
        return AttackCheck("kind_changed", index)
    errors = len(rewritten.errors)
    if category is Category.DECOY_BENIGN:
        return AttackCheck("error_added" if errors else "ok", index)
    if not errors:
        return AttackCheck("no_error", index)
    if category is Category.ADVERSARIAL_BENIGN and errors > 1:
        return AttackCheck("many_errors", index)
    return AttackCheck("ok", index)


def _templates(disease: Disease, kind: ErrorType, wording: Split) -> list[int]:
    held_out = held_out_template(disease, kind)
    if wording is Split.HELD_OUT:
        return [held_out]
    return [i for i in range(len(TEMPLATES[kind])) if wording is Split.ANY or i != held_out]


def _kinds(rng: random.Random, finding: str, facts: Split) -> list[ErrorType]:
    if facts is Split.ANY:
        return rng.sample(list(ErrorType), FACTS_PER_NOTE)
    held_out = held_out_kind(finding)
    others = [kind for kind in ErrorType if kind is not held_out]
    if facts is Split.SEEN:
        return rng.sample(others, FACTS_PER_NOTE)
    kinds = [held_out, *rng.sample(others, FACTS_PER_NOTE - 1)]
    rng.shuffle(kinds)
    return kinds


def sample_clean_note(rng: random.Random, wording: Split = Split.ANY, facts: Split = Split.ANY) -> Note:
    """A correct note: the finding and ``FACTS_PER_NOTE`` facts of different kinds in random order.

    Args:
        rng: Source of all choices.
        wording: Templates of the facts. ``HELD_OUT`` words every fact as no ``SEEN`` note words it.
        facts: ``HELD_OUT`` states one fact about its finding that no ``SEEN`` note states of that finding.
    """
    disease = rng.choice(DISEASES)
    finding, template = rng.choice(disease.findings), rng.randrange(len(TEMPLATES[None]))
    sentences = [Sentence(None, finding, template, age=rng.choice(AGES), sex=rng.choice(SEXES))]
    for kind in _kinds(rng, finding, facts):
        template = rng.choice(_templates(disease, kind, wording))
        dose = rng.choice(disease.doses) if kind is ErrorType.PHARMACOTHERAPY else ""
        sentences.append(Sentence(kind, disease.fact(kind), template, dose))
    return Note(tuple(sentences))


def with_error(rng: random.Random, note: Note, index: int) -> Note:
    """``note`` with sentence ``index`` made wrong, in the same wording and unlike it was before.

    Raises:
        ValueError: The sentence is the finding.
    """
    sentence, disease = note.sentences[index], note.disease
    if sentence.kind is None:
        raise ValueError("the finding decides what is true, so it cannot be wrong; choose a fact")
    if sentence.kind is ErrorType.PHARMACOTHERAPY and rng.random() < _WRONG_DOSE_SHARE:
        doses = [d for d in ALL_DOSES if d not in disease.doses and d != sentence.dose]
        return note.with_sentence(index, replace(sentence, value=disease.drug, dose=rng.choice(doses)))
    excluded = (disease.fact(sentence.kind), sentence.value)
    value = rng.choice([v for v in DISEASE_OF_FACT[sentence.kind] if v not in excluded])
    dose = rng.choice(DOSES_OF_DRUG[value]) if sentence.kind is ErrorType.PHARMACOTHERAPY else ""
    return note.with_sentence(index, replace(sentence, value=value, dose=dose))


def inject_error(rng: random.Random, note: Note) -> tuple[Note, int]:
    """A correct note with exactly one error, and the index of the wrong sentence."""
    index = rng.randrange(1, len(note.sentences))
    return with_error(rng, note, index), index


def reworded(rng: random.Random, note: Note, index: int, wording: Split = Split.ANY) -> Note:
    """``note`` with the same content in sentence ``index`` said in other words.

    Raises:
        ValueError: The sentence is the finding, or ``wording`` leaves no other template.
    """
    sentence = note.sentences[index]
    if sentence.kind is None:
        raise ValueError("the finding is never reworded; choose a fact")
    others = [t for t in _templates(note.disease, sentence.kind, wording) if t != sentence.template]
    if not others:
        raise ValueError(f"wording {wording.value!r} has no other template for {sentence.text!r}")
    return note.with_sentence(index, replace(sentence, template=rng.choice(others)))


def error_detail(note: Note, index: int) -> str:
    """The kind of a wrong sentence, with drug errors told apart into ``drug`` and ``dose``."""
    sentence = note.sentences[index]
    if sentence.kind is ErrorType.PHARMACOTHERAPY:
        return "dose" if sentence.implied_disease is note.disease else "drug"
    return sentence.kind.value if sentence.kind else "finding"
