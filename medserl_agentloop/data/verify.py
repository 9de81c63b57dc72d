"""Is a parquet file fit to train on? Opened as verl opens it, every row checked. Called by ``medserl data verify``.

Rows may be damaged in any way, so nothing here trusts a type.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from medserl_agentloop.data.conversion import SCHEMA
from medserl_agentloop.data.leaks import LabelledRow, find_leaks
from medserl_agentloop.data.rows import AGENT_NAME
from medserl_agentloop.data.vignettes import NearDuplicateIndex
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.prompting import ProfileEncoder, PromptProfile, load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, Role, VanillaAttacker
from medserl_agentloop.paths import DIFFERS, MANIFEST, differs_from_manifest, hash_in_manifest, option_in_manifest

SHOWN_PER_CHECK = 3  # problems kept in words, for each check of each file; the rest is counted
BALANCE_LIMIT = 0.6
REMAKE = "write the file again with data_prep/medec_to_parquet.py"
_FACTS_THAT_VARY = ("category", "seed_note", "vignette_id", "text_id", "index")
_MAY_BE_ABSENT = ("error_note", "clean_note", "error_type", "error_sentence", "corrected_sentence")
_REQUIRED_FACTS = [fact.name for fact in SCHEMA.field("extra_info").type if fact.name not in _MAY_BE_ABSENT]


class Check(str, Enum):
    """What is checked, in the order of the final table."""

    OPENS = "verl's RLHFDataset hands out every row"
    MANIFEST = "files are those of their manifest"
    SCHEMA = "schema, and no missing values"
    PROMPT = "prompts are native lists, rendered from their own note"
    LENGTH = "prompt lengths"
    LABELS = "labels"
    FACTS = "facts of the game"
    AGENT = "agent name"
    INDEX = "unique indices"
    SPLITS = "no case in two splits"
    BALANCE = "balance of presented labels"
    CONSTANT = "no constant columns"
    LEAKS = "no label leaks"


Finding = tuple[Check, str]  # the message says what was found and what to do


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
    unchecked: dict[Check, str] = field(default_factory=dict)  # why nothing, or not every row, was checked

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
    profile: str | None = None,
    vanilla_attacker: VanillaAttacker | None = None,
    max_prompt_tokens: int | None = None,
) -> Report:
    """Check every row of files that are used together, e.g. train, validation and evaluation rows.

    Args:
        paths: The parquet files.
        tokenizer: The tokenizer of the model to train.
        profile: Prompt profile that the files were written with. None: what a file's manifest says, or "medserl".
        vanilla_attacker: What they were written with. None: what a file's manifest says, or "skip".
        max_prompt_tokens: verl's ``data.max_prompt_length``; None leaves lengths unchecked.

    Raises:
        ValueError: A file is missing, is not parquet, or verl cannot open it; or the profile does not exist.
    """
    report = Report()
    unplayable = 0
    first: dict[tuple[str, str], tuple[Any, str]] = {}
    same_name = len({path.name for path in paths}) < len(paths)
    for path, schema in [(path, _schema_of(path)) for path in paths]:
        name = str(path) if same_name else path.name
        for message in _wrong_columns(schema):
            report.add(Check.SCHEMA, name, None, message)
        if differs_from_manifest(path):
            report.add(Check.MANIFEST, name, None, DIFFERS)
        prompts = load_profile(profile or option_in_manifest(path, "--profile") or "medserl")
        encoder = ProfileEncoder(tokenizer, prompts)
        copying = vanilla_attacker or VanillaAttacker(option_in_manifest(path, "--vanilla-attacker") or "skip")
        dataset = _open_as_verl(path, tokenizer)
        summary = FileSummary(name, len(dataset))
        report.files.append(summary)
        rows: list[dict[str, Any]] = []
        for number in range(summary.rows):
            try:
                row = dataset[number]
            except Exception as error:  # whatever verl raises on a damaged row is the finding
                message = f"verl cannot hand out the row ({type(error).__name__}: {error}); {REMAKE}"
                report.add(Check.OPENS, name, number, message)
                row = dataset.dataframe[number]
            rows.append(row)
            findings = [*_check_values(row), *_check_against(first, _facts_of(row), f"{name}, row {number}")]
            try:
                spec = GameSpec.from_extra_info(_facts_of(row))
                role = spec.category.first_role(copying.on(_facts_of(row)))
                findings += _check_game(row, spec, role, prompts)
                tokens = len(encoder.of(role, spec.task, spec.seed_note).ids)
            except (ValueError, TypeError) as error:
                tokens = 0
                unplayable += 1
                findings.append((Check.FACTS, str(error).rstrip(".")))
            summary.longest_prompt = max(summary.longest_prompt, tokens)
            if max_prompt_tokens is not None and tokens > max_prompt_tokens:
                message = (
                    f"the prompt has {tokens} tokens and the limit is {max_prompt_tokens}, so the row could not "
                    f"be played; set data.max_prompt_length to at least {tokens}, or leave the row out"
                )
                findings.append((Check.LENGTH, message))
            for check, message in findings:
                report.add(check, name, number, message)
        _check_columns(report, summary, rows)
    _check_near_duplicates(report, first)
    report.unchecked = _unchecked(report, paths, unplayable, {split for split, _ in first.values()})
    if max_prompt_tokens is None:
        report.unchecked[Check.LENGTH] = "give --max-prompt-tokens"
    return report


def _unchecked(report: Report, paths: Sequence[Path], unplayable: int, splits: set[Any]) -> dict[Check, str]:
    """What says nothing about the files although it found nothing wrong."""
    loose = [path.name for path in paths if hash_in_manifest(path) is None]
    why = {
        Check.MANIFEST: f"no {MANIFEST} beside it names {', '.join(loose)}" if loose else "",
        Check.PROMPT: f"{unplayable} rows describe no game" if unplayable else "",
        Check.SPLITS: "all rows are of one split" if len(splits) < 2 else "",
        Check.CONSTANT: "every file has one row" if all(file.rows < 2 for file in report.files) else "",
    }
    labels = max(len(file.labels) for file in report.files)
    why |= {
        Check.BALANCE: "" if labels else "no row has a label",
        Check.LEAKS: "" if labels > 1 else "no file has both labels",
    }
    return {check: reason for check, reason in why.items() if reason}


def _schema_of(path: Path) -> Any:
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: verl reads files that end in .parquet; give such a file.")
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise ValueError(
            f"{path}: cannot be read as parquet ({reason}); give a file written by data_prep/medec_to_parquet.py."
        ) from error
    if file.metadata.num_rows == 0:
        raise ValueError(f"{path}: the file has no rows, and verl cannot run on it; leave it out or write it again.")
    schema = file.schema_arrow
    if "messages" in schema.names:
        raise ValueError(
            f"{path}: the file has conversations for a warm start, which verl's SFT trainer reads and nothing here "
            "checks; give files that data_prep/medec_to_parquet.py or medec_eval_to_parquet.py wrote."
        )
    if "extra_info" in schema.names and not pa.types.is_struct(kind := schema.field("extra_info").type):
        raise ValueError(f"{path}: column 'extra_info' is {kind}, not a struct with the facts of a game; {REMAKE}.")
    return schema


def _wrong_columns(schema: Any) -> Iterator[str]:
    """Every column that is not as ``SCHEMA`` declares it; verl hands all there are to the agent loop."""
    found, expected = ({column.name: column.type for column in columns} for columns in (schema, SCHEMA))
    for name in expected | found:
        is_type, should_be = found.get(name, "missing"), expected.get(name, "missing")
        if is_type != should_be:
            yield f"column {name!r} is {is_type}, and it should be {should_be}; {REMAKE}"


def _open_as_verl(path: Path, tokenizer: Any) -> Any:
    """verl's own dataset of one file, nothing filtered."""
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"filter_overlong_prompts": False, "max_prompt_length": None})
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return RLHFDataset(os.fspath(path), tokenizer, config)
    except Exception as error:  # datasets raises many kinds; all mean that training could not start
        raise ValueError(f"{path}: verl's RLHFDataset cannot open it ({error}); {REMAKE}.") from error
    finally:
        datasets.enable_progress_bars()


