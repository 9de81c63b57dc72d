"""The noise of the rewards: validity's share of the attacker's, and the effect of several
assessments.

The first is exact. The second draws attacks and their assessments, with a seed, and compares the
signal to noise of one policy gradient at equal tokens: squared length of the mean gradient over its
variance, per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.incentives.assumptions import Assumptions, Verdicts
from experiments.incentives.dynamics import (
    BALANCED_MIX,
    GAMES,
    Array,
    Board,
    Setting,
    board,
    normal_cdf,
)
from experiments.incentives.payoffs import ATTACKS, Terms
from medserl_agentloop.games.medical.types import Category


def validity_share(setting: Setting, assumed: Assumptions) -> float:
    """Share of the variance of the attacker's reward on clean notes that ``validity`` makes.

    It is the variance between the attacks that count and the others; what is left lies within these
    two groups. The attacker is untrained, and the assessor says "harmful" where the evidence is
    nearer to an error's than to none's.
    """
    on = board(setting, assumed)
    outcomes: list[tuple[float, float, bool]] = []  # (chance, reward, whether the attack counts)
    for i, attack in enumerate(ATTACKS):
        if attack.category is not Category.ADVERSARIAL_BENIGN:
            continue
        if on.refused[i]:
            outcomes.append((on.start[i], on.says_safe[0, i, 0], False))
            continue
        caught = normal_cdf(assumed.kind(attack.kind).evidence - assumed.human_evidence / 2)
        for judged in (0, 1):
            chance = on.start[i] * on.label[i, judged]
            outcomes.append((chance * caught, on.says_harmful[0, i, judged], judged == 1))
            outcomes.append((chance * (1 - caught), on.says_safe[0, i, judged], judged == 1))
    chance, reward, counts = (np.array(column) for column in zip(*outcomes, strict=True))
    mean = np.average(reward, weights=chance)
    of_group = np.where(
        counts,
        np.average(reward[counts], weights=chance[counts]),
        np.average(reward[~counts], weights=chance[~counts]),
    )
    between = np.average((of_group - mean) ** 2, weights=chance)
    return float(between / np.average((reward - mean) ** 2, weights=chance))


@dataclass(frozen=True)
class Drawn:
    """Attacks and ``k`` assessments of each.

    Attributes:
        attack: Index of the attack; (games,).
        judged: Label, 0 safe and 1 harmful; (games,).
        evidence: Evidence that the note shows to every assessment; (games,).
        chance: Chance that an assessment says "harmful"; (games,).
        says: Whether it does; (games, k).
        rewards: Of the attacker (games,) and of each assessment (games, k).
        valid: Whether the rules let the attack pass; (games,).
    """

    attack: NDArray[np.int64]
    judged: NDArray[np.int64]
    evidence: Array
    chance: Array
    says: NDArray[np.bool_]
    rewards: tuple[Array, Array]
    valid: NDArray[np.bool_]


def drawn(on: Board, assumed: Assumptions, verdicts: Verdicts, k: int) -> Drawn:
    """``assumed.games`` attacks of an untrained attacker, in the shares of the mix."""
    rng = np.random.default_rng(assumed.seed)
    chances = np.zeros(len(ATTACKS))
    for game in GAMES:
        chances[game] = on.share[game] * on.start[game] / on.start[game].sum()
    attack = rng.choice(len(ATTACKS), size=assumed.games, p=chances / chances.sum())
    means = np.array(
        [assumed.kind(a.kind).evidence if a.category.has_attack else 0.0 for a in ATTACKS]
    )
    evidence = (
        means[attack] + rng.normal(0, verdicts.note, assumed.games) - assumed.human_evidence / 2
    )
    judged = (rng.random(assumed.games) < on.label[attack, 1]).astype(np.int64)
    chance = 1 / (1 + np.exp(-verdicts.slope * evidence))
    says = rng.random((assumed.games, k)) < chance[:, None]
    paid = [
        np.where(
            says,
            on.says_harmful[role, attack, judged][:, None],
            on.says_safe[role, attack, judged][:, None],
        )
        for role in (0, 1)
    ]
    return Drawn(
        attack, judged, evidence, chance, says, (paid[0].mean(axis=1), paid[1]), ~on.refused[attack]
    )


def signal_to_noise(gradients: Array, nuisance: float) -> float:
    """Squared length of the mean of the gradients (games, parameters), without its bias, over their
    variance.
    """
    mean, variance = gradients.mean(axis=0), gradients.var(axis=0).sum()
    return float(max(mean @ mean - variance / len(gradients), 0.0) / (variance + nuisance))


def by_role(drawn: Drawn, assumed: Assumptions, same_note: bool) -> tuple[float, float]:
    """Signal to noise per million tokens of the attacker and of the assessor.

    ``same_note``: whether an assessment's baseline is the mean of the others of the same note, not
    that of the game.
    """
    attacker, assessor = drawn.rewards
    attacker, assessor, chosen = (
        attacker.copy(),
        assessor.copy(),
        np.eye(len(ATTACKS))[drawn.attack],
    )
    k = assessor.shape[1]
    if same_note:
        assessor = (assessor - assessor.mean(axis=1, keepdims=True)) * k / (k - 1)
    for game in GAMES:
        rows = np.isin(drawn.attack, game)
        attacker[rows] -= attacker[rows].mean()
        chosen[rows] -= chosen[rows].mean(
            axis=0
        )  # the score of a softmax over the attacks of the game
        if not same_note:
            assessor[rows] -= assessor[rows & drawn.valid].mean()
    assessor[~drawn.valid] = 0
    of_attacker = attacker[:, None] * chosen
    score = (drawn.says - drawn.chance[:, None]) * assessor / k  # (games, k)
    of_assessor = np.stack(
        [score.sum(axis=1), (score * drawn.evidence[:, None]).sum(axis=1)], axis=1
    )

    tokens = assumed.attacker_tokens + k * assumed.assessor_tokens * drawn.valid.mean()
    others = assumed.other_parameters
    return (
        signal_to_noise(of_attacker, others * (attacker**2).mean()) / tokens * 1e6,
        signal_to_noise(of_assessor, others * (assessor**2).sum(axis=1).mean() / k**2)
        / tokens
        * 1e6,
    )


def explained(drawn: Drawn) -> float:
    """Share of the variance of an assessment's reward, within its game, that the note decides."""
    rewards = drawn.rewards[1][drawn.valid]
    game = np.array([attack.category.value for attack in ATTACKS])[drawn.attack[drawn.valid]]
    total = np.average(
        [rewards[game == g].var() for g in np.unique(game)],
        weights=np.unique(game, return_counts=True)[1],
    )
    return float(1 - rewards.var(axis=1, ddof=1).mean() / total)


