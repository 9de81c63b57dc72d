"""``medserl score``: submission files against MEDEC's notes, with floors and published results.

``medserl evaluate`` reads its notes and reports its scores here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from typer import Argument, Option

from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.paths import resource, sha256_of
from medserl_agentloop.scoring.metrics import (
    COMPARED,
    GROUP_MEASURES,
    RESAMPLES,
    compare,
    floors,
    floors_above,
    summarise,
)
from medserl_agentloop.scoring.notes import Reference, ReferenceNote, read_submission
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS, Grades, grade
from medserl_agentloop.terminal import errors_in_one_line, plain, say, table

_SHOWN_PROBLEMS = 20
_OF_MEDEC = re.compile(r"(ms|uw)-(train|val|test)-\d+")
"""Ids of MEDEC's notes: published results are quoted only for these."""

PUBLISHED = json.loads(resource("assets/published_results.json").read_text(encoding="utf-8"))
"""Results that others report, and the reason why each is not comparable: notes, prompt, judge."""

Neural = Annotated[bool, Option("--neural", help="Add BERTScore and BLEURT: models of several GB.")]


def score(
    predictions: Annotated[
        list[Path], Argument(help="Submission files; or folders, whose .txt files are seeds.")
    ],
    reference: Annotated[list[Path], Option(help="MEDEC's CSV with the answers. Repeatable.")],
    neural: Neural = False,
    output: Annotated[Path | None, Option(help="File for all results, as JSON.")] = None,
) -> None:
    """Score submissions on MEDEC, with intervals, floors to beat and published results.

    The other systems are compared with the first one on the same notes. Choose models, prompts and
    settings on the validation set; the test set is for one final run.
    """
    scorers = NEURAL_SCORERS if neural else SCORERS
    files: dict[str, dict[str, Any]] = {}
    grades: dict[str, list[Grades]] = {}
    with errors_in_one_line():
        notes = read_reference(reference)
        for system in predictions:
            name = str(system)
            paths = sorted(system.rglob("*.txt")) if system.is_dir() else [system]
            if not paths:
                raise ValueError(f"{name}: the folder holds no .txt files; give submission files.")
            if name in grades:
                raise ValueError(f"{name} is given twice; give each system once.")
            for path in paths:
                answers, problems = read_submission(path, [note.text_id for note in notes.notes])
                grades.setdefault(name, []).append(grade(notes.notes, answers.values(), scorers))
                files[str(path)] = {"system": name, "sha256": sha256_of(path), "problems": problems}
        report = report_on(notes, grades) | {"files": files}
        if output is not None:
            written = json.dumps(report, indent=2, allow_nan=False)
            output.write_text(written + "\n", encoding="utf-8")
    for file, facts in files.items():
        for problem in facts["problems"][:_SHOWN_PROBLEMS]:
            say(Console(stderr=True), f"{file}: {problem}")
        if (more := len(facts["problems"]) - _SHOWN_PROBLEMS) > 0:
            say(Console(stderr=True), f"{file}: {more} more problems; --output holds all of them")
    console = Console()
    console.print(tables(report))
    if output is not None:
        say(console, f"results: {output}")


def read_reference(paths: Sequence[Path]) -> Reference:
    """Every note of MEDEC's CSV files; a MedecFormatError names file, row and column."""
    rows, read = build_eval_rows(paths)
    notes = tuple(ReferenceNote.from_extra_info(row["extra_info"]) for row in rows)
    sha256 = {report.file: report.sha256 for report in read.reports}
    return Reference(notes, read.dropped_empty, sha256)


def report_on(reference: Reference, systems: Mapping[str, Sequence[Grades]]) -> dict[str, Any]:
    """Scores of systems, floors and differences to the first system, JSON-able."""
    first, *others = systems
    bounds = floors(reference.notes)
    scores = {name: summarise(seeds) for name, seeds in systems.items()}
    is_medec = all(_OF_MEDEC.fullmatch(note.text_id) for note in reference.notes)
    return {
        "reference": {
            "sha256": reference.sha256,
            "notes": len(reference.notes),
            "dropped_empty": reference.dropped_empty,
        },
        "settings": {"resamples": RESAMPLES},
        "systems": {
            name: asdict(of) | {"below_floors": floors_above(of, bounds)}
            for name, of in scores.items()
        },
        "comparisons": [
            {"first": first, "second": name, "differences": compare(systems[first], systems[name])}
            for name in others
        ],
        "floors": {name: asdict(floor) for name, floor in bounds.items()},
        "published": PUBLISHED if is_medec else [],
    }


# --- tables ---


