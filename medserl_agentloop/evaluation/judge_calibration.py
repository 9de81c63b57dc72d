"""``medserl judge``: serve a judge, or measure it and its blind reader on edits whose truth is
known.

The judge sees what a run would show it, without the case's other note, which would be the answer
here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

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
    REWORDED,
    UNKNOWABLE,
    Rule,
)
from medserl_agentloop.evaluation.play import all_of
from medserl_agentloop.games.medical.config import BlindGate, MedicalConfig
from medserl_agentloop.games.medical.edits import compare_notes, split_sentences
from medserl_agentloop.games.medical.judges import Judge, LabelJudge, build_judge, failure
from medserl_agentloop.games.medical.judges.llm import BlindReader, LlmJudge
from medserl_agentloop.games.medical.judges.report import (
    CountedShare,
    JudgedGroup,
    JudgeReport,
    judge_identity,
    write_report,
)
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import JUDGE_ABSTAINED, AttackRecord, Reading
from medserl_agentloop.games.medical.rules import MedicalGame
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, known_type
from medserl_agentloop.terminal import errors_in_one_line, plain, say

app = typer.Typer(no_args_is_help=True, help="Serve a judge, or measure how good one is.")

_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
_SAFE = ("repaired", "reworded", "harmless", "dressed")
EDITS = ("harmful", *_SAFE, "injected")
"""Kinds of edits whose truth is known; the last has a sentence that tells the judge what to say."""
NOTES = ("error", "clean", "unknowable")
"""Kinds of notes that a blind reader is shown: a real error, no error, or a change that nobody can
see.
"""

_Facts = dict[str, bool]
"""Of one answer, by the name of a group's share: whether it is a hit.

Names that are left out do not count.
"""


@dataclass(frozen=True)
class _Known:
    """An edit of a case's note, or a note alone, whose truth is known by its kind."""

    kind: str
    subgroup: str  # the rule that made it; of an error, its type
    case: Case
    before: str
    after: str
    wrong: tuple[
        str, ...
    ] = ()  # where a reader may find something: the error's sentence, the changed one, or all

    @property
    def truth(self) -> Label:
        return Label.HARMFUL if self.kind == "harmful" else Label.SAFE

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
        """Return whether the edit passes the rules as an attack, so that a run asks its judge about
        it.
        """
        facts = ("error_note", "clean_note", "error_sentence", "corrected_sentence")
        spec = replace(self.spec, **{fact: getattr(self.case, fact) for fact in facts})
        attack = AttackRecord(note=self.after)
        MedicalGame(spec, config.edits, load_profile(config.profile).parser).take(attack)
        return attack.invalid is None


OneOf = Callable[[Mapping[str, Rule], str], tuple[str, str] | None]
"""Rules and a note -> the least used of the rules that change it, and the changed note."""


def _choose(
    of_case: Callable[[Case, OneOf], Iterator[_Known]],
    cases: Sequence[Case],
    limit: int | None,
    seed: int,
) -> list[_Known]:
    """Choose at most ``limit`` edits of each kind; the cases come in an order drawn by the seed."""
    found: dict[str, list[_Known]] = defaultdict(list)
    uses: Counter[str] = Counter()
    for case in random.Random(seed).sample(cases, len(cases)):

        def one_of(
            rules: Mapping[str, Rule], note: str, of: str = case.case_id
        ) -> tuple[str, str] | None:
            changed = {
                name: rule(note, random.Random(f"{seed}/{of}/{name}"))
                for name, rule in rules.items()
            }
            able = [(name, after) for name, after in changed.items() if after is not None]
            return (
                min(able, key=lambda each: uses[each[0]]) if able else None
            )  # so that each rule has its share

        for known in of_case(case, one_of):
            if limit is None or len(found[known.kind]) < limit:
                found[known.kind].append(known)
                uses[known.subgroup] += 1
    return [known for every in found.values() for known in every]


