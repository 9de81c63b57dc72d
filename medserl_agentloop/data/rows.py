"""Vignettes -> the rows of ``train.parquet`` and ``val.parquet``.

Called by ``conversion.py``. Everything here is a function of the vignettes and the
plan: the same ones give the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from medserl_agentloop.core.interaction import AGENT_NAME as AGENT_NAME
from medserl_agentloop.data.allocation import AllocationError, Mix, exactly, largest_exact
from medserl_agentloop.data.vignettes import EditTag, Vignette
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.types import Category, Label, Role, VanillaAttacker

ABILITY = "medical_error_detection"

Row = dict[str, Any]  # one parquet row, as ``writing.SCHEMA`` declares it


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
class Bar:
    """A vignette may not serve ``categories``: None keeps it out altogether, () only notes it."""

    reason: str
    detail: str
    categories: tuple[Category, ...] | None = None


Screen = Callable[[Vignette], Iterable[Bar]]


class Exclusions(dict[str, list[tuple[str, str | None]]]):
    """What gives no row, or not every row it could: reason -> id and detail of each."""

    def add(self, reason: str, text_id: str, detail: str | None = None) -> None:
        """Note that ``text_id`` is left out; ``detail`` says more about this one."""
        self.setdefault(reason, []).append((text_id, detail))

    def counts(self) -> dict[str, int]:
        """Number of ids by reason, in the order in which the reasons came up."""
        return {reason: len(rows) for reason, rows in self.items()}


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
        exclusions: What gives no row, or not every row it could, with the reason.
    """

    train: list[Row]
    val: list[Row]
    reports: dict[str, SplitReport]
    sharing_a_note: int
    exclusions: Exclusions


@dataclass(frozen=True)
class _Case:
    """A vignette that may be used, its number in the input, and the categories of the mix it may serve."""

    number: int
    vignette: Vignette
    serves: frozenset[Category]


def build_rows(vignettes: Iterable[Vignette], plan: RowPlan, screens: Sequence[Screen] = ()) -> GameRows:
    """Split the vignettes, choose those that serve each category, and make their rows.

    Args:
        vignettes: The cases.
        plan: What to make.
        screens: What else keeps a vignette out of some categories, or out of the files.

    Raises:
        AllocationError: The plan cannot be met exactly; the message says what to change.
        ValueError: The prompt profile does not exist or cannot be rendered.
    """
    if not 0 <= plan.val_fraction <= 1:
        raise AllocationError(f"val fraction is {plan.val_fraction}; write a number from 0 to 1.")
    if plan.rows is not None and plan.rows < 1:
        raise AllocationError(f"rows is {plan.rows}; write a positive number, or leave it out.")
    profile = load_profile(plan.profile)
    exclusions = Exclusions()
    splits, sharing = _split(_usable(vignettes, plan, screens, exclusions), plan, exclusions)
    total = sum(map(len, splits.values()))
    val_share = plan.val_fraction if plan.val_from is None else len(splits["val"]) / max(1, total)
    val_rows = None if plan.rows is None else int(plan.rows * val_share + 0.5)
    made: dict[str, list[Row]] = {}
    reports: dict[str, SplitReport] = {}
    for name, members in splits.items():
        eligible = {category: sum(category in case.serves for case in members) for category in plan.mix}
        rows = val_rows if val_rows is None or name == "val" else (plan.rows or 0) - val_rows
        share = val_share if name == "val" else 1 - val_share
        counts = _counts(name, plan, share, len(members), eligible, rows)
        chosen = _choose(members, counts, random.Random(f"{plan.seed}/{name}"))
        used = {case.number for case, _ in chosen}
        unused = sorted((case for case in members if case.number not in used), key=lambda case: case.number)
        for case in unused:
            exclusions.add(f"without any row in {name}: the mix has no place for it", case.vignette.vignette_id)
        reports[name] = SplitReport(len(members), len(unused), eligible, counts)
        made[name] = []
        for index, (case, category) in enumerate(chosen, start=sum(map(len, made.values()))):
            role = category.first_role(plan.vanilla_attacker)
            note = seed_note(case.vignette, category) or ""
            made[name].append(game_row(case.vignette, category, role, note, name, index, profile))
    return GameRows(made["train"], made["val"], reports, sharing, exclusions)


def seed_note(vignette: Vignette, category: Category) -> str | None:
    """The note that a game of ``category`` starts from; None if the vignette cannot serve it."""
    if vignette.categories is not None and category not in vignette.categories:
        return None
    if category.seed_label is Label.SAFE:
        return vignette.clean_note
    # A no-op edit is not an error, so its "error note" must not be labelled harmful.
    return None if vignette.edit_tag is EditTag.NO_OP else vignette.error_note


