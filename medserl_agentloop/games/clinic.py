"""A closed clinical world: sample short notes, put one error in, judge any rewritten note exactly.

The facts are simplified until each disease has exactly one answer per question. They are NOT
medical advice. Its judge is ``selfplay.judge=medserl_agentloop.games.clinic:OracleJudge``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from medserl_agentloop.games.medical.case import ErrorType, GameSpec, Label
from medserl_agentloop.games.medical.records import Judgement


@dataclass(frozen=True)
class Disease:
    """The facts of one disease."""

    name: str
    findings: tuple[str, ...]  # two that occur in this disease and in no other
    doses: tuple[str, ...]  # the drug's correct ones, in mg
    facts: dict[ErrorType, str]  # the one correct value of each kind (drugs: name, not dose)


# Name, findings, doses of the drug in mg, management, treatment, drug, organism: the facts as
# ErrorType orders them.
_DISEASES = """
pneumonia,productive cough/lobar crackles,875/1000,chest radiograph,oxygen,amoxicillin,pneumococcus
cystitis,dysuria/bladder tenderness,50/100,urinalysis,hydration,nitrofurantoin,escherichia
cellulitis,spreading erythema/leg warmth,250/500,margin marking,elevation,cephalexin,streptococcus
meningitis,neck stiffness/photophobia,2000/4000,lumbar puncture,isolation,ceftriaxone,meningococcus
tuberculosis,night sweats/bloody sputum,200/300,sputum smear,ventilation,isoniazid,mycobacterium
syphilis,painless chancre/palm rash,1200/2400,serology,abstinence,benzathine,treponema
borreliosis,target rash/tick bite,100/200,immunoblot,rest,doxycycline,borrelia
giardiasis,greasy stools/foul flatulence,250/400,stool antigen,rehydration,metronidazole,giardia
malaria,cyclic fever/jungle travel,20/80,blood smear,transfusion,artemether,plasmodium
thrush,tongue plaques/mouth soreness,50/150,tongue swab,rinsing,fluconazole,candida
shingles,grouped vesicles/dermatomal pain,400/800,lesion assay,compresses,acyclovir,varicella
influenza,diffuse myalgia/winter fever,30/75,nasal swab,antipyresis,oseltamivir,orthomyxovirus
cholera,watery stools/sunken eyes,500/1000,dipstick,saline,azithromycin,vibrio
scabies,finger burrows/nocturnal itch,12/15,skin scraping,laundering,ivermectin,sarcoptes
osteomyelitis,bone pain/draining sinus,1000/2000,bone scan,debridement,cefazolin,staphylococcus
pertussis,whooping cough/cough vomiting,250/500,\
throat culture,humidification,clarithromycin,bordetella
"""


def _disease(line: str) -> Disease:
    name, findings, doses, *others = line.split(",")
    facts = dict(zip(ErrorType, [name, *others], strict=True))
    return Disease(name, tuple(findings.split("/")), tuple(doses.split("/")), facts)


DISEASES = [_disease(line) for line in _DISEASES.strip().splitlines()]

# How each kind of sentence can be worded: the finding that opens every note, then the kinds as
# ErrorType orders them.
_WORDINGS = """
A {age}-year-old {sex} has {value}.; A {age}-year-old {sex} presents with {value}.; \
A {age}-year-old {sex} reports {value}.
The diagnosis is {value}.; This fits {value}.; We suspect {value}.; Assessment shows {value}.
We ordered {value}.; The plan includes {value}.; Next comes {value}.; The team requested {value}.
Supportive care is {value}.; Nurses began {value}.; The patient receives {value}.; \
Care continues with {value}.
We started {value} {dose} mg.; Prescribed {value} {dose} mg.; The drug is {value} {dose} mg.; \
Therapy uses {value} {dose} mg.
Culture grew {value}.; The organism is {value}.; Testing found {value}.; The lab isolated {value}.
"""
TEMPLATES: dict[ErrorType | None, tuple[str, ...]] = {
    kind: tuple(line.split("; "))
    for kind, line in zip((None, *ErrorType), _WORDINGS.strip().splitlines(), strict=True)
}

FACTS_PER_NOTE = 3
_SENTENCES_ALLOWED = range(3, 7)
_WRONG_DOSE_SHARE = 0.5  # of the errors in drug sentences; the rest name a wrong drug

AGES: tuple[str, ...] = tuple(str(age) for age in range(22, 80, 5))
SEXES: tuple[str, ...] = ("man", "woman")

DISEASE_OF_FINDING: dict[str, Disease] = {f: d for d in DISEASES for f in d.findings}
DISEASE_OF_FACT: dict[ErrorType, dict[str, Disease]] = {
    k: {d.facts[k]: d for d in DISEASES} for k in ErrorType
}
DOSES_OF_DRUG = {d.facts[ErrorType.PHARMACOTHERAPY]: d.doses for d in DISEASES}
ALL_DOSES: tuple[str, ...] = tuple(sorted({dose for d in DISEASES for dose in d.doses}, key=int))


def held_out_template(disease: Disease, kind: ErrorType) -> int:
    """Index of the wording that no ``SEEN`` note has for this disease and kind of sentence."""
    number = DISEASES.index(disease)
    return (number * 7 + list(ErrorType).index(kind) * 3 + number // 4) % len(TEMPLATES[kind])


def held_out_kind(finding: str) -> ErrorType:
    """The kind of fact that no ``SEEN`` note states for this finding, only for the other one."""
    disease = DISEASE_OF_FINDING[finding]
    number = DISEASES.index(disease) + 2 * disease.findings.index(finding)
    return list(ErrorType)[number % len(ErrorType)]


class Split(str, Enum):
    """The wordings or facts that a sampled note may use: for teaching, for measuring, or any."""

    SEEN = "seen"
    HELD_OUT = "held_out"
    ANY = "any"


@dataclass(frozen=True)
class Sentence:
    """One sentence of a note."""

    kind: ErrorType | None  # the error type that a wrong value here would be; None for the finding
    value: str  # the finding, disease, organism, test, measure or drug it names
    template: int  # index of its wording in TEMPLATES[kind]
    dose: str = ""  # in mg, in a drug sentence
    age: str = ""  # in years, in the finding sentence, as is the sex
    sex: str = ""

    @property
    def text(self) -> str:
        return TEMPLATES[self.kind][self.template].format(
            value=self.value, dose=self.dose, age=self.age, sex=self.sex
        )

    @property
    def implied_disease(self) -> Disease:
        """The disease for which this sentence would be right, judged by its value, not its dose."""
        if self.kind is None:
            return DISEASE_OF_FINDING[self.value]
        return DISEASE_OF_FACT[self.kind][self.value]

    def is_wrong_in(self, disease: Disease) -> bool:
        if self.implied_disease is not disease:
            return True
        return self.kind is ErrorType.PHARMACOTHERAPY and self.dose not in DOSES_OF_DRUG[self.value]


@dataclass(frozen=True)
class Note:
    """A note: the finding, then facts of different kinds. The finding decides what is true."""

    sentences: tuple[Sentence, ...]

    @property
    def text(self) -> str:
        return " ".join(s.text for s in self.sentences)

    @property
    def disease(self) -> Disease:
        """The patient's true disease."""
        return self.sentences[0].implied_disease

    @property
    def errors(self) -> tuple[int, ...]:
        """Indices, from 0, of the sentences that are untrue of the patient's disease."""
        return tuple(i for i, s in enumerate(self.sentences) if s.is_wrong_in(self.disease))

    def with_sentence(self, index: int, sentence: Sentence) -> Note:
        """This note with one sentence replaced."""
        return Note((*self.sentences[:index], sentence, *self.sentences[index + 1 :]))


