"""Scores beside floors and published results, as tables for the terminal and as JSON.

Called by ``medserl score`` and ``medserl evaluate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import plain
from medserl_agentloop.scoring.metrics import (
    COMPARED,
    GROUP_MEASURES,
    RESAMPLES,
    Difference,
    Estimate,
    Grades,
    Scores,
    compare,
    floor_value,
    floors,
    floors_above,
    summarise,
)
from medserl_agentloop.scoring.notes import Reference, ReferenceNote

TITLES = {
    "readable": "answers read",
    "flag_accuracy": "flag accuracy",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "false_positive_rate": "false-positive rate",
    "sentence_accuracy": "sentence accuracy",
    "rouge_1": "ROUGE-1 F",
    "bertscore": "BERTScore F1",
    "bleurt": "BLEURT",
    "aggregate": "AggregateScore",
    "rouge_1_composite": "Composite, ROUGE-1",
    "bertscore_composite": "Composite, BERTScore",
    "bleurt_composite": "Composite, BLEURT",
    "aggregate_composite": "Composite, all three",
}
_SHORT = TITLES | {"flag_accuracy": "flag", "sentence_accuracy": "sentence", "rouge_1_composite": "composite"}


@dataclass(frozen=True)
class _Published:
    """A result that others report, quoted, and what keeps it from being comparable: notes, prompt, judge."""

    system: str
    source: str
    differs: str
    measures: dict[str, float]


_LOG = "log of the OpenRLHF system that this project replaces; not published"
_RAG = "arXiv 2511.19858"
_READERS = f"arXiv 2412.19260 as quoted in {_RAG}"
_GEPA = "arXiv 2602.22483"
_TEST = "MEDEC test set"
_BOTH = f"{_TEST}, notes of both hospitals (925)"
_OWN = "its own prompt and scoring"
# fmt: off
PUBLISHED = (
    _Published("Qwen3-4B, zero-shot", _LOG, f"{_BOTH}; {_OWN}",
              {"flag_accuracy": 0.587, "f1": 0.675, "recall": 0.811, "sentence_accuracy": 0.554}),
    _Published("Qwen3-4B, best RL run", _LOG, f"{_BOTH}; {_OWN}",
              {"f1": 0.700, "recall": 0.878, "sentence_accuracy": 0.739}),
    _Published("Qwen3-4B, a later RL run", _LOG, f"{_BOTH}; {_OWN}", {"f1": 0.498}),
    _Published("earlier inference run", _LOG, f"MEDEC-MS test set (597); {_OWN}",
              {"flag_accuracy": 0.519, "precision": 0.532, "recall": 0.720, "f1": 0.612}),
    _Published("GPT-4.1, zero-shot", _RAG, _TEST, {"flag_accuracy": 0.6812, "sentence_accuracy": 0.6573}),
    _Published("GPT-4.1, 10 retrieved shots", _RAG, f"{_TEST}; ten training notes in each prompt",
              {"flag_accuracy": 0.7286, "sentence_accuracy": 0.7037}),
    _Published("GPT-5, optimised prompt", _GEPA, f"{_BOTH}; prompt optimised by GEPA", {"flag_accuracy": 0.785}),
    _Published("Qwen3-32B, optimised prompt", _GEPA, f"{_BOTH}; prompt optimised by GEPA", {"flag_accuracy": 0.690}),
    _Published("physician 1", _READERS, f"{_TEST}; a human reader",
              {"flag_accuracy": 0.7961, "sentence_accuracy": 0.6588}),
    _Published("physician 2", _READERS, f"{_TEST}; a human reader",
              {"flag_accuracy": 0.7161, "sentence_accuracy": 0.6677}),
)
# fmt: on


@dataclass(frozen=True)
class _Report:
    """Systems on one reference and what they stand beside; the first is compared with each of the others."""

    reference: Reference
    scores: dict[str, Scores]  # by the system's name
    floors: dict[str, Scores | str]  # by name; why it is not computed
    comparisons: dict[str, dict[str, Difference]]  # by the other system's name, then by measure
    settings: dict[str, Any]  # what decides the random draws and the classifiers


def report_on(
    reference: Reference,
    systems: Mapping[str, Sequence[Grades]],
    training: Sequence[ReferenceNote] = (),
    training_left_out: int = 0,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> _Report:
    """Score systems, floors and differences; several submissions of a system are pooled.

    ``training_left_out`` is how many training notes were left out because they are in the reference too.
    """
    first, *others = systems
    return _Report(
        reference=reference,
        scores={name: summarise(seeds, resamples=resamples, seed=seed) for name, seeds in systems.items()},
        floors=floors(reference.notes, training),
        comparisons={name: compare(systems[first], systems[name], resamples=resamples, seed=seed) for name in others},
        settings={
            "resamples": resamples,
            "seed": seed,
            "training_notes": len(training),
            "training_notes_left_out": training_left_out,
        },
    )


def as_json(report: _Report) -> dict[str, Any]:
    """Everything in the tables and more; ``null`` with a ``why`` is not computed."""
    reference = report.reference
    return {
        "reference": {
            "sha256": reference.sha256,
            "notes": len(reference.notes),
            "dropped_empty": reference.dropped_empty,
        },
        "settings": report.settings,
        "systems": {
            name: asdict(scores) | {"below_floors": floors_above(scores, report.floors)}
            for name, scores in report.scores.items()
        },
        "comparisons": [
            {"first": next(iter(report.scores)), "second": name, "differences": as_dicts(differences)}
            for name, differences in report.comparisons.items()
        ],
        "floors": [
            {"name": name, "scores": None, "why": floor}
            if isinstance(floor, str)
            else {"name": name, "scores": asdict(floor), "why": None}
            for name, floor in report.floors.items()
        ],
        "published": [asdict(published) for published in PUBLISHED],
    }


def as_dicts(differences: Mapping[str, Difference]) -> dict[str, Any]:
    """Differences by measure, JSON-able."""
    return {measure: asdict(difference) for measure, difference in differences.items()}


def tables(report: _Report) -> Group:
    """The report for a terminal."""
    reference, first = report.reference, next(iter(report.scores))
    errors = sum(note.flag for note in reference.notes)
    blank = f"; {reference.dropped_empty} blank records count nowhere" if reference.dropped_empty else ""
    heading = f"{', '.join(reference.sha256)}: {len(reference.notes)} notes, {errors} with an error{blank}"
    parts: list[RenderableType] = [plain(heading), _measures(report)]
    parts += [_groups(name, scores, len(report.scores) > 1) for name, scores in report.scores.items()]
    parts += [_comparison(first, *compared) for compared in report.comparisons.items()]
    parts += _beside(report)
    return Group(*(part for each in parts for part in (each, "")))


def published_script(file: str, printed: Mapping[str, float | None] | str) -> RenderableType:
    """What the published script prints of a file, or how it stops."""
    if isinstance(printed, str):
        return plain(printed)
    table = Table("", "value", title=plain(f"By the published script, mistakes included: {file}"))
    for title, value in printed.items():
        table.add_row(title, repr(value))
    return table


def table_of(title: str, *columns: str) -> Table:
    """An empty table in the style of all scores."""
    table = Table(title=plain(title), title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(plain(column), min_width=0 if at else 16, overflow="fold")
    return table


def with_interval(value: float | None, low: float | None = None, high: float | None = None, form: str = ".3f") -> str:
    """A number, and its interval where it has one."""
    if value is None:
        return "-"
    return f"{value:{form}}" if low is None or high is None else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _measures(report: _Report) -> Table:
    table = table_of("Scores with 95 % intervals", "", *report.scores)
    systems = report.scores.values()
    if any(scores.seeds > 1 for scores in systems):
        table.add_row("pooled submissions", *(str(scores.seeds) for scores in systems))
    for title, counts in (
        ("unreadable answers", [scores.unreadable for scores in systems]),
        ("notes without an answer", [scores.missing for scores in systems]),
    ):
        table.add_row(title, *(f"{count:.4g}, counted as wrong" if count else "0" for count in counts))
    for name, title in TITLES.items():
        measures = [scores.measures.get(name, Estimate(None)) for scores in systems]
        # A composite that is not computed has the reason in the row of its score.
        if not name.endswith("_composite") or any(measure.value is not None for measure in measures):
            table.add_row(title, *map(_cell, measures))
    return table


def _groups(name: str, scores: Scores, several: bool) -> Table:
    title = "By kind of note" + (f": {name}" if several else "")
    table = table_of(title, "", "notes", *(_SHORT[m] for m in GROUP_MEASURES))
    for kind, groups in scores.groups.items():
        for label, group in groups.items():
            values = [group.measures.get(m, Estimate(None)) for m in GROUP_MEASURES]
            cells = [Text("-") if measure.value is None else _cell(measure, ".2f") for measure in values]
            table.add_row(f"{label} sentence" if kind == "error position" else plain(label), str(group.notes), *cells)
        table.add_row()
    return table


def _comparison(first: str, second: str, differences: Mapping[str, Difference]) -> Table:
    title = f"{first} (1st) minus {second} (2nd); McNemar by the notes that only one of them has right"
    table = table_of(title, "", "difference", "bootstrap p", "McNemar p", "1st : 2nd")
    for name, title in TITLES.items():
        one = differences.get(name)
        if one is None or one.value is None:
            continue
        tested = one.mcnemar_p is not None
        exact = (f"{one.mcnemar_p:.2g}", f"{one.only_first} : {one.only_second}") if tested else ()
        p_value = "" if one.p_value is None else f"{one.p_value:.2g}"
        table.add_row(title, Text(with_interval(one.value, one.low, one.high, "+.3f")), p_value, *exact)
    return table


def _beside(report: _Report) -> Iterator[RenderableType]:
    table = table_of("Beside floors and published results", "", *(_SHORT[m] for m in COMPARED))
    marks: list[Text] = []
    for name, scores in report.scores.items():
        above = floors_above(scores, report.floors)
        values = {m: scores.measures[m].value for m in COMPARED}
        table.add_row(plain(name), *(with_interval(values[m]) + (" <" if above.get(m) else "") for m in COMPARED))
        marks += [plain(f"< {name}, {TITLES[m]}: below {'; '.join(names)}") for m, names in above.items() if names]
    table.add_row()
    for name, floor in report.floors.items():
        title = f"floor: {name}" + (f" (not computed: {floor})" if isinstance(floor, str) else "")
        table.add_row(title, *(with_interval(floor_value(floor, m)) for m in COMPARED))
    table.add_row()
    sources = list(dict.fromkeys(f"{published.source}; {published.differs}" for published in PUBLISHED))
    for published in PUBLISHED:
        number = sources.index(f"{published.source}; {published.differs}") + 1
        cells = [with_interval(published.measures.get(m)) for m in COMPARED]
        table.add_row(Text(f"quoted: {published.system} [{number}]"), *cells)
    yield table
    yield Group(*marks, *(Text(f"[{at}] {source}") for at, source in enumerate(sources, start=1)))


def _cell(measure: Estimate, form: str = ".3f") -> Text:
    if measure.value is None:
        return plain(f"not computed: {measure.why}")
    spread = "" if measure.spread is None else f" sd {measure.spread:.3f}"
    return Text(with_interval(measure.value, measure.low, measure.high, form) + spread)