def tables(report: Mapping[str, Any]) -> Group:
    """The tables of a report from ``report_on``."""
    reference, systems = report["reference"], report["systems"]
    errors = next(iter(systems.values()))["errors"]
    files = ", ".join(reference["sha256"])
    heading = f"{files}: {reference['notes']} notes, {errors} with an error"
    if blank := reference["dropped_empty"]:
        heading += f"; {blank} blank records are not counted"
    parts: list[RenderableType] = [plain(heading), _measures(systems)]
    for name, scores in systems.items():
        parts.append(_groups(name if len(systems) > 1 else "", scores["groups"]))
    parts += [_comparison(**compared) for compared in report["comparisons"]]
    parts += _bounds(report)
    return Group(*(part for each in parts for part in (each, "")))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines; an empty row separates two groups."""
    filled = [row or [""] * len(columns) for row in rows]
    made = table(title, columns, filled, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    made.columns[0].min_width = 16  # many systems leave little room
    return made


def _cell(estimate: Mapping[str, Any], form: str = ".3f") -> str:
    """A number with its interval and its spread over seeds, if known."""
    if estimate["value"] is None:
        return f"not computed: {estimate['why']}" if estimate.get("why") else "-"
    shown, low, high = (estimate.get(name) for name in ("value", "low", "high"))
    cell = f"{shown:{form}}"
    if low is not None and high is not None:
        cell += f" [{low:{form}}, {high:{form}}]"
    spread = estimate.get("spread")
    return cell if spread is None else f"{cell} sd {spread:.3f}"


def _words(measure: str) -> str:
    return measure.replace("_percent", " %").replace("_", " ")


def _measures(systems: Mapping[str, Any]) -> Table:
    rows: list[list[str]] = []
    if any(scores["seeds"] > 1 for scores in systems.values()):
        rows.append(["pooled submissions", *(str(of["seeds"]) for of in systems.values())])
    counted = {"unreadable": "unreadable answers", "missing": "notes without an answer"}
    for name, title in counted.items():
        counts = [scores[name] for scores in systems.values()]
        rows.append([title, *(f"{n:.4g}, counted as wrong" if n else "0" for n in counts)])
    first = next(iter(systems.values()))
    for name in first["measures"]:
        measures = [scores["measures"][name] for scores in systems.values()]
        # A composite that is not computed has the reason in the row of its score.
        if not name.endswith("_composite") or any(m["value"] is not None for m in measures):
            rows.append([_words(name), *map(_cell, measures)])
    rows.append([])
    for name in first["screening"]:
        form = ".1f" if name.startswith("false_alarms") else ".3f"
        cells = [_cell(scores["screening"][name], form) for scores in systems.values()]
        rows.append([_words(name), *cells])
    return _table("Scores with 95 % intervals", ["", *systems], rows)


def _groups(system: str, kinds: Mapping[str, Any]) -> Table:
    rows: list[list[str]] = []
    for kind, groups in kinds.items():
        for label, group in groups.items():
            title = f"{label} sentence" if kind == "error position" else label
            found = [group["measures"].get(name) for name in GROUP_MEASURES]
            cells = ("-" if m is None or m["value"] is None else _cell(m, ".2f") for m in found)
            rows.append([title, str(group["notes"]), *cells])
        rows.append([])
    title = f"By kind of note: {system}".removesuffix(": ")
    return _table(title, ["", "notes", *map(_words, GROUP_MEASURES)], rows)


def _comparison(first: str, second: str, differences: Mapping[str, Any]) -> Table:
    rows = []
    for name, one in differences.items():
        if one["value"] is not None:
            p_value = "" if one["p_value"] is None else f"{one['p_value']:.2g}"
            rows.append((_words(name), _cell(one, "+.3f"), p_value))
    return _table(f"{first} minus {second}", ["", "difference", "bootstrap p"], rows)


def _bounds(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The systems, the floors and published results in one table, and notes on them."""
    rows, notes = [], []
    for name, scores in report["systems"].items():
        above = scores["below_floors"]
        values = {key: scores["measures"][key]["value"] for key in COMPARED}
        cells = (_number(values[key]) + " <" * bool(above.get(key)) for key in COMPARED)
        rows.append([name, *cells])
        notes += [
            f"< {name}, {_words(measure)}: below {'; '.join(names)}"
            for measure, names in above.items()
            if names
        ]
    rows.append([])
    for name, floor in report["floors"].items():
        cells = (_number(floor["measures"][key]["value"]) for key in COMPARED)
        rows.append([f"floor: {name}", *cells])
    quoted = report["published"]
    rows += [[]] if quoted else []
    sources: dict[str, int] = {}
    for published in quoted:
        source = f"{published['source']}; {published['differs']}"
        number = sources.setdefault(source, len(sources) + 1)
        cells = (_number(published["measures"].get(key)) for key in COMPARED)
        rows.append([f"quoted: {published['system']} [{number}]", *cells])
    title = "Against floors" + (" and published results" if quoted else "")
    yield _table(title, ["", *map(_words, COMPARED)], rows)
    notes += [f"[{number}] {source}" for source, number in sources.items()]
    yield Group(*map(plain, notes))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
