"""Is a parquet file fit to train on? Opened as verl opens it, every row checked. Called by
``medserl data verify``.

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

import contextlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import types
from scipy.stats import hypergeom

from medserl_agentloop.data.cases import Case, contradictions, near_duplicates
from medserl_agentloop.data.rows import AGENT_NAME, CASE_FACTS, SCHEMA, Row
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import GameSpec, Label
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
    "double blanks inside the note": "normalise white space in the notes of both labels alike",
    _PLACE: "shuffle the rows with a seed",
    "the note's length": "take the notes of both labels from the same cases",
}
_MAY_BE_ABSENT = (
    "target_label",
    "error_note",
    "clean_note",
    "error_type",
    "error_sentence",
    "corrected_sentence",
)


class Check(str, Enum):
    """The checks, in the order of the final table."""

    MANIFEST = "files are those of their manifest"
    SCHEMA = "columns, and no missing values"
    FACTS = "facts of every row"
    SENTENCES = "sentences of the notes"
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
    unchecked: dict[Check, str] = field(
        default_factory=dict
    )  # why nothing, or not every row, was checked
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


def verify_files(paths: Sequence[Path]) -> Report:
    """Check every row of files that are used together, e.g. train, validation and evaluation rows.

    A ValueError says that a file is missing or is not parquet.
    """
    report = Report()
    first: dict[tuple[str, str], tuple[str, str]] = {}
    same_name = len({path.name for path in paths}) < len(paths)
    schemas = [(path, _schema_of(path)) for path in paths]
    for path, schema in schemas:
        name = str(path) if same_name else path.name
        wrong = list(_wrong_columns(schema))
        for message in wrong:
            report.add(Check.SCHEMA, name, None, message)
        if not wrong and not schema.equals(schemas[0][1]):
            message = (
                f"its types are spelt otherwise than in {paths[0].name}, so verl cannot load both "
                "in one list"
            )
            report.add(Check.SCHEMA, name, None, f"{message}; {REMAKE}", warning=True)
        if differs_from_manifest(path):
            report.add(Check.MANIFEST, name, None, DIFFERS)
        dataset = _open_as_verl(path)
        report.files[name] = Counter({"rows": len(dataset)})
        specs: list[GameSpec] = []
        cases: dict[tuple[str, str | None], Case] = {}
        for number in () if wrong else range(len(dataset)):
            row = dataset.dataframe[number]
            if message := _wrong_values(row):
                report.add(Check.SCHEMA, name, number, f"{message}; {REMAKE}")
                continue
            try:
                dataset[number]
                spec = GameSpec.from_extra_info(row["extra_info"])
            except Exception as error:  # verl raises anything on a damaged row
                report.add(Check.FACTS, name, number, str(error).rstrip("."))
                continue
            specs.append(spec)
            facts = {name: row["extra_info"][name] for name in CASE_FACTS}
            sentences = {
                sentence["id"]: sentence["text"] for sentence in row["extra_info"]["sentences"]
            }
            cases.setdefault(
                (spec.vignette_id, spec.error_note),
                Case(spec.vignette_id, sentences=sentences, **facts),
            )
            for check, message in _repeated(
                first, spec, row["extra_info"]["split"], f"{name}, row {number}"
            ):
                report.add(check, name, number, message)
        only_eval = not wrong and all(
            "_eval/" in source for source in dataset.dataframe["data_source"]
        )
        contradicting, refusal = contradictions(
            cases.values()
        )  # sentences that are not in their notes
        if refusal:
            report.add(Check.SENTENCES, name, None, f"{refusal}; {REMAKE}, its columns put right")
        for case_id, why in () if refusal else contradicting.items():
            report.add(Check.SENTENCES, name, None, f"case {case_id!a}: {why}", warning=True)
        _check_labels(report, name, specs, only_eval)
    _check_near_duplicates(report, first)
    report.unchecked = _unchecked(report, paths, {split for split, _ in first.values()})
    return report


def _schema_of(path: Path) -> Any:
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
            "and nothing here "
            "checks; give files that medserl data convert wrote."
        )
    return table.schema


def _wrong_columns(schema: Any) -> Iterator[str]:
    """Every column that is not as ``SCHEMA`` declares it; verl hands all there are to the agent
    loop.
    """
    types, expected = (
        {column.name: column.type for column in columns} for columns in (schema, SCHEMA)
    )
    for name in expected | types:
        is_type, should_be = types.get(name, "missing"), expected.get(name, "missing")
        if "missing" in (is_type, should_be) or not _holds_the_same(is_type, should_be):
            yield f"column {name!r} is {is_type}, and it should be {should_be}; {REMAKE}"


def _holds_the_same(kind: Any, expected: Any) -> bool:
    """Compare Arrow types by what Python reads: pandas may write large_string, categories, null
    where all is None.
    """
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(expected) and types.is_struct(kind):
        own, wanted = ({field.name: field.type for field in one} for one in (kind, expected))
        return own.keys() == wanted.keys() and all(
            _holds_the_same(own[name], wanted[name]) for name in wanted
        )
    if types.is_list(expected) and (types.is_list(kind) or types.is_large_list(kind)):
        return bool(types.is_null(kind.value_type)) or _holds_the_same(
            kind.value_type, expected.value_type
        )
    if types.is_string(expected):
        same = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
        return any(holds(kind) for holds in same)
    return bool(kind == expected or (types.is_integer(expected) and types.is_integer(kind)))


def _open_as_verl(path: Path) -> Any:
    """verl's own data set of one file, nothing filtered."""
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"filter_overlong_prompts": False, "max_prompt_length": None})
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return RLHFDataset(os.fspath(path), None, config)
    finally:
        datasets.enable_progress_bars()


