"""Vignettes -> the rows of ``train.parquet`` and ``val.parquet``.

Called by ``data_prep/medec_to_parquet.py``. Everything here is a function of the vignettes and the
plan: the same ones give the same rows in the same order. Only numbers are held for each vignette; the
texts are read when a row is written.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.game.types import Category, Label, Role, VanillaAttacker
from medserl_agentloop.medec.allocation import AllocationError, Mix, exactly, largest_exact
from medserl_agentloop.medec.screens import Screen
from medserl_agentloop.medec.splits import split_by_case
from medserl_agentloop.medec.store import Exclusions
from medserl_agentloop.medec.survey import CATEGORIES, Numbers, Survey, survey
from medserl_agentloop.medec.vignettes import EditTag, Vignette
from medserl_agentloop.prompting import PromptProfile, load_profile

AGENT_NAME = "medserl_selfplay"
ABILITY = "medical_error_detection"

Row = dict[str, Any]  # one parquet row, as schema.py declares it


@dataclass(frozen=True)
class RowPlan:
    """What to make.

    Attributes:
        mix: Share of each category.
        rows: Rows of both splits together; None for as many as the vignettes allow.
        val_fraction: Share of vignettes (and of ``rows``) that goes to the validation split, 0 to 1.
        seed: Seed of the split, of the choice of vignettes and of the row order.
        profile: Prompt profile of the first turn.
        vanilla_attacker: What the attacker does in vanilla games; with copy, theirs is the first turn.
        val_from: Number of the first vignette that was given for validation: it and all after it are the
            validation split, whatever ``val_fraction``. None to split by ``val_fraction``.
    """

    mix: Mix
    rows: int | None = None
    val_fraction: float = 0.1
    seed: int = 42
    profile: str = "medserl"
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP
    val_from: int | None = None


@dataclass(frozen=True)
class SplitReport:
    """How one split was filled: vignettes, those that could serve a category, rows made of it."""

    vignettes: int
    unused_vignettes: int
    eligible: dict[Category, int]
    rows: dict[Category, int]


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split, made when they are iterated over.

    Attributes:
        name: ``train`` or ``val``.
        vignettes: All vignettes.
        numbers: Of every row, the number of its vignette; (rows,).
        categories: Of every row, the position of its category in ``Category``; (rows,).
        first_index: Index of the first row.
        profile: Prompt profile of the first turn.
        vanilla_attacker: What the attacker does in vanilla games.
    """

    name: str
    vignettes: Sequence[Vignette]
    numbers: Numbers
    categories: Numbers
    first_index: int
    profile: PromptProfile
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Row]:
        for at in range(len(self)):
            yield self[at]

    def __getitem__(self, at: int) -> Row:
        number, category = int(self.numbers[at]), CATEGORIES[self.categories[at]]
        role = category.first_role(self.vanilla_attacker)
        return _row(self.vignettes[number], category, role, self.name, self.first_index + at, self.profile)


@dataclass(frozen=True)
class GameRows:
    """The rows of both splits, and an account of what was made and what was left out.

    Attributes:
        train: Rows of the training split.
        val: Rows of the validation split.
        reports: Account per split name.
        sharing_a_note: Vignettes that share a note with another one; they went to one split together.
        exclusions: What gives no row, or not every row it could, with the reason.
    """

    train: SplitRows
    val: SplitRows
    reports: dict[str, SplitReport]
    sharing_a_note: int
    exclusions: Exclusions


def build_rows(
    vignettes: Sequence[Vignette],
    plan: RowPlan,
    screens: Sequence[Screen] = (),
    stream: Iterable[Vignette] | None = None,
) -> GameRows:
    """Split the vignettes, choose those that serve each category, and plan their rows.

    Args:
        vignettes: The cases; each is read once here and again for every row.
        plan: What to make.
        screens: What else keeps a vignette out of some categories, or out of the files.
        stream: ``vignettes`` once more, where the caller shows progress over them.

    Raises:
        AllocationError: The plan cannot be met exactly; the message says what to change.
        ValueError: The prompt profile does not exist or cannot be rendered.
    """
    _check(plan)
    profile = load_profile(plan.profile)
    exclusions = Exclusions()
    facts = survey(vignettes if stream is None else stream, _Seeds(plan), screens, exclusions)
    splits, sharing = split_by_case(vignettes, facts, plan.val_fraction, plan.seed, plan.val_from, exclusions)
    total = sum(map(len, splits.values()))
    val_share = plan.val_fraction if plan.val_from is None else len(splits["val"]) / max(1, total)
    val_rows = None if plan.rows is None else int(plan.rows * val_share + 0.5)
    made: dict[str, SplitRows] = {}
    reports: dict[str, SplitReport] = {}
    first_index = 0
    for name, members in splits.items():
        rng = random.Random(f"{plan.seed}/{name}")
        eligible = {c: int(facts.may_serve(members, c).sum()) for c in plan.mix}
        rows = val_rows if val_rows is None or name == "val" else (plan.rows or 0) - val_rows
        share = val_share if name == "val" else 1 - val_share
        counts = _counts(name, plan, share, len(members), eligible, rows)
        numbers, categories = _choose(facts, members, counts, rng)
        made[name] = SplitRows(name, vignettes, numbers, categories, first_index, profile, plan.vanilla_attacker)
        first_index += len(numbers)
        unused = np.setdiff1d(facts.numbers[members], numbers)
        for number in unused:
            reason = f"without any row in {name}: the mix has no place for it"
            exclusions.add(reason, [vignettes[int(number)].vignette_id])
        reports[name] = SplitReport(len(members), len(unused), eligible, counts)
    return GameRows(made["train"], made["val"], reports, sharing, exclusions)


