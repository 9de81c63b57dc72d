"""The ``selfplay.credit`` node: how the roles' advantages are normalised and weighted.

Read by :mod:`medserl_agentloop.core.config`, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.games.medical.types import Role

Normalization = Literal["batch", "category", "group", "mean", "none"]
"""What is done to a role's advantages once the estimator's own baseline is taken off.

``batch``: whitened (mean 0, variance 1) over the role's trained tokens of the batch. ``category``: the
same within each category of games. ``group``: divided by the standard deviation of the role's rewards
within the prompt group. ``mean``: centred over the
role's tokens of the batch, not divided. ``none``: left as they are.
"""

NORMALIZATIONS: Mapping[str, tuple[Normalization, ...]] = {
    "role_gae": ("batch", "category", "mean", "none"),
    # The group is the centre already. `mean` stops there (Dr. GRPO); `none` would be role_reinforce_pp with `none`.
    "role_grpo": ("group", "mean", "batch", "category"),
    # Whitening within a category would take off again what the baseline, one per category, put in.
    "role_rae": ("none", "mean", "batch"),
    "role_reinforce_pp": ("batch", "category", "mean", "none"),
    # Centred within the group already.
    "role_rloo": ("none", "batch", "category"),
}
"""The role-separated estimators, each with the normalisations that make sense for it, its own form first."""


class RoleWeights(BaseModel):
    """Factors of the roles' advantages. 0 silences a role, whose tokens still count in the loss's mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attacker: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="Factor of the attacker's.")
    assessor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="Factor of the assessor's.")


class RoleNormalizations(BaseModel):
    """One :data:`Normalization` per role; None is the estimator's own form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attacker: Normalization | None = Field(default=None, description="Of the attacker's advantages.")
    assessor: Normalization | None = Field(default=None, description="Of the assessor's advantages.")


class CreditSettings(BaseModel):
    """What the role-separated estimators can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role_weights: RoleWeights = Field(default=RoleWeights(), description="Factors after normalisation.")
    normalize: RoleNormalizations = Field(default=RoleNormalizations(), description="Normalisation per role.")
    equal_role_tokens: bool = Field(
        default=False,
        description="true: each role weighs the same in the loss. false: as many times as it has tokens, which is what "
        "verl's loss_agg_mode=token-mean does (selfplay/<role>/signal_share).",
    )
    rae_decay: float = Field(
        default=0.95, ge=0.0, lt=1.0, description="role_rae: how much of a baseline is left after one more game."
    )

    def weight(self, role: Role) -> float:
        """Factor of the advantages of ``role``."""
        weight: float = getattr(self.role_weights, role.value)
        return weight

    def normalization(self, estimator: str, role: Role) -> Normalization:
        """What ``estimator`` does to the advantages of ``role``.

        Raises:
            ValueError: The chosen one makes no sense for this estimator; the message says which do.
        """
        allowed = NORMALIZATIONS[estimator]
        chosen: Normalization | None = getattr(self.normalize, role.value)
        if chosen is None:
            return allowed[0]
        if chosen not in allowed:
            raise ValueError(
                f"selfplay.credit.normalize.{role.value}={chosen} makes no sense with {estimator}: "
                f"choose one of {', '.join(allowed)}, or null for {allowed[0]}"
            )
        return chosen
