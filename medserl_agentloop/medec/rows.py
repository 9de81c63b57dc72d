"""Vignettes -> the rows of ``train.parquet`` and ``val.parquet``.

Called by ``data_prep/medec_to_parquet.py``. Everything here is a function of the vignettes and the
plan: the same ones give the same rows in the same order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medserl_agentloop.game.types import Category, Label, Role
from medserl_agentloop.medec.allocation import AllocationError, Mix, exactly, largest_exact
from medserl_agentloop.medec.vignettes import EditTag, Vignette, one_line
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
    """

    mix: Mix
    rows: int | None = None
    val_fraction: float = 0.1
    seed: int = 42
    profile: str = "medserl"


@dataclass(frozen=True)
class SplitReport:
    """How one split was filled: vignettes, those that could serve a category, rows made of it."""

    vignettes: int
    unused_vignettes: int
    eligible: dict[Category, int]
    rows: dict[Category, int]


@dataclass(frozen=True)
class GameRows:
    """The rows of both splits, and an account of what was made and what was left out.

    Attributes:
        train: Rows of the training split.
        val: Rows of the validation split.
        reports: Account per split name.
        sharing_a_note: Vignettes that share a note with another one; they went to one split together.
        excluded: Reason -> number of vignettes that could not serve some category.
    """

    train: list[Row]
    val: list[Row]
    reports: dict[str, SplitReport]
    sharing_a_note: int
    excluded: dict[str, int]


def build_rows(vignettes: Sequence[Vignette], plan: RowPlan) -> GameRows:
    """Split the vignettes, choose those that serve each category, and write their rows.

    Raises:
        AllocationError: The plan cannot be met exactly; the message says what to change.
        ValueError: The prompt profile does not exist or cannot be rendered.
    """
    _check(vignettes, plan)
    profile = load_profile(plan.profile)
    groups = _groups_that_share_a_note(vignettes)
    splits = _split(groups, plan)
    wanted = _rows_per_split(plan)
    rows: dict[str, list[Row]] = {}
    reports: dict[str, SplitReport] = {}
    first_index = 0
    for name, members in splits.items():
        rng = random.Random(f"{plan.seed}/{name}")
        eligible = {c: sum(seed_note(v, c) is not None for v in members) for c in plan.mix}
        counts = _counts(name, plan, len(members), eligible, wanted[name])
        chosen = _choose(members, counts, rng)
        rng.shuffle(chosen)  # order in the source goes with the label
        rows[name] = [
            _row(vignette, category, name, first_index + i, profile) for i, (vignette, category) in enumerate(chosen)
        ]
        first_index += len(chosen)
        used = {vignette.vignette_id for vignette, _ in chosen}
        reports[name] = SplitReport(len(members), len(members) - len(used), eligible, counts)
    return GameRows(
        train=rows["train"],
        val=rows["val"],
        reports=reports,
        sharing_a_note=sum(len(group) for group in groups if len(group) > 1),
        excluded=_excluded(vignettes, plan.mix),
    )


def seed_note(vignette: Vignette, category: Category) -> str | None:
    """The note that a game of ``category`` starts from; None if the vignette cannot serve it."""
    if category.seed_label is Label.SAFE:
        return vignette.clean_note
    # A no-op edit is not an error, so its "error note" must not be labelled harmful.
    return None if vignette.edit_tag is EditTag.NO_OP else vignette.error_note


def _check(vignettes: Sequence[Vignette], plan: RowPlan) -> None:
    if not 0 <= plan.val_fraction <= 1:
        raise AllocationError(f"val fraction is {plan.val_fraction}; write a number from 0 to 1.")
    if plan.rows is not None and plan.rows < 1:
        raise AllocationError(f"rows is {plan.rows}; write a positive number, or leave it out.")
    repeated = [i for i, n in Counter(v.vignette_id for v in vignettes).items() if n > 1]
    if repeated:
        raise AllocationError(f"vignette {repeated[0]!r} occurs twice in the input; give it once.")