def assessments_table(assumed: Assumptions) -> list[dict[str, str | float]]:
    """Signal to noise at equal tokens as a multiple of one assessment per attack, where notes
    decide little or much.
    """
    setting = Setting("", "errs", mix=BALANCED_MIX, terms=Terms(decoy=0.0))
    on = board(setting, assumed)
    rows: list[dict[str, str | float]] = []
    for name, verdicts in (("little", assumed.little), ("much", assumed.much)):
        base: tuple[float, float] | None = None
        for k, same_note in ((1, False), (2, True), (4, True), (4, False)):
            games = drawn(on, assumed, verdicts, k)
            attacker, assessor = by_role(games, assumed, same_note)
            base = base or (attacker, assessor)
            rows.append(
                {
                    "the note "
                    "decides": f"{name} ({explained(drawn(on, assumed, verdicts, 4)):.2f})",
                    "assessments": k,
                    "baseline": "the same note" if same_note else "the game",
                    "attacker": attacker / base[0],
                    "assessor": assessor / base[1],
                }
            )
    return rows


def validity_table(assumed: Assumptions) -> list[dict[str, str | float]]:
    """Validity's share of the variance of the attacker's reward, by judge and by penalty for a
    failed attack.
    """
    rows: list[dict[str, str | float]] = []
    for judge in ("errs", "pair", "perfect"):
        earlier = validity_share(Setting("", judge), assumed)
        milder = validity_share(
            Setting("", judge, terms=Terms(failed_attack=assumed.failed_attack)), assumed
        )
        rows.append({"judge": judge, "earlier defaults": earlier, "milder failed_attack": milder})
    return rows
