"""Does what happens to one role leave the gradient of the other's tokens alone?

A row holds the turns of both roles, so a loss or a correction that takes one number per row or per batch
couples them. ``tests/run_check/test_coupling.py`` measures all that verl has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    _parse_rollout_is_threshold,
    _parse_rollout_rs_thresholds,
)

from medserl_agentloop.core.run_check.run import ACTOR, CRITIC, ROLLOUT, Run

LOSS = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
WEIGHTS, REJECTION = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
NORMALIZED = f"{CORRECTION}.rollout_is_batch_normalize"

_PER_ROW = "takes one number from all tokens of a row"
_PER_BATCH = "picks tokens by comparing them with all of a micro-batch"
_ROW_MEAN = {"seq-mean-token-mean": "divides by the number of tokens in a row"}

COUPLED = {
    LOSS: {
        "gspo": _PER_ROW,
        "geo_mean": _PER_ROW,
        "sapo": "divides by the number of tokens in a row, whatever loss_agg_mode says",
        "clip_cov": _PER_BATCH,
        "kl_cov": _PER_BATCH,
    },
    f"{ACTOR}.loss_agg_mode": _ROW_MEAN,
    f"{CRITIC}.loss_agg_mode": _ROW_MEAN,
    WEIGHTS: {"sequence": _PER_ROW},
    REJECTION: dict.fromkeys(SUPPORTED_ROLLOUT_RS_OPTIONS - TOKEN_LEVEL_ROLLOUT_RS_OPTIONS, _PER_ROW),
    NORMALIZED: {"True": "divides by the mean over all tokens of a batch"},
}
"""Values that couple the roles: what each does."""

INSTEAD = {
    LOSS: "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{CRITIC}.loss_agg_mode": "token-mean",
    WEIGHTS: "token",
    REJECTION: "token_k1",
    NORMALIZED: "False",
}


def coupling(run: Run) -> Iterator[str]:
    """No loss or correction takes one number from both roles."""
    if run.selfplay.train != "both":  # all trained tokens of a row are one role's
        return
    used = {f"{CRITIC}.loss_agg_mode": CRITIC in run.trained, NORMALIZED: run[WEIGHTS] is not None}
    for key, coupled in COUPLED.items():
        for value in run.names(key):
            if value in coupled and used.get(key, True):
                yield (
                    f"{key}={value} {coupled[value]}. These are of both roles, so what happens to one role would "
                    f"change the gradient of the other. Set {key}={INSTEAD[key]}, or train one role (selfplay.train)."
                )


def row_length(run: Run) -> Iterator[str]:
    """No loss depends on how long the other role's turns are."""
    # verl/trainer/ppo/core_algos.py (agg_loss). seq-mean-token-sum passes: it divides by the number of rows
    # of a mini-batch, which no role changes.
    for engine in run.trained:
        scale = f"{engine}.loss_scale_factor"
        if run[f"{engine}.loss_agg_mode"] == "seq-mean-token-sum-norm" and run[scale] is None:
            yield (
                f"{engine}.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of a micro-batch, so "
                "a long turn of one role would shrink the gradient of the other. Set "
                f"{scale} to a constant, e.g. {run['data.max_response_length']}."
            )


def policy_loss(run: Run) -> Iterator[str]:
    """verl's loss can be computed for every micro-batch."""
    if run[LOSS] == "bypass_mode":
        yield (
            f"{LOSS}=bypass_mode ends the run at a micro-batch without a trained token, such as a void game. Set "
            f"{LOSS}=vanilla; {CORRECTION}.bypass_mode=True alone takes the rollout's log-probs as the old ones."
        )
    if run[LOSS] == "dro" and not run[f"{ACTOR}.policy_loss.dro_beta"]:
        yield f"{LOSS}=dro needs {ACTOR}.policy_loss.dro_beta. Set it to a number above 0."


def correction(run: Run) -> Iterator[str]:
    """verl applies the importance correction that the run asks for."""
    rejections = run.names(REJECTION)
    others = run[WEIGHTS] or rejections or run[f"{CORRECTION}.loss_type"] not in (None, "ppo_clip")
    if run[f"{CORRECTION}.bypass_mode"] and others:
        # verl/trainer/ppo/v1/trainer_base.py: only the legacy trainer hands these keys on to the loss.
        yield (
            f"{CORRECTION}.bypass_mode=True: verl's V1 trainer then ignores rollout_is, rollout_rs and loss_type, and "
            "nothing would be corrected. Set bypass_mode=False, or leave the others at null, null and ppo_clip."
        )
    for used, key, parse in (
        (run[WEIGHTS], f"{CORRECTION}.rollout_is_threshold", _parse_rollout_is_threshold),
        (rejections, f"{CORRECTION}.rollout_rs_threshold", partial(_parse_rollout_rs_thresholds, rejections)),
    ):
        if used:
            try:
                parse(run[key])
            except (TypeError, ValueError) as error:
                yield f"{key}={run[key]}: {error}"


def log_probs(run: Run) -> Iterator[str]:
    """Corrections that read the rollout's log-probs get them."""
    if run[f"{ROLLOUT}.calculate_log_probs"]:
        return
    for key in (WEIGHTS, REJECTION, f"{CORRECTION}.bypass_mode"):
        if run[key]:
            yield (
                f"{key}={run[key]} reads the rollout's log-probs, and {ROLLOUT}.calculate_log_probs=False asks for "
                f"none. Set {ROLLOUT}.calculate_log_probs=True."
            )