def game_row(
    vignette: Vignette, category: Category, role: Role, note: str, split: str, index: int, profile: PromptProfile
) -> Row:
    """The row of a game that starts from ``note``, with ``role``'s turn first."""
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


def _usable(
    vignettes: Iterable[Vignette], plan: RowPlan, screens: Sequence[Screen], exclusions: Exclusions
) -> list[_Case]:
    """The cases that no screen bars, in an order that does not depend on the order of the input."""
    labels = {category.seed_label for category in plan.mix}
    cases = []
    for number, vignette in enumerate(vignettes):
        serves = {category for category in plan.mix if seed_note(vignette, category) is not None}
        bars = [bar for screen in screens for bar in screen(vignette)]
        for bar in bars:
            exclusions.add(bar.reason, vignette.vignette_id, bar.detail)
            serves -= set(bar.categories or ())
        if any(bar.categories is None for bar in bars):
            continue
        if Label.HARMFUL in labels and vignette.edit_tag is EditTag.NO_OP:
            reason = "not a harmful seed: its two notes differ in letter case or white space only"
            exclusions.add(reason, vignette.vignette_id)
        if Label.HARMFUL in labels and vignette.error_note is None:
            exclusions.add("not a harmful seed: it has no error note", vignette.vignette_id)
        if Label.SAFE in labels and vignette.clean_note is None:
            exclusions.add("not a benign seed: it has no clean note", vignette.vignette_id)
        if vignette.twin_text_id and vignette.twin_text_id != vignette.clean_text_id:
            reason = "twin whose own text is not used: the pair's corrected text is the clean note"
            exclusions.add(reason, vignette.twin_text_id)
        cases.append(_Case(number, vignette, frozenset(serves)))
    return sorted(cases, key=lambda case: _hash(case.vignette.vignette_id))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _split(cases: list[_Case], plan: RowPlan, exclusions: Exclusions) -> tuple[dict[str, list[_Case]], int]:
    """The cases of ``train`` and ``val``, and how many share a note with another.

    Where validation input was given, training cases that share a note with it are left out.
    """
    groups = _sharing_a_note(cases)
    several = sorted((group for group in groups if len(group) > 1), key=lambda group: group[1])
    left_out: set[int] = set()
    if plan.val_from is None:
        random.Random(plan.seed).shuffle(groups)
        in_val: set[int] = set()
        wanted = int(len(cases) * plan.val_fraction + 0.5)
        for group in groups:
            if len(in_val) + len(group) <= wanted:
                in_val.update(group)
    else:
        in_val = {at for at, case in enumerate(cases) if case.number >= plan.val_from}
        reason = "not for training: it shares a note with a case that was given for validation"
        for group in several:
            validation = [at for at in group if at in in_val]
            for at in group:
                if validation and at not in in_val:
                    left_out.add(at)
                    exclusions.add(reason, cases[at].vignette.vignette_id, cases[validation[0]].vignette.vignette_id)
    splits = {
        "train": [case for at, case in enumerate(cases) if at not in in_val and at not in left_out],
        "val": [case for at, case in enumerate(cases) if at in in_val],
    }
    return splits, sum(map(len, several))


def _sharing_a_note(cases: list[_Case]) -> list[list[int]]:
    """Positions of the cases that share a note, directly or through others; most cases are a group of their own.

    Two ids with one note would otherwise carry it from the training into the validation split.
    """
    notes = [{one_line(note).casefold() for note in case.vignette.notes} for case in cases]
    group_of: dict[str, list[int]] = {}
    for at in range(len(cases)):
        group = sorted({at, *(other for note in notes[at] for other in group_of.get(note, ()))})
        for member in group:
            group_of |= dict.fromkeys(notes[member], group)
    groups = {group[0]: group for group in group_of.values()}
    return [groups[first] for first in sorted(groups)]


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


def _choose(members: list[_Case], counts: dict[Category, int], rng: random.Random) -> list[tuple[_Case, Category]]:
    """Seeded choice that takes vignettes not used yet first, so that as many as possible serve."""
    order = list(members)
    rng.shuffle(order)
    times_used: Counter[int] = Counter()
    chosen: list[tuple[_Case, Category]] = []
    for category, count in counts.items():
        eligible = sorted((c for c in order if category in c.serves), key=lambda case: times_used[case.number])
        chosen += [(case, category) for case in eligible[:count]]
        times_used.update(case.number for case in eligible[:count])
    rng.shuffle(chosen)  # order in the source goes with the label
    return chosen