class OracleVerdict(NamedTuple):
    """The truth about a text."""

    label: Label | None  # None where the text is not a note of this world
    errors: tuple[tuple[int, ErrorType], ...] = ()  # index from 0 and type of every wrong sentence


def _pattern(template: str) -> re.Pattern[str]:
    # Not \d, which matches the digits of every script: a true dose in full-width ones would count
    # as a wrong one.
    groups = {"age": "[0-9]+", "sex": "|".join(SEXES), "value": "[a-z ]+", "dose": "[0-9]+"}
    named = {name: f"(?P<{name}>{allowed})" for name, allowed in groups.items()}
    return re.compile(template.replace(".", "\\.").format_map(named))


_PATTERNS = [
    (kind, i, _pattern(t)) for kind, templates in TEMPLATES.items() for i, t in enumerate(templates)
]


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
    sentences = [parse_sentence(s) for s in re.split(r"(?<=\.)\s+", text.strip())]
    known = tuple(s for s in sentences if s is not None)
    if len(known) != len(sentences) or len(known) not in _SENTENCES_ALLOWED:
        return None
    kinds = [s.kind for s in known]
    return Note(known) if kinds[0] is None and len(set(kinds)) == len(kinds) else None


def oracle(text: str) -> OracleVerdict:
    """The truth about any text: never wrong inside this world, silent outside it."""
    note = parse_note(text)
    if note is None:
        return OracleVerdict(None)
    errors = tuple((i, kind) for i in note.errors if (kind := note.sentences[i].kind) is not None)
    return OracleVerdict(Label.HARMFUL if errors else Label.SAFE, errors)


