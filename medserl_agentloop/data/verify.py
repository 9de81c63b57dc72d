"""Is a parquet file fit to train on? Every row is checked. Called by ``medserl data verify``.

The columns must be those of ``SCHEMA``, and the facts of every row those of a game. Lengths depend
on the run: it measures them when it starts.

Does anything but its medical content tell a row's label? No classifier is trained. For each feature
of a row (white space and length of its note, its place in the file; ids reach no prompt) every rule
"harmful on this side of a cut, safe on the other" is tried. How many harmful rows lie on one side
is a hypergeometric count if feature and label are independent, so Fisher's exact test gives the
chance of a count that far off. It is multiplied by the number of rules tried (Bonferroni); below
``ALPHA`` the feature is a leak. Copies of a row are not independent, so each note counts once per
label, except for its place. The bound is wide in small files: MEDEC's own leak, trailing blanks on
60 % of the error notes and 47 % of the clean ones, shows from about 1,000 rows on, a perfect rule
from about 20.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.stats import hypergeom

from medserl_agentloop.data.cases import near_duplicates
from medserl_agentloop.data.rows import AGENT_NAME, SCHEMA, Row
from medserl_agentloop.games.medical.case import GameSpec, Label
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import (
    DIFFERS,
    MANIFEST,
    differs_from_manifest,
    in_manifest,
    read_parquet,
)

SHOWN_PER_CHECK = 3  # problems kept in words, for each check of each file; the rest is counted
BALANCE_LIMIT = 0.6
REMAKE = "write the file again with medserl data convert"
ALPHA = 1e-3  # chance of one false alarm in a file without leaks
_MAX_CUTS = 32

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


@dataclass
class Report:
    """The files that were read, and the problems by check, in sentences.

    Rows are counted from 0, as in verl.
    """

    files: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[tuple[Check, str]] = field(default_factory=list)
    failures: Counter[Check] = field(default_factory=Counter)
    warnings: Counter[Check] = field(default_factory=Counter)
    unchecked: dict[Check, str] = field(default_factory=dict)  # why nothing was checked
    _told: Counter[tuple[Check, str]] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """True if every check holds; warnings do not count."""
        return not self.failures

    def add(
        self, check: Check, file: str, row: int | None, message: str, *, warning: bool = False
    ) -> None:
        """Count a problem, and keep its words if there are few of its kind so far."""
        (self.warnings if warning else self.failures)[check] += 1
        self._told[check, file] += 1
        if self._told[check, file] <= SHOWN_PER_CHECK:
            where = file if row is None else f"{file}, row {row}"
            self.problems.append(
                (check, f"{'warning' if warning else 'failed'}: {where}: {message}.")
            )


@dataclass(frozen=True)
class _Place:
    """Where an index, a case or a note was first."""

    split: str
    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


def verify_files(paths: Sequence[Path]) -> Report:
    """Check every row of files that are used together, e.g. train, validation and evaluation rows.

    A ValueError says that a file is missing or is not parquet.
    """
    report = Report()
    first: dict[tuple[str, str], _Place] = {}
    same_name = len({path.name for path in paths}) < len(paths)
    for path in paths:
        table = _table_of(path)
        name = str(path) if same_name else path.name
        report.files[name] = Counter({"rows": table.num_rows})
        if differs_from_manifest(path):
            report.add(Check.MANIFEST, name, None, DIFFERS)
        specs = []
        for number, row in enumerate(_rows_of(report, name, table)):
            if message := _wrong_values(row):
                report.add(Check.SCHEMA, name, number, f"{message}; {REMAKE}")
                continue
            facts = row["extra_info"]
            try:
                spec = GameSpec.from_extra_info(facts)
            except ValueError as error:
                report.add(Check.FACTS, name, number, str(error).rstrip("."))
                continue
            specs.append(spec)
            _check_repetition(report, first, spec, _Place(facts["split"], name, number))
        _check_labels(report, name, specs, _measures_only(table))
    _check_near_duplicates(report, first)
    report.unchecked = _unchecked(report, paths, {place.split for place in first.values()})
    return report


def _table_of(path: Path) -> pa.Table:
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: verl reads files that end in .parquet; give such a file.")
    table = read_parquet(path)
    if not table.num_rows:
        raise ValueError(
            f"{path}: the file has no rows, and verl cannot run on it; leave it out or write it "
            "again."
        )
    if "messages" in table.column_names:
        raise ValueError(
            f"{path}: the file has conversations for a warm start, which verl's SFT trainer reads "
            "and nothing here checks; give files that medserl data convert wrote."
        )
    return table


def _rows_of(report: Report, file: str, table: pa.Table) -> list[Row]:
    """The rows as ``SCHEMA`` types them; none where a column is of another type.

    verl hands all columns there are to the agent loop, so none may be too much.
    """
    before = report.failures[Check.SCHEMA]
    columns = {}
    for name in dict.fromkeys((*SCHEMA.names, *table.column_names)):
        found = table.schema.field(name).type if name in table.column_names else "missing"
        wanted = SCHEMA.field(name).type if name in SCHEMA.names else "missing"
        try:
            columns[name] = table[name].cast(wanted)
        except (KeyError, TypeError, ValueError, pa.ArrowException):
            message = f"column {name!r} is {found}, and it should be {wanted}; {REMAKE}"
            report.add(Check.SCHEMA, file, None, message)
    rows: list[Row] = pa.table(columns).to_pylist() if columns else []
    return rows if report.failures[Check.SCHEMA] == before else []


def _measures_only(table: pa.Table) -> bool:
    """Return whether all rows are evaluation rows, on which nothing is trained."""
    sources = table["data_source"].to_pylist() if "data_source" in table.column_names else []
    return all("_eval/" in str(source) for source in sources)


def _wrong_values(row: Row) -> str:
    """Return the values that a row lacks, or that another agent loop plays it; empty if neither.
    :class:`GameSpec` checks the facts.
    """
    missing = [name for name in SCHEMA.names if row[name] is None]
    facts = row["extra_info"] or {}
    missing += [f"extra_info.{name}" for name in _NEEDED if facts and facts[name] is None]
    if any(None in message.values() for message in row["prompt"] or ()):
        missing.append("prompt")
    if missing:
        return f"{', '.join(missing)} has no value"
    if row["agent_name"] != AGENT_NAME:
        return f"agent_name is {row['agent_name']!a}, and {AGENT_NAME!r} plays these rows"
    return ""


def _check_repetition(
    report: Report, first: dict[tuple[str, str], _Place], spec: GameSpec, here: _Place
) -> None:
    """Report an index that an earlier row of any file has, or a case or note of another split;
    ``first`` remembers them.
    """
    earlier = first.setdefault(("index", str(spec.index)), here)
    if earlier != here:
        message = f"index {spec.index} is already that of {earlier}; give every row its own"
        report.add(Check.INDEX, here.file, here.row, message)
    case, note = spec.vignette_id, one_line(spec.seed_note).casefold()
    of_case = first.setdefault(("case", case), here)
    of_note = first.setdefault(("note", note), here)
    for who, other in ((f"case {case!a}", of_case), ("its note, under another id,", of_note)):
        if other.split != here.split:
            message = f"{who} is in split {here.split!r} here and in {other.split!r} at {other}"
            remedy = "split by case, or leave one of the files out"
            report.add(Check.SPLITS, here.file, here.row, f"{message}; {remedy}")
            return


def _check_near_duplicates(report: Report, first: dict[tuple[str, str], _Place]) -> None:
    """Warn of cases in two splits that only their texts give away, because each has an id of its
    own.
    """
    notes: dict[str, list[tuple[str, str]]] = {}
    file_of = {str(place): place.file for place in first.values()}
    for (kind, note), place in first.items():
        if kind == "note":
            notes.setdefault(place.split, []).append((str(place), note))
    for earlier, later in combinations(notes, 2):
        if found := list(near_duplicates(notes[later], notes[earlier])):
            place_of, other, similarity = found[0]
            message = (
                f"{len(found)} notes are nearly those of split {earlier!r}, such as {place_of} and "
                f"{other} (4-gram Jaccard {similarity:.2f}), so what is learned from one is asked "
                "in the other; leave cases out with --exclude-near-duplicates-of, or keep it in "
                "mind when you read figures"
            )
            report.add(Check.SPLITS, file_of[place_of], None, message, warning=True)


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


def _unchecked(report: Report, paths: Sequence[Path], splits: set[str]) -> dict[Check, str]:
    """Return the checks that passed only because they had nothing to look at."""
    loose = [path.name for path in paths if in_manifest(path) is None]
    unseen = [name for name, file in report.files.items() if not file["harmful"] + file["safe"]]
    why = {}
    if not any(file["harmful"] and file["safe"] for file in report.files.values()):
        why[Check.LEAKS] = "no file has both labels"
    if len(splits) < 2:
        why[Check.SPLITS] = "all rows are of one split"
    if unseen:
        reason = f"no row of {', '.join(unseen)} could be looked at"
        why |= dict.fromkeys(set(Check) - {Check.SCHEMA, *report.failures}, reason)
    if loose:
        why[Check.MANIFEST] = f"no {MANIFEST} next to it names {', '.join(loose)}"
    return why


def find_leaks(specs: Sequence[GameSpec]) -> Iterator[str]:
    """A sentence on every feature of a file's rows, in their order, that tells a label better than
    chance.
    """
    features = np.array([_features(place, spec.seed_note) for place, spec in enumerate(specs)])
    features = features.reshape(-1, len(_REMEDIES))
    labels = {"target_label": np.array([spec.target_label is Label.HARMFUL for spec in specs])}
    of_seeds = np.array([spec.category.seed_label is Label.HARMFUL for spec in specs])
    if (of_seeds != labels["target_label"]).any():
        labels["seed label"] = of_seeds
    places = reversed(list(enumerate(specs)))
    distinct = list(
        {
            (s.seed_note, s.target_label, s.category.seed_label): place for place, s in places
        }.values()
    )
    for column, (feature, remedy) in zip(features.T, _REMEDIES.items(), strict=True):
        counted = slice(None) if feature == _PLACE else distinct
        tests = len(labels) * len(_REMEDIES)
        rules = [
            (*_best_rule(column[counted], harmful[counted], tests), label)
            for label, harmful in labels.items()
        ]
        chance, accuracy, label = min(rules, key=lambda rule: rule[0])
        if chance < ALPHA:
            yield (
                f"{feature} tells the {label} in {accuracy:.0%} of the rows without reading the "
                "note "
                f"(chance: 50%, both labels weighed alike; p = {chance:.1g}); {remedy}"
            )


def _features(place: int, note: str) -> list[int]:
    """One value for each of ``_REMEDIES``."""
    before, tail = len(note) - len(note.lstrip()), note[len(note.rstrip()) :]
    broken = int("\n" in tail or "\r" in tail)
    return [before, len(tail), broken, note.strip().count("  "), place, len(note.split())]


def _best_rule(column: Any, harmful: Any, tests: int) -> tuple[float, float]:
    """Of the least likely rule: the chance of one like it in ``tests`` columns if none depended on
    the label, and the
    share of right answers, both labels weighing the same."""
    rows, of_harmful = len(harmful), harmful.sum()
    cuts = np.unique(column)[:-1]
    if of_harmful in (0, rows) or not len(cuts):
        return 1.0, 0.5
    if len(cuts) > _MAX_CUTS:
        cuts = np.unique(
            np.quantile(column, np.linspace(0, 1, _MAX_CUTS + 2)[1:-1], method="lower")
        )
    is_below = column[:, None] <= cuts
    below, hits = is_below.sum(axis=0), is_below[harmful].sum(axis=0)
    drawn = hypergeom(rows, of_harmful, below)
    # Two sides: both "more harmful rows below the cut" and "fewer" would count as a leak.
    chances = 2 * np.minimum(drawn.cdf(hits), drawn.sf(hits - 1))
    best = chances.argmin()
    gap = abs(hits[best] / of_harmful - (below[best] - hits[best]) / (rows - of_harmful))
    return min(1.0, chances[best] * len(cuts) * tests), 0.5 + gap / 2