def _edits_of(case: Case, one_of: OneOf) -> Iterator[_Known]:
    wrong, clean, twin = case.error_note, case.clean_note, case.twin_note
    if wrong is not None and clean is not None and case.edit_tag is not EditTag.NO_OP:
        subgroup = case.error_type or "unknown"
        harmful = _Known("harmful", subgroup, case, clean, wrong)
        repaired = _Known("repaired", subgroup, case, wrong, clean)
        yield from (harmful, repaired)
        for edit, lie in ((harmful, "absent"), (repaired, "present")):
            if injected := one_of(INJECTIONS[lie], edit.after):
                yield replace(edit, kind="injected", subgroup=injected[0], after=injected[1])
    if clean is not None:
        reworded = twin is not None and twin.split() != clean.split()
        twins: dict[str, Rule] = {"twin": lambda note, rng: twin} if reworded else {}
        for kind, rules in (
            ("reworded", REWORDED),
            ("harmless", twins | HARMLESS),
            ("dressed", DRESSED),
        ):
            if edited := one_of(rules, clean):
                yield _Known(kind, edited[0], case, clean, edited[1])


def _notes_of(case: Case, one_of: OneOf) -> Iterator[_Known]:
    wrong, clean = case.error_note, case.clean_note
    if wrong is not None and case.error_sentence and case.edit_tag is not EditTag.NO_OP:
        subgroup = case.error_type or "unknown"
        yield _Known("error", subgroup, case, wrong, wrong, (case.error_sentence,))
    if clean is not None:
        yield _Known("clean", "clean", case, clean, clean, tuple(split_sentences(clean)))
        if changed := one_of(UNKNOWABLE, clean):
            name, note = changed
            yield _Known("unknowable", name, case, note, note, compare_notes(clean, note).inserted)


known_edits = partial(_choose, _edits_of)
"""The edits of each kind, for cases, limit and seed: of a case two injections, else one; no pairs
of equal notes.
"""
known_notes = partial(_choose, _notes_of)  # the notes of each kind for a reader


def calibrate(
    config: MedicalConfig,
    edits: Sequence[_Known],
    *,
    sources: dict[str, str],
    limit: int | None,
    seed: int,
) -> JudgeReport:
    """Count how often a run's judge is right about edits; a ValueError if it cannot be asked or
    never answers.
    """
    if not edits:
        raise ValueError(
            "the input gives no edits: it needs notes that are known to be correct, or pairs"
        )
    judge = build_judge(
        config.model_copy(update={"blind": BlindGate()})
    )  # the gate is measured apart

    async def ask(edit: _Known) -> tuple[Label | None, str | None]:
        """Return the judge's label, or why a game would be void."""
        try:
            label = (await judge.judge(edit.after, edit.before, edit.spec)).label
        except Exception as error:
            return None, failure(judge, error)
        return label, None if label else JUDGE_ABSTAINED

    answers = asyncio.run(all_of(ask, edits, config.judge_server.concurrency, "questions"))
    labels = [label for label, _ in answers]
    void = Counter(reason for _, reason in answers if reason)
    if not any(labels):
        reason, count = void.most_common(1)[0]
        raise ValueError(f"the judge answered none of {len(edits)} questions; {count} x {reason}")
    facts: list[tuple[_Known, _Facts]] = []
    without = {
        (edit.case.case_id, edit.before): label
        for edit, label in zip(edits, labels, strict=True)
        if edit.kind in ("harmful", "repaired")
    }
    for edit, (label, reason) in zip(edits, answers, strict=True):
        expected = (
            without.get((edit.case.case_id, edit.before)) if edit.kind == "injected" else edit.truth
        )
        fact = {
            "abstained": reason == JUDGE_ABSTAINED,
            "failed": reason not in (None, JUDGE_ABSTAINED),
        }
        fact["reaches"] = edit.passes(config)
        facts.append((edit, {"right": label is expected, **fact} if label and expected else fact))

    safe = [fact for edit, fact in facts if edit.kind in _SAFE]
    return JudgeReport(
        judge=judge_identity(config),
        sources=sources,
        limit=limit,
        seed=seed,
        sensitivity=CountedShare.of(
            fact.get("right") for edit, fact in facts if edit.kind == "harmful"
        ),
        specificity=CountedShare.of(fact.get("right") for fact in safe if fact["reaches"]),
        specificity_all=CountedShare.of(fact.get("right") for fact in safe),
        groups=_groups(EDITS, facts, "right", "reaches"),
        void=dict(void),
    )


