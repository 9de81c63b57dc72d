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

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import resource, sha256_of
from medserl_agentloop.scoring import metrics
from medserl_agentloop.scoring.floors import COMPARED, floors, floors_above
from medserl_agentloop.scoring.notes import Reference, ReferenceNote, read_submission
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS
from medserl_agentloop.terminal import errors_in_one_line, plain, say, table

_SHOWN_PROBLEMS = 20

_OF_MEDEC = re.compile(r"(ms|uw)-(train|val|test)-\d+")
"""Ids of MEDEC's notes: published results are quoted only for these."""

PUBLISHED = json.loads(resource("assets/published_results.json").read_text(encoding="utf-8"))
"""Results that others report, and the reason why each is not comparable: notes, prompt, judge."""

Train = Annotated[
    list[Path] | None,
    typer.Option(
        help="MEDEC's training CSV, or a .jsonl file of pairs, for two of the floors; may be "
        "repeated."
    ),
]
Neural = Annotated[
    bool,
    typer.Option("--neural", help="Compute BERTScore and BLEURT too; their models take some GB."),
]


def score(
    predictions: Annotated[
        list[Path],
        typer.Argument(
            help="Submission files. A folder counts as one system whose .txt files are its seeds."
        ),
    ],
    reference: Annotated[
        list[Path], typer.Option(help="MEDEC's CSV with the answers; may be repeated.")
    ],
    train: Train = None,
    neural: Neural = False,
    output: Annotated[Path | None, typer.Option(help="File for all results, as JSON.")] = None,
) -> None:
    """Score submissions on MEDEC, with intervals, floors to beat and published results.

    Several systems are compared with the first one on the same notes. Choose models, prompts and
    settings on the validation set; the test set is for one final run.
    """
    scorers = NEURAL_SCORERS if neural else SCORERS
    files: dict[str, dict[str, Any]] = {}
    grades: dict[str, list[metrics.Grades]] = {}
    with errors_in_one_line():
        notes = read_reference(reference)
        training = read_training(train, notes.notes) if train else ([], 0)
        for system in predictions:
            name, paths = (
                str(system),
                sorted(system.rglob("*.txt")) if system.is_dir() else [system],
            )
            if not paths:
                raise ValueError(f"{name}: the folder holds no .txt files; give submission files.")
            if name in grades:
                raise ValueError(f"{name} is given twice; give each system once.")
            for path in paths:
                answers, problems = read_submission(path, [note.text_id for note in notes.notes])
                grades.setdefault(name, []).append(
                    metrics.grade(notes.notes, answers.values(), scorers)
                )
                files[str(path)] = {"system": name, "sha256": sha256_of(path), "problems": problems}
        report = report_on(notes, grades, *training)
        if output is not None:
            output.write_text(
                json.dumps(report | {"files": files}, indent=2, allow_nan=False) + "\n",
                encoding="utf-8",
            )
    for file, facts in files.items():
        more = len(facts["problems"]) - _SHOWN_PROBLEMS
        rest = [f"{more} more problems; --output holds all of them"] if more > 0 else []
        for problem in (*facts["problems"][:_SHOWN_PROBLEMS], *rest):
            say(Console(stderr=True), f"{file}: {problem}")
    console = Console()
    console.print(tables(report))
    if output is not None:
        say(console, f"results: {output}")


def read_reference(paths: Sequence[Path]) -> Reference:
    """Every note of MEDEC's CSV files; a MedecFormatError names file, row and column of what is
    wrong in them.
    """
    rows, read = build_eval_rows(paths)
    notes = tuple(ReferenceNote.from_extra_info(row["extra_info"]) for row in rows)
    return Reference(
        notes, read.dropped_empty, {report.file: report.sha256 for report in read.reports}
    )


def read_training(
    paths: Sequence[Path], reference: Sequence[ReferenceNote]
) -> tuple[list[ReferenceNote], int]:
    """Notes of MEDEC's CSV or of pair files, and how many were left out because the reference has
    them too.
    """
    notes: list[ReferenceNote] = []
    for path in paths:
        if path.suffix.lower() == ".csv":
            notes += read_reference([path]).notes
        else:
            cases = read_files([path], as_published=True).cases  # white space may give labels away
            if any(case.categories is not None for case in cases):
                raise ValueError(
                    f"{path}: holds no pairs; give --train MEDEC's CSV or a .jsonl file of pairs."
                )
            notes += [
                ReferenceNote("", note, note is case.error_note)
                for case in cases
                for note in case.notes
            ]
    in_reference = {one_line(note.text).casefold() for note in reference}
    kept = [note for note in notes if one_line(note.text).casefold() not in in_reference]
    if not kept:
        raise ValueError(
            "every note of the training file is in the reference too; give --train another file."
        )
    return kept, len(notes) - len(kept)


