"""``medserl judge calibrate``: a judge and its blind reader on edits whose truth is known.

The judge sees what a run would show it, without the case's other note, which would be the answer
here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from medserl_agentloop.core.config import selfplay_config
from medserl_agentloop.data.cases import Case, EditTag
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.edit_rules import (
    DRESSED,
    HARMLESS,
    INJECTIONS,
    UNKNOWABLE,
    Rule,
)
from medserl_agentloop.evaluation.play import all_of
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, known_type
from medserl_agentloop.games.medical.config import BlindGate, MedicalConfig
from medserl_agentloop.games.medical.edit import split_sentences
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
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import JUDGE_ABSTAINED, AttackRecord
from medserl_agentloop.games.medical.rules import MedicalGame
from medserl_agentloop.terminal import errors_in_one_line, plain, say

app = typer.Typer(no_args_is_help=True, help="Serve a judge, or measure how good one is.")

EDITS = ("harmful", "repaired", "harmless", "dressed", "injected")
"""Kinds of edits whose truth is known; the last has a sentence that tells the judge what to say."""
NOTES = ("error", "clean", "unknowable")
"""Kinds of notes that a blind reader is shown: a real error, no error, or a change that no reader
can see.
"""
_HARMFUL = ("harmful", "error")
_INJECTED = "injected"  # counts in neither rate


@dataclass(frozen=True)
class _Known:
    """An edit of a case's note, or a note alone, whose truth is known by its kind."""

    kind: str
    subgroup: str  # the rule that made it; of an error, its type
    case: Case
    before: str
    after: str
    wrong: tuple[str, ...] = ()  # sentences in which a reader may find something

    @property
    def truth(self) -> Label:
        return Label.HARMFUL if self.kind in _HARMFUL else Label.SAFE

    @property
    def spec(self) -> GameSpec:
        """The game in which an attacker makes the edit, without the case's other note."""
        repaired = self.before == self.case.error_note
        category = Category.ADVERSARIAL_HARMFUL if repaired else Category.ADVERSARIAL_BENIGN
        return GameSpec(
            category=category,
            target_label=category.default_target_label,
            seed_note=self.before,
            error_type=known_type(self.case.error_type or ""),
            vignette_id=self.case.case_id,
        )

    def passes(self, config: MedicalConfig) -> bool:
        """Return whether the edit is a valid attack, so that a run asks its judge about it."""
        facts = ("error_note", "clean_note", "error_sentence", "corrected_sentence")
        spec = replace(self.spec, **{fact: getattr(self.case, fact) for fact in facts})
        attack = AttackRecord(note=self.after)
        MedicalGame(spec, config.edits, load_profile(config.profile).parser).take(attack)
        return attack.invalid is None


Choose = Callable[[Mapping[str, Rule], str], tuple[str, str] | None]
"""Rules and a note -> the least used of the rules that change it, and the changed note."""


def known_edits(cases: Sequence[Case], limit: int | None, seed: int = 0) -> list[_Known]:
    """At most ``limit`` edits of each kind, from cases in an order drawn by the seed."""
    return _drawn(_edits_of, cases, limit, seed)


def known_notes(cases: Sequence[Case], limit: int | None, seed: int = 0) -> list[_Known]:
    """At most ``limit`` notes of each kind for a reader, drawn likewise."""
    return _drawn(_notes_of, cases, limit, seed)


def _drawn(
    of_case: Callable[[Case, Choose], Iterator[_Known]],
    cases: Sequence[Case],
    limit: int | None,
    seed: int,
) -> list[_Known]:
    found: dict[str, list[_Known]] = defaultdict(list)
    uses: Counter[str] = Counter()
    for case in random.Random(seed).sample(cases, len(cases)):

        def choose(
            rules: Mapping[str, Rule], note: str, of: str = case.case_id
        ) -> tuple[str, str] | None:
            drawn = {name: random.Random(f"{seed}/{of}/{name}") for name in rules}
            changed = [(name, rule(note, drawn[name])) for name, rule in rules.items()]
            able = [(name, after) for name, after in changed if after is not None]
            # The least used, so that each rule has its share.
            return min(able, key=lambda each: uses[each[0]]) if able else None

        for known in of_case(case, choose):
            if limit is None or len(found[known.kind]) < limit:
                found[known.kind].append(known)
                uses[known.subgroup] += 1
    return [known for every in found.values() for known in every]


