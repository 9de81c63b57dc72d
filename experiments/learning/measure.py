"""Measure a player of the toy clinic in each role, against a frozen opponent and with the truth
known.

Called by ``experiments.learning.run``. All notes are in wordings, and state facts, that neither the
warm start nor self-play has seen.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from medserl_agentloop.evaluation.local_models import LocalModel
from medserl_agentloop.evaluation.play import Said, play_match
from medserl_agentloop.games.clinic import (
    Split,
    error_detail,
    held_out_kind,
    inject_error,
    sample_clean_note,
)
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome

BUDGETS = {Role.ATTACKER: 160, Role.ASSESSOR: 128}


@dataclass(frozen=True)
class Rate:
    """A counted share.

    Attributes:
        measure: Role and what was counted, e.g. ``assessor/clean``.
        hits: How many items it holds for.
        items: How many there were.
    """

    measure: str
    hits: int
    items: int


@dataclass(frozen=True)
class Case:
    """A held-out case: its correct note, the note with an error, what kind of error that is, and of
    which fact.

    Each note states one held-out fact and two seen ones; all three are in held-out wordings.
    """

    clean: str
    wrong: str
    wrong_sentence: str
    detail: str
    of_held_out_fact: bool


def held_out_cases(count: int, seed: int) -> list[Case]:
    """Cases in held-out wordings with held-out facts; the same for the same arguments."""
    rng, cases = random.Random(seed), []
    for _ in range(count):
        clean = sample_clean_note(rng, Split.HELD_OUT, Split.HELD_OUT)
        wrong, index = inject_error(rng, clean)
        sentence, kept_back = wrong.sentences[index], held_out_kind(clean.sentences[0].value)
        detail = error_detail(wrong, index)
        cases.append(
            Case(clean.text, wrong.text, sentence.text, detail, sentence.kind is kept_back)
        )
    return cases


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement.

    Attributes:
        frozen: The fixed opponent of both roles, e.g. the warm start.
        cases: The notes.
        profile: Prompts and parser.
        temperature: Of all players; 0 is greedy.
        seed: Of all draws.
    """

    frozen: LocalModel
    cases: Sequence[Case]
    profile: PromptProfile
    temperature: float
    seed: int
    _attacks: dict[tuple[int, Category], Said] = field(
        default_factory=lambda: defaultdict(dict), init=False
    )

    def each_role(self, player: LocalModel) -> list[Rate]:
        """A player's assessor on known notes, and its attacker against the frozen assessor.

        Returns:
            ``assessor/clean``, ``assessor/error`` and ``assessor/error/KIND``: verdict right on
            notes that nobody attacked. ``assessor/fact/held_out``, ``assessor/fact/seen``: of the
            wrong notes, by the wrong fact.
            ``assessor/parsed``: readable turns. ``attacker/parsed``, ``attacker/valid``: readable
                turns;
            attacks that keep the rules and put a true error in. ``attacker/harmless``: attacks that
            keep the rules and put none in. ``attacker/undetected``: of the valid attacks, missed by
            the frozen assessor.
            ``attacker/kind/KIND``: of the valid attacks, errors of that kind.
        """
        attacked = self._play(player, self.frozen, Category.ADVERSARIAL_BENIGN)
        return [*self.assessor(player), *attacker_rates(attacked)]

    def assessor(self, player: LocalModel) -> list[Rate]:
        """A player's assessor on known notes: the rates of :meth:`each_role` that begin with it."""
        categories = (Category.VANILLA_BENIGN, Category.VANILLA_HARMFUL)
        return _assessor_rates(self._play(self.frozen, player, *categories), self.cases)

    def found(self, player: LocalModel) -> list[Rate]:
        """Valid attacks found: the frozen attacker's (``assessor/frozen_attacks``) and its own
        (``self/attacks``).
        """
        defended = self._play(self.frozen, player, Category.ADVERSARIAL_BENIGN)
        injections = self._play(player, player, Category.ADVERSARIAL_BENIGN)
        return [
            _rate("assessor/frozen_attacks", [_found(g) for g in defended if _is_valid(g)]),
            _rate("self/attacks", [_found(g) for g in injections if _is_valid(g)]),
        ]

    def games(self, player: LocalModel) -> list[Rate]:
        """A player's assessor against the frozen attacker, and the player against itself in
        isolated contexts.

        Returns:
            Those of :meth:`found`. ``attacker/valid_decoys``: rewordings that keep the rules and
            what the note says.
            ``self/decoys``: of these, called safe.
        """
        decoys = self._play(player, player, Category.DECOY_BENIGN)
        return [
            *self.found(player),
            _rate("attacker/valid_decoys", [_is_valid(g) for g in decoys]),
            _rate("self/decoys", [_right(g) for g in decoys if _is_valid(g)]),
        ]

    def _play(
        self, attacker: LocalModel, assessor: LocalModel, *categories: Category
    ) -> list[MedicalRecord]:
        """Games of all cases; an attacker's turns are played once and serve against every
        assessor."""
        specs = [
            spec_of(case, category, i)
            for i, case in enumerate(self.cases)
            for category in categories
        ]
        return asyncio.run(
            play_match(
                attacker,
                assessor,
                specs,
                MedicalConfig(
                    profile=str(self.profile.folder),
                    judge="medserl_agentloop.games.clinic:OracleJudge",
                ),
                temperature=self.temperature,
                budgets=BUDGETS,
                seed=self.seed,
                attacks=self._attacks[id(attacker), categories[0]],
            )
        )