def read_twins(paths: Sequence[Path]) -> list[ReferenceNote]:
    """The two notes of each case, the error note first; unless they differ in letter case or white
    space only.
    """
    notes = []
    for case in read_files(paths).cases:
        if case.error_note and case.clean_note and case.edit_tag is not EditTag.NO_OP:
            notes.append(ReferenceNote(case.case_id + "+error", case.error_note, True))
            notes.append(ReferenceNote(case.case_id + "+clean", case.clean_note, False))
    if not notes:
        raise ValueError("--twins: the file has no note with an error and its correction")
    return notes


def report_on(
    reference: Reference,
    systems: Mapping[str, Sequence[metrics.Grades]],
    training: Sequence[ReferenceNote] = (),
    training_left_out: int = 0,
) -> dict[str, Any]:
    """Scores of systems, floors and differences to the first one, JSON-able; ``why`` says what is
    not computed.
    """
    first, *others = systems
    bounds, absent = floors(reference.notes, training)
    scores = {name: metrics.summarise(seeds) for name, seeds in systems.items()}
    is_medec = all(_OF_MEDEC.fullmatch(note.text_id) for note in reference.notes)
    return {
        "reference": {
            "sha256": reference.sha256,
            "notes": len(reference.notes),
            "dropped_empty": reference.dropped_empty,
        },
        "settings": {
            "resamples": metrics.RESAMPLES,
            "training_notes": len(training),
            "training_notes_left_out": training_left_out,
        },
        "systems": {
            name: asdict(of) | {"below_floors": floors_above(of, bounds)}
            for name, of in scores.items()
        },
        "comparisons": [
            {
                "first": first,
                "second": name,
                "differences": metrics.compare(systems[first], systems[name]),
            }
            for name in others
        ],
        "floors": [
            *(
                {"name": name, "scores": asdict(floor), "why": None}
                for name, floor in bounds.items()
            ),
            *({"name": name, "scores": None, "why": why} for name, why in absent.items()),
        ],
        "published": PUBLISHED if is_medec else [],
    }