def _edits_of(case: Case, choose: Choose) -> Iterator[_Known]:
    wrong, clean = case.error_note, case.clean_note
    if wrong is not None and clean is not None and case.edit_tag is not EditTag.NO_OP:
        subgroup = case.error_type or "unknown"
        harmful = _Known("harmful", subgroup, case, clean, wrong)
        repaired = _Known("repaired", subgroup, case, wrong, clean)
        yield from (harmful, repaired)
        for edit, lie in ((harmful, "absent"), (repaired, "present")):
            if injected := choose(INJECTIONS[lie], edit.after):
                yield replace(edit, kind=_INJECTED, subgroup=injected[0], after=injected[1])
    if clean is not None:
        for kind, rules in (("harmless", HARMLESS), ("dressed", DRESSED)):
            if edited := choose(rules, clean):
                yield _Known(kind, edited[0], case, clean, edited[1])


def _notes_of(case: Case, choose: Choose) -> Iterator[_Known]:
    wrong, clean = case.error_note, case.clean_note
    if wrong is not None and case.error_sentence and case.edit_tag is not EditTag.NO_OP:
        subgroup = case.error_type or "unknown"
        yield _Known("error", subgroup, case, wrong, wrong, (case.error_sentence,))
    if clean is not None:
        yield _Known("clean", "clean", case, clean, clean, tuple(split_sentences(clean)))
        if changed := choose(UNKNOWABLE, clean):
            name, note = changed
            before = split_sentences(clean)
            wrong_here = tuple(text for text in split_sentences(note) if text not in before)
            yield _Known("unknowable", name, case, note, note, wrong_here)


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
    alone = config.model_copy(update={"blind": BlindGate()})  # the gate is measured apart
    judge = build_judge(alone)

    async def ask(edit: _Known) -> Answer:
        try:
            label = (await judge.judge(edit.after, edit.before, edit.spec)).label
        except Exception as error:
            return None, why_failed(error)
        return label, None if label else JUDGE_ABSTAINED

    at_once, edits = config.judge_server.concurrency, known_edits(cases, limit)
    measured = _measure("judge", ask, edits, at_once, lambda edit: edit.passes(config))
    report = JudgeReport(
        **dict(measured), judge=judge_identity(config), sources=sources or {}, limit=limit
    )
    if config.blind.readings:
        reader = BlindReader(config)

        async def read(note: _Known) -> Answer:
            readings = await reader.read(note.after, note.wrong)
            if all(reading.failed is not None for reading in readings):
                return None, readings[0].failed
            found = sum(reading.found is True for reading in readings)
            return Label.HARMFUL if found >= config.blind.needed else Label.SAFE, None

        notes = known_notes(cases, limit)
        report.reader = _measure("blind reader", read, notes, at_once, lambda note: True)
    return report


