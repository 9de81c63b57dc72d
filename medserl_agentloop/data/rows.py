"""Vignettes -> the rows of ``train.parquet`` and ``val.parquet``; official sets -> evaluation rows.

Called by the ``medserl data`` commands, evaluation rows also by scoring. Everything here is a function of the
vignettes and the plan: the same ones give the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

from medserl_agentloop.core.interaction import AGENT_NAME as AGENT_NAME
from medserl_agentloop.data.intake import MedecFormatError, RowPlace, read_source
from medserl_agentloop.data.official_csv import csv_records, vignette_of_row
from medserl_agentloop.data.reader import ReadResult, read_files
from medserl_agentloop.data.vignettes import EditTag, Vignette
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.types import EVAL_SPLIT, Category, Label, Role, VanillaAttacker

# Three of the four categories present a harmful note, so the safe one has three shares.
DEFAULT_MIX = "vanilla_harmful=1,adversarial_harmful=1,vanilla_benign=3,adversarial_benign=1"
AS_GIVEN = "as-given"  # the mix of an input whose rows name their categories: every row is kept
NOT_FOR_TRAINING = "not for training: it shares a note with a case that was given for validation"
# Far above the indices of training files, so that evaluation rows can be used with them in one run.
FIRST_INDEX = 1_000_000_000

Row = dict[str, Any]  # one parquet row, as ``conversion.SCHEMA`` declares it
Mix = Mapping[Category, int]  # shares in the smallest whole numbers
Exclusions = defaultdict[str, list[tuple[str, str | None]]]
"""What gives no row, or not every row it could: reason -> id and detail of each."""


@dataclass(frozen=True)
class RowPlan:
    """What to make."""

    mix: Mix
    rows: int | None = None  # of both splits together; None for as many as the vignettes allow
    keep_all: bool = False  # every row that the vignettes allow in the categories of ``mix``, whatever its shares
    val_fraction: float = 0.1  # share of vignettes (and of ``rows``) that goes to the validation split, 0 to 1
    seed: int = 42  # of the split, of the choice of vignettes and of the row order
    profile: str = "medserl"
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP  # with copy, the first turn of vanilla games is its
    # Vignettes that were given for validation: they are the validation split, whatever ``val_fraction``.
    val_ids: frozenset[str] | None = None


@dataclass(frozen=True)
class SplitReport:
    """How one split was filled: vignettes, those that could serve a category, rows made of it."""

    vignettes: int
    unused_vignettes: int
    eligible: dict[Category, int]
    rows: dict[Category, int]


@dataclass(frozen=True)
class GameRows:
    """The rows of both splits, and an account of what was made and what was left out."""

    train: list[Row]
    val: list[Row]
    reports: dict[str, SplitReport]
    sharing_a_note: int  # vignettes that share a note with another one; they went to one split together
    no_validation: bool  # all cases are for training, because those for validation are too few for the mix
    exclusions: Exclusions


def labels_of(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by the label of the note that is presented."""
    found = Counter(row["reward_model"]["ground_truth"] for row in rows)
    return {label.value: found[label.value] for label in Label}


def parse_mix(text: str) -> dict[Category, int]:
    """Read ``category=share,...``, or raise ValueError; categories left out, or with share 0, get no rows."""
    known = [category.value for category in Category]
    shares: dict[str, Fraction] = {}
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ValueError(
                f"mix: {name!r} is not a category; write shares such as {DEFAULT_MIX} (categories: {', '.join(known)})."
            )
        if name in shares:
            raise ValueError(f"mix: {name} is given twice; write each category once.")
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", share):
            raise ValueError(f"mix: the share of {name} is {share!r}; write a number such as {name}=1 or {name}=0.5.")
        shares[name] = Fraction(share)
    if not any(shares.values()):
        raise ValueError(f"mix: every share is 0; write shares such as {DEFAULT_MIX}.")
    scale = Fraction(lcm(*(s.denominator for s in shares.values())), gcd(*(s.numerator for s in shares.values())))
    return {category: int(shares[category.value] * scale) for category in Category if shares.get(category.value)}


