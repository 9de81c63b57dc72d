"""The ``selfplay.credit`` node: how the roles' advantages are normalised and weighted.

Read by :mod:`medserl_agentloop.core.config`, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Normalization = Literal["batch", "kind", "group", "mean", "none"]
"""What is done to a role's advantages once the estimator's own baseline is taken off.

``batch``: whitened (mean 0, variance 1) over the role's trained tokens of the batch. ``kind``: the
same within each kind of game. ``group``: divided by the standard deviation of the role's rewards
within the prompt group. ``mean``: centred over the
role's tokens of the batch, not divided. ``none``: left as they are.
"""

NORMALIZATIONS: Mapping[str, tuple[Normalization, ...]] = {
    "role_gae": ("batch", "kind", "mean", "none"),
    # The group is the centre already. `mean` stops there (Dr. GRPO); `none` would be role_reinforce_pp with `none`.
    "role_grpo": ("group", "mean", "batch", "kind"),
    # Nearly centred within the group already.
    "role_opo": ("none", "batch", "kind"),
    # Whitening within a kind would take off again what the baseline, one per kind, put in.
    "role_rae": ("none", "mean", "batch"),
    "role_reinforce_pp": ("batch", "kind", "mean", "none"),
    # Centred within the group already.
    "role_rloo": ("none", "batch", "kind"),
}
"""The role-separated estimators, each with the normalisations that make sense for it, its own form first."""


Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class CreditSettings(BaseModel):
    """What the role-separated estimators can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role_weights: dict[str, Weight] = Field(
        default={},
        description="Factor of each role's advantages after normalisation, 1 where none is given. 0 silences a role, "
        "whose tokens still count in the loss's mean.",
    )
    normalize: dict[str, Normalization | None] = Field(
        default={}, description="Normalisation per role; null is the estimator's own."
    )
    equal_role_tokens: bool = Field(
        default=False,
        description="true: each role weighs the same in the loss. false: as many times as it has tokens, which is what "
        "verl's loss_agg_mode=token-mean does (selfplay/<role>/signal_share).",
    )
    rae_decay: float = Field(
        default=0.95, ge=0.0, lt=1.0, description="role_rae: how much of a baseline is left after one more game."
    )

    def weight(self, role: str) -> float:
        """Factor of the advantages of ``role``."""
        return self.role_weights.get(role, 1.0)

    def normalization(self, estimator: str, role: str) -> Normalization:
        """What ``estimator`` does to the advantages of ``role``; ValueError if the chosen one makes no sense for it."""
        allowed = NORMALIZATIONS[estimator]
        chosen = self.normalize.get(role)
        if chosen is None:
            return allowed[0]
        if chosen not in allowed:
            raise ValueError(
                f"selfplay.credit.normalize.{role}={chosen} makes no sense with {estimator}: "
                f"choose one of {', '.join(allowed)}, or null for {allowed[0]}"
            )
        return chosen