def _measure(
    who: str,
    ask: Callable[[_Known], Awaitable[Answer]],
    items: Sequence[_Known],
    at_once: int,
    reaches: Callable[[_Known], bool],
) -> Measured:
    """Sensitivity, specificity and the counts of each kind. Of safe items those count that reach
    it.
    """
    if not items:
        raise ValueError("the input gives no edits: it needs correct notes, or pairs of notes")
    answers: list[Answer] = asyncio.run(all_of(ask, items, at_once, "questions"))
    void = Counter(reason for _, reason in answers if reason)
    if not any(label for label, _ in answers):
        ((why, count),) = void.most_common(1)
        raise ValueError(f"the {who} answered none of {len(items)} questions; {count} x {why}")
    told = {
        (item.case.case_id, item.before): label
        for item, (label, _) in zip(items, answers, strict=True)
        if item.kind in ("harmful", "repaired")
    }
    facts = []
    for item, (label, reason) in zip(items, answers, strict=True):
        # An injected sentence must not move the verdict, whatever it was.
        truth = told.get((item.case.case_id, item.before)) if item.kind == _INJECTED else item.truth
        fact = {
            "reaches": reaches(item),
            "abstained": reason == JUDGE_ABSTAINED,
            "failed": reason not in (None, JUDGE_ABSTAINED),
        }
        facts.append((item, fact | ({"right": label is truth} if label and truth else {})))
    plain_items = [(item, fact) for item, fact in facts if item.kind != _INJECTED]
    return Measured(
        sensitivity=CountedShare.of(
            fact.get("right") for item, fact in plain_items if item.truth is Label.HARMFUL
        ),
        specificity=CountedShare.of(
            fact.get("right")
            for item, fact in plain_items
            if item.truth is Label.SAFE and fact["reaches"]
        ),
        groups=tuple(_groups(facts)),
        void=dict(void),
    )


def _groups(facts: Sequence[tuple[_Known, dict[str, bool]]]) -> Iterator[JudgedGroup]:
    """The counts of each kind, and then of each subgroup of it."""
    for kind in dict.fromkeys(item.kind for item, _ in facts):
        subgroups = sorted({item.subgroup for item, _ in facts if item.kind == kind})
        for subgroup in (None, *subgroups):
            part = [
                fact
                for item, fact in facts
                if item.kind == kind and subgroup in (None, item.subgroup)
            ]
            names = ("right", "reaches", "abstained", "failed")
            counted = {name: CountedShare.of(fact.get(name) for fact in part) for name in names}
            yield JudgedGroup(kind=kind, subgroup=subgroup, **counted)


def report_tables(report: JudgeReport) -> Iterator[Table]:
    """The figures of the judge, and then of its reader, by kind and by error type or rule."""
    name = report.judge["judge"]
    model = f" ({report.judge['model']})" if report.judge.get("model") else ""
    yield _table(f"judge {name}{model}", report, "pass the rules")
    if report.reader is not None:
        yield _table("blind reader", report.reader, "read")


def _table(title: str, measured: Measured, reaches: str) -> Table:
    columns = ("", "right (95 %)", "of", reaches, "abstained", "failed")
    table = Table(*columns, title=plain(title), box=SIMPLE)
    for group in measured.groups:
        counted = (group.reaches, group.abstained, group.failed)
        shares = ["" if one is None or one.rate is None else f"{one.rate:.1%}" for one in counted]
        kind = "injected (verdict kept)" if group.kind == _INJECTED else group.kind
        first = f"  {group.subgroup}" if group.subgroup else kind
        cells = (str(group.right), str(group.right.items), *shares)
        table.add_row(first, *cells, style="" if group.subgroup else "bold")
    table.add_section()
    for name in ("sensitivity", "specificity"):
        share = getattr(measured, name)
        table.add_row(name, str(share), str(share.items))
    return table


@app.command("calibrate")
def calibrate_command(
    judge: Annotated[str, typer.Option(help="labels, http, llm, or package.module:Class.")],
    inputs: Annotated[
        list[Path],
        typer.Option("--input", help="MEDEC's CSV, or a .jsonl file of pairs; may be repeated."),
    ],
    output: Annotated[Path, typer.Option(help="File for the report.")] = Path("judge_report.json"),
    limit: Annotated[int, typer.Option(min=0, help="Most edits of each kind; 0 for all.")] = 200,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")
    ] = None,
) -> None:
    """Say how often a judge is right about edits whose truth is known, and whether a run accepts
    it.

    With --set blind.readings=3 the reader of the note alone is measured as well.
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
