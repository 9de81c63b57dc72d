"""The simulation's assumptions: every number in one place, changed as ``key=value`` on the command
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field


class _Assumed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Kind(_Assumed):
    """One kind of rewritten note: what its readers see in it, and how often an untrained attacker
    writes it.
    """

    evidence: float = Field(
        description="Mean of the assessor's evidence for an error, where that of a right note is 0."
    )
    pair: float = Field(
        ge=0, le=1, description="Chance that a judge who compares with the original says harmful."
    )
    blind: float = Field(
        ge=0,
        le=1,
        description="Chance that one reading of the note alone finds an error in the edit.",
    )
    error_asked: float = Field(
        default=1, gt=0, description="Weight at the start where the game asks for an error."
    )
    decoy_asked: float = Field(
        default=1, gt=0, description="Weight at the start where it asks for a harmless edit."
    )


class Verdicts(_Assumed):
    """The share of an answer that the note decides, in the part that measures signal to noise."""

    slope: float = Field(
        gt=0, description='Steepness of the chance of "harmful" in the evidence: large is certain.'
    )
    note: float = Field(
        ge=0,
        description="Standard deviation, between notes, of the evidence of one kind of attack.",
    )


def _kind(
    evidence: float, pair: float, blind: float, error_asked: float = 1, decoy_asked: float = 1
) -> Kind:
    return Kind(
        evidence=evidence, pair=pair, blind=blind, error_asked=error_asked, decoy_asked=decoy_asked
    )


class Assumptions(_Assumed):
    """Skills are frozen: only what the players choose to do changes.

    The assessor's evidence has a standard deviation of 1; an untouched error has a mean of
    ``human_evidence``.
    """

    no_op: Kind = _kind(0.0, 0.0, 0.0)
    harmless: Kind = _kind(0.0, 0.10, 0.05, decoy_asked=6)
    odd: Kind = _kind(1.0, 0.15, 0.10)
    blatant: Kind = _kind(2.5, 0.95, 0.90, error_asked=4)
    subtle: Kind = _kind(1.0, 0.65, 0.60, error_asked=2)
    unknowable: Kind = _kind(0.0, 0.65, 0.05)
    repaired: Kind = _kind(0.0, 0.15, 0.05)
    elsewhere: Kind = _kind(1.0, 0.80, 0.05, error_asked=3)
    worsened: Kind = _kind(2.5, 0.95, 0.85, error_asked=2)
    hidden: Kind = _kind(0.5, 0.70, 0.45)

    human_evidence: float = Field(
        default=1.0, description="Mean evidence of MEDEC's own errors (d')."
    )
    edit_seen: float = Field(
        default=0.70, ge=0, le=1, description="Chance that a rewritten note looks edited."
    )
    error_looks_edited: float = Field(
        default=0.15, ge=0, le=1, description="The same for an untouched error note."
    )
    clean_looks_edited: float = Field(
        default=0.06, ge=0, le=1, description="The same for an untouched clean note."
    )
    names_sentence: float = Field(
        default=0.7, ge=0, le=1, description="Chance that a detection names the sentence."
    )
    sensitivity: float = Field(
        default=0.73, ge=0, le=1, description="Of the judge that errs whatever the attack is."
    )
    specificity: float = Field(default=0.90, ge=0, le=1, description="Of the same judge.")
    gate_readings: int = Field(default=3, ge=1, description="Readings of the blind gate (k).")
    gate_hits: int = Field(default=2, ge=1, description="Readings that must find the error (m).")
    failed_attack: float = Field(
        default=-1.5, description="The milder penalty for an attack that the judge contradicts."
    )
    assessments: int = Field(
        default=4, ge=1, description="Assessments of one attack under the learnable reward (k)."
    )
    test_prior: float = Field(
        default=0.52, gt=0, lt=1, description="Share of harmful notes in the test set."
    )

    rate: float = Field(default=0.3, gt=0, description="Step size of both players.")
    steps: int = Field(default=1000, ge=10, description="Steps; the second half is averaged.")
    explore: float = Field(
        default=0.01, ge=0, lt=1, description="Share of attacks that are chosen at random."
    )
    attacker_tokens: float = Field(
        default=900, gt=0, description="Length of an attacker's turn, with its prompt."
    )
    assessor_tokens: float = Field(
        default=600, gt=0, description="Length of an assessor's turn, with its prompt."
    )
    other_parameters: float = Field(
        default=30, ge=0, description="Parameters that an advantage moves by noise alone."
    )
    little: Verdicts = Verdicts(slope=1.0, note=1.0)
    much: Verdicts = Verdicts(slope=3.0, note=1.2)
    games: int = Field(
        default=60_000, ge=100, description="Attacks that are drawn for the signal to noise."
    )
    seed: int = Field(default=0, description="Of these draws; the rest is exact.")

    def kind(self, name: str) -> Kind:
        """The readers' view of a kind of attack."""
        kind: Kind = getattr(self, name.replace("-", "_"))
        return kind

    def gate(self, name: str) -> float:
        """Chance that a kind of attack passes the blind gate; readings are independent."""
        hit, readings = self.kind(name).blind, range(self.gate_hits, self.gate_readings + 1)
        k = self.gate_readings
        return sum(comb(k, n) * hit**n * (1 - hit) ** (k - n) for n in readings)

    def changed(self, overrides: Sequence[str]) -> Assumptions:
        """These assumptions with others in place of some, e.g. ``["subtle.blind=0.3",
        "steps=500"]``.

        Raises:
            ValueError: There is no such key, or it does not take the value; pydantic's message
                names it.
        """
        new = OmegaConf.merge(self.model_dump(), OmegaConf.from_dotlist(list(overrides)))
        return Assumptions.model_validate(OmegaConf.to_container(new))
