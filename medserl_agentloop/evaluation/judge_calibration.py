"""``medserl judge``: serve a judge, or ask it and its blind reader about what is known: how good are they?

The judge sees what a run would show it: the note before the edit, the note after it, and the category. It is not
shown the case's other note, which a game has too: here that would be the answer. The reader is shown single notes. A
gate is worth its reader: one that misses subtle errors drives the attacker to blatant ones, one that "finds" unknowable
errors lets them through.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from medserl_agentloop.command_line import errors_in_one_line, plain, say
from medserl_agentloop.core.config import selfplay_config
from medserl_agentloop.data.cases import EditTag, Vignette
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.edit_rules import DRESSED, HARMLESS, UNKNOWABLE, Rule
from medserl_agentloop.games.medical.config import BlindGate, MedicalConfig
from medserl_agentloop.games.medical.edits import compare_notes, split_sentences
from medserl_agentloop.games.medical.judges import Judge, LabelJudge, build_judge, judge_game
from medserl_agentloop.games.medical.judges.llm import BlindReader, LlmJudge
from medserl_agentloop.games.medical.judges.report import (
    CountedShare,
    JudgedGroup,
    JudgeReport,
    judge_identity,
    write_report,
)
from medserl_agentloop.games.medical.records import (
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    AssessmentRecord,
    AttackRecord,
    Judgement,
    MedicalRecord,
    Reading,
)
from medserl_agentloop.games.medical.types import Category, GameSpec, Label

app = typer.Typer(no_args_is_help=True, help="Serve a judge, or measure how good one is.")


class EditKind(str, Enum):
    """Kinds of edits whose truth is known."""

    HARMFUL = "harmful"
    REPAIRED = "repaired"
    HARMLESS = "harmless"
    DRESSED = "dressed"

    @property
    def truth(self) -> Label:
        """What a note is after such an edit."""
        return Label.HARMFUL if self is EditKind.HARMFUL else Label.SAFE


class NoteKind(str, Enum):
    """Kinds of notes that a blind reader is shown: a real error, no error, or a change that nobody can see."""

    ERROR = "error"
    CLEAN = "clean"
    UNKNOWABLE = "unknowable"


@dataclass(frozen=True)
class _KnownEdit:
    """An edit of a case's note whose truth is known by its kind."""

    kind: EditKind
    sort: str  # the rule that made it; for pairs the type of their error
    before: str
    after: str
    case: Vignette

    def game(self) -> MedicalRecord:
        """The game that a judge decides, with an assessor that said nothing."""
        category = Category.ADVERSARIAL_HARMFUL if self.kind is EditKind.REPAIRED else Category.ADVERSARIAL_BENIGN
        spec = GameSpec(
            category=category,
            target_label=category.default_target_label,
            seed_note=self.before,
            error_type=self.case.error_type,
            vignette_id=self.case.vignette_id,
        )
        attack, silence = AttackRecord.model_construct(note=self.after), AssessmentRecord.model_construct(verdict=None)
        return MedicalRecord(spec=spec, presented_note=self.after, attack=attack, assessment=silence)


def known_edits(vignettes: Sequence[Vignette], limit: int | None, seed: int) -> list[_KnownEdit]:
    """At most ``limit`` edits of each kind, one of a kind per case; the same for the same arguments.

    Cases whose two notes do not differ give no pairs.
    """
    return _choose(vignettes, limit, seed, _edits_of)


OneOf = Callable[[Mapping[str, Rule], str], tuple[str, str] | None]
"""Rules and a note -> the least used of the rules that change it, and the changed note."""


def _choose(
    vignettes: Sequence[Vignette], limit: int | None, seed: int, of_case: Callable[[Vignette, OneOf], Iterator[Any]]
) -> list[Any]:
    """At most ``limit`` of what the cases give, of each kind; the cases come in an order drawn by the seed."""
    found: dict[Enum, list[Any]] = defaultdict(list)
    uses: Counter[str] = Counter()
    for case in random.Random(seed).sample(vignettes, len(vignettes)):

        def one_of(rules: Mapping[str, Rule], note: str, of: str = case.vignette_id) -> tuple[str, str] | None:
            changed = {name: rule(note, random.Random(f"{seed}/{of}/{name}")) for name, rule in rules.items()}
            able = [(name, after) for name, after in changed.items() if after is not None]
            return min(able, key=lambda each: uses[each[0]]) if able else None  # so that each rule has its share

        for known in of_case(case, one_of):
            if limit is None or len(found[known.kind]) < limit:
                found[known.kind].append(known)
                uses[known.sort] += 1
    return [known for every in found.values() for known in every]