def calibrate_reader(config: MedicalConfig, notes: Sequence[_Known]) -> tuple[JudgedGroup, ...]:
    """Have the reader of ``selfplay.blind`` read all notes, each as often as in a run; a ValueError
    if it cannot.
    """
    reader = BlindReader(config)

    async def read(known: _Known) -> list[Reading]:
        return await reader.read(known.after, known.wrong)

    every: list[list[Reading]] = asyncio.run(
        all_of(read, notes, config.judge_server.concurrency, "questions")
    )
    lost = [
        reading.failed for readings in every for reading in readings if reading.failed is not None
    ]
    if len(lost) == sum(map(len, every)):
        raise ValueError(
            f"the blind reader answered none of {len(lost)} questions; "
            f"{lost[0] if lost else 'no notes'}"
        )
    facts: list[tuple[_Known, _Facts]] = []
    for known, readings in zip(notes, every, strict=True):
        facts.append(
            (known, {"passed": sum(r.found is True for r in readings) >= config.blind.needed})
        )
        for reading in readings:
            answered = {
                "failed": False,
                "found": reading.found is True,
                "abstained": reading.found is None,
            }
            facts.append((known, {"failed": True} if reading.failed else answered))
    return _groups(NOTES, facts, "found", "passed")


def _groups(
    kinds: Iterable[str], facts: Sequence[tuple[_Known, _Facts]], *shares: str
) -> tuple[JudgedGroup, ...]:
    """The shares of each kind, and then of each subgroup of it."""
    groups = []
    for kind in kinds:
        for subgroup in (
            None,
            *sorted({known.subgroup for known, _ in facts if known.kind == kind}),
        ):
            part = [
                fact
                for known, fact in facts
                if known.kind == kind and subgroup in (None, known.subgroup)
            ]
            names = (*shares, "abstained", "failed")
            counted = {name: CountedShare.of(fact.get(name) for fact in part) for name in names}
            groups.append(JudgedGroup(kind=kind, subgroup=subgroup, **counted))
    return tuple(groups)


def report_tables(report: JudgeReport, gate: BlindGate) -> Iterator[Table]:
    """The figures of a report, by kind of edit, error type and rule, and of the judge as a whole;
    then its reader's.
    """
    name = (
        "judge "
        + report.judge["judge"]
        + (f" ({report.judge['model']})" if report.judge.get("model") else "")
    )
    table = _table(
        name,
        report.groups,
        "edits",
        "told right (95 %)",
        "of",
        "abstained",
        "failed",
        "pass the rules",
    )
    table.add_section()
    for name, share in (
        ("sensitivity", report.sensitivity),
        ("specificity", report.specificity),
        ("  all safe edits", report.specificity_all),
    ):
        table.add_row(name, str(share), str(share.items))
    yield table
    if report.blind:
        passes = f"passes {gate.needed} of {gate.readings} (95 %)"
        yield _table(
            "blind reader",
            report.blind,
            "note",
            "found (95 %)",
            passes,
            "notes",
            "cannot tell",
            "failed",
        )


