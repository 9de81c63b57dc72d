"""Checks whether parquet files can be trained on. Every row is checked. Called by ``medserl data
verify``.

The columns must match ``SCHEMA``, and every row must have a game's facts. Lengths depend on the
run: it measures them when it starts.

Checks whether anything but medical content reveals a row's label. The features of a row are white
space and length of its note, and its place in the file (ids reach no prompt). Each is compared
between the labels by a Mann-Whitney test, and its p-value multiplied by the number of tests
(Bonferroni); below ``ALPHA`` the feature is a leak. Copies of a row are not independent, so each
note counts once per label, except for its place. MEDEC's own leak, trailing blanks on 60 % of the
error notes and 47 % of the clean ones, shows from about 1,000 rows on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from scipy.stats import mannwhitneyu

from medserl_agentloop.data.cases import near_duplicates
from medserl_agentloop.data.rows import AGENT_NAME, SCHEMA, Row
from medserl_agentloop.games.medical.case import GameSpec, Label
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import DIFFERS, differs_from_manifest, read_parquet

BALANCE_LIMIT = 0.6
REMAKE = "write the file again with medserl data convert"
ALPHA = 1e-3  # chance of one false alarm in a file without leaks
_PLACE = "the row's place in the file"
_STRIP = "strip the notes of both labels alike"
_REMEDIES = {
    "white space before the note": _STRIP,
    "white space after the note": _STRIP,
    "a line break at the end of the note": _STRIP,
    "double blanks inside the note": "normalize white space in the notes of both labels alike",
    _PLACE: "shuffle the rows with a seed",
    "the note's length": "take the notes of both labels from the same cases",
}
_NEEDED = ("index", "split", "subset", "vignette_id", "category")


class Check(str, Enum):
    """The checks, in the order of the final table."""

    MANIFEST = "files are those of their manifest"
    SCHEMA = "columns, and no missing values"
    FACTS = "facts of every row"
    INDEX = "unique indices"
    SPLITS = "no case in two splits"
    BALANCE = "balance of presented labels"
    LEAKS = "no label leaks"


class Problem(NamedTuple):
    """A problem of a file or one of its rows, counted from 0 as in verl."""

    check: Check
    file: str
    row: int | None
    message: str
    warning: bool = False

    def __str__(self) -> str:
        where = self.file if self.row is None else f"{self.file}, row {self.row}"
        return f"{'warning' if self.warning else 'failed'}: {where}: {self.message}."


@dataclass
class Report:
    """Rows and labels of each file, and all problems."""

    files: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every check holds; warnings do not count."""
        return all(problem.warning for problem in self.problems)

    def add(
        self, check: Check, file: str, row: int | None, message: str, warning: bool = False
    ) -> None:
        self.problems.append(Problem(check, file, row, message, warning))


Seen = dict[tuple[str, str], tuple[str, str]]
"""What was seen, such as ``("case", id)``, and the split and place of its first occurrence."""


def verify_files(paths: Sequence[Path]) -> Report:
    """Check every row of files that are used together, e.g. train, validation and evaluation rows.

    A ValueError says that a file is missing, is not parquet, or has no rows.
    """
    report, seen = Report(), Seen()
    same_name = len({path.name for path in paths}) < len(paths)
    for path in paths:
        table = read_parquet(path)
        if not table.num_rows:
            raise ValueError(f"{path}: has no rows, and verl cannot run on it; leave it out.")
        name = str(path) if same_name else path.name
        report.files[name] = Counter({"rows": table.num_rows})
        if differs_from_manifest(path):
            report.add(Check.MANIFEST, name, None, DIFFERS)
        specs, sources = [], set()
        for number, row in enumerate(_rows_of(report, name, table)):
            if message := _wrong_values(row):
                report.add(Check.SCHEMA, name, number, f"{message}; {REMAKE}")
                continue
            try:
                spec = GameSpec.from_extra_info(row["extra_info"])
            except ValueError as error:
                report.add(Check.FACTS, name, number, str(error).rstrip("."))
                continue
            if row["prompt"] != [{"role": "user", "content": spec.seed_note}]:
                report.add(Check.FACTS, name, number, f"prompt is not the row's note; {REMAKE}")
            specs.append(spec)
            sources.add(row["data_source"])
            for check, why in _repeated(seen, spec, row["extra_info"]["split"], name, number):
                report.add(check, name, number, why)
        if specs:
            _check_labels(report, name, specs, only_eval=all("_eval/" in each for each in sources))
    _check_near_duplicates(report, seen)
    return report


def _rows_of(report: Report, file: str, table: pa.Table) -> list[Row]:
    """The rows with the types of ``SCHEMA``; empty if a column has another type.

    verl passes all columns to the agent loop, so extra ones are refused.
    """
    columns = {}
    for name in dict.fromkeys((*SCHEMA.names, *table.column_names)):
        found = table.schema.field(name).type if name in table.column_names else "missing"
        wanted = SCHEMA.field(name).type if name in SCHEMA.names else "missing"
        try:
            columns[name] = table[name].cast(wanted)
        except (KeyError, TypeError, ValueError, pa.ArrowException):
            message = f"column {name!r} is {found}, and it should be {wanted}; {REMAKE}"
            report.add(Check.SCHEMA, file, None, message)
            return []
    rows: list[Row] = pa.table(columns).to_pylist()
    return rows


