"""Is a parquet file fit to train on? Opened as verl opens it, every row checked.

Called by ``data_prep/verify_parquet.py``. ``verify_rows.py`` looks at single rows, ``verify_leaks.py``
at labels that can be told without reading the note; here is what concerns whole files and several.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.types import Category, GameSpec, Label, VanillaAttacker
from medserl_agentloop.medec.manifest import DIFFERS, differs_from_manifest
from medserl_agentloop.medec.verify_leaks import LeakTest
from medserl_agentloop.medec.verify_open import open_as_verl, parquet_file, parquet_schema, schema_findings
from medserl_agentloop.medec.verify_rows import REMAKE, Check, Finding, check_row, facts_of, messages_of
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.rollout.encoding import ChatEncoder

SHOWN_PER_CHECK = 3  # problems kept in words, for each check of each file; the rest is counted
BALANCE_LIMIT = 0.6
_MUST_VARY = ("prompt", "ground_truth", "category", "seed_note", "vignette_id", "text_id", "index")


@dataclass(frozen=True)
class Problem:
    """Something that does not hold. ``row`` counts from 0 as verl does; None for the whole file."""

    check: Check
    file: str
    row: int | None
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.file}{'' if self.row is None else f', row {self.row}'}: {self.message}."


@dataclass
class FileSummary:
    """What one file holds: rows, presented labels, and tokens of its longest first prompt."""

    file: str
    rows: int
    labels: Counter[str] = field(default_factory=Counter)
    longest_prompt: int = 0


@dataclass
class Report:
    """The result: what was read, the problems in words, and how many there are of each check."""

    files: list[FileSummary] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    failures: Counter[Check] = field(default_factory=Counter)
    warnings: Counter[Check] = field(default_factory=Counter)
    _kept: Counter[tuple[Check, str]] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether every check holds; warnings do not count."""
        return not self.failures

    def add(self, problem: Problem) -> None:
        """Count a problem, and keep its words if its kind is not yet well known."""
        (self.warnings if problem.warning else self.failures)[problem.check] += 1
        kind = (problem.check, problem.file)
        self._kept[kind] += 1
        if self._kept[kind] <= SHOWN_PER_CHECK:
            self.problems.append(problem)


@dataclass
class _Seen:
    """What rows of all files have in common: where each index, case and note was seen first."""

    index: dict[int, str] = field(default_factory=dict)
    case: dict[str, tuple[str, str]] = field(default_factory=dict)
    note: dict[bytes, tuple[str, str]] = field(default_factory=dict)


def verify_files(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    profile: str = "medserl",
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP,
    max_prompt_tokens: int | None = None,
    on_row: Callable[[], None] = lambda: None,
) -> Report:
    """Check every row of every file.

    Args:
        paths: Parquet files that are used together, e.g. train, validation and evaluation rows.
        tokenizer: The tokenizer of the model to train.
        profile: Prompt profile that the files were written with.
        vanilla_attacker: What it was told of the attacker in vanilla games.
        max_prompt_tokens: verl's ``data.max_prompt_length``; None leaves lengths unchecked.
        on_row: Called after each row, for a progress bar.

    Raises:
        UnreadableFile: A file is missing, is not parquet, or verl cannot open it.
        ValueError: The profile does not exist.
    """
    report, seen = Report(), _Seen()
    prompts = load_profile(profile)
    encoder = ChatEncoder(tokenizer, prompts)
    names = _names(paths)
    for path, name in zip(paths, names, strict=True):
        schema = parquet_schema(path)
        for check, message in schema_findings(schema):
            report.add(Problem(check, name, None, message))
        if differs_from_manifest(path):
            report.add(Problem(Check.MANIFEST, name, None, DIFFERS))
        with open_as_verl(path, tokenizer) as dataset:
            rows = len(dataset)
            summary = FileSummary(name, rows)
            report.files.append(summary)
            varying: dict[str, set[int]] = defaultdict(set)
            leaks, only_eval = LeakTest(), True
            for number in range(rows):
                try:
                    row = dataset[number]
                except Exception as error:  # whatever verl raises on a damaged row is the finding
                    message = f"verl cannot hand out the row ({type(error).__name__}: {error}); {REMAKE}"
                    report.add(Problem(Check.OPENS, name, number, message))
                    row = dataset.dataframe[number]
                findings = [
                    *check_row(row, prompts, vanilla_attacker),
                    *_seen_before(row, seen, f"{name}, row {number}"),
                    *_too_long(row, summary, tokenizer, encoder, vanilla_attacker, max_prompt_tokens),
                ]
                for check, message in findings:
                    report.add(Problem(check, name, number, message))
                _note_values(row, varying)
                only_eval &= "_eval/" in str(row.get("data_source"))
                _note_labels(row, summary, leaks)
                on_row()
        for check, message in _constant_columns(rows, varying):
            report.add(Problem(check, name, None, message))
        for problem in (*_imbalance(summary), *_leaks(name, leaks, only_eval)):
            report.add(problem)
    return report