def _groups_that_share_a_note(vignettes: Sequence[Vignette]) -> list[list[Vignette]]:
    """Vignettes joined wherever two have a note in common, in the order of their ids.

    Two ids with one note would otherwise carry it from the training into the validation split.
    """
    group_of: dict[str, list[Vignette]] = {}
    for vignette in sorted(vignettes, key=lambda v: v.vignette_id):
        joined = [vignette]
        for group in {id(g): g for note in _notes(vignette) if (g := group_of.get(note))}.values():
            joined = group + joined
        group_of.update((note, joined) for member in joined for note in _notes(member))
    groups = {id(group): group for group in group_of.values()}.values()
    return sorted(groups, key=lambda group: group[0].vignette_id)


def _notes(vignette: Vignette) -> list[str]:
    notes = (vignette.error_note, vignette.clean_note, vignette.twin_note)
    return [one_line(note).casefold() for note in notes if note]


def _split(groups: list[list[Vignette]], plan: RowPlan) -> dict[str, list[Vignette]]:
    shuffled = list(groups)
    random.Random(plan.seed).shuffle(shuffled)
    val_size = _share(sum(map(len, groups)), plan.val_fraction)
    splits: dict[str, list[Vignette]] = {"train": [], "val": []}
    for group in shuffled:
        fits = len(splits["val"]) + len(group) <= val_size
        splits["val" if fits else "train"] += group
    return splits


def _rows_per_split(plan: RowPlan) -> dict[str, int | None]:
    if plan.rows is None:
        return {"train": None, "val": None}
    val = _share(plan.rows, plan.val_fraction)
    return {"train": plan.rows - val, "val": val}


def _counts(
    name: str, plan: RowPlan, size: int, eligible: dict[Category, int], rows: int | None
) -> dict[Category, int]:
    share = plan.val_fraction if name == "val" else 1 - plan.val_fraction
    if share == 0:
        return dict.fromkeys(plan.mix, 0)  # this split was asked to be empty
    if size == 0:
        raise AllocationError(
            f"split {name}: --val-fraction {plan.val_fraction} leaves it without a vignette; "
            "change the fraction (0 or 1 ask for one split only) or give more input."
        )
    if rows is None:
        return largest_exact(name, plan.mix, eligible)
    return exactly(name, plan.mix, eligible, rows)


def _choose(
    members: list[Vignette], counts: dict[Category, int], rng: random.Random
) -> list[tuple[Vignette, Category]]:
    """Seeded choice that takes vignettes not used yet first, so that as many as possible serve."""
    order = sorted(members, key=lambda v: v.vignette_id)
    rng.shuffle(order)
    times_used: Counter[str] = Counter()
    chosen: list[tuple[Vignette, Category]] = []
    for category, count in counts.items():
        eligible = [v for v in order if seed_note(v, category) is not None]
        eligible.sort(key=lambda v: times_used[v.vignette_id])
        chosen += [(v, category) for v in eligible[:count]]
        times_used.update(v.vignette_id for v in eligible[:count])
    return chosen


def _row(vignette: Vignette, category: Category, split: str, index: int, profile: PromptProfile) -> Row:
    note = seed_note(vignette, category)
    if note is None:
        raise ValueError(f"vignette {vignette.vignette_id!r} has no note for {category.value}")
    from_error = category.seed_label is Label.HARMFUL
    label = category.default_target_label.value
    return {
        "data_source": f"{vignette.subset}/{category.value}",
        "agent_name": AGENT_NAME,
        "prompt": profile.messages(Role.ATTACKER if category.has_attack else Role.ASSESSOR, category, note),
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


def _excluded(vignettes: Sequence[Vignette], mix: Mix) -> dict[str, int]:
    reasons: Counter[str] = Counter()
    labels = {category.seed_label for category in mix}
    for vignette in vignettes:
        if Label.HARMFUL in labels and vignette.edit_tag is EditTag.NO_OP:
            reasons["not a harmful seed: its two notes differ in letter case or white space only"] += 1
        if Label.HARMFUL in labels and vignette.error_note is None:
            reasons["not a harmful seed: it has no error note"] += 1
        if Label.SAFE in labels and vignette.clean_note is None:
            reasons["not a benign seed: it has no clean note"] += 1
    return dict(reasons)


def _share(count: int, fraction: float) -> int:
    return int(count * fraction + 0.5)