def _facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row's ``extra_info``; empty if it is not a struct."""
    facts = row.get("extra_info")
    return facts if isinstance(facts, dict) else {}


def _truth_of(row: dict[str, Any]) -> Any:
    """The row's ``reward_model.ground_truth``; None if it has none."""
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _check_values(row: dict[str, Any]) -> Iterator[Finding]:
    """What is wrong with single values."""
    facts = _facts_of(row)
    # verl makes an empty struct of an extra_info that is null.
    missing = [name for name in SCHEMA.names if row.get(name) is None or row[name] == {}]
    missing += [f"extra_info.{name}" for name in _REQUIRED_FACTS if facts and facts.get(name) is None]
    if missing:
        yield Check.SCHEMA, f"{', '.join(missing)} has no value; {REMAKE}"
    if (agent := row.get("agent_name")) != AGENT_NAME:
        message = f"agent_name is {_shown(agent)}, not {AGENT_NAME!r}, the agent loop that plays these rows; {REMAKE}"
        yield Check.AGENT, message
    truth, target = _truth_of(row), facts.get("target_label")
    if truth != target or truth not in [label.value for label in Label]:
        yield (
            Check.LABELS,
            f"reward_model.ground_truth is {_shown(truth)} and extra_info.target_label is {_shown(target)}; "
            f"both must be the same text, 'harmful' or 'safe': {REMAKE}",
        )


