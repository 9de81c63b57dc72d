"""Turns cases into rows of ``train.parquet`` and ``val.parquet``, and official sets into evaluation
rows, which ``medserl score`` and ``evaluate`` read as well.

The same cases and plan give the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.interaction import AGENT_NAME as AGENT_NAME
from medserl_agentloop.data.cases import Case, EditTag, MedecFormatError
from medserl_agentloop.data.reader import Layout, ReadResult, read_files
from medserl_agentloop.games.medical.case import EVAL_SPLIT, Category, GameSpec, Label
from medserl_agentloop.games.medical.edit import one_line

# Three of the four categories present a harmful note, so the safe one has three shares.
DEFAULT_MIX = "vanilla_harmful=1,adversarial_harmful=1,vanilla_benign=3,adversarial_benign=1"
AS_GIVEN = "as-given"  # the mix of an input whose rows name their categories: every row is kept
# Far above the indices of training files, so that evaluation rows can be used with them in one run.
FIRST_INDEX = 1_000_000_000
UW_AGREEMENT = "Accept MEDEC-UW rows; you have signed its data use agreement."
NOT_FOR_TRAINING = "not for training: it shares a note with a case that was given for validation"
_ROW_GROUP = 2000


# Declared, not inferred: inference gives a column that is empty in one file the null type, and
# files whose types differ cannot be concatenated.
MESSAGES = pa.list_(pa.struct({"role": "string", "content": "string"}))
_NAMES = (
    *("index", "split", "subset", "text_id", "vignette_id", "category"),
    "target_label",  # only where it is not the category's own
    *("error_note", "clean_note", "error_type", "error_sentence", "corrected_sentence"),
    *("error_sentence_id", "sentences", "pair_source", "edit_tag", "source_sha256"),
)
_FACTS: dict[str, Any] = dict.fromkeys(_NAMES, "string") | {
    "index": "int64",
    "error_sentence_id": "int64",
    "sentences": pa.list_(pa.struct({"id": "int64", "text": "string"})),
}
SCHEMA: Any = pa.schema(
    {
        "data_source": "string",
        "agent_name": "string",
        "prompt": MESSAGES,
        "ability": "string",
        "reward_model": pa.struct({"style": "string"}),  # verl's rollout dumps need it
        "extra_info": pa.struct(_FACTS),
    }
)

Row = dict[str, Any]  # one parquet row, as ``SCHEMA`` declares it
Mix = Mapping[Category, int]  # shares in the smallest whole numbers
Exclusions = defaultdict[str, list[tuple[str, str | None]]]
"""Cases without a row, or with fewer rows than possible: reason -> id and detail of each."""


class RowPlan(BaseModel):
    """Options for making rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mix: str | None = None
    val_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    seed: int = 42
    adversarial_benign: Label = Label.HARMFUL

    def label_of(self, category: Category) -> Label:
        """Label of the note that a game of ``category`` presents if its attack is valid."""
        if category is Category.ADVERSARIAL_BENIGN:
            return self.adversarial_benign
        return category.default_target_label

    def shares(self, cases: Sequence[Case]) -> Mix:
        """The share of each category in the rows of these cases."""
        if self.mix is None:
            return default_mix(cases)
        if self.mix != AS_GIVEN:
            return parse_mix(self.mix)
        if given := mix_of(cases):
            return given
        raise ValueError(
            f"--mix {AS_GIVEN} keeps every row of an input that names its category: give such an "
            f"input, or write shares such as {DEFAULT_MIX}."
        )


@dataclass(frozen=True)
class SplitRows:
    """The rows of both splits, and a report on the rows made and the cases left out."""

    train: list[Row]
    val: list[Row]
    exclusions: Exclusions
    reports: dict[str, dict[str, Any]]  # by split: its cases, those for a category, its rows
    mix: Mix

    @property
    def left_out(self) -> dict[str, int]:
        """The number of exclusions by reason."""
        return {reason: len(rows) for reason, rows in self.exclusions.items() if rows}