def seed_note(vignette: Vignette, category: Category) -> str | None:
    """The note that a game of ``category`` starts from; None if the vignette cannot serve it."""
    if vignette.categories is not None and category not in vignette.categories:
        return None
    if category.seed_label is Label.SAFE:
        return vignette.clean_note
    # A no-op edit is not an error, so its "error note" must not be labelled harmful.
    return None if vignette.edit_tag is EditTag.NO_OP else vignette.error_note


class _Seeds:
    """Which categories of the mix a vignette can serve, and what is known to be left out for it."""

    def __init__(self, plan: RowPlan) -> None:
        self.categories = tuple(plan.mix)
        self._labels = {category.seed_label for category in plan.mix}

    def serves(self, vignette: Vignette) -> list[Category]:
        return [category for category in self.categories if seed_note(vignette, category) is not None]

    def left_out(self, vignette: Vignette) -> Iterator[tuple[str, str]]:
        """Reason and id of what cannot serve, or is not needed."""
        if Label.HARMFUL in self._labels and vignette.edit_tag is EditTag.NO_OP:
            yield "not a harmful seed: its two notes differ in letter case or white space only", vignette.vignette_id
        if Label.HARMFUL in self._labels and vignette.error_note is None:
            yield "not a harmful seed: it has no error note", vignette.vignette_id
        if Label.SAFE in self._labels and vignette.clean_note is None:
            yield "not a benign seed: it has no clean note", vignette.vignette_id
        if vignette.twin_text_id and vignette.twin_text_id != vignette.clean_text_id:
            yield "twin whose own text is not used: the pair's corrected text is the clean note", vignette.twin_text_id


def _check(plan: RowPlan) -> None:
    if not 0 <= plan.val_fraction <= 1:
        raise AllocationError(f"val fraction is {plan.val_fraction}; write a number from 0 to 1.")
    if plan.rows is not None and plan.rows < 1:
        raise AllocationError(f"rows is {plan.rows}; write a positive number, or leave it out.")


def _counts(
    name: str, plan: RowPlan, share: float, size: int, eligible: dict[Category, int], rows: int | None
) -> dict[Category, int]:
    if share == 0 and plan.val_from is None:
        return dict.fromkeys(plan.mix, 0)  # this split was asked to be empty
    if size == 0:
        given = f"--val-fraction {plan.val_fraction}" if plan.val_from is None else "what was left out"
        raise AllocationError(
            f"split {name}: {given} leaves it without a vignette; "
            "change the fraction (0 or 1 ask for one split only) or give more input."
        )
    if rows is None:
        return largest_exact(name, plan.mix, eligible)
    return exactly(name, plan.mix, eligible, rows)


def _choose(
    facts: Survey, members: Numbers, counts: dict[Category, int], rng: random.Random
) -> tuple[Numbers, Numbers]:
    """Seeded choice that takes vignettes not used yet first, so that as many as possible serve.

    Returns:
        Vignette number and category position of every row, in an order that tells nothing.
    """
    shuffled = array("q", members.tobytes())
    rng.shuffle(shuffled)
    order = np.array(shuffled, dtype=np.int64)
    times_used = np.zeros(len(facts), dtype=np.int8)
    chosen, categories = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int8)]
    for category, count in counts.items():
        eligible = order[facts.may_serve(order, category)]
        taken = eligible[np.argsort(times_used[eligible], kind="stable")[:count]]
        times_used[taken] += 1
        chosen.append(taken)
        categories.append(np.full(count, CATEGORIES.index(category), dtype=np.int8))
    places = array("q", range(sum(counts.values())))
    rng.shuffle(places)  # order in the source goes with the label
    mixed = np.array(places, dtype=np.int64)
    return facts.numbers[np.concatenate(chosen)[mixed]], np.concatenate(categories)[mixed]


def _row(vignette: Vignette, category: Category, role: Role, split: str, index: int, profile: PromptProfile) -> Row:
    note = seed_note(vignette, category)
    assert note is not None  # the survey chose it for this category
    from_error = category.seed_label is Label.HARMFUL
    label = category.default_target_label.value
    return {
        "data_source": f"{vignette.subset}/{category.value}",
        "agent_name": AGENT_NAME,
        "prompt": profile.messages(role, category, note),
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": {
            "index": index,
            "split": split,
            "subset": vignette.subset,
            "text_id": vignette.error_text_id if from_error else vignette.clean_text_id,
            "vignette_id": vignette.vignette_id,
            "category": category.value,
            "target_label": label,
            "seed_note": note,
            "error_note": vignette.error_note,
            "clean_note": vignette.clean_note,
            "error_type": vignette.error_type.value if vignette.error_type else None,
            "error_sentence": vignette.error_sentence,
            "corrected_sentence": vignette.corrected_sentence,
            "error_sentence_id": vignette.error_sentence_id,
            "sentences": [{"id": s.id, "text": s.text} for s in vignette.sentences],
            "pair_source": vignette.pair_source.value,
            "edit_tag": vignette.edit_tag.value,
            "source_sha256": vignette.source_sha256,
        },
    }
