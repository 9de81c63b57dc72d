"""Is a parquet file fit to train on? Opened as verl opens it, every row checked.

Called by ``medserl data verify``. ``verify_rows.py`` looks at the rows of one file; here is what concerns whole
files and several.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
from rich.console import Console
from rich.progress import track

from medserl_agentloop.core.manifest import DIFFERS, differs_from_manifest
from medserl_agentloop.data.conversion import load_tokenizer
from medserl_agentloop.data.verify_rows import (
    REMAKE,
    Check,
    Finding,
    LabelledRow,
    check_row,
    facts_of,
    find_leaks,
    messages_of,
    truth_of,
)
from medserl_agentloop.data.writing import SCHEMA
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, VanillaAttacker
from medserl_agentloop.paths import resource

SHOWN_PER_CHECK = 3  # problems kept in words, for each check of each file; the rest is counted
BALANCE_LIMIT = 0.6
_FACTS_THAT_VARY = ("category", "seed_note", "vignette_id", "text_id", "index")


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

    @property
    def ok(self) -> bool:
        """Whether every check holds; warnings do not count."""
        return not self.failures

    def add(self, check: Check, file: str, row: int | None, message: str, *, warning: bool = False) -> None:
        """Count a problem, and keep its words if there are few of its kind so far."""
        (self.warnings if warning else self.failures)[check] += 1
        if sum((known.check, known.file) == (check, file) for known in self.problems) < SHOWN_PER_CHECK:
            self.problems.append(Problem(check, file, row, message, warning))


def verify_files(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    profile: str = "medserl",
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP,
    max_prompt_tokens: int | None = None,
) -> Report:
    """Check every row of files that are used together, e.g. train, validation and evaluation rows.

    Args:
        paths: The parquet files.
        tokenizer: The tokenizer of the model to train.
        profile: Prompt profile that the files were written with.
        vanilla_attacker: What they were written with.
        max_prompt_tokens: verl's ``data.max_prompt_length``; None leaves lengths unchecked.

    Raises:
        ValueError: A file is missing, is not parquet, or verl cannot open it; or the profile does not exist.
    """
    report, seen = Report(), _Seen()
    prompts = load_profile(profile)
    encoder = ProfileEncoder(tokenizer, prompts)
    console = Console(stderr=True)
    same_name = len({path.name for path in paths}) < len(paths)
    for path, schema in [(path, _schema_of(path)) for path in paths]:
        name = str(path) if same_name else path.name
        for message in _wrong_columns(schema):
            report.add(Check.SCHEMA, name, None, message)
        if differs_from_manifest(path):
            report.add(Check.MANIFEST, name, None, DIFFERS)
        dataset = _open_as_verl(path, tokenizer)
        summary = FileSummary(name, len(dataset))
        report.files.append(summary)
        rows: list[dict[str, Any]] = []
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        for number in track(range(summary.rows), f"checking {path.name}", **bar):
            findings: list[Finding] = []
            try:
                row = dataset[number]
            except Exception as error:  # whatever verl raises on a damaged row is the finding
                message = f"verl cannot hand out the row ({type(error).__name__}: {error}); {REMAKE}"
                findings.append((Check.OPENS, message))
                row = dataset.dataframe[number]
            findings += check_row(row, prompts, vanilla_attacker)
            findings += seen.before(facts_of(row), f"{name}, row {number}")
            tokens = _prompt_tokens(row, tokenizer, encoder, vanilla_attacker)
            summary.longest_prompt = max(summary.longest_prompt, tokens)
            if max_prompt_tokens is not None and tokens > max_prompt_tokens:
                message = (
                    f"the prompt has {tokens} tokens and the limit is {max_prompt_tokens}, so the row could not be "
                    f"played; set data.max_prompt_length to at least {tokens}, or leave the row out"
                )
                findings.append((Check.LENGTH, message))
            for check, message in findings:
                report.add(check, name, number, message)
            rows.append(row)
        for message in _constant_columns(rows):
            report.add(Check.CONSTANT, name, None, message)
        _check_labels(report, summary, rows)
    return report


def tokenizer_of(path: str | None) -> Any:
    """The tokenizer in a folder; without one the tiny player's.

    Raises:
        ValueError: It cannot be loaded.
    """
    try:
        return load_tokenizer(path or str(resource("assets/tiny_player")))
    except FileNotFoundError:
        raise ValueError("the tiny player is not installed; give the model's tokenizer with --tokenizer.") from None


def _schema_of(path: Path) -> Any:
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: verl reads files that end in .parquet; give such a file.")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; give one written by data_prep/medec_to_parquet.py.")
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise ValueError(
            f"{path}: cannot be read as parquet ({reason}); give a file written by data_prep/medec_to_parquet.py."
        ) from error
    if file.metadata.num_rows == 0:
        raise ValueError(f"{path}: the file has no rows, and verl cannot run on it; leave it out or write it again.")
    return file.schema_arrow


def _wrong_columns(schema: Any) -> Iterator[str]:
    """Every column that is not as ``SCHEMA`` declares it."""
    for column in SCHEMA:
        if column.name not in schema.names:
            yield f"column {column.name!r} is missing; {REMAKE}"
        elif (found := schema.field(column.name).type) != column.type:
            yield (
                f"column {column.name!r} is of type {found}, expected {column.type}; {REMAKE}, because files of "
                "different types cannot be trained on together"
            )
    for name in schema.names:
        if name not in SCHEMA.names:
            yield (
                f"column {name!r} is not part of the format, and verl hands every column to the agent loop; "
                "take it out of the file"
            )


def _open_as_verl(path: Path, tokenizer: Any) -> Any:
    """verl's own dataset of one file, nothing filtered."""
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"filter_overlong_prompts": False, "max_prompt_length": None})
    with tempfile.TemporaryDirectory(prefix="medserl-verify-") as cache:
        # A cache of its own: files that are written again under one name are never read from an old one.
        usual, bars = datasets.config.HF_DATASETS_CACHE, datasets.is_progress_bar_enabled()
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        datasets.disable_progress_bars()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return RLHFDataset(os.fspath(path), tokenizer, config)
        except Exception as error:  # datasets raises many kinds; all mean that training could not start
            raise ValueError(f"{path}: verl's RLHFDataset cannot open it ({error}); {REMAKE}.") from error
        finally:
            datasets.config.HF_DATASETS_CACHE = usual
            if bars:
                datasets.enable_progress_bars()