def labels_of(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by the label of the note that is presented."""
    of = Counter(GameSpec.from_extra_info(row["extra_info"]).target_label for row in rows)
    return {label.value: of[label] for label in Label}


def parse_mix(text: str) -> dict[Category, int]:
    """Parse ``category=share,...`` with whole numbers; ValueError if wrong. Omitted categories and
    share 0 get no rows.
    """
    known = [category.value for category in Category]
    shares: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,6})\s*", part)
        if not match or match[1] not in known or match[1] in shares:
            raise ValueError(
                f"mix: {part!r} is not a category with its share, or is given twice; write shares "
                f"such as {DEFAULT_MIX} (categories: {', '.join(known)})."
            )
        shares[match[1]] = int(match[2])
    scale = gcd(*shares.values())
    if not scale:
        raise ValueError(f"mix: every share is 0; write shares such as {DEFAULT_MIX}.")
    found = {category: shares.get(category.value, 0) // scale for category in Category}
    return {category: share for category, share in found.items() if share}


def default_mix(cases: Sequence[Case]) -> dict[Category, int]:
    """``DEFAULT_MIX``, or the categories of it that the cases can serve, with as many shares of
    safe presented notes as of harmful ones.
    """
    mix = parse_mix(DEFAULT_MIX)
    served = {each for each in mix if any(seed_note(case, each) is not None for case in cases)}
    if len(served) in (0, len(mix)):
        return mix
    shares = dict.fromkeys((each for each in mix if each in served), 1)
    if Category.VANILLA_BENIGN in served:
        shares[Category.VANILLA_BENIGN] = max(1, len(served) - 1)
    return shares


def mix_of(cases: Iterable[Case]) -> dict[Category, int]:
    """The shares of categories in rows that name them; empty if no row does."""
    named = Counter(category for case in cases for category in case.categories or ())
    scale = gcd(*named.values())
    return {category: named[category] // scale for category in Category if named[category]}


def format_mix(mix: Mix) -> str:
    """The mix as ``--mix`` would read it, in whole numbers."""
    return ",".join(f"{category.value}={share}" for category, share in mix.items())


def refuse_uw(rows: int, agreed: bool) -> None:
    """Raise ValueError for rows of MEDEC-UW without the agreement."""
    if rows and not agreed:
        raise ValueError(
            f"the input has {rows} MEDEC-UW rows, by their ids, their file's name or marks such as "
            "<NAME/>: add --i-have-the-uw-agreement if your signed agreement allows this use."
        )


def write_parquet(rows: list[Row], path: Path, schema: Any = SCHEMA) -> None:
    """Write rows; a file without rows still has the columns."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=_ROW_GROUP)


def build_rows(
    cases: Sequence[Case],
    plan: RowPlan,
    exclusions: Exclusions | None = None,
    val_ids: set[str] | None = None,
) -> SplitRows:
    """Split the cases, choose cases for each category, and make as many rows as the mix allows.

    Adds to ``exclusions``. The cases of ``val_ids`` are the validation split, whatever the plan's
    fraction. If the plan cannot be met, a ValueError says what to change.
    """
    mix = plan.shares(cases)
    exclusions = defaultdict(list) if exclusions is None else exclusions
    splits = _split(_usable(cases, mix, exclusions), plan, val_ids, exclusions)
    made: dict[str, list[Row]] = {"train": [], "val": []}
    reports: dict[str, dict[str, Any]] = {}
    for name, members in splits.items():
        counts = eligible = {c: sum(seed_note(m, c) is not None for m in members) for c in mix}
        if plan.mix != AS_GIVEN:
            # As many as possible at exactly this mix, or up to its shares if cases are few.
            times = min(eligible[each] // share for each, share in mix.items())
            counts = {each: times * n or min(n, eligible[each]) for each, n in mix.items()}
        chosen = _choose(members, counts, random.Random(f"{plan.seed}/{name}"))
        unused = sorted({case.case_id for case in members} - {case.case_id for case, _ in chosen})
        why = f"without any row in {name}: the mix has no place for it"
        exclusions[why] += [(each, None) for each in unused]
        reports[name] = {"cases": len(members), "eligible": eligible, "rows": counts}
        for case, category in chosen:
            index = len(made["train"]) + len(made["val"])
            made[name].append(_parquet_row(case, category, index, name, plan.label_of(category)))
    main = "val" if plan.val_fraction == 1 and val_ids is None else "train"
    if missing := [category.value for category in mix if not reports[main]["eligible"][category]]:
        left_out = "; ".join(f"{len(ids)} {why}" for why, ids in exclusions.items() if ids)
        raise ValueError(
            f"no case for {main} can serve {', '.join(missing)}: give more input or another --mix "
            f"(left out: {left_out or 'none'})."
        )
    return SplitRows(made["train"], made["val"], exclusions, reports, mix)


def seed_note(case: Case, category: Category) -> str | None:
    """The note that a game of ``category`` starts from; None if the case has none."""
    if case.categories is not None and category not in case.categories:
        return None
    if category.seed_label is Label.SAFE:
        return case.clean_note
    # A no-op edit is not an error, so its "error note" must not be labelled harmful.
    return None if case.edit_tag is EditTag.NO_OP else case.error_note


def _parquet_row(
    case: Case, category: Category, index: int, split: str, label: Label | None = None
) -> Row:
    """The row of a game on a case; ``label`` is that of the presented note, by default the
    category's own.
    """
    harmful = category.seed_label is Label.HARMFUL
    own = label in (None, category.default_target_label)
    facts = {
        "index": index,
        "split": split,
        "text_id": case.text_id(harmful),
        "vignette_id": case.case_id,
        "category": category.value,
        "target_label": None if own else label,
        "sentences": [{"id": number, "text": text} for number, text in case.sentences.items()],
    }
    return {
        "data_source": f"{case.subset}/{category.value}",
        "agent_name": AGENT_NAME,
        # The note alone, for verl: the run renders the prompts of the profile that it has.
        "prompt": [{"role": "user", "content": case.error_note if harmful else case.clean_note}],
        "ability": "medical_error_detection",
        "reward_model": {"style": "rule"},
        "extra_info": {
            name: facts[name] if name in facts else getattr(case, name) for name in _FACTS
        },
    }


def _usable(cases: Sequence[Case], mix: Mix, exclusions: Exclusions) -> list[Case]:
    """The cases in an order independent of the input's; records what they cannot serve."""
    labels = {category.seed_label for category in mix}
    for case in cases:
        if case.twin and case.pair_source == "in_row":
            twin = "twin whose own text is not used: the pair's corrected text is the clean note"
            exclusions[twin].append((case.twin.id, None))
        if Label.SAFE in labels and case.clean_note is None:
            exclusions["not a benign seed: it has no clean note"].append((case.case_id, None))
        if Label.HARMFUL in labels and case.error_note is None:
            exclusions["not a harmful seed: it has no error note"].append((case.case_id, None))
        elif Label.HARMFUL in labels and case.edit_tag is EditTag.NO_OP:
            why = "not a harmful seed: its two notes differ in letter case or space only"
            exclusions[why].append((case.case_id, None))
    # The digest as a little-endian number.
    return sorted(
        cases, key=lambda case: hashlib.blake2b(case.case_id.encode(), digest_size=8).digest()[::-1]
    )


def _split(
    cases: list[Case], plan: RowPlan, val_ids: set[str] | None, exclusions: Exclusions
) -> dict[str, list[Case]]:
    """Cases of ``train`` and ``val``: those that share a note stay together, or are left out if
    ``val_ids`` has one.
    """
    groups, val, left_out = _sharing_a_note(cases), set(val_ids or ()), set[str]()
    if val_ids is None:
        random.Random(plan.seed).shuffle(groups)
        # A small input has a case to validate on as well.
        wanted = max(
            int(len(cases) * plan.val_fraction + 0.5), int(0 < plan.val_fraction < 1 < len(groups))
        )
        for group in groups:
            if len(val) + len(group) <= wanted:
                val.update(group)
    else:
        for group in groups:
            validation = [case_id for case_id in group if case_id in val]
            barred = [case_id for case_id in group if validation and case_id not in val]
            exclusions[NOT_FOR_TRAINING] += [(case_id, validation[0]) for case_id in barred]
            left_out.update(barred)
    train = [case for case in cases if case.case_id not in val | left_out]
    return {"train": train, "val": [case for case in cases if case.case_id in val]}


def _sharing_a_note(cases: list[Case]) -> list[list[str]]:
    """Ids of cases that share a note, directly or through others."""
    from scipy.cluster.hierarchy import DisjointSet  # not at the top: it is slow to load

    groups, first = DisjointSet(range(len(cases))), dict[str, int]()
    for at, case in enumerate(cases):
        for note in case.notes:
            groups.merge(at, first.setdefault(one_line(note).casefold(), at))
    return [[cases[at].case_id for at in sorted(group)] for group in groups.subsets()]


def _choose(
    members: list[Case], counts: dict[Category, int], rng: random.Random
) -> list[tuple[Case, Category]]:
    """Seeded choice that prefers unused cases, so that as many as possible are used."""
    order = list(members)
    rng.shuffle(order)
    times_used: Counter[str] = Counter()
    chosen: list[tuple[Case, Category]] = []
    for category, count in counts.items():
        eligible = [case for case in order if seed_note(case, category) is not None]
        taken = sorted(eligible, key=lambda case: times_used[case.case_id])[:count]
        chosen += [(case, category) for case in taken]
        times_used.update(case.case_id for case in taken)
    rng.shuffle(chosen)  # order in the source is correlated with the label
    return chosen


def build_eval_rows(
    paths: Sequence[Path], columns: Layout | None = None
) -> tuple[list[Row], ReadResult]:
    """One assessor turn for every row of files with MEDEC's columns, in order, and the report on
    the files; MedecFormatError names a mistake.

    Published figures are about the text as it was published, so nothing is stripped or left out.
    Indices begin at a number that depends on the files, so that sets can be used together.
    """
    read = read_files(paths, columns=columns, as_published=True)
    digest = hashlib.sha256("".join(report.sha256 for report in read.reports).encode()).digest()
    rows: list[Row] = []
    for index, case in enumerate(read.cases, FIRST_INDEX * (1 + int.from_bytes(digest[:3]))):
        if case.has_error and case.error_sentence_id not in case.sentences:
            raise MedecFormatError(
                f"{case.case_id!a} does not say which sentence is wrong, so answers on it cannot "
                "be scored; write Sentences (a line for each, after its number) and Error Sentence "
                "ID."
            )
        category = Category.VANILLA_HARMFUL if case.has_error else Category.VANILLA_BENIGN
        row = _parquet_row(case, category, index, EVAL_SPLIT)
        row["data_source"] = f"{case.subset}_eval/{category.value}"
        rows.append(row)
    return rows, read
