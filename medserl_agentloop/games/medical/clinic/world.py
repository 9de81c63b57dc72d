"""The facts and wordings of the toy clinic: sixteen diseases and how a note speaks of them.

Called by ``clinic.clinic`` only. The facts are simplified until each disease has exactly one answer
per question, so that a game can be judged exactly. They are NOT medical advice.
"""

from __future__ import annotations

from dataclasses import dataclass

from medserl_agentloop.games.medical.types import ErrorType


@dataclass(frozen=True)
class Disease:
    """What is true of one disease in this world.

    Attributes:
        name: The disease.
        findings: Findings that occur in this disease and in no other.
        organism: Its one causal organism.
        management: Its one test or procedure.
        treatment: Its one supportive measure.
        drug: Its one drug.
        doses: The drug's correct doses in mg.
    """

    name: str
    findings: tuple[str, str]
    organism: str
    management: str
    treatment: str
    drug: str
    doses: tuple[str, str]

    def fact(self, kind: ErrorType) -> str:
        """The one correct value for a sentence of this kind (for drugs: the name, not the dose)."""
        return {
            ErrorType.DIAGNOSIS: self.name,
            ErrorType.CAUSAL_ORGANISM: self.organism,
            ErrorType.MANAGEMENT: self.management,
            ErrorType.TREATMENT: self.treatment,
            ErrorType.PHARMACOTHERAPY: self.drug,
        }[kind]


# fmt: off
DISEASES: tuple[Disease, ...] = (
    Disease("pneumonia", ("productive cough", "lobar crackles"), "pneumococcus",
            "chest radiograph", "oxygen", "amoxicillin", ("875", "1000")),
    Disease("cystitis", ("dysuria", "bladder tenderness"), "escherichia",
            "urinalysis", "hydration", "nitrofurantoin", ("50", "100")),
    Disease("cellulitis", ("spreading erythema", "leg warmth"), "streptococcus",
            "margin marking", "elevation", "cephalexin", ("250", "500")),
    Disease("meningitis", ("neck stiffness", "photophobia"), "meningococcus",
            "lumbar puncture", "isolation", "ceftriaxone", ("2000", "4000")),
    Disease("tuberculosis", ("night sweats", "bloody sputum"), "mycobacterium",
            "sputum smear", "ventilation", "isoniazid", ("200", "300")),
    Disease("syphilis", ("painless chancre", "palm rash"), "treponema",
            "serology", "abstinence", "benzathine", ("1200", "2400")),
    Disease("borreliosis", ("target rash", "tick bite"), "borrelia",
            "immunoblot", "rest", "doxycycline", ("100", "200")),
    Disease("giardiasis", ("greasy stools", "foul flatulence"), "giardia",
            "stool antigen", "rehydration", "metronidazole", ("250", "400")),
    Disease("malaria", ("cyclic fever", "jungle travel"), "plasmodium",
            "blood smear", "transfusion", "artemether", ("20", "80")),
    Disease("thrush", ("tongue plaques", "mouth soreness"), "candida",
            "tongue swab", "rinsing", "fluconazole", ("50", "150")),
    Disease("shingles", ("grouped vesicles", "dermatomal pain"), "varicella",
            "lesion assay", "compresses", "acyclovir", ("400", "800")),
    Disease("influenza", ("diffuse myalgia", "winter fever"), "orthomyxovirus",
            "nasal swab", "antipyresis", "oseltamivir", ("30", "75")),
    Disease("cholera", ("watery stools", "sunken eyes"), "vibrio",
            "dipstick", "saline", "azithromycin", ("500", "1000")),
    Disease("scabies", ("finger burrows", "nocturnal itch"), "sarcoptes",
            "skin scraping", "laundering", "ivermectin", ("12", "15")),
    Disease("osteomyelitis", ("bone pain", "draining sinus"), "staphylococcus",
            "bone scan", "debridement", "cefazolin", ("1000", "2000")),
    Disease("pertussis", ("whooping cough", "cough vomiting"), "bordetella",
            "throat culture", "humidification", "clarithromycin", ("250", "500")),
)
# fmt: on

AGES: tuple[str, ...] = tuple(str(age) for age in range(22, 80, 5))
SEXES: tuple[str, ...] = ("man", "woman")

DISEASE_OF_FINDING: dict[str, Disease] = {f: d for d in DISEASES for f in d.findings}
DISEASE_OF_FACT: dict[ErrorType, dict[str, Disease]] = {k: {d.fact(k): d for d in DISEASES} for k in ErrorType}
DOSES_OF_DRUG: dict[str, tuple[str, str]] = {d.drug: d.doses for d in DISEASES}
ALL_DOSES: tuple[str, ...] = tuple(sorted({dose for d in DISEASES for dose in d.doses}, key=int))

# How each kind of sentence can be worded; None is the finding that opens every note.
TEMPLATES: dict[ErrorType | None, tuple[str, ...]] = {
    None: (
        "A {age}-year-old {sex} has {value}.",
        "A {age}-year-old {sex} presents with {value}.",
        "A {age}-year-old {sex} reports {value}.",
    ),
    ErrorType.DIAGNOSIS: (
        "The diagnosis is {value}.",
        "This fits {value}.",
        "We suspect {value}.",
        "Assessment shows {value}.",
    ),
    ErrorType.CAUSAL_ORGANISM: (
        "Culture grew {value}.",
        "The organism is {value}.",
        "Testing found {value}.",
        "The lab isolated {value}.",
    ),
    ErrorType.MANAGEMENT: (
        "We ordered {value}.",
        "The plan includes {value}.",
        "Next comes {value}.",
        "The team requested {value}.",
    ),
    ErrorType.TREATMENT: (
        "Supportive care is {value}.",
        "Nurses began {value}.",
        "The patient receives {value}.",
        "Care continues with {value}.",
    ),
    ErrorType.PHARMACOTHERAPY: (
        "We started {value} {dose} mg.",
        "Prescribed {value} {dose} mg.",
        "The drug is {value} {dose} mg.",
        "Therapy uses {value} {dose} mg.",
    ),
}


def held_out_template(disease: Disease, kind: ErrorType) -> int:
    """Index of the wording that the warm start never sees for this disease and kind of sentence.

    Notes that use it measure whether the player reads the fact rather than the whole sentence.
    """
    number = DISEASES.index(disease)
    shift = list(ErrorType).index(kind)
    return (number * 7 + shift * 3 + number // 4) % len(TEMPLATES[kind])


def held_out_kind(finding: str) -> ErrorType:
    """The kind of fact that is never stated of this finding where held-out facts are kept back.

    It is stated of the disease's other finding, so it can be inferred and not recited.
    """
    disease = DISEASE_OF_FINDING[finding]
    return list(ErrorType)[(DISEASES.index(disease) + 2 * disease.findings.index(finding)) % len(ErrorType)]