def count_rows(paths: Sequence[Path]) -> int:
    """Rows of all files together, from their footers.

    Raises:
        UnreadableFile: A file is missing or is not parquet.
    """
    return sum(parquet_file(path).metadata.num_rows for path in paths)


def _names(paths: Sequence[Path]) -> list[str]:
    """What to call the files: by name, or by path where two names are the same."""
    twice = len({path.name for path in paths}) < len(paths)
    return [str(path) if twice else path.name for path in paths]


def _seen_before(row: dict[str, Any], seen: _Seen, place: str) -> Iterator[Finding]:
    facts = facts_of(row)
    index = facts.get("index")
    if isinstance(index, int):
        first = seen.index.setdefault(index, place)
        if first != place:
            yield Check.INDEX, f"index {index} is already that of {first}; give every row of all files its own"
    split, case, note = facts.get("split"), facts.get("vignette_id"), facts.get("seed_note")
    if not isinstance(split, str):
        return
    remedy = "split by vignette, or leave one of the files out"
    if isinstance(case, str) and case:
        first_split, first = seen.case.setdefault(case, (split, place))
        if first_split != split:
            yield (
                Check.SPLITS,
                f"vignette {case!a} is in split {split!r} here and in {first_split!r} at {first}; {remedy}",
            )
            return
    if isinstance(note, str) and note:
        digest = hashlib.blake2b(one_line(note).casefold().encode(errors="replace"), digest_size=16).digest()
        first_split, first = seen.note.setdefault(digest, (split, place))
        if first_split != split:
            yield (
                Check.SPLITS,
                f"its note is in split {split!r} here and, under another id, in {first_split!r} at {first}; {remedy}",
            )


def _too_long(
    row: dict[str, Any],
    summary: FileSummary,
    tokenizer: Any,
    encoder: ChatEncoder,
    vanilla_attacker: VanillaAttacker,
    limit: int | None,
) -> Iterator[Finding]:
    messages = messages_of(row)
    if messages is None:
        return
    try:
        spec = GameSpec.from_extra_info(facts_of(row))
        tokens = len(
            encoder.opening(spec.category.first_role(vanilla_attacker.on(facts_of(row))), spec.task, spec.seed_note).ids
        )
    except (ValueError, TypeError):  # a row that cannot be played still has a length for verl
        tokens = len(
            tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        )
    summary.longest_prompt = max(summary.longest_prompt, tokens)
    if limit is not None and tokens > limit:
        yield (
            Check.LENGTH,
            f"the prompt has {tokens} tokens and the limit is {limit}, so the row could not be played; set "
            f"data.max_prompt_length to at least {tokens}, or leave the row out",
        )


def _note_values(row: dict[str, Any], varying: dict[str, set[int]]) -> None:
    facts, reward_model = facts_of(row), row.get("reward_model")
    values = {
        **{name: facts.get(name) for name in _MUST_VARY if name in facts},
        "prompt": json.dumps(row.get("prompt"), sort_keys=True, default=str),
        "ground_truth": reward_model.get("ground_truth") if isinstance(reward_model, dict) else None,
    }
    for name, value in values.items():
        if len(varying[name]) < 2:
            varying[name].add(hash(value))


def _constant_columns(rows: int, varying: dict[str, set[int]]) -> Iterator[Finding]:
    for name in _MUST_VARY:
        if rows > 1 and len(varying[name]) == 1:
            yield (
                Check.CONSTANT,
                f"{name} is the same in all {rows} rows, so that nothing can be learned from it; write the file "
                "again with data_prep/medec_to_parquet.py and a --mix of harmful and benign categories",
            )


def _note_labels(row: dict[str, Any], summary: FileSummary, leaks: LeakTest) -> None:
    facts = facts_of(row)
    try:
        target, category = Label(facts.get("target_label")), Category(facts.get("category"))
    except ValueError:
        return  # reported as a wrong label or fact
    summary.labels[target.value] += 1
    text_id, note = facts.get("text_id"), facts.get("seed_note")
    if isinstance(text_id, str) and isinstance(note, str):
        leaks.add(text_id=text_id, seed_note=note, target_label=target, seed_label=category.seed_label)


def _imbalance(summary: FileSummary) -> Iterator[Problem]:
    harmful, safe = summary.labels["harmful"], summary.labels["safe"]
    if max(harmful, safe) > BALANCE_LIMIT * (harmful + safe):
        message = (
            f"the presented notes are {harmful} harmful and {safe} safe, beyond 60 to 40, so that one constant "
            "answer wins most games; change --mix"
        )
        yield Problem(Check.BALANCE, summary.file, None, message, warning=True)


def _leaks(name: str, leaks: LeakTest, only_eval: bool) -> Iterator[Problem]:
    for leak in leaks.leaks():
        message = (
            f"{leak.feature} tells the {leak.label} in {leak.accuracy:.0%} of the rows without reading the note "
            f"(chance: 50%, both labels weighed alike; p = {leak.chance:.1g}); {leak.remedy}"
        )
        if only_eval:  # official text stays as published, and nothing is trained on it
            message += ", or keep in mind that a model may profit from it here"
        yield Problem(Check.LEAKS, name, None, message, warning=only_eval)