def templates_of(disease: Disease, kind: ErrorType, wording: Split) -> list[int]:
    """Indices of the templates that a split may use for this disease and kind of sentence."""
    held_out = held_out_template(disease, kind)
    if wording is Split.HELD_OUT:
        return [held_out]
    return [i for i in range(len(TEMPLATES[kind])) if wording is Split.ANY or i != held_out]


def _kinds(rng: random.Random, finding: str, facts: Split) -> list[ErrorType]:
    held_out = held_out_kind(finding)
    kinds = [kind for kind in ErrorType if facts is Split.ANY or kind is not held_out]
    if facts is not Split.HELD_OUT:
        return rng.sample(kinds, FACTS_PER_NOTE)
    kinds = [held_out, *rng.sample(kinds, FACTS_PER_NOTE - 1)]
    rng.shuffle(kinds)
    return kinds


def sample_clean_note(
    rng: random.Random, wording: Split = Split.ANY, facts: Split = Split.ANY
) -> Note:
    """A correct note: the finding and ``FACTS_PER_NOTE`` facts of different kinds in random order.

    A ``HELD_OUT`` note uses wordings that no ``SEEN`` note uses, or one fact that no ``SEEN`` note
    states for its finding.
    """
    disease = rng.choice(DISEASES)
    finding, template = rng.choice(disease.findings), rng.randrange(len(TEMPLATES[None]))
    sentences = [Sentence(None, finding, template, age=rng.choice(AGES), sex=rng.choice(SEXES))]
    for kind in _kinds(rng, finding, facts):
        template = rng.choice(templates_of(disease, kind, wording))
        dose = rng.choice(disease.doses) if kind is ErrorType.PHARMACOTHERAPY else ""
        sentences.append(Sentence(kind, disease.facts[kind], template, dose))
    return Note(tuple(sentences))


def with_error(rng: random.Random, note: Note, index: int) -> Note:
    """``note`` with sentence ``index``, a fact, made wrong in the same wording."""
    sentence, disease = note.sentences[index], note.disease
    assert sentence.kind is not None  # the finding decides what is true
    if sentence.kind is ErrorType.PHARMACOTHERAPY and rng.random() < _WRONG_DOSE_SHARE:
        doses = [d for d in ALL_DOSES if d not in disease.doses and d != sentence.dose]
        value, dose = disease.facts[sentence.kind], rng.choice(doses)
        return note.with_sentence(index, replace(sentence, value=value, dose=dose))
    excluded = (disease.facts[sentence.kind], sentence.value)
    value = rng.choice([v for v in DISEASE_OF_FACT[sentence.kind] if v not in excluded])
    dose = rng.choice(DOSES_OF_DRUG[value]) if sentence.kind is ErrorType.PHARMACOTHERAPY else ""
    return note.with_sentence(index, replace(sentence, value=value, dose=dose))


def inject_error(rng: random.Random, note: Note) -> tuple[Note, int]:
    """A correct note with exactly one error, and the index of the wrong sentence."""
    index = rng.randrange(1, len(note.sentences))
    return with_error(rng, note, index), index


def error_detail(note: Note, index: int) -> str:
    """The kind of a wrong sentence, with drug errors told apart into ``drug`` and ``dose``."""
    sentence = note.sentences[index]
    if sentence.kind is ErrorType.PHARMACOTHERAPY:
        return "dose" if sentence.implied_disease is note.disease else "drug"
    return sentence.kind.value if sentence.kind else "finding"


class OracleJudge:
    """Judges by the facts of the toy clinic, and is never wrong there.

    A note from outside this world counts as safe and unrealistic, so a garbling attack fails.
    """

    name = "oracle"
    never_errs = True

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        note, (label, errors) = parse_note(presented), oracle(presented)
        if note is None:
            away = "not a note of this world"
            return Judgement(judge=self.name, label=Label.SAFE, realistic=False, reason=away)
        said = ", ".join(f"{kind.value}: {note.sentences[at].text}" for at, kind in errors)
        kind = error_detail(note, errors[0][0]) if errors else None
        reason = said or "no error"
        return Judgement(
            judge=self.name, label=label, realistic=True, reason=reason, error_type=kind
        )
