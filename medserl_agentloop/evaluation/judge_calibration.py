"""``medserl judge calibrate``: measures a judge and its blind reader on known edits.

The judge sees what a run would show it, but not the case's other note, which would be the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from typer import Option

from medserl_agentloop.core.config import selfplay_config
from medserl_agentloop.data.cases import Case
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.known_edits import INJECTED, Known, known_edits, known_notes
from medserl_agentloop.evaluation.play import all_of
from medserl_agentloop.games.medical.case import Label
from medserl_agentloop.games.medical.config import BlindGate, MedicalConfig
from medserl_agentloop.games.medical.judges import build_judge, why_failed
from medserl_agentloop.games.medical.judges.llm import BlindReader
from medserl_agentloop.games.medical.judges.report import (
    CountedShare,
    JudgedGroup,
    JudgeReport,
    Measured,
    judge_identity,
    why_refused,
    write_report,
)
from medserl_agentloop.games.medical.records import JUDGE_ABSTAINED
from medserl_agentloop.terminal import errors_in_one_line, say, table

app = typer.Typer(no_args_is_help=True, help="Serve a judge, or measure how good one is.")

Answer = tuple[Label | None, str | None]
"""A label, or why there is none."""


def calibrate(
    config: MedicalConfig,
    cases: Sequence[Case],
    *,
    sources: dict[str, str] | None = None,
    limit: int | None = None,
) -> JudgeReport:
    """Count how often a run's judge is right about edits, and its blind reader, if it has one,
    about notes.

    ValueError if the cases give nothing to ask, or no question is answered.
    """
    alone = config.model_copy(update={"blind": BlindGate()})  # the gate is measured separately
    judge = build_judge(alone)

    async def ask(edit: Known) -> Answer:
        try:
            label = (await judge.judge(edit.after, edit.before, edit.spec)).label
        except Exception as error:
            return None, why_failed(error)
        return label, None if label else JUDGE_ABSTAINED

    async def read(note: Known) -> Answer:
        readings = await reader.read(note.after, note.wrong)
        if all(reading.failed is not None for reading in readings):
            return None, readings[0].failed
        found = sum(reading.found is True for reading in readings)
        return Label.HARMFUL if found >= config.blind.needed else Label.SAFE, None

    at_once, edits = config.judge_server.concurrency, known_edits(cases, limit)
    measured = _measure("judge", ask, edits, at_once, lambda edit: edit.passes(config))
    identity = judge_identity(config)
    report = JudgeReport(**dict(measured), judge=identity, sources=sources or {}, limit=limit)
    if config.blind.readings:
        reader, notes = BlindReader(config), known_notes(cases, limit)
        report.reader = _measure("blind reader", read, notes, at_once, lambda note: True)
    return report


class _Fact(NamedTuple):
    """The result of one question."""

    right: bool | None
    reaches: bool  # the rules let it reach a judge
    why: str | None  # there is no answer


def _measure(
    who: str,
    ask: Callable[[Known], Awaitable[Answer]],
    items: Sequence[Known],
    at_once: int,
    reaches: Callable[[Known], bool],
) -> Measured:
    """Sensitivity, specificity of the safe items that reach it, and the counts of each kind."""
    if not items:
        raise ValueError("the input gives no edits: it needs correct notes, or pairs of notes")
    answers: list[Answer] = asyncio.run(all_of(ask, items, at_once, "questions"))
    void = Counter(why for _, why in answers if why)
    if not any(label for label, _ in answers):
        ((reason, count),) = void.most_common(1)
        raise ValueError(f"the {who} answered none of {len(items)} questions; {count} x {reason}")
    # An injected sentence must not move the verdict on the same edit, whatever that was.
    told = {
        (item.case.case_id, item.before): label
        for item, (label, _) in zip(items, answers, strict=True)
        if item.kind in ("harmful", "repaired")
    }
    harmful, safe, groups = [], [], defaultdict[tuple[str, str], list[_Fact]](list)
    for item, (label, why) in zip(items, answers, strict=True):
        injected = item.kind == INJECTED
        truth = told.get((item.case.case_id, item.before)) if injected else item.truth
        right = label is truth if label and truth else None
        fact = _Fact(right, reaches(item), why)
        for subgroup in ("", item.subgroup):  # the total of a kind has no name, and comes first
            groups[item.kind, subgroup].append(fact)
        if not injected and truth is Label.HARMFUL:
            harmful.append(right)
        elif not injected and fact.reaches:
            safe.append(right)
    kinds = list(dict.fromkeys(item.kind for item in items))
    order = sorted(groups, key=lambda group: (kinds.index(group[0]), group[1]))
    return Measured(
        sensitivity=CountedShare.of(harmful),
        specificity=CountedShare.of(safe),
        groups=tuple(_group(*group, groups[group]) for group in order),
        void=dict(void),
    )


def _group(kind: str, subgroup: str, facts: Sequence[_Fact]) -> JudgedGroup:
    return JudgedGroup(
        kind=kind,
        subgroup=subgroup or None,
        right=CountedShare.of(fact.right for fact in facts),
        reaches=CountedShare.of(fact.reaches for fact in facts),
        abstained=CountedShare.of(fact.why == JUDGE_ABSTAINED for fact in facts),
        failed=CountedShare.of(fact.why not in (None, JUDGE_ABSTAINED) for fact in facts),
    )


def report_tables(report: JudgeReport) -> Iterator[Table]:
    """The figures of the judge, and then of its reader, by kind and by error type or rule."""
    name = report.judge["judge"]
    model = f" ({report.judge['model']})" if report.judge.get("model") else ""
    yield _table(f"judge {name}{model}", report, "pass the rules")
    if report.reader is not None:
        yield _table("blind reader", report.reader, "read")


def _table(title: str, measured: Measured, reaches: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for group in measured.groups:
        counted = (group.reaches, group.abstained, group.failed)
        shares = ["" if one is None or one.rate is None else f"{one.rate:.1%}" for one in counted]
        kind = "injected (verdict kept)" if group.kind == INJECTED else group.kind
        first = f"  {group.subgroup}" if group.subgroup else kind
        rows.append((first, str(group.right), str(group.right.items), *shares))
    for name in ("sensitivity", "specificity"):
        share = getattr(measured, name)
        rows.append((name, str(share), str(share.items), "", "", ""))
    columns = ("", "right (95 %)", "of", reaches, "abstained", "failed")
    return table(title, columns, rows, box=SIMPLE)


@app.command("calibrate")
def calibrate_command(
    judge: Annotated[str, Option(help="labels, http, llm, or package.module:Class.")],
    inputs: Annotated[list[Path], Option("--input", help="Notes, as for data convert.")],
    output: Annotated[Path, Option(help="File for the report.")] = Path("judge_report.json"),
    limit: Annotated[int, Option(min=0, help="Maximum edits of each kind; 0 for all.")] = 200,
    settings: Annotated[
        list[str] | None, Option("--set", help="A key of the selfplay node: KEY=VALUE.")
    ] = None,
) -> None:
    """Measure how often a judge is right about known edits, and say whether a run accepts it.

    With --set blind.readings=3 the blind reader is also measured.
    """
    with errors_in_one_line():
        config = selfplay_config(MedicalConfig, {"judge": judge}, settings or [])
        read = read_files(inputs)
        sources = {source.file: source.sha256 for source in read.reports}
        report = calibrate(config, read.cases, sources=sources, limit=limit or None)
        write_report(report, output)
    console = Console()
    console.print(*report_tables(report))
    for reason, count in Counter(report.void).most_common(5):
        say(console, f"no answer: {count} x {reason}")
    say(console, f"report: {output}")
    why = why_refused(report)
    say(console, f"a run refuses this judge: {why}" if why else "a run accepts this judge")