def _wrong_values(row: Row) -> str:
    """Return the values that a row lacks, or that another agent loop plays it; empty if neither."""
    facts = row["extra_info"] or {}
    missing = [name for name in SCHEMA.names if row[name] is None]
    missing += [
        f"extra_info.{name}"
        for name, value in facts.items()
        if value is None and name not in _MAY_BE_ABSENT
    ]
    if missing:
        return f"{', '.join(missing)} has no value"
    if row["agent_name"] != AGENT_NAME:
        return (
            f"agent_name is {row['agent_name']!a}, not {AGENT_NAME!r}, the agent loop that plays "
            "these rows"
        )
    return ""


def _repeated(
    first: dict[tuple[str, str], tuple[str, str]], spec: GameSpec, split: str, place: str
) -> Iterator[tuple[Check, str]]:
    """Yield a problem if an earlier row of any file has the same index, case or note; ``first``
    remembers them.
    """
    _, earlier = first.setdefault(("index", str(spec.index)), (split, place))
    if earlier != place:
        yield (
            Check.INDEX,
            f"index {spec.index} is already that of {earlier}; give every row of all files its own",
        )
    case, note = spec.vignette_id, one_line(spec.seed_note).casefold()
    for key, who in {
        ("case", case): f"case {case!a}",
        ("note", note): "its note, under another id,",
    }.items():
        other, earlier = first.setdefault(key, (split, place))
        if other != split:
            message = f"{who} is in split {split!r} here and in {other!r} at {earlier}"
            yield Check.SPLITS, f"{message}; split by case, or leave one of the files out"
            return


def _check_near_duplicates(report: Report, first: dict[tuple[str, str], tuple[str, str]]) -> None:
    """Warns of cases in two splits that only their texts give away, because each has an id of its
    own.
    """
    of_notes = [
        (split, place, note) for (kind, note), (split, place) in first.items() if kind == "note"
    ]
    splits = dict.fromkeys(split for split, _, _ in of_notes)
    notes = {
        each: [(place, note) for split, place, note in of_notes if split == each] for each in splits
    }
    for earlier, later in combinations(notes, 2):
        if pairs := list(near_duplicates(notes[later], notes[earlier])):
            place, other, similarity = pairs[0]
            message = (
                f"{len(pairs)} notes are nearly those of split {earlier!r}, such as {place} and "
                f"{other} (4-gram "
                f"Jaccard {similarity:.2f}), so that what is learned from one is asked in the "
                "other; leave cases out "
                "with --exclude-near-duplicates-of, or mind it when you read figures"
            )
            report.add(Check.SPLITS, place.split(", row ")[0], None, message, warning=True)


def _check_labels(report: Report, file: str, specs: Sequence[GameSpec], only_eval: bool) -> None:
    """Count the labels, and report features that would let a player guess them."""
    counts = report.files[file]
    counts.update(spec.target_label.value for spec in specs)
    harmful, safe = counts["harmful"], counts["safe"]
    if max(harmful, safe) > BALANCE_LIMIT * (harmful + safe):
        message = (
            f"the presented notes are {harmful} harmful and {safe} safe, beyond 60 to 40, so that "
            "one constant "
            "answer wins most games; write the file again with another --mix"
        )
        report.add(Check.BALANCE, file, None, message, warning=True)
    for message in find_leaks(specs):
        if only_eval:  # official text stays as published, and nothing is trained on it
            message += ", or keep in mind that a model may profit from it here"
        report.add(Check.LEAKS, file, None, message, warning=only_eval)


def _unchecked(report: Report, paths: Sequence[Path], splits: set[str]) -> dict[Check, str]:
    """Return the checks that passed only because they had nothing to look at."""
    loose = [path.name for path in paths if in_manifest(path) is None]
    files = report.files.values()
    unseen = ", ".join(
        name for name, file in report.files.items() if not file["harmful"] + file["safe"]
    )
    unseen = f"no row of {unseen} could be looked at" if unseen else ""
    why = {
        Check.MANIFEST: f"no {MANIFEST} beside it names {', '.join(loose)}" if loose else "",
        Check.FACTS: "" if report.failures[Check.FACTS] else unseen,
        Check.SENTENCES: unseen,
        Check.INDEX: unseen,
        Check.SPLITS: unseen or ("all rows are of one split" if len(splits) < 2 else ""),
        Check.BALANCE: ""
        if any(file["harmful"] + file["safe"] for file in files)
        else "no row has a label",
        Check.LEAKS: ""
        if any(file["harmful"] and file["safe"] for file in files)
        else "no file has both labels",
    }
    return {check: reason for check, reason in why.items() if reason}


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