class _Seen:
    """Where each index, case and note of all files was seen first, and in which split."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Any], tuple[str, str]] = {}

    def before(self, facts: dict[str, Any], place: str) -> Iterator[Finding]:
        """What an earlier row has that only this one may have."""
        index, split = facts.get("index"), facts.get("split")
        case, note = facts.get("vignette_id"), facts.get("seed_note")
        if isinstance(index, int):
            _, first = self._first.setdefault(("index", index), ("", place))
            if first != place:
                yield Check.INDEX, f"index {index} is already that of {first}; give every row of all files its own"
        if not isinstance(split, str):
            return
        keys = {"case": case, "note": one_line(note).casefold() if isinstance(note, str) else None}
        for kind, key in keys.items():
            if not isinstance(key, str) or not key:
                continue
            first_split, first = self._first.setdefault((kind, key), (split, place))
            if first_split != split:
                who, by = (f"vignette {case!a}", "") if kind == "case" else ("its note", ", under another id,")
                message = f"{who} is in split {split!r} here and{by} in {first_split!r} at {first}"
                yield Check.SPLITS, f"{message}; split by vignette, or leave one of the files out"
                return


def _prompt_tokens(
    row: dict[str, Any], tokenizer: Any, encoder: ProfileEncoder, vanilla_attacker: VanillaAttacker
) -> int:
    messages = messages_of(row)
    if messages is None:
        return 0
    try:
        spec = GameSpec.from_extra_info(facts_of(row))
        role = spec.category.first_role(vanilla_attacker.on(facts_of(row)))
        return len(encoder.of(role, spec.task, spec.seed_note).ids)
    except (ValueError, TypeError):  # a row that cannot be played still has a length for verl
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(tokenizer.encode(text))


def _constant_columns(rows: list[dict[str, Any]]) -> Iterator[str]:
    facts = [facts_of(row) for row in rows]
    columns: dict[str, list[Any]] = {
        "prompt": [row.get("prompt") for row in rows],
        "ground_truth": [truth_of(row) for row in rows],
        **{name: [fact[name] for fact in facts if name in fact] for name in _FACTS_THAT_VARY},
    }
    for name, values in columns.items():
        if len(rows) > 1 and len({json.dumps(value, sort_keys=True, default=str) for value in values}) == 1:
            yield (
                f"{name} is the same in all {len(rows)} rows, so that nothing can be learned from it; write the file "
                "again with data_prep/medec_to_parquet.py and a --mix of harmful and benign categories"
            )


def _check_labels(report: Report, summary: FileSummary, rows: list[dict[str, Any]]) -> None:
    """Counts the labels, and reports what would let a player guess them."""
    labelled: list[LabelledRow] = []
    for facts in map(facts_of, rows):
        try:
            target, category = Label(facts.get("target_label")), Category(facts.get("category"))
        except ValueError:
            continue  # reported as a wrong label or fact
        summary.labels[target.value] += 1
        text_id, note = facts.get("text_id"), facts.get("seed_note")
        if isinstance(text_id, str) and isinstance(note, str):
            labelled.append(LabelledRow(text_id, note, target, category.seed_label))
    harmful, safe = summary.labels["harmful"], summary.labels["safe"]
    if max(harmful, safe) > BALANCE_LIMIT * (harmful + safe):
        message = (
            f"the presented notes are {harmful} harmful and {safe} safe, beyond 60 to 40, so that one constant "
            "answer wins most games; change --mix"
        )
        report.add(Check.BALANCE, summary.file, None, message, warning=True)
    only_eval = all("_eval/" in str(row.get("data_source")) for row in rows)
    for leak in find_leaks(labelled):
        message = (
            f"{leak.feature} tells the {leak.label} in {leak.accuracy:.0%} of the rows without reading the note "
            f"(chance: 50%, both labels weighed alike; p = {leak.chance:.1g}); {leak.remedy}"
        )
        if only_eval:  # official text stays as published, and nothing is trained on it
            message += ", or keep in mind that a model may profit from it here"
        report.add(Check.LEAKS, summary.file, None, message, warning=only_eval)
