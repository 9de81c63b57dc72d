"""Rewards corrected for a judge that errs at known rates. Called by the reward manager and by ``judges.startup``."""

from __future__ import annotations

from dataclasses import dataclass

from medserl_agentloop.games.medical.records import GameRecord, Rewards
from medserl_agentloop.games.medical.rewards import RewardScheme
from medserl_agentloop.games.medical.types import Label

LEAST_INFORMATION = 0.2
"""Least ``ErrorRates.information`` to correct with: below it, the judge's word would move a reward more than five times
as far as without."""


@dataclass(frozen=True)
class ErrorRates:
    """How often a judge that answers is right.

    Attributes:
        sensitivity: Share of the notes with an error that it calls harmful, 0 to 1.
        specificity: Share of the notes without an error that it calls safe, 0 to 1.
    """

    sensitivity: float
    specificity: float

    @property
    def information(self) -> float:
        """Sensitivity + specificity - 1: 1 if the judge is always right, 0 if it says the same of any note."""
        return self.sensitivity + self.specificity - 1

    def weight_of_unsaid(self, said: Label) -> float:
        """Weight, at most 0, of the rewards under the label that the judge did not give; the others have 1 less it."""
        missed = 1 - (self.sensitivity if said is Label.HARMFUL else self.specificity)
        return -missed / self.information


def corrected(scheme: RewardScheme, rates: ErrorRates) -> RewardScheme:
    """A scheme whose rewards are, on average over the judge's errors, those of ``scheme`` under the true label.

    With ``r(y)`` the rewards under label ``y``, ``s`` the sensitivity and ``p`` the specificity, a note that
    is called harmful earns ``(p r(harmful) - (1 - s) r(safe)) / (s + p - 1)`` and one that is called safe
    ``(s r(safe) - (1 - p) r(harmful)) / (s + p - 1)``: the estimator of Natarajan et al., Learning with Noisy
    Labels (NeurIPS 2013), lemma 1. Components are combined by name; one that a label does not have is 0
    there. Example, s = p = 0.8: +1 if harmful, -1 if safe, called harmful: 0.8 / 0.6 + 0.2 / 0.6 = 1.667.

    Untouched notes, whose labels come from the data, and games without a judgement are scored as they are.

    Raises:
        ValueError: The judge says too little to divide by.
    """
    if rates.information < LEAST_INFORMATION:
        raise ValueError(
            f"a judge with sensitivity {rates.sensitivity:.3g} and specificity {rates.specificity:.3g} cannot be "
            f"corrected for: their sum less 1 is {rates.information:.3g}, and rewards would be divided by it "
            f"(at least {LEAST_INFORMATION:g})"
        )

    def score(record: GameRecord) -> Rewards:
        said = scheme(record)
        judgement = record.judgement
        if record.void is not None or not record.category.has_attack or judgement is None or judgement.label is None:
            return said
        weight = rates.weight_of_unsaid(judgement.label)
        if weight == 0:
            return said
        opposite = Label.SAFE if judgement.label is Label.HARMFUL else Label.HARMFUL
        unsaid = scheme(record.model_copy(update={"judgement": judgement.model_copy(update={"label": opposite})}))
        return {
            role: {
                name: (1 - weight) * said.get(role, {}).get(name, 0.0) + weight * unsaid.get(role, {}).get(name, 0.0)
                for name in {**said.get(role, {}), **unsaid.get(role, {})}
            }
            for role in {**said, **unsaid}
        }

    return score