def tables(report: Mapping[str, Any]) -> Group:
    reference, systems = report["reference"], report["systems"]
    errors = next(iter(systems.values()))["errors"]
    blank = (
        f"; {reference['dropped_empty']} blank records count nowhere"
        if reference["dropped_empty"]
        else ""
    )
    heading = (
        f"{', '.join(reference['sha256'])}: {reference['notes']} notes, {errors} with an "
        f"error{blank}"
    )
    parts: list[RenderableType] = [plain(heading), _measures(systems)]
    parts += [
        _groups(name if len(systems) > 1 else "", scores["groups"])
        for name, scores in systems.items()
    ]
    parts += [_comparison(**compared) for compared in report["comparisons"]]
    parts += [*_beside(report), *_robustness(report)]
    return Group(*(part for each in parts for part in (each, "")))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table without lines, in which an empty row parts two groups of rows."""
    filled = [row or [""] * len(columns) for row in rows]
    made = table(title, columns, filled, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    made.columns[0].min_width = 16  # many systems leave little room
    return made


def _with_interval(
    value: float | None, low: float | None = None, high: float | None = None, form: str = ".3f"
) -> str:
    """A number, and its interval where it has one."""
    if value is None:
        return "-"
    return (
        f"{value:{form}}"
        if low is None or high is None
        else f"{value:{form}} [{low:{form}}, {high:{form}}]"
    )


def _words(measure: str) -> str:
    return measure.replace("_", " ")


def _measures(systems: Mapping[str, Any]) -> Table:
    rows = []
    if any(scores["seeds"] > 1 for scores in systems.values()):
        rows.append(["pooled submissions", *(str(scores["seeds"]) for scores in systems.values())])
    for name, title in (
        ("unreadable", "unreadable answers"),
        ("missing", "notes without an answer"),
    ):
        counts = [scores[name] for scores in systems.values()]
        rows.append(
            [title, *(f"{count:.4g}, counted as wrong" if count else "0" for count in counts)]
        )
    for name in next(iter(systems.values()))["measures"]:
        measures = [scores["measures"][name] for scores in systems.values()]
        # A composite that is not computed has the reason in the row of its score.
        if not name.endswith("_composite") or any(
            measure["value"] is not None for measure in measures
        ):
            rows.append([_words(name), *map(_cell, measures)])
    rows.append([])
    for name in next(iter(systems.values()))["screening"]:
        form = ".1f" if name.startswith("false_alarms") else ".3f"
        cells = [_cell(scores["screening"][name], form) for scores in systems.values()]
        rows.append([_words(name).replace(" percent", " %"), *cells])
    return _table("Scores with 95 % intervals", ["", *systems], rows)


def _groups(system: str, kinds: Mapping[str, Any]) -> Table:
    rows: list[list[str]] = []
    for kind, groups in kinds.items():
        for label, group in groups.items():
            values = [group["measures"].get(m, {"value": None}) for m in metrics.GROUP_MEASURES]
            cells = [
                "-" if measure["value"] is None else _cell(measure, ".2f") for measure in values
            ]
            rows.append(
                [
                    f"{label} sentence" if kind == "error position" else label,
                    str(group["notes"]),
                    *cells,
                ]
            )
        rows.append([])
    title = f"By kind of note: {system}".removesuffix(": ")
    return _table(title, ["", "notes", *map(_words, metrics.GROUP_MEASURES)], rows)


def _comparison(first: str, second: str, differences: Mapping[str, Any]) -> Table:
    rows = [
        (_words(name), _moved(one), "" if one["p_value"] is None else f"{one['p_value']:.2g}")
        for name, one in differences.items()
        if one["value"] is not None
    ]
    return _table(f"{first} minus {second}", ["", "difference", "bootstrap p"], rows)


def _beside(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    quoted = report["published"]
    rows, notes = [], []
    for name, scores in report["systems"].items():
        above = scores["below_floors"]
        values = {m: scores["measures"][m]["value"] for m in COMPARED}
        rows.append(
            [
                name,
                *(_with_interval(values[m]) + (" <" if above.get(m) else "") for m in COMPARED),
            ]
        )
        notes += [
            f"< {name}, {_words(m)}: below {'; '.join(names)}"
            for m, names in above.items()
            if names
        ]
    rows.append([])
    for floor in report["floors"]:
        title = f"floor: {floor['name']}" + (
            f" (not computed: {floor['why']})" if floor["why"] else ""
        )
        values = {
            m: floor["scores"]["measures"][m]["value"] if floor["scores"] else None
            for m in COMPARED
        }
        rows.append([title, *map(_with_interval, values.values())])
    if quoted:
        rows.append([])
    sources: dict[str, int] = {}
    for published in quoted:
        number = sources.setdefault(
            f"{published['source']}; {published['differs']}", len(sources) + 1
        )
        cells = (_with_interval(published["measures"].get(m)) for m in COMPARED)
        rows.append([f"quoted: {published['system']} [{number}]", *cells])
    title = "Against floors" + (" and published results" if quoted else "")
    yield _table(title, ["", *map(_words, COMPARED)], rows)
    yield Group(
        *map(plain, (*notes, *(f"[{number}] {source}" for source, number in sources.items())))
    )


def _robustness(report: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the results of ``medserl evaluate`` with ``--twins`` and ``--shortcuts``."""
    if twins := report.get("twins"):
        rows = []
        for name, share in [*twins.items()][1:]:
            value, low, high = share or (None, None, None)
            rows.append(
                [
                    _words(name),
                    _with_interval(value, low, high, "+.3f" if name == "bias" else ".3f"),
                ]
            )
        yield _table(f"Both notes of {twins['cases']} cases", ["", "of cases"], rows)
    if shortcuts := report.get("shortcuts"):
        measures = ("flag_accuracy", "sentence_accuracy")
        rows = [
            [name, *(_moved(moved["differences"][m]) for m in measures)]
            for name, moved in shortcuts.items()
        ]
        yield _table("How far accuracy moves", ["", *map(_words, measures)], rows)


def _moved(difference: Mapping[str, Any]) -> str:
    return _with_interval(difference["value"], difference["low"], difference["high"], "+.3f")


def _cell(measure: Mapping[str, Any], form: str = ".3f") -> str:
    if measure["value"] is None:
        return f"not computed: {measure['why']}"
    spread = "" if measure["spread"] is None else f" sd {measure['spread']:.3f}"
    return _with_interval(measure["value"], measure["low"], measure["high"], form) + spread
