"""Dynamics of two tabular players with fixed skills under the payoffs. Expectations are exact; no
game is drawn.

The attacker has one distribution over six kinds of attack per game, the assessor one chance of
saying "harmful" per pair of what it sees: whether the note looks edited, and how much evidence for
an error it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import erf

import numpy as np
from numpy.typing import NDArray

from experiments.incentives.assumptions import Assumptions
from experiments.incentives.payoffs import ATTACKS, BEFORE, Attack, Terms, earned
from medserl_agentloop.data.rows import DEFAULT_MIX, parse_mix
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.records import Outcome

Array = NDArray[np.float64]

BALANCED_MIX = (
    "vanilla_harmful=2,vanilla_benign=2,adversarial_benign=1,adversarial_harmful=1,decoy_benign=2"
)
EDGES = np.linspace(-1.5, 3.5, 21)
"""Borders between the levels of evidence."""
LEVEL_FROM = np.array([-np.inf, *EDGES])
"""The start of each level."""
GAMES = [
    [i for i, attack in enumerate(ATTACKS) if attack.category is category]
    for category in Category
    if category.has_attack
]
"""Indices of the attacks of each game."""
ANSWERS = ("safe", "harmful", "harmful, elsewhere")
LABELS = (Label.SAFE, Label.HARMFUL)
LARGEST_LOGIT = 6.0


@dataclass(frozen=True)
class Setting:
    """The settings of a run.

    Attributes:
        name: What the table calls it.
        judge: ``labels`` (believes the row), ``errs`` (the same rates whatever the attack),
            ``pair`` (compares with the original) or ``perfect``.
        mix: Shares of the games.
        terms: Constants of the rewards.
        gate: Whether an attack that was judged harmful counts only if the blind readers find the
            error.
        touch: Whether an attack on an error note must touch the error.
        learnable: Whether the attacker is paid by how learnable its note is.
        failed_gate: What an attack that fails the gate earns the attacker; None: nothing, and
            nobody learns from it.
    """

    name: str
    judge: str
    mix: str = DEFAULT_MIX
    terms: Terms = BEFORE
    gate: bool = False
    touch: bool = False
    learnable: bool = False
    failed_gate: float | None = None


def normal_cdf(x: float) -> float:
    """Chance that a standard normal number is below ``x``."""
    return (1 + erf(x / 2**0.5)) / 2


def levels(mean: float) -> Array:
    """Chances of the levels of evidence, for a normal evidence of standard deviation 1."""
    below = [0.0, *(normal_cdf(edge - mean) for edge in EDGES), 1.0]
    return np.diff(below)


def seen(assumed: Assumptions, evidence: float, looks_edited: float) -> Array:
    """Chances of what the assessor sees of a note: (looks edited, level)."""
    return np.outer([1 - looks_edited, looks_edited], levels(evidence))


def untouched(assumed: Assumptions, truth: Label) -> Array:
    """The same of an untouched note."""
    if truth is Label.HARMFUL:
        return seen(assumed, assumed.human_evidence, assumed.error_looks_edited)
    return seen(assumed, 0.0, assumed.clean_looks_edited)


def judged_as(setting: Setting, attack: Attack, assumed: Assumptions) -> tuple[float, float]:
    """Chances that the judge calls a rewritten note safe and harmful; what is left is void."""
    harmful = attack.truth is Label.HARMFUL
    chance = {
        "labels": float(attack.category.default_target_label is Label.HARMFUL),
        "errs": assumed.sensitivity if harmful else 1 - assumed.specificity,
        "pair": assumed.kind(attack.kind).pair,
        "perfect": float(harmful),
    }[setting.judge]
    return 1 - chance, chance * (assumed.gate(attack.kind) if setting.gate else 1.0)


@dataclass(frozen=True)
class Board:
    """One setting as arrays, in the order of ``ATTACKS``.

    Attributes:
        share: Share of the attack's game in all games; (attack,).
        start: Weights of the attacks at the start; (attack,).
        label: Chances that the note is judged safe and harmful; what is left is void; (attack,
            label).
        refused: Whether the rules refuse the attack; (attack,).
        seen: Chances of what the assessor sees; (attack, looks edited, level).
        says_safe: What a role earns if the assessor says "safe"; (role, attack, label).
        says_harmful: The same for "harmful".
    """

    share: Array
    start: Array
    label: Array
    refused: NDArray[np.bool_]
    seen: Array
    says_safe: Array
    says_harmful: Array


def board(setting: Setting, assumed: Assumptions) -> Board:
    """The payoffs and chances of a setting."""
    mix = parse_mix(setting.mix)
    scheme = setting.terms.scheme
    size = len(ATTACKS)
    share, start, refused = np.zeros(size), np.ones(size), np.zeros(size, dtype=bool)
    label, sight = np.zeros((size, len(LABELS))), np.zeros((size, 2, len(EDGES) + 1))
    paid = np.zeros((len(Role), size, len(LABELS), len(ANSWERS)))
    for i, attack in enumerate(ATTACKS):
        share[i] = float(mix.get(attack.category, 0)) / float(sum(mix.values()))
        for (j, judged), (k, answer) in product(enumerate(LABELS), enumerate(ANSWERS)):
            record = attack.played(answer, judged, must_touch_error=setting.touch)
            refused[i] = record.outcome is Outcome.INVALID_ATTACK
            paid[:, i, j, k] = [earned(scheme.rewards(record), role) for role in Role]
        if attack.category.has_attack:
            kind = assumed.kind(attack.kind)
            start[i] = (
                kind.decoy_asked if attack.category is Category.DECOY_BENIGN else kind.error_asked
            )
            label[i] = [0.0, 0.0] if refused[i] else judged_as(setting, attack, assumed)
            sight[i] = seen(assumed, kind.evidence, assumed.edit_seen)
        else:
            label[i] = [float(attack.truth is judged) for judged in LABELS]
            sight[i] = untouched(assumed, attack.truth)
    named = assumed.names_sentence
    says_harmful = named * paid[..., 1] + (1 - named) * paid[..., 2]
    return Board(share, start, label, refused, sight, paid[..., 0], says_harmful)


class Players:
    """The two players of several settings at once; every array has the settings as its first
    axis."""

    def __init__(self, settings: Sequence[Setting], assumed: Sequence[Assumptions]) -> None:
        boards = [board(setting, each) for setting, each in zip(settings, assumed, strict=True)]
        self.boards = Board(
            *(np.stack([getattr(one, field.name) for one in boards]) for field in fields(Board))
        )
        self.learnable = np.array([setting.learnable for setting in settings])[:, None, None]
        # NaN where an attack that fails the gate is void for the attacker as well
        self.failed_gate = np.array([setting.failed_gate for setting in settings], dtype=float)[
            :, None
        ]
        self.rate, self.explore = assumed[0].rate, assumed[0].explore
        self.assessments = np.array([each.assessments for each in assumed])[:, None, None]
        self.logits = np.log(self.boards.start)
        self.verdict = np.zeros((len(boards), 2, len(EDGES) + 1))  # logits of "harmful"

    @property
    def harmful(self) -> Array:
        """The assessor's chances of saying "harmful": (setting, looks edited, level)."""
        chances: Array = 1 / (1 + np.exp(-self.verdict))
        return chances

    @property
    def chosen(self) -> Array:
        """The attacker's chances of the attacks of each game: (setting, attack)."""
        chances = np.ones_like(self.logits)
        for game in GAMES:
            weights = np.exp(self.logits[:, game] - self.logits[:, game].max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            chances[:, game] = (1 - self.explore) * weights + self.explore / len(game)
        return chances

    def attacker_values(self) -> Array:
        """The attacker's reward for each attack under each label: (setting, attack, label)."""
        caught = (self.boards.seen * self.harmful[:, None]).sum(axis=(2, 3))[..., None]
        safe, harmful = self.boards.says_safe[:, 0], self.boards.says_harmful[:, 0]
        # Of k independent assessments, a share s is right; 4 s (1 - s) is 1 where that is half, 0
        # where all agree.
        learnable = 4 * caught * (1 - caught) * (1 - 1 / self.assessments)
        by_learning = (safe + harmful) / 2 + abs(safe - harmful) / 2 * (2 * learnable - 1)
        values: Array = np.where(
            self.learnable, by_learning, caught * harmful + (1 - caught) * safe
        )
        return values

    def step(self) -> None:
        """Move both players along the natural gradient of what they earn; void games move
        nobody."""
        on, chosen = self.boards, self.chosen
        counts = np.where(on.refused, 1.0, on.label.sum(axis=2))
        value = np.where(
            on.refused, on.says_safe[:, 0, :, 0], (on.label * self.attacker_values()).sum(axis=2)
        )
        value += (1 - counts) * np.nan_to_num(self.failed_gate)
        counts = np.where(np.isnan(self.failed_gate), counts, 1.0)
        for game in GAMES:
            mean = (chosen * value)[:, game].sum(axis=1) / (chosen * counts)[:, game].sum(axis=1)
            self.logits[:, game] += self.rate * (value - counts * mean[:, None])[:, game]
            best = self.logits[:, game].max(axis=1, keepdims=True)
            self.logits[:, game] = np.maximum(self.logits[:, game] - best, -LARGEST_LOGIT)
        weight = (on.share * chosen)[..., None, None] * on.seen
        gain = (on.label * (on.says_harmful - on.says_safe)[:, 1]).sum(axis=2)
        reached = (weight * on.label.sum(axis=2)[..., None, None]).sum(axis=1)
        slope = (weight * gain[..., None, None]).sum(axis=1) / np.maximum(reached, 1e-9)
        self.verdict = np.clip(self.verdict + self.rate * slope, -LARGEST_LOGIT, LARGEST_LOGIT)


def settled(settings: Sequence[Setting], assumed: Sequence[Assumptions]) -> list[dict[str, float]]:
    """Average the second half of the steps, since the players may go in circles."""
    players, steps = Players(settings, assumed), assumed[0].steps
    chosen, harmful = np.zeros_like(players.chosen), np.zeros_like(players.harmful)
    for step in range(steps):
        players.step()
        if step >= steps // 2:
            chosen += players.chosen / (steps - steps // 2)
            harmful += players.harmful / (steps - steps // 2)
    on = players.boards
    void = np.where(on.refused, 0.0, 1 - on.label.sum(axis=2))
    return [
        measured(chosen[i], harmful[i], on.share[i], void[i], each)
        for i, each in enumerate(assumed)
    ]


def measured(
    chosen: Array, harmful: Array, share: Array, void: Array, assumed: Assumptions
) -> dict[str, float]:
    """The columns of the table, from the players' policies in one setting; shares and chances from
    0 to 1.
    """

    def played(category: Category, *kinds: str) -> float:
        rows = [
            i
            for i, attack in enumerate(ATTACKS)
            if attack.category is category and attack.kind in kinds
        ]
        return float(chosen[rows].sum()) if share[rows].any() else float("nan")

    injected = Category.ADVERSARIAL_BENIGN
    attacked = np.array([attack.category.has_attack for attack in ATTACKS])
    recall = float((untouched(assumed, Label.HARMFUL) * harmful).sum())
    alarms = float((untouched(assumed, Label.SAFE) * harmful).sum())
    clean, wrong = levels(0.0), levels(assumed.human_evidence)
    none, strong = LEVEL_FROM < 0, LEVEL_FROM >= 1.5
    weight = share * chosen
    return {
        "harmful of untouched": float(share[0] / (share[0] + share[1])),
        "blatant": played(injected, "blatant"),
        "subtle": played(injected, "subtle"),
        "unknowable": played(injected, "unknowable"),
        "no error": played(injected, "no-op", "harmless", "odd"),
        "elsewhere": played(Category.ADVERSARIAL_HARMFUL, "elsewhere"),
        "odd decoys": played(Category.DECOY_BENIGN, "odd"),
        "void": float((weight * void)[attacked].sum() / weight[attacked].sum()),
        "edited, nothing seen": float((clean * harmful[1])[none].sum() / clean[none].sum()),
        "edited, error seen": float((wrong * harmful[1])[strong].sum() / wrong[strong].sum()),
        "shortcut": float((seen(assumed, 0.0, assumed.edit_seen) * harmful).sum()) - alarms,
        "recall": recall,
        "F1": f1(recall, alarms, assumed.test_prior),
    }


def f1(recall: float, alarms: float, prior: float) -> float:
    """F1 of harmful notes at a prior."""
    return 2 * prior * recall / (prior * recall + (1 - prior) * alarms + prior)


def best_f1(assumed: Assumptions) -> float:
    """The best F1 on untouched notes that a threshold on the evidence reaches."""
    clean, wrong = levels(0.0)[::-1].cumsum(), levels(assumed.human_evidence)[::-1].cumsum()
    return max(
        f1(recall, alarms, assumed.test_prior) for recall, alarms in zip(wrong, clean, strict=True)
    )