def _wrong_values(row: Row) -> str:
    """Return the values that a row lacks, or that another agent loop plays it; empty if neither.
    :class:`GameSpec` checks the facts.
    """
    facts = row["extra_info"] or {}
    missing = [name for name in SCHEMA.names if row[name] is None]
    missing += [f"extra_info.{name}" for name in _NEEDED if facts and facts[name] is None]
    if missing:
        return f"{', '.join(missing)} has no value"
    if row["agent_name"] != AGENT_NAME:
        return f"agent_name is {row['agent_name']!a}, and {AGENT_NAME!r} plays these rows"
    return ""


def _repeated(
    seen: Seen, spec: GameSpec, split: str, file: str, row: int
) -> Iterator[tuple[Check, str]]:
    """Yield problems if an earlier row has the index, or a row of another split the case
    or note.
    """
    here = (split, f"{file}, row {row}")
    other, place = seen.setdefault(("index", str(spec.index)), here)
    if (other, place) != here:
        yield Check.INDEX, f"index {spec.index} is that of {place}, too; give every row its own"
    note = one_line(spec.seed_note).casefold()
    for kind, value in (("case", spec.vignette_id), ("note", note)):
        other, place = seen.setdefault((kind, value), here)
        if other != split:
            who = f"case {spec.vignette_id!a}" if kind == "case" else "its note, under another id,"
            remedy = "split by case, or leave one of the files out"
            yield (
                Check.SPLITS,
                f"{who} is in split {split!r} here and {other!r} at {place}; {remedy}",
            )
            return


def _check_near_duplicates(report: Report, seen: Seen) -> None:
    """Warn about cases in two splits under different ids, found by their texts."""
    notes: dict[str, list[tuple[str, str]]] = {}
    for (kind, note), (split, place) in seen.items():
        if kind == "note":
            notes.setdefault(split, []).append((place, note))
    for earlier, later in combinations(notes, 2):
        if found := list(near_duplicates(notes[later], notes[earlier])):
            place, other, similarity = found[0]
            message = (
                f"{len(found)} notes are nearly those of split {earlier!r}, such as {place} and "
                f"{other} (4-gram Jaccard {similarity:.2f}); leave cases out with "
                "--exclude-near-duplicates-of, or keep it in mind when you read figures"
            )
            report.add(Check.SPLITS, place.partition(", row ")[0], None, message, warning=True)


def _check_labels(report: Report, file: str, specs: Sequence[GameSpec], only_eval: bool) -> None:
    """Count the labels, and report features that would let a player guess them."""
    counts = report.files[file]
    counts.update(spec.target_label.value for spec in specs)
    harmful, safe = counts["harmful"], counts["safe"]
    if max(harmful, safe) > BALANCE_LIMIT * (harmful + safe):
        message = (
            f"the presented notes are {harmful} harmful and {safe} safe, beyond 60 to 40, so one "
            "constant answer wins most games; write the file again with another --mix"
        )
        report.add(Check.BALANCE, file, None, message, warning=True)
    for message in find_leaks(specs):
        if only_eval:  # official text stays as published, and nothing is trained on it
            message += ", or keep in mind that a model may profit from it here"
        report.add(Check.LEAKS, file, None, message, warning=only_eval)


def find_leaks(specs: Sequence[GameSpec]) -> Iterator[str]:
    """A sentence on every feature of a file's rows, in their order, that tells a label better than
    chance.
    """
    keys = [(spec.seed_note, spec.target_label, spec.category.seed_label) for spec in specs]
    distinct = list({key: place for place, key in reversed([*enumerate(keys)])}.values())
    features = np.array([_features(place, spec.seed_note) for place, spec in enumerate(specs)])
    labels = {
        "target_label": np.array([target is Label.HARMFUL for _, target, _ in keys]),
        "seed label": np.array([seed is Label.HARMFUL for _, _, seed in keys]),
    }
    told = set[str]()
    for (label, harmful), (at, feature) in product(labels.items(), enumerate(_REMEDIES)):
        counted = slice(None) if feature == _PLACE else distinct
        column, wrong = features[counted, at], harmful[counted]
        if feature in told or wrong.all() or not wrong.any() or (column == column[0]).all():
            continue
        test = mannwhitneyu(column[wrong], column[~wrong])
        chance = test.pvalue * len(labels) * len(_REMEDIES)
        if chance < ALPHA:
            told.add(feature)
            area = test.statistic / (wrong.sum() * (~wrong).sum())
            yield (
                f"{feature} tells the {label} without reading the note (AUC "
                f"{max(area, 1 - area):.2f}, p = {chance:.1g}); {_REMEDIES[feature]}"
            )


def _features(place: int, note: str) -> list[int]:
    """One value for each of ``_REMEDIES``."""
    before, tail = len(note) - len(note.lstrip()), note[len(note.rstrip()) :]
    broken = int("\n" in tail or "\r" in tail)
    return [before, len(tail), broken, note.strip().count("  "), place, len(note.split())]