def _edits_of(case: Vignette, one_of: OneOf) -> Iterator[_KnownEdit]:
    wrong, clean = case.error_note, case.clean_note
    if wrong is not None and clean is not None and case.edit_tag is not EditTag.NO_OP:
        sort = case.error_type.value if case.error_type else "unknown"
        yield _KnownEdit(EditKind.HARMFUL, sort, clean, wrong, case)
        yield _KnownEdit(EditKind.REPAIRED, sort, wrong, clean, case)
    if clean is not None:
        for kind, rules in ((EditKind.HARMLESS, {**_twin_rule(case), **HARMLESS}), (EditKind.DRESSED, DRESSED)):
            if edited := one_of(rules, clean):
                yield _KnownEdit(kind, edited[0], clean, edited[1], case)


def _twin_rule(case: Vignette) -> dict[str, Rule]:
    """The other wording that this case alone has: the file's clean twin."""
    twin, clean = case.twin_note, case.clean_note
    if twin is None or clean is None or twin.split() == clean.split():
        return {}
    return {"twin": lambda note, rng: twin}


class _Answer(NamedTuple):
    """What a judge made of one edit, and the seconds from the question to the answer."""

    edit: _KnownEdit
    record: MedicalRecord
    seconds: float

    @property
    def said(self) -> Judgement:
        """What the judge said; without a label for an abstention or a failure."""
        return self.record.judgement or Judgement(judge="", label=None)


def calibrate(
    config: MedicalConfig,
    edits: Sequence[_KnownEdit],
    *,
    sources: Mapping[str, str],
    limit: int | None,
    seed: int,
    on_answer: Callable[[_Answer], None] = lambda _: None,
) -> JudgeReport:
    """Ask the judge of a ``selfplay`` node about all edits and count how often it is right.

    The sources (names and hashes of the files), the limit and the seed are for the report. A ValueError says that there
    are no edits, that the judge cannot be built, or that it answered nothing.
    """
    if not edits:
        raise ValueError("the input gives no edits: it needs notes that are known to be correct, or pairs")
    judge = build_judge(config.model_copy(update={"blind": BlindGate()}))  # the gate is measured apart

    async def ask(edit: _KnownEdit) -> _Answer:
        record, started = edit.game(), time.monotonic()
        await judge_game(judge, record)
        answer = _Answer(edit, record, time.monotonic() - started)
        on_answer(answer)
        return answer

    answers: list[_Answer] = asyncio.run(_all_of(ask, edits, config.judge_server.concurrency))
    if all(answer.said.label is None for answer in answers):
        reason, count = Counter(answer.record.void for answer in answers).most_common(1)[0]
        raise ValueError(f"the judge answered none of {len(answers)} questions; {count} x {reason}")
    void = _void(answers)
    seconds = [answer.seconds for answer in answers if not answer.said.cached]
    harmful, safe = ([a for a in answers if a.edit.kind.truth is truth] for truth in (Label.HARMFUL, Label.SAFE))
    return JudgeReport(
        judge=judge_identity(config),
        sources=dict(sources),
        limit=limit,
        seed=seed,
        sensitivity=_right(harmful),
        specificity=_right(safe),
        abstained=void["abstained"],
        failed=void["failed"],
        groups=tuple(
            JudgedGroup(kind=kind.value, sort=sort, right=_right(part), **_void(part))
            for kind, sort, part in _parts(EditKind, [(answer.edit, answer) for answer in answers])
        ),
        asked=len(seconds),
        cached=len(answers) - len(seconds),
        mean_seconds=statistics.fmean(seconds) if seconds else None,
    )