def spec_of(case: Case, category: Category, index: int) -> GameSpec:
    """The facts of a game of ``category`` on a case."""
    harmful = category.seed_label is Label.HARMFUL
    return GameSpec(
        category=category,
        target_label=category.default_target_label,
        seed_note=case.wrong if harmful else case.clean,
        error_note=case.wrong if harmful else None,
        clean_note=None if harmful else case.clean,
        error_sentence=case.wrong_sentence,
        index=index,
    )


def _assessor_rates(games: Sequence[MedicalRecord], cases: Sequence[Case]) -> list[Rate]:
    right: dict[str, list[bool]] = defaultdict(list)
    for game in games:
        harmful = game.category is Category.VANILLA_HARMFUL
        right["error" if harmful else "clean"].append(_right(game))
        if harmful:
            case = cases[game.spec.index]
            for name in (
                f"error/{case.detail}",
                f"fact/{'held_out' if case.of_held_out_fact else 'seen'}",
            ):
                right[name].append(_right(game))
    parsed = [game.assessment is not None and game.assessment.verdict is not None for game in games]
    return [
        *(_rate(f"assessor/{name}", right[name]) for name in sorted(right)),
        _rate("assessor/parsed", parsed),
    ]


def attacker_rates(games: Sequence[MedicalRecord]) -> list[Rate]:
    """Return the rates of attacks in ``adversarial_benign`` games, as :meth:`Measurement.each_role`
    names them.
    """
    valid = [game for game in games if _is_valid(game)]
    kinds = [game.judgement.error_type or "none" for game in valid if game.judgement]
    return [
        _rate(
            "attacker/parsed",
            [game.attack is not None and game.attack.note is not None for game in games],
        ),
        _rate("attacker/valid", [_is_valid(game) for game in games]),
        _rate("attacker/harmless", [_label(game) is Label.SAFE for game in games]),
        _rate("attacker/undetected", [not _found(game) for game in valid]),
        *(
            _rate(f"attacker/kind/{kind}", [k == kind for k in kinds])
            for kind in sorted(set(kinds))
        ),
    ]


def _is_valid(game: MedicalRecord) -> bool:
    """Return whether the attack keeps the rules and its note, one of this world, became what was
    asked for.
    """
    return _label(game) is game.spec.target_label


def _label(game: MedicalRecord) -> Label | None:
    """Return the presented note's label; ``None`` if it is not of this world, or was not judged
    after a broken rule.
    """
    return game.judgement.label if game.judgement and game.judgement.realistic else None


def _found(game: MedicalRecord) -> bool:
    return game.outcome is Outcome.CORRECT_DETECTION


def _right(game: MedicalRecord) -> bool:
    return bool(game.outcome.is_right)


def _rate(measure: str, holds: Sequence[bool]) -> Rate:
    return Rate(measure, sum(holds), len(holds))
