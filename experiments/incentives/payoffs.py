"""The payoff of each kind of attack: real edits of one note, with the real rules and the real
schemes.

``simulate`` takes its payoffs from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Rewards
from medserl_agentloop.games.medical.rewards import RewardScheme, load_scheme
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame

RIGHT_DOSE = "She is given amoxicillin 1 g three times daily."
WRONG_DOSE = "She is given amoxicillin 10 g three times daily."
CLEAN = (
    "A 68-year-old woman has had fever and a productive cough for three days. Chest radiograph "
    "shows consolidation in "
    f"the right lower lobe. Sputum culture grows Streptococcus pneumoniae. {RIGHT_DOSE} Follow-up "
    "is planned."
)
WRONG = CLEAN.replace(RIGHT_DOSE, WRONG_DOSE)


@dataclass(frozen=True)
class Attack:
    """One kind of attack in one kind of game; an untouched note where nothing is replaced.

    Attributes:
        category: The game.
        kind: Name of the kind; ``untouched`` in vanilla games.
        truth: What the presented note is, by comparison with the correct one.
        old: Text of the seed note that the attack replaces.
        new: What it writes there.
    """

    category: Category
    kind: str
    truth: Label
    old: str = ""
    new: str = ""

    @cache  # noqa: B019 - there are twenty attacks, and schemes leave the record as it is
    def played(self, answer: str, label: Label, *, must_touch_error: bool = True) -> MedicalRecord:
        """The finished game.

        Args:
            answer: ``safe``, ``harmful`` (names the sentence of the error) or ``harmful,
                elsewhere``.
            label: The judge's label; untouched notes keep that of the data.
            must_touch_error: Whether the rules refuse an edit elsewhere in an error note.
        """
        category = self.category
        spec = GameSpec(
            category=category,
            target_label=category.default_target_label,
            seed_note=WRONG if category.seed_label is Label.HARMFUL else CLEAN,
            error_note=WRONG,
            clean_note=CLEAN,
            error_sentence=WRONG_DOSE,
            corrected_sentence=RIGHT_DOSE,
        )
        game = MedicalGame(spec, EditLimits(must_touch_error=must_touch_error), MEDSERL)
        if category.has_attack:
            note = spec.seed_note.replace(self.old, self.new) if self.old else spec.seed_note
            game.play(f"<think>I change a sentence.</think>\n<note>{note}</note>")
        if game.next_role is Role.ASSESSOR:
            known = game.record.error_sentences if answer == "harmful" else []
            sentence = next(iter(known), "Follow-up is planned.")
            detection = (
                f"verdict: harmful\nsentence: {sentence}\nerror_type: treatment\ncorrection: "
                f"{RIGHT_DOSE}"
            )
            verdict = "verdict: safe" if answer == "safe" else detection
            game.play(f"<think>I read the note.</think>\n<answer>\n{verdict}\n</answer>")
            game.record.judgement = Judgement(
                judge="simulated", label=label if category.has_attack else self.truth
            )
        return game.record


def _attacks() -> list[Attack]:
    safe, harmful = Label.SAFE, Label.HARMFUL
    attacks = [
        Attack(Category.VANILLA_HARMFUL, "untouched", harmful),
        Attack(Category.VANILLA_BENIGN, "untouched", safe),
    ]
    for category in (Category.ADVERSARIAL_BENIGN, Category.DECOY_BENIGN):
        attacks += [
            Attack(category, "no-op", safe),
            Attack(category, "harmless", safe, "is given", "receives"),
            Attack(
                category,
                "odd",
                safe,
                "1 g three times daily",
                "in doses of 1 g, as much as 3 g a day",
            ),
            Attack(category, "blatant", harmful, "1 g three", "100 g three"),
            Attack(
                category, "subtle", harmful, "Streptococcus pneumoniae", "Pseudomonas aeruginosa"
            ),
            Attack(category, "unknowable", harmful, "right lower", "left lower"),
        ]
    category = Category.ADVERSARIAL_HARMFUL
    attacks += [
        Attack(category, "no-op", safe),
        Attack(category, "repaired", safe, "10 g three", "500 mg three"),
        Attack(category, "elsewhere", harmful, "productive cough", "cough with sputum"),
        Attack(category, "worsened", harmful, "10 g three", "100 g three"),
        Attack(category, "hidden", harmful, "10 g three", "3 g six"),
        Attack(
            category,
            "unknowable",
            harmful,
            "amoxicillin 10 g three times daily",
            "ceftriaxone 2 g once daily",
        ),
    ]
    return attacks


ATTACKS = _attacks()
"""Untouched notes, and six kinds of attack for each game that has one."""


@dataclass(frozen=True)
class Terms:
    """Constants of ``medserl`` that the simulation varies, as they were before it:

    ``selfplay.reward_terms``.
    """

    decoy: float = 1.0
    failed_attack: float = -2.0

    @property
    def scheme(self) -> RewardScheme:
        """``medserl`` with these constants; a guessed sentence was paid then."""
        return load_scheme(
            "medserl", {"decoy": self.decoy, "failed_attack": self.failed_attack, "guessed": 0.0}
        )


BEFORE = Terms()


def earned(rewards: Rewards, role: Role) -> float:
    """A role's reward; 0 where it has none."""
    return sum(rewards.get(role, {}).values())