def _table(title: str, groups: Iterable[JudgedGroup], *columns: str) -> Table:
    """A line for each kind, and, indented, one for each subgroup of it."""
    table = Table(*columns, title=plain(title), box=SIMPLE)
    for group in groups:
        shares = [share for share in (group.right, group.found, group.passed) if share is not None]
        counted = [
            share for share in (group.abstained, group.failed, group.reaches) if share is not None
        ]
        void = [f"{share.rate:.1%}" if share.rate is not None else "" for share in counted]
        kind = "injected (verdict kept)" if group.kind == "injected" else group.kind
        cells = (
            f"  {group.subgroup}" if group.subgroup else kind,
            *map(str, shares),
            str(shares[-1].items),
            *void,
        )
        table.add_row(*cells, style="" if group.subgroup else "bold")
    return table


@app.command()
def serve(
    backend: Annotated[
        Literal["labels", "llm"],
        typer.Option(help="Labels of the categories, or a language model."),
    ],
    url: Annotated[
        str | None, typer.Option(help="llm: base of an OpenAI-compatible API, with its /v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="llm: name of the model.")] = None,
    profile: Annotated[
        str, typer.Option(help="llm: prompt profile that words the question.")
    ] = "medserl",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="llm: a key of selfplay.judge_server.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this need --token-env.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8001,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key of all requests.")
    ] = None,
) -> None:
    """Offer POST /judge and GET /health until interrupted.

    Untouched notes get the label of their category, whatever the backend.
    """
    from medserl_agentloop.medical_team import protocol  # it loads a web framework

    judge: Judge = LabelJudge()
    token = os.environ.get(token_env or "", "")
    with errors_in_one_line():
        if token_env and not token:
            raise ValueError("--token-env names an environment variable that is not set")
        if not token and host not in _THIS_MACHINE:
            raise ValueError(
                f"--host {host} lets other machines in: name an environment variable that holds a "
                "key in --token-env, "
                "and give clients the same key, in judge_server.api_key_env or as the password of "
                "the address"
            )
        if backend == "llm":
            if url is None or model is None:
                raise ValueError("--backend llm needs --url and --model")
            named = {
                "judge": backend,
                "profile": profile,
                "judge_server": {"url": url, "model": model},
            }
            config = selfplay_config(
                MedicalConfig, named, [f"judge_server.{setting}" for setting in settings or []]
            )
            judge = LlmJudge.from_config(config)
    protocol.serve(protocol.create_app(judge, token), host, port)


@app.command("calibrate")
def calibrate_command(
    judge: Annotated[str, typer.Option(help="labels, http, llm, or package.module:Class.")],
    inputs: Annotated[
        list[Path],
        typer.Option("--input", help="MEDEC's CSV, or a .jsonl file of pairs; may be repeated."),
    ],
    output: Annotated[Path, typer.Option(help="File for the report.")] = Path("judge_report.json"),
    limit: Annotated[int, typer.Option(min=0, help="Most edits of each kind; 0 for all.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the choice of edits.")] = 0,
    profile: Annotated[
        str, typer.Option(help="llm: prompt profile that words the question.")
    ] = "medserl",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")
    ] = None,
) -> None:
    """Ask a judge about edits whose truth is known, print how often it is right, and write a report
    for runs.

    With --set blind.readings=3 the reader of the note alone is measured as well.
    """
    # A line for each failure; they are counted here.
    logging.getLogger("medserl_agentloop.games.medical.judges").setLevel(logging.ERROR)
    with errors_in_one_line():
        config = selfplay_config(
            MedicalConfig, {"judge": judge, "profile": profile}, settings or []
        )
        read, most = read_files(inputs), limit or None
        sources = {source.file: source.sha256 for source in read.reports}
        edits = known_edits(read.cases, most, seed)
        report = calibrate(config, edits, sources=sources, limit=most, seed=seed)
        if config.blind.readings:
            blind = calibrate_reader(config, known_notes(read.cases, most, seed))
            report = report.model_copy(update={"blind": blind})
        write_report(report, output)
    console = Console()
    console.print(*report_tables(report, config.blind))
    for reason, count in Counter(report.void).most_common(5):
        say(console, f"no answer: {count} x {reason}")
    typer.echo(f"report: {output}")
