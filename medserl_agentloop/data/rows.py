"""Cases -> the rows of ``train.parquet`` and ``val.parquet``; official sets -> evaluation rows.

Called by the ``medserl data`` commands, evaluation rows also by scoring. Everything here is a function of the
cases and the plan: the same ones give the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medserl_agentloop.core.interaction import AGENT_NAME as AGENT_NAME
from medserl_agentloop.data.cases import EditTag, MedecFormatError, RowPlace, Vignette, read_text
from medserl_agentloop.data.reader import ReadResult, case_of_row, csv_records, read_files
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.types import EVAL_SPLIT, Category, Label, Role, VanillaAttacker

# Three of the four categories present a harmful note, so the safe one has three shares.
DEFAULT_MIX = "vanilla_harmful=1,adversarial_harmful=1,vanilla_benign=3,adversarial_benign=1"
AS_GIVEN = "as-given"  # the mix of an input whose rows name their categories: every row is kept
NOT_FOR_TRAINING = "not for training: it shares a note with a case that was given for validation"
# Far above the indices of training files, so that evaluation rows can be used with them in one run.
FIRST_INDEX = 1_000_000_000
INPUTS = "MEDEC's CSV, a .jsonl of pairs or OpenRLHF rows, or a data set: a folder or hf:NAME. Repeatable."
UW_AGREEMENT = "Accept MEDEC-UW rows; you have signed its data use agreement."
NOT_UW = "State that no OpenRLHF row of unknown origin is from MEDEC-UW."
PROFILE = "Prompt profile: a name, or the path of a folder."

Row = dict[str, Any]  # one parquet row, as ``conversion.SCHEMA`` declares it
Mix = Mapping[Category, int]  # shares in the smallest whole numbers
Exclusions = defaultdict[str, list[tuple[str, str | None]]]
"""What gives no row, or not every row it could: reason -> id and detail of each."""


class RowPlan(BaseModel):
    """Which rows to make. A ValueError names the option that is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mix: str = Field(
        DEFAULT_MIX, description=f"Share of each category, or {AS_GIVEN}: every row of an input that names categories."
    )
    rows: int | None = Field(None, ge=1, description="Rows of both splits; default: as many as the mix allows.")
    val_fraction: float | None = Field(
        None, ge=0, le=1, allow_inf_nan=False, description="Share of cases for validation, 0 to 1; default 0.1."
    )
    seed: int = Field(42, description="Seed of the split, the choice and the order.")
    profile: str = Field("medserl", description=PROFILE)
    vanilla_attacker: VanillaAttacker = Field(
        VanillaAttacker.SKIP,
        description="Whether the attacker copies the note in vanilla games, as the run's selfplay key says.",
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            option = "--" + str(first["loc"][0]).replace("_", "-")
            raise ValueError(f"{option} is {first['input']}: {first['msg']}.") from None

    @property
    def keeps_all(self) -> bool:
        """Whether every row is kept that the cases allow in the categories that they name."""
        return self.mix == AS_GIVEN

    @property
    def fraction(self) -> float:
        """Share of cases that goes to the validation split."""
        return 0.1 if self.val_fraction is None else self.val_fraction

    def shares(self, cases: Iterable[Vignette]) -> Mix:
        """The share of each category in the rows of these cases."""
        if not self.keeps_all:
            return parse_mix(self.mix)
        given = mix_of(cases)
        if self.rows is not None or not given:
            why = "it keeps every row, so leave out --rows" if given else "no row of the input names its category"
            raise ValueError(f"--mix {AS_GIVEN}: {why}; or write shares such as {DEFAULT_MIX}.")
        return given


class ConvertOptions(RowPlan):
    """What ``medserl data convert`` is asked for: its options by name."""

    input: list[str] = Field(min_length=1, description=INPUTS)
    output: Path = Field(description="Folder for train.parquet, val.parquet and manifest.json.")
    val_input: list[str] | None = Field(None, description="Input whose cases all go to the validation split.")
    join: list[Path] | None = Field(None, description="File to look up the cases of OpenRLHF rows in. Repeatable.")
    exclude_near_duplicates_of: list[Path] | None = Field(
        None, description="Leave out cases that are nearly the same as one of this file. Repeatable."
    )
    repair_encoding: bool = Field(
        False, description="Put right UTF-8 that was read as another encoding, in all fields."
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longest first prompt, in tokens.")
    tokenizer: str | None = Field(None, description="Name or folder of the tokenizer that counts.")
    on_overlong: Literal["error", "exclude"] = Field("error", description="What to do with longer prompts.")
    dry_run: bool = Field(False, description="Show the summary and write nothing.")
    i_have_the_uw_agreement: bool = Field(False, description=UW_AGREEMENT)
    not_medec_uw: bool = Field(False, description=NOT_UW)


@dataclass(frozen=True)
class SplitRows:
    """The rows of both splits, and an account of what was made and what was left out."""

    train: list[Row]
    val: list[Row]
    exclusions: Exclusions
    # By split, for the manifest: its cases, those without a row, those that can serve a category, rows made of it.
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    sharing_a_note: int = 0  # cases that share a note with another one; they went to one split together
    no_validation: bool = False  # all cases are for training, because those for validation are too few for the mix

    @property
    def left_out(self) -> dict[str, int]:
        """How many there are of each of the exclusions."""
        return {reason: len(rows) for reason, rows in self.exclusions.items() if rows}


def labels_of(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by the label of the note that is presented."""
    of = Counter(row["reward_model"]["ground_truth"] for row in rows)
    return {label.value: of[label.value] for label in Label}


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


def mix_of(cases: Iterable[Vignette]) -> dict[Category, int]:
    """The shares that the categories have in rows that name them; empty where none does."""
    named = Counter(category for case in cases for category in case.categories or ())
    scale = gcd(*named.values())
    return {category: named[category] // scale for category in Category if named[category]}


def format_mix(mix: Mix) -> str:
    """The mix as ``--mix`` would read it, in whole numbers."""
    return ",".join(f"{category.value}={share}" for category, share in mix.items())


def build_rows(
    cases: Sequence[Vignette],
    plan: RowPlan,
    exclusions: Exclusions | None = None,
    val_ids: Iterable[str] | None = None,
) -> SplitRows:
    """Split the cases, choose those that serve each category, and make their rows.

    ``exclusions`` are those of cases that were left out before; more are added. ``val_ids`` are the cases that were
    given for validation: they are the validation split, whatever the plan's fraction. If the plan cannot be met
    exactly, a ValueError says what to change.
    """
    mix, profile = plan.shares(cases), load_profile(plan.profile)
    exclusions = defaultdict(list) if exclusions is None else exclusions
    usable = _usable(cases, mix, exclusions)
    splits, sharing = _split(usable, plan, None if val_ids is None else set(val_ids), exclusions)
    no_validation = False
    if val_ids is None and 0 < plan.fraction < 1 and plan.rows is None:
        few = _eligible(splits["val"], mix)
        no_validation = any(few[category] < (1 if plan.keeps_all else share) for category, share in mix.items())
    if no_validation:
        splits = {"train": splits["train"] + splits["val"], "val": []}
    total = sum(map(len, splits.values()))
    val_share = plan.fraction if val_ids is None else len(splits["val"]) / max(1, total)
    val_rows = int((plan.rows or 0) * val_share + 0.5)
    rows_of = {"train": (plan.rows or 0) - val_rows, "val": val_rows}
    made: dict[str, list[Row]] = {"train": [], "val": []}
    reports: dict[str, dict[str, Any]] = {}
    for name, members in splits.items():
        eligible = _eligible(members, mix)
        asked_empty = val_ids is None and plan.fraction == (0 if name == "val" else 1)
        if asked_empty or (no_validation and name == "val"):
            counts = dict.fromkeys(mix, 0)
        elif plan.keeps_all:
            counts = eligible
        else:
            counts = _counts(name, mix, eligible, None if plan.rows is None else rows_of[name])
        chosen = _choose(members, counts, random.Random(f"{plan.seed}/{name}"))
        used = {case.vignette_id for case, _ in chosen}
        unused = sorted(case.vignette_id for case in members if case.vignette_id not in used)
        if unused:
            reason = f"without any row in {name}: the mix has no place for it"
            exclusions[reason] += [(case_id, None) for case_id in unused]
        reports[name] = {
            "vignettes": len(members),
            "unused_vignettes": len(unused),
            "eligible": eligible,
            "rows": counts,
        }
        for case, category in chosen:
            role, note = category.first_role(plan.vanilla_attacker), seed_note(case, category) or ""
            index = len(made["train"]) + len(made["val"])
            made[name].append(_parquet_row(case, category, role, note, name, index, profile))
    return SplitRows(made["train"], made["val"], exclusions, reports, sharing, no_validation)


def _eligible(cases: Iterable[Vignette], mix: Mix) -> dict[Category, int]:
    """How many cases can serve each category."""
    return {category: sum(seed_note(case, category) is not None for case in cases) for category in mix}


def seed_note(case: Vignette, category: Category) -> str | None:
    """The note that a game of ``category`` starts from; None if the case cannot serve it."""
    if case.categories is not None and category not in case.categories:
        return None
    if category.seed_label is Label.SAFE:
        return case.clean_note
    # A no-op edit is not an error, so its "error note" must not be labelled harmful.
    return None if case.edit_tag is EditTag.NO_OP else case.error_note


def _parquet_row(
    case: Vignette, category: Category, role: Role, note: str, split: str, index: int, profile: PromptProfile
) -> Row:
    """The row of a game that starts from ``note``, with ``role``'s turn first."""
    from_twin = case.clean_from_twin and category.seed_label is Label.SAFE
    label = category.default_target_label.value
    return {
        "data_source": f"{case.subset}/{category.value}",
        "agent_name": AGENT_NAME,
        "prompt": profile.messages(role, category, note),
        "ability": "medical_error_detection",
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": {
            "index": index,
            "split": split,
            "subset": case.subset,
            "text_id": case.twin_text_id if from_twin else case.vignette_id,
            "vignette_id": case.vignette_id,
            "category": category.value,
            "target_label": label,
            "seed_note": note,
            "error_note": case.error_note,
            "clean_note": case.clean_note,
            "error_type": case.error_type.value if case.error_type else None,
            "error_sentence": case.error_sentence,
            "corrected_sentence": case.corrected_sentence,
            "error_sentence_id": case.error_sentence_id,
            "sentences": [{"id": s.id, "text": s.text} for s in case.sentences],
            "pair_source": case.pair_source,
            "edit_tag": case.edit_tag.value,
            "source_sha256": case.source_sha256,
        },
    }


def _usable(cases: Sequence[Vignette], mix: Mix, exclusions: Exclusions) -> list[Vignette]:
    """The cases in an order that does not depend on that of the input; notes what they cannot serve."""
    labels = {category.seed_label for category in mix}
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
    return sorted(cases, key=lambda case: hashlib.blake2b(case.vignette_id.encode(), digest_size=8).digest()[::-1])


def _split(
    cases: list[Vignette], plan: RowPlan, val_ids: set[str] | None, exclusions: Exclusions
) -> tuple[dict[str, list[Vignette]], int]:
    """The cases of ``train`` and ``val``, and how many share a note with another.

    Where validation input was given, training cases that share a note with it are left out.
    """
    groups = _sharing_a_note(cases)
    several = [group for group in groups if len(group) > 1]
    val, left_out = set(val_ids or ()), set[str]()
    if val_ids is None:
        random.Random(plan.seed).shuffle(groups)
        wanted = int(len(cases) * plan.fraction + 0.5)
        for group in groups:
            if len(val) + len(group) <= wanted:
                val.update(group)
    else:
        for group in several:
            validation = [case_id for case_id in group if case_id in val]
            barred = [case_id for case_id in group if validation and case_id not in val]
            exclusions[NOT_FOR_TRAINING] += [(case_id, validation[0]) for case_id in barred]
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
    """How many rows of each category a split gets; ``capacity`` is how many cases can serve a category.

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
                f"split {split}: {sum(counts.values())} rows at the mix {format_mix(mix)} need {count} cases for "
                f"{category.value} and there are {capacity[category]}; this split can have at most about {possible} "
                "rows: give more input, or change --rows, --mix or --val-fraction."
            )
    return counts


def _choose(
    members: list[Vignette], counts: dict[Category, int], rng: random.Random
) -> list[tuple[Vignette, Category]]:
    """Seeded choice that takes cases not used yet first, so that as many as possible serve."""
    order = list(members)
    rng.shuffle(order)
    times_used: Counter[str] = Counter()
    chosen: list[tuple[Vignette, Category]] = []
    for category, count in counts.items():
        eligible = [case for case in order if seed_note(case, category) is not None]
        taken = sorted(eligible, key=lambda case: times_used[case.vignette_id])[:count]
        chosen += [(case, category) for case in taken]
        times_used.update(case.vignette_id for case in taken)
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
    case_of = {text_id: case.vignette_id for case in read.vignettes for text_id in case.text_ids}
    rows: list[Row] = []
    for path in paths:
        text, sha256 = read_text(path)
        for place, cells in csv_records(path.name, text):
            if cells:
                published = _as_published(place, cells, sha256)
                category = Category.VANILLA_BENIGN if published.error_note is None else Category.VANILLA_HARMFUL
                index = first_index + len(rows)
                row = _parquet_row(published, category, Role.ASSESSOR, cells["Text"], EVAL_SPLIT, index, prompts)
                row["data_source"] = f"{name or published.subset}_eval/{category.value}"
                row["extra_info"]["vignette_id"] = case_of[published.vignette_id]
                rows.append(row)
    return rows, read


def _as_published(place: RowPlace, cells: Mapping[str, str], sha256: str) -> Vignette:
    """The row as a case of its own, with its texts exactly as they stand in the file."""
    cleaned = case_of_row(place, cells, sha256)
    columns = {
        "error_note": "Text",
        "clean_note": "Text" if cleaned.error_note is None else "Corrected Text",
        "error_sentence": "Error Sentence",
        "corrected_sentence": "Corrected Sentence",
    }
    raw = {name: cells[column] for name, column in columns.items() if getattr(cleaned, name) is not None}
    return replace(cleaned, **raw)  # type: ignore[arg-type]