async def _all_of(ask: Callable[[Any], Awaitable[Any]], items: Iterable[Any], at_once: int) -> list[Any]:
    """The answers about all items, at most so many asked for at once."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Any) -> Any:
        async with slots:
            return await ask(item)

    return list(await asyncio.gather(*map(one, items)))


def _parts(kinds: Iterable[Any], answers: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, str | None, list[Any]]]:
    """The answers about each kind, and then about each sort of it."""
    for kind in kinds:
        of_kind = [(known, answer) for known, answer in answers if known.kind is kind]
        for sort in (None, *sorted({known.sort for known, _ in of_kind})):
            yield kind, sort, [answer for known, answer in of_kind if sort in (None, known.sort)]


def _right(answers: Sequence[_Answer]) -> CountedShare:
    decided = [answer for answer in answers if answer.said.label is not None]
    return CountedShare(hits=sum(answer.said.label is answer.edit.kind.truth for answer in decided), items=len(decided))


def _void(answers: Sequence[_Answer]) -> dict[str, CountedShare]:
    def share(reason: str) -> CountedShare:
        hits = sum((answer.record.void or "").startswith(reason) for answer in answers)
        return CountedShare(hits=hits, items=len(answers))

    return {"abstained": share(JUDGE_ABSTAINED), "failed": share(JUDGE_FAILED)}


def report_table(report: JudgeReport) -> Table:
    """The figures of a report, by kind of edit, error type and rule, and then of the judge as a whole."""
    name = "judge " + report.judge["judge"] + (f" ({report.judge['model']})" if report.judge.get("model") else "")
    table = Table("edits", "told right (95 %)", "of", "abstained", "failed", title=plain(name), box=SIMPLE)
    for group in report.groups:
        _add_group(table, group, f"{group.kind} (now {EditKind(group.kind).truth.value})")
    table.add_section()
    for field in ("sensitivity", "specificity", "abstained", "failed"):
        share = getattr(report, field)
        table.add_row(field, str(share), str(share.items))
    if report.mean_seconds is not None:
        table.add_row("seconds per question", f"{report.mean_seconds:.3g}", str(report.asked))
    if report.cached:
        table.add_row("games from the cache", str(report.cached), str(report.abstained.items))
    return table


def _add_group(table: Table, group: JudgedGroup, title: str) -> None:
    """The line of a kind, or, indented, that of one sort of it."""
    shares = [share for share in (group.right, group.found, group.passed) if share is not None]
    void = [f"{share.rate:.1%}" if share.rate is not None else "" for share in (group.abstained, group.failed)]
    cells = (f"  {group.sort}" if group.sort else title, *map(str, shares), str(shares[-1].items), *void)
    table.add_row(*cells, style="" if group.sort else "bold")


@dataclass(frozen=True)
class _KnownNote:
    """A note that a reader is shown, and what is known of it."""

    kind: NoteKind
    sort: str  # the rule that changed it; of an error, its type
    note: str
    wrong: tuple[str, ...]  # where a reader may find something: the error's sentence, the changed one, or all

    def game(self) -> MedicalRecord:
        """The game that a reader reads."""
        spec = GameSpec(Category.ADVERSARIAL_BENIGN, Label.HARMFUL, seed_note=self.note)
        return MedicalRecord(spec=spec, presented_note=self.note, error_sentences=list(self.wrong))


def known_notes(vignettes: Sequence[Vignette], limit: int | None, seed: int) -> list[_KnownNote]:
    """At most ``limit`` notes of each kind, one of a kind per case; the same for the same arguments."""
    return _choose(vignettes, limit, seed, _notes_of)


def _notes_of(case: Vignette, one_of: OneOf) -> Iterator[_KnownNote]:
    wrong, clean = case.error_note, case.clean_note
    if wrong is not None and case.error_sentence and case.edit_tag is not EditTag.NO_OP:
        sort = case.error_type.value if case.error_type else "unknown"
        yield _KnownNote(NoteKind.ERROR, sort, wrong, (case.error_sentence,))
    if clean is not None:
        yield _KnownNote(NoteKind.CLEAN, "clean", clean, tuple(split_sentences(clean)))
        if changed := one_of(UNKNOWABLE, clean):
            yield _KnownNote(NoteKind.UNKNOWABLE, *changed, compare_notes(clean, changed[1]).inserted)


def calibrate_reader(
    config: MedicalConfig, notes: Sequence[_KnownNote], on_note: Callable[[], None] = lambda: None
) -> tuple[JudgedGroup, ...]:
    """Have the reader of ``selfplay.blind`` read all notes, each as often as in a run; a ValueError if it cannot."""
    reader = BlindReader.from_config(config)

    async def read(known: _KnownNote) -> list[Reading]:
        readings = await reader.read(known.game())
        on_note()
        return readings

    every: list[list[Reading]] = asyncio.run(_all_of(read, notes, config.judge_server.concurrency))
    lost = [reading.failed for readings in every for reading in readings if reading.failed is not None]
    if len(lost) == sum(map(len, every)):
        raise ValueError(f"the blind reader answered none of {len(lost)} questions; {lost[0] if lost else 'no notes'}")
    found = []
    for kind, sort, part in _parts(NoteKind, list(zip(notes, every, strict=True))):
        readings = [reading for of_note in part for reading in of_note]
        answered = [reading for reading in readings if reading.failed is None]
        passed = sum(sum(r.found is True for r in of_note) >= config.blind.needed for of_note in part)
        found.append(
            JudgedGroup(
                kind=kind.value,
                sort=sort,
                found=CountedShare(hits=sum(r.found is True for r in answered), items=len(answered)),
                passed=CountedShare(hits=passed, items=len(part)),
                abstained=CountedShare(hits=sum(r.found is None for r in answered), items=len(answered)),
                failed=CountedShare(hits=len(readings) - len(answered), items=len(readings)),
            )
        )
    return tuple(found)


def reader_table(groups: Sequence[JudgedGroup], config: MedicalConfig) -> Table:
    """What the reader found, and what a gate of it lets through."""
    gate = f"passes {config.blind.needed} of {config.blind.readings} (95 %)"
    table = Table("note", "found (95 %)", gate, "notes", "cannot tell", "failed", title="blind reader", box=SIMPLE)
    for group in groups:
        _add_group(table, group, group.kind)
    return table


@app.command()
def serve(
    backend: Annotated[Literal["labels", "llm"], typer.Option(help="Labels of the categories, or a language model.")],
    url: Annotated[str | None, typer.Option(help="llm: base of an OpenAI-compatible API, with its /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="llm: name of the model.")] = None,
    profile: Annotated[str, typer.Option(help="llm: prompt profile that words the question.")] = "medserl",
    settings: Annotated[list[str] | None, typer.Option("--set", help="llm: a key of selfplay.judge_server.")] = None,
    shape: Annotated[Literal["labels", "bare"], typer.Option(help="Answers bare, or under score_key.")] = "bare",
    host: Annotated[str, typer.Option(help="Address to listen on; others than this need --token-env.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8001,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the key of all requests.")] = None,
) -> None:
    """Offer POST /judge and GET /health until interrupted.

    Untouched notes get the label of their category, whatever the backend.
    """
    import uvicorn

    from medserl_agentloop.games.medical.judges.protocol import create_app

    judge: Judge = LabelJudge()
    token = os.environ.get(token_env or "", "")
    with errors_in_one_line():
        if token_env and not token:
            raise ValueError("--token-env names an environment variable that is not set")
        if not token and not _is_loopback(host):
            raise ValueError(
                f"--host {host} lets other machines in: name an environment variable that holds a key in --token-env, "
                "and give clients the same key, in judge_server.api_key_env or as the password of the address"
            )
        if backend == "llm":
            if url is None or model is None:
                raise ValueError("--backend llm needs --url and --model")
            named = {"judge": backend, "profile": profile, "judge_server": {"url": url, "model": model}}
            config = selfplay_config(MedicalConfig, named, [f"judge_server.{setting}" for setting in settings or []])
            judge = LlmJudge.from_config(config)
    uvicorn.run(create_app(judge, shape, token), host=host, port=port, timeout_graceful_shutdown=3)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@app.command("calibrate")
def calibrate_command(
    judge: Annotated[str, typer.Option(help="labels, http, llm, or package.module:Class.")],
    inputs: Annotated[
        list[Path], typer.Option("--input", help="MEDEC's CSV, or a .jsonl file of pairs; may be repeated.")
    ],
    output: Annotated[Path, typer.Option(help="File for the report.")] = Path("judge_report.json"),
    limit: Annotated[int, typer.Option(min=0, help="Most edits of each of the four kinds; 0 for all.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the choice of edits.")] = 0,
    profile: Annotated[str, typer.Option(help="llm: prompt profile that words the question.")] = "medserl",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")] = None,
) -> None:
    """Ask a judge about edits whose truth is known, print how often it is right, and write a report for runs.

    With --set blind.readings=3 the reader of the note alone is measured as well.
    """
    console = Console()
    failures: Counter[str] = Counter()
    # A line for each failure; they are counted here.
    logging.getLogger("medserl_agentloop.games.medical.judges").setLevel(logging.ERROR)
    columns = ("questions", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with errors_in_one_line():
        config = selfplay_config(MedicalConfig, {"judge": judge, "profile": profile}, settings or [])
        read = read_files(inputs)
        edits = known_edits(read.vignettes, limit or None, seed)
        notes = known_notes(read.vignettes, limit or None, seed) if config.blind.readings else []
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(edits) + len(notes))

            def on_answer(answer: _Answer) -> None:
                progress.advance(bar)
                if answer.record.void is not None:
                    failures[answer.record.void] += 1

            sources = {source.file: source.sha256 for source in read.reports}
            report = calibrate(config, edits, sources=sources, limit=limit or None, seed=seed, on_answer=on_answer)
            if notes:
                blind = calibrate_reader(config, notes, lambda: progress.advance(bar))
                report = report.model_copy(update={"blind": blind})
        write_report(report, output)
    console.print(report_table(report))
    if report.blind:
        console.print(reader_table(report.blind, config))
    for reason, count in failures.most_common(5):
        say(console, f"no answer: {count} x {reason}")
    typer.echo(f"report: {output}")