def _check_game(row: dict[str, Any], spec: GameSpec, role: Role, profile: PromptProfile) -> Iterator[Finding]:
    """Where a row does not agree with the game that its facts describe."""
    category, name = spec.category, profile.folder.name
    key = "error_note" if category.seed_label is Label.HARMFUL else "clean_note"
    if getattr(spec, key) not in (None, spec.seed_note):
        message = f"seed_note is not the row's {key}, from which a {category.value} game starts; {REMAKE}"
        yield Check.FACTS, message
    if not category.has_attack and spec.target_label is not category.seed_label:
        yield (
            Check.LABELS,
            f"a {category.value} row presents its seed note as it is, so its label must be "
            f"{category.seed_label.value!r}, not {spec.target_label.value!r}: {REMAKE}",
        )
    if row.get("prompt") != profile.messages(role, spec.task, spec.seed_note):
        yield (
            Check.PROMPT,
            f"the prompt is {_shown(row.get('prompt'))}, not the list of messages that profile {name!r} renders from "
            f"the row's seed note in category {category.value}; {REMAKE} --profile {name}, or verify it with the "
            "--profile and --vanilla-attacker it was written with",
        )


def _check_against(
    first: dict[tuple[str, str], tuple[Any, str]], facts: dict[str, Any], place: str
) -> Iterator[Finding]:
    """What an earlier row of any file has that only this one may have; ``first`` remembers split and place."""
    index, split = str(facts.get("index")), facts.get("split")
    _, earlier = first.setdefault(("index", index), (split, place))
    if earlier != place and index != "None":
        yield Check.INDEX, f"index {index} is already that of {earlier}; give every row of all files its own"
    case, note = (str(facts.get(name) or "") for name in ("vignette_id", "seed_note"))
    keys = {("case", case): f"vignette {case!a}", ("note", one_line(note).casefold()): "its note, under another id,"}
    for key, who in keys.items():
        other, earlier = first.setdefault(key, (split, place)) if key[1] else (split, place)
        if other != split:
            message = f"{who} is in split {split!r} here and in {other!r} at {earlier}"
            yield Check.SPLITS, f"{message}; split by vignette, or leave one of the files out"
            return


def _check_near_duplicates(report: Report, first: dict[tuple[str, str], tuple[Any, str]]) -> None:
    """Warns of cases in two splits that only their texts give away, because each has an id of its own."""
    found: dict[tuple[str, Any], list[str]] = {}
    indices: dict[Any, tuple[NearDuplicateIndex, list[str]]] = {}
    for (kind, note), (split, place) in first.items():
        if kind == "note" and note:
            for other, (index, places) in indices.items():
                if other != split and (match := index.find(note)):
                    like = f"{place} and {places[match[0]]} (4-gram Jaccard {match[1]:.2f})"
                    found.setdefault((place.rpartition(", row ")[0], other), []).append(like)
            index, places = indices.setdefault(split, (NearDuplicateIndex(), []))
            index.add(note)
            places.append(place)
    for (file, other), pairs in found.items():
        message = (
            f"{len(pairs)} notes are nearly those of split {other!r}, such as {pairs[0]}, so that what is learned "
            "from one is asked in the other; leave cases out with --exclude-near-duplicates-of, or mind it when you "
            "read figures"
        )
        report.add(Check.SPLITS, file, None, message, warning=True)


def _check_columns(report: Report, summary: FileSummary, rows: list[dict[str, Any]]) -> None:
    """Counts the labels, and reports what would let a player guess them, or learn nothing."""
    facts = [_facts_of(row) for row in rows]
    columns = {"prompt": [row.get("prompt") for row in rows], "ground_truth": [_truth_of(row) for row in rows]}
    columns |= {name: [fact.get(name) for fact in facts] for name in _FACTS_THAT_VARY}
    for column, values in columns.items():
        if len(rows) > 1 and values[0] is not None and all(value == values[0] for value in values):
            message = (
                f"{column} is the same in all {len(rows)} rows, so that nothing can be learned from it; write the "
                "file again with data_prep/medec_to_parquet.py and a --mix of harmful and benign categories"
            )
            report.add(Check.CONSTANT, summary.file, None, message)
    labelled: list[LabelledRow] = []
    for fact in facts:
        with contextlib.suppress(ValueError):  # reported as a wrong label or fact
            target, category = Label(fact.get("target_label")), Category(fact.get("category"))
            summary.labels[target.value] += 1
            labelled.append(LabelledRow(str(fact.get("seed_note")), target, category.seed_label))
    harmful, safe = summary.labels["harmful"], summary.labels["safe"]
    if max(harmful, safe) > BALANCE_LIMIT * (harmful + safe):
        message = (
            f"the presented notes are {harmful} harmful and {safe} safe, beyond 60 to 40, so that one constant "
            "answer wins most games; write the file again with another --mix"
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


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
