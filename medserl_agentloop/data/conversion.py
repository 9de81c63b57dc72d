"""MEDEC data -> a folder with ``train.parquet``, ``val.parquet`` and ``manifest.json``.

Called by ``data_prep/medec_to_parquet.py``, which reads the command line and prints the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medserl_agentloop.core.manifest import MANIFEST, sha256_of
from medserl_agentloop.data.allocation import AllocationError
from medserl_agentloop.data.fields import MedecFormatError
from medserl_agentloop.data.manifest import write_manifest
from medserl_agentloop.data.reader import ReadOptions, ReadResult, read_files
from medserl_agentloop.data.rows import GameRows, Row, RowPlan, Screen, build_rows
from medserl_agentloop.data.screens import (
    OVERLONG,
    NearDuplicateIndex,
    load_tokenizer,
    near_duplicates_of,
    prompt_length,
)
from medserl_agentloop.data.vignettes import Vignette
from medserl_agentloop.data.writing import all_or_none, write_parquet
from medserl_agentloop.games.medical.types import Label

_NAMED_IN_A_MESSAGE = 10
Watch = Callable[[Iterable[Any], str, int | None], Iterable[Any]]  # stream, what it is, length if known


@dataclass(frozen=True)
class ScreenOptions:
    """What to keep out.

    Attributes:
        near_duplicates_of: Files whose cases, and what is nearly the same, are kept out.
        max_prompt_tokens: Longest first prompt; None for any length.
        tokenizer: Name or folder of the tokenizer that counts; needed with ``max_prompt_tokens``.
        exclude_overlong: Leave overlong prompts out; otherwise they are an error.
    """

    near_duplicates_of: tuple[Path, ...] = ()
    max_prompt_tokens: int | None = None
    tokenizer: str | None = None
    exclude_overlong: bool = False


@dataclass(frozen=True)
class CrossSplitPair:
    """A training case and a validation case with a note of theirs nearly the same."""

    train: str
    val: str
    similarity: float


@dataclass(frozen=True)
class Prepared:
    """Rows that are not yet written.

    Attributes:
        read: The input.
        games: The rows.
        near_duplicates: Training and validation cases that are nearly the same.
    """

    read: ReadResult
    games: GameRows
    near_duplicates: tuple[CrossSplitPair, ...]


def prepare(read: ReadResult, plan: RowPlan, options: ScreenOptions, read_as: ReadOptions, watch: Watch) -> Prepared:
    """Screen the vignettes, make the rows and compare the splits.

    Raises:
        ValueError: The package's own errors, each a sentence.
    """
    screens = list(_screens(plan, options, read_as))
    games = build_rows(watch(read.vignettes, "looking at cases", len(read.vignettes)), plan, screens)
    overlong = games.exclusions.get(OVERLONG, [])
    if overlong and not options.exclude_overlong:
        named = ", ".join(f"{text_id} ({detail})" for text_id, detail in overlong[:_NAMED_IN_A_MESSAGE])
        more = f" and {len(overlong) - _NAMED_IN_A_MESSAGE} more" if len(overlong) > _NAMED_IN_A_MESSAGE else ""
        raise AllocationError(
            f"{len(overlong)} prompts are overlong: {named}{more}; "
            "raise --max-prompt-tokens, or leave them out with --on-overlong exclude."
        )
    return Prepared(read, games, tuple(_across_splits(read.vignettes, games, watch)))


def write(prepared: Prepared, folder: Path, command: str, options: dict[str, Any], watch: Watch) -> None:
    """Write all three files into ``folder``, or none.

    Raises:
        ValueError: They cannot be written.
    """
    games = prepared.games
    with all_or_none(folder) as place:
        outputs = {}
        for split, rows in (("train", games.train), ("val", games.val)):
            path = place / f"{split}.parquet"
            write_parquet(watch(_checked(rows), f"writing {path.name}", len(rows)), path)
            outputs[path.name] = {"rows": len(rows), "labels": labels(games, split), "sha256": sha256_of(path)}
        account = {
            "sources": [asdict(source) for source in prepared.read.reports],
            "outputs": outputs,
            "splits": {name: asdict(report) for name, report in games.reports.items()},
            "near_duplicates_across_splits": [asdict(pair) for pair in prepared.near_duplicates],
        }
        write_manifest(place / MANIFEST, command, options, account, games.exclusions)


def labels(games: GameRows, split: str) -> dict[str, int]:
    """Rows of a split by the label of the note that is presented."""
    rows = games.reports[split].rows.items()
    return {label.value: sum(n for category, n in rows if category.default_target_label is label) for label in Label}


def _screens(plan: RowPlan, options: ScreenOptions, read_as: ReadOptions) -> Iterator[Screen]:
    if options.near_duplicates_of:
        yield near_duplicates_of(read_files(options.near_duplicates_of, read_as).vignettes)
    if options.max_prompt_tokens is not None:
        if options.tokenizer is None:
            raise AllocationError("--max-prompt-tokens needs --tokenizer: the name or folder of the model to train.")
        tokenizer = load_tokenizer(options.tokenizer)
        yield prompt_length(options.max_prompt_tokens, options.exclude_overlong, tokenizer, plan)


def _checked(rows: list[Row]) -> Iterator[Row]:
    """The rows, each made sure to show its note: a profile that forgets it would train on nothing."""
    for row in rows:
        if row["extra_info"]["seed_note"] not in row["prompt"][-1]["content"]:
            raise MedecFormatError(
                f"the prompt of {row['extra_info']['text_id']} does not contain its note; "
                "write {{ note }} in every template of the profile."
            )
        yield row


def _across_splits(vignettes: list[Vignette], games: GameRows, watch: Watch) -> Iterator[CrossSplitPair]:
    """Compares one note per case: its correct one, or its error note where that is all there is."""

    def used(rows: list[Row]) -> list[tuple[str, str]]:
        ids = {row["extra_info"]["vignette_id"] for row in rows}
        return [(v.vignette_id, v.clean_note or v.error_note or "") for v in vignettes if v.vignette_id in ids]

    train, val = used(games.train), used(games.val)
    if not train or not val:
        return
    index = NearDuplicateIndex(note for _, note in val)
    for name, note in watch(train, "comparing the splits", len(train)):
        if match := index.find(note):
            yield CrossSplitPair(name, val[match.number][0], round(match.similarity, 3))