def mix_of(vignettes: Iterable[Vignette]) -> dict[Category, int]:
    """The shares that the categories have in rows that name them; empty where none does."""
    found = Counter(category for vignette in vignettes for category in vignette.categories or ())
    scale = gcd(*found.values())
    return {category: found[category] // scale for category in Category if found[category]}


def format_mix(mix: Mix) -> str:
    """The mix as ``--mix`` would read it, in whole numbers."""
    return ",".join(f"{category.value}={share}" for category, share in mix.items())


def build_rows(vignettes: Iterable[Vignette], plan: RowPlan, exclusions: Exclusions | None = None) -> GameRows:
    """Split the vignettes, choose those that serve each category, and make their rows.

    ``exclusions`` are those of vignettes that were left out before; more are added. If the plan cannot be met exactly,
    a ValueError says what to change.
    """
    if not 0 <= plan.val_fraction <= 1:
        raise ValueError(f"val fraction is {plan.val_fraction}; write a number from 0 to 1.")
    if plan.rows is not None and plan.rows < 1:
        raise ValueError(f"rows is {plan.rows}; write a positive number, or leave it out.")
    profile = load_profile(plan.profile)
    exclusions = defaultdict(list) if exclusions is None else exclusions
    splits, sharing = _split(_usable(vignettes, plan, exclusions), plan, exclusions)
    total = sum(map(len, splits.values()))
    val_share = plan.val_fraction if plan.val_ids is None else len(splits["val"]) / max(1, total)
    val_rows = int((plan.rows or 0) * val_share + 0.5)
    rows_of = {"train": (plan.rows or 0) - val_rows, "val": val_rows}
    made: dict[str, list[Row]] = {"train": [], "val": []}
    reports: dict[str, SplitReport] = {}
    few = _eligible(splits["val"], plan.mix)
    no_validation = 0 < plan.val_fraction < 1 and plan.val_ids is None and plan.rows is None
    no_validation &= any(few[category] < (1 if plan.keep_all else share) for category, share in plan.mix.items())
    if no_validation:
        splits = {"train": splits["train"] + splits["val"], "val": []}
    for name, members in splits.items():
        eligible = _eligible(members, plan.mix)
        asked_empty = plan.val_ids is None and plan.val_fraction == (0 if name == "val" else 1)
        if asked_empty or (no_validation and name == "val"):
            counts = dict.fromkeys(plan.mix, 0)
        elif plan.keep_all:
            counts = eligible
        else:
            counts = _counts(name, plan.mix, eligible, None if plan.rows is None else rows_of[name])
        chosen = _choose(members, counts, random.Random(f"{plan.seed}/{name}"))
        used = {vignette.vignette_id for vignette, _ in chosen}
        unused = sorted(vignette.vignette_id for vignette in members if vignette.vignette_id not in used)
        if unused:
            reason = f"without any row in {name}: the mix has no place for it"
            exclusions[reason] += [(vignette_id, None) for vignette_id in unused]
        reports[name] = SplitReport(len(members), len(unused), eligible, counts)
        for vignette, category in chosen:
            role, note = category.first_role(plan.vanilla_attacker), seed_note(vignette, category) or ""
            index = len(made["train"]) + len(made["val"])
            made[name].append(game_row(vignette, category, role, note, name, index, profile))
    return GameRows(made["train"], made["val"], reports, sharing, no_validation, exclusions)


def _eligible(vignettes: Sequence[Vignette], mix: Mix) -> dict[Category, int]:
    """How many vignettes can serve each category."""
    return {category: sum(seed_note(v, category) is not None for v in vignettes) for category in mix}


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
    from_twin = vignette.clean_from_twin and category.seed_label is Label.SAFE
    label = category.default_target_label.value
    return {
        "data_source": f"{vignette.subset}/{category.value}",
        "agent_name": AGENT_NAME,
        "prompt": profile.messages(role, category, note),
        "ability": "medical_error_detection",
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": {
            "index": index,
            "split": split,
            "subset": vignette.subset,
            "text_id": vignette.twin_text_id if from_twin else vignette.vignette_id,
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


def _usable(vignettes: Iterable[Vignette], plan: RowPlan, exclusions: Exclusions) -> list[Vignette]:
    """The vignettes in an order that does not depend on that of the input; notes what they cannot serve."""
    labels = {category.seed_label for category in plan.mix}
    cases = list(vignettes)
    for case in cases:
        twin = "twin whose own text is not used: the pair's corrected text is the clean note"
        if case.twin_text_id and not case.clean_from_twin:
            exclusions[twin].append((case.twin_text_id, None))
        cannot_serve = {
            "not a harmful seed: its two notes differ in letter case or white space only": (
                Label.HARMFUL in labels and case.edit_tag is EditTag.NO_OP
            ),
            "not a harmful seed: it has no error note": Label.HARMFUL in labels and case.error_note is None,
            "not a benign seed: it has no clean note": Label.SAFE in labels and case.clean_note is None,
        }
        for reason, holds in cannot_serve.items():
            if holds:
                exclusions[reason].append((case.vignette_id, None))
    # The digest as a little-endian number.
    return sorted(cases, key=lambda v: hashlib.blake2b(v.vignette_id.encode(), digest_size=8).digest()[::-1])


def _split(cases: list[Vignette], plan: RowPlan, exclusions: Exclusions) -> tuple[dict[str, list[Vignette]], int]:
    """The cases of ``train`` and ``val``, and how many share a note with another.

    Where validation input was given, training cases that share a note with it are left out.
    """
    groups = _sharing_a_note(cases)
    several = [group for group in groups if len(group) > 1]
    val, left_out = set(plan.val_ids or ()), set[str]()
    if plan.val_ids is None:
        random.Random(plan.seed).shuffle(groups)
        wanted = int(len(cases) * plan.val_fraction + 0.5)
        for group in groups:
            if len(val) + len(group) <= wanted:
                val.update(group)
    else:
        for group in several:
            validation = [vignette_id for vignette_id in group if vignette_id in val]
            barred = [vignette_id for vignette_id in group if validation and vignette_id not in val]
            exclusions[NOT_FOR_TRAINING] += [(vignette_id, validation[0]) for vignette_id in barred]
            left_out.update(barred)
    splits = {
        "train": [case for case in cases if case.vignette_id not in val | left_out],
        "val": [case for case in cases if case.vignette_id in val],
    }
    return splits, sum(map(len, several))


def _sharing_a_note(cases: list[Vignette]) -> list[list[str]]:
    """Ids of the cases that share a note, directly or through others; most cases are a group of their own.

    Two ids with one note would otherwise carry it from the training into the validation split.
    """
    notes = [{one_line(note).casefold() for note in case.notes} for case in cases]
    group_of: dict[str, list[int]] = {}
    for at in range(len(cases)):
        group = sorted({at, *(other for note in notes[at] for other in group_of.get(note, ()))})
        for member in group:
            group_of |= dict.fromkeys(notes[member], group)
    groups = {group[0]: group for group in group_of.values()}
    return [[cases[at].vignette_id for at in groups[first]] for first in sorted(groups)]


def _counts(split: str, mix: Mix, capacity: Mapping[Category, int], rows: int | None) -> dict[Category, int]:
    """How many rows of each category a split gets; ``capacity`` is how many vignettes can serve a category.

    Without ``rows`` the most that capacity allows at this very mix; else exactly ``rows``, each category
    within one row of its share (largest remainders).
    """
    total = sum(mix.values())
    if rows is None:
        times = max(1, min(capacity[category] // share for category, share in mix.items()))
        counts = {category: times * share for category, share in mix.items()}
    else:
        counts = {category: rows * share // total for category, share in mix.items()}
        by_remainder = sorted(mix, key=lambda category: -(rows * mix[category] % total))
        for category in by_remainder[: rows - sum(counts.values())]:
            counts[category] += 1
    for category, count in counts.items():
        if count > capacity[category]:
            possible = min(capacity[category] * total // share for category, share in mix.items())
            raise ValueError(
                f"split {split}: {sum(counts.values())} rows at the mix {format_mix(mix)} need {count} vignettes for "
                f"{category.value} and there are {capacity[category]}; this split can have at most about {possible} "
                "rows: give more input, or change --rows, --mix or --val-fraction."
            )
    return counts


def _choose(
    members: list[Vignette], counts: dict[Category, int], rng: random.Random
) -> list[tuple[Vignette, Category]]:
    """Seeded choice that takes vignettes not used yet first, so that as many as possible serve."""
    order = list(members)
    rng.shuffle(order)
    times_used: Counter[str] = Counter()
    chosen: list[tuple[Vignette, Category]] = []
    for category, count in counts.items():
        eligible = [vignette for vignette in order if seed_note(vignette, category) is not None]
        taken = sorted(eligible, key=lambda vignette: times_used[vignette.vignette_id])[:count]
        chosen += [(vignette, category) for vignette in taken]
        times_used.update(vignette.vignette_id for vignette in taken)
    rng.shuffle(chosen)  # order in the source goes with the label
    return chosen


def build_eval_rows(
    paths: Sequence[Path],
    *,
    profile: str = "medserl",
    first_index: int = FIRST_INDEX,
    name: str = "",
) -> tuple[list[Row], ReadResult]:
    """One assessor turn for every row of MEDEC's CSV files, in their order, and the account of the files.

    ``name`` is what the metrics call the set: by default, each note's collection. Published figures are computed on
    the text as it was published, so unlike in training rows nothing is stripped, repaired or left out here. A
    MedecFormatError names file, row and column where a file is not a right MEDEC CSV.
    """
    prompts = load_profile(profile)
    for path in paths:
        if path.suffix.lower() != ".csv":
            raise MedecFormatError(f"{path}: evaluation rows are made from MEDEC's .csv files; give such a file.")
    # The reader refuses whatever is wrong and knows which rows are one case, but it cleans the text.
    read = read_files(paths)
    case_of = {text_id: vignette.vignette_id for vignette in read.vignettes for text_id in vignette.text_ids}
    rows: list[Row] = []
    for path in paths:
        source = read_source(path)
        for place, cells in csv_records(source):
            if cells:
                published = _as_published(place, cells, source.sha256)
                category = Category.VANILLA_BENIGN if published.error_note is None else Category.VANILLA_HARMFUL
                index = first_index + len(rows)
                row = game_row(published, category, Role.ASSESSOR, cells["Text"], EVAL_SPLIT, index, prompts)
                row["data_source"] = f"{name or published.subset}_eval/{category.value}"
                row["extra_info"]["vignette_id"] = case_of[published.vignette_id]
                rows.append(row)
    return rows, read


def _as_published(place: RowPlace, cells: Mapping[str, str], sha256: str) -> Vignette:
    """The row as a case of its own, with its texts exactly as they stand in the file."""
    cleaned = vignette_of_row(place, cells, sha256)
    columns = {
        "error_note": "Text",
        "clean_note": "Text" if cleaned.error_note is None else "Corrected Text",
        "error_sentence": "Error Sentence",
        "corrected_sentence": "Corrected Sentence",
    }
    raw = {name: cells[column] for name, column in columns.items() if getattr(cleaned, name) is not None}
    return replace(cleaned, **raw)  # type: ignore[arg-type]
