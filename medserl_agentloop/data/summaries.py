"""What the ``medserl data`` commands print when they are done: tables of what was read, written and left out.

Called by ``cli.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from medserl_agentloop.core.manifest import MANIFEST
from medserl_agentloop.data.allocation import format_mix
from medserl_agentloop.data.conversion import Prepared, labels
from medserl_agentloop.data.eval_rows import EvalRows
from medserl_agentloop.data.reader import ReadReport, ReadResult
from medserl_agentloop.data.rows import RowPlan
from medserl_agentloop.data.sft import SftRows
from medserl_agentloop.data.verify import Report
from medserl_agentloop.data.verify_rows import Check
from medserl_agentloop.games.medical.types import Category


def print_conversion(console: Console, prepared: Prepared, plan: RowPlan, output: Path, dry_run: bool) -> None:
    """Input, rows, what was left out, near-duplicates, files."""
    read, games = prepared.read, prepared.games
    for table in (_input_table(read), _type_table(read), _category_table(prepared)):
        console.print(table)
    dropped = sum(report.dropped_empty for report in read.reports)
    counts = {"records dropped: every field is empty": dropped, **games.exclusions.counts()}
    counts["vignettes kept in one split because they share a note"] = games.sharing_a_note
    console.print(_left_out(counts.items()))
    for report in read.reports:
        for text_id, reason in report.not_joined:
            _say(console, f"not joined: {report.file}, {text_id}: {reason}")
    for pair in prepared.near_duplicates:
        found = f"near-duplicates across the splits: train {pair.train}, val {pair.val}"
        _say(console, f"{found} (4-gram Jaccard {pair.similarity:.2f})")
    _say(console, f"mix {format_mix(plan.mix)}, seed {plan.seed}, profile {plan.profile}")
    for split, rows in (("train", games.train), ("val", games.val)):
        of = labels(games, split)
        written = f"{output / split}.parquet: {len(rows)} rows"
        _say(console, f"{written}, presented notes {of['harmful']} harmful, {of['safe']} safe")
    _say(console, "nothing was written: --dry-run" if dry_run else f"{output / MANIFEST}: the account")


def print_conversations(console: Console, made: SftRows, output: Path, files: Mapping[str, int]) -> None:
    """Conversations by role and game, what was left out, files with their numbers of conversations."""
    table = _table("Conversations", ["role", "game"], ["train", "val"])
    counts = [Counter((row["game_role"], row["category"]) for row in rows) for rows in (made.train, made.val)]
    for role, category in sorted(counts[0] | counts[1]):
        table.add_row(role, category, *(str(count[role, category]) for count in counts))
    console.print(table)
    if made.left_out:
        console.print(_left_out(sorted(made.left_out.items())))
    for name, count in files.items():
        _say(console, f"{output / name}: {count} conversations")


def print_eval_rows(console: Console, made: EvalRows, output: Path) -> None:
    """Rows by source."""
    table = _table("Rows", ["data_source"], ["rows"])
    for name, count in sorted(Counter(row["data_source"] for row in made.rows).items()):
        table.add_row(Text(name), str(count))
    console.print(table)
    _say(console, f"{output}: {len(made.rows)} rows; {made.dropped_empty} empty records dropped")


def print_report(console: Console, report: Report) -> None:
    """Problems in words, files, checks."""
    for problem in report.problems:
        _say(console, f"{'warning' if problem.warning else 'failed'}: {problem}")
    shown = sum(1 for problem in report.problems if not problem.warning)
    if hidden := sum(report.failures.values()) - shown:
        _say(console, f"and {hidden} more failures of the same kinds")
    table = _table("Files", ["file"], ["rows", "harmful", "safe", "longest prompt, tokens"])
    for file in report.files:
        counts = (file.rows, file.labels["harmful"], file.labels["safe"], file.longest_prompt)
        table.add_row(Text(file.file), *map(str, counts))
    console.print(table)
    table = _table("Checks", ["check", "result"])
    for check in Check:
        failures, warnings = report.failures[check], report.warnings[check]
        words = [f"failed: {failures}"] if failures else []
        words += [f"warnings: {warnings}"] if warnings else []
        table.add_row(Text(check.value), ", ".join(words) or "holds")
    console.print(table)


def _say(console: Console, line: str) -> None:
    # Text and no wrapping: brackets in a name are no markup, and a line can be searched for.
    console.print(Text(line), soft_wrap=True)


def _table(title: str, words: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """An empty table with columns of words, then columns of numbers."""
    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", overflow="fold")
    return table


def _left_out(counts: Iterable[tuple[str, int]]) -> Table:
    """What gives no row, or not every row it could, and why; the manifest has the ids."""
    table = _table("Left out", ["what and why"], ["count"])
    for reason, count in counts:
        if count:
            table.add_row(Text(reason), str(count))
    return table


def _input_table(read: ReadResult) -> Table:
    measures: dict[str, Callable[[ReadReport], int]] = {
        "records read": lambda r: r.records,
        "= empty records, dropped": lambda r: r.dropped_empty,
        "+ pairs (error note and clean note)": lambda r: r.pairs,
        "+ clean rows that are a pair's twin": lambda r: r.twins,
        "+ clean notes without an error note": lambda r: r.clean_only,
        "+ error notes without a clean note": lambda r: r.error_only,
        "pairs whose clean note is the twin's": lambda r: r.pairs_by_twin,
        "pairs edited in more than one place": lambda r: r.non_local_edits,
        "pairs without a real edit (no-op)": lambda r: r.no_op_edits,
        "error sentence number not in the list": lambda r: r.unlisted_error_sentences,
        "OpenRLHF rows joined with their case": lambda r: r.joined,
        "OpenRLHF rows not joined: no error type": lambda r: len(r.not_joined),
        "rows in which misread characters were put right": lambda r: r.repaired,
    }
    table = _table("Input", [""], [report.file for report in read.reports])
    for name, measure in measures.items():
        table.add_row(name, *(str(measure(report)) for report in read.reports))
    return table


def _type_table(read: ReadResult) -> Table:
    total: Counter[str] = Counter()
    for report in read.reports:
        total.update(report.error_types)
    table = _table("Error types", ["type"], ["vignettes"])
    for name, count in total.most_common():
        table.add_row(name, str(count))
    return table


def _category_table(prepared: Prepared) -> Table:
    reports = prepared.games.reports
    title = "Rows (in brackets: vignettes that could serve)"
    table = _table(title, ["category", "presented note"], reports)
    for category in next(iter(reports.values())).rows:
        cells = (f"{r.rows[category]} ({r.eligible[category]})" for r in reports.values())
        table.add_row(category.value, Category(category).default_target_label.value, *cells)
    table.add_section()
    table.add_row("total", "", *(str(sum(r.rows.values())) for r in reports.values()))
    return table
