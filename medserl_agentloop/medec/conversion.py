"""MEDEC data -> a folder with ``train.parquet``, ``val.parquet`` and ``manifest.json``.

Called by ``data_prep/medec_to_parquet.py``, which reads the command line and prints the summary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medserl_agentloop.game.types import Label
from medserl_agentloop.medec.allocation import AllocationError
from medserl_agentloop.medec.fields import MedecFormatError
from medserl_agentloop.medec.manifest import MANIFEST, CrossSplitPair, Manifest, write_manifest
from medserl_agentloop.medec.near_duplicates import NearDuplicateIndex
from medserl_agentloop.medec.reader import ReadOptions, ReadResult, read_files
from medserl_agentloop.medec.rows import GameRows, Row, RowPlan, SplitRows, build_rows, seed_note
from medserl_agentloop.medec.screens import OVERLONG, NearDuplicates, PromptLength, Screen, load_tokenizer
from medserl_agentloop.medec.vignettes import Vignette
from medserl_agentloop.medec.writing import all_or_none, sha256_of, write_parquet
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.rollout.encoding import ChatEncoder

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
class Prepared:
    """Rows that are planned and not yet written.

    Attributes:
        read: The input.
        games: The rows.
        near_duplicates: Training and validation cases that are nearly the same.
    """

    read: ReadResult
    games: GameRows
    near_duplicates: tuple[CrossSplitPair, ...]


def prepare(read: ReadResult, plan: RowPlan, options: ScreenOptions, read_as: ReadOptions, watch: Watch) -> Prepared:
    """Screen the vignettes, plan the rows and compare the splits.

    Raises:
        ValueError: The package's own errors, each a sentence.
    """
    screens = list(_screens(plan, options, read_as))
    stream = watch(read.vignettes, "looking at cases", len(read.vignettes))
    games = build_rows(read.vignettes, plan, screens, stream)
    overlong = list(games.exclusions.rows(OVERLONG))
    if overlong and not options.exclude_overlong:
        named = ", ".join(f"{text_id} ({detail})" for text_id, detail in overlong[:_NAMED_IN_A_MESSAGE])
        more = f" and {len(overlong) - _NAMED_IN_A_MESSAGE} more" if len(overlong) > _NAMED_IN_A_MESSAGE else ""
        raise AllocationError(
            f"{len(overlong)} prompts are overlong: {named}{more}; "
            "raise --max-prompt-tokens, or leave them out with --on-overlong exclude."
        )
    return Prepared(read, games, tuple(_across_splits(games, watch)))


def write(prepared: Prepared, folder: Path, command: str, options: dict[str, Any], watch: Watch) -> None:
    """Write the three files; all of them come to stand in ``folder``, or none.

    Raises:
        ValueError: They cannot be written.
    """
    games = prepared.games
    with all_or_none(folder) as place:
        outputs = {}
        for split in (games.train, games.val):
            path = place / f"{split.name}.parquet"
            write_parquet(watch(_checked(split), f"writing {path.name}", len(split)), path)
            outputs[path.name] = {"rows": len(split), "labels": labels(games, split.name), "sha256": sha256_of(path)}
        manifest = Manifest(
            command=command,
            options=options,
            sources=prepared.read.reports,
            outputs=outputs,
            splits=games.reports,
            near_duplicates=prepared.near_duplicates,
            exclusions=games.exclusions,
        )
        write_manifest(manifest, place / MANIFEST)


def labels(games: GameRows, split: str) -> dict[str, int]:
    """Rows of a split by the label of the note that is presented."""
    rows = games.reports[split].rows.items()
    return {label.value: sum(n for category, n in rows if category.default_target_label is label) for label in Label}


def _screens(plan: RowPlan, options: ScreenOptions, read_as: ReadOptions) -> Iterator[Screen]:
    if options.near_duplicates_of:
        yield NearDuplicates(read_files(options.near_duplicates_of, read_as).vignettes)
    if options.max_prompt_tokens is not None:
        if options.tokenizer is None:
            raise AllocationError("--max-prompt-tokens needs --tokenizer: the name or folder of the model to train.")
        tokenizer, profile = load_tokenizer(options.tokenizer), load_profile(plan.profile)
        limit, exclude = options.max_prompt_tokens, options.exclude_overlong
        encoder = ChatEncoder(tokenizer, profile)
        yield PromptLength(limit, exclude, encoder, tuple(plan.mix), plan.vanilla_attacker, seed_note)


def _checked(rows: SplitRows) -> Iterator[Row]:
    """The rows, each made sure to show its note: a profile that forgets it would train on nothing."""
    for row in rows:
        if row["extra_info"]["seed_note"] not in row["prompt"][-1]["content"]:
            raise MedecFormatError(
                f"the prompt of {row['extra_info']['text_id']} does not contain its note; "
                "write {{ note }} in every template of the profile."
            )
        yield row


def _across_splits(games: GameRows, watch: Watch) -> Iterator[CrossSplitPair]:
    """Compares one note per case: its correct one, or its error note where that is all there is."""
    vignettes = games.train.vignettes
    train, val = (_used(split) for split in (games.train, games.val))
    if not train or not val:
        return
    index = NearDuplicateIndex((_note(vignettes[n]) for n in val), lambda at: _note(vignettes[val[at]]))
    for number in watch(train, "comparing the splits", len(train)):
        vignette = vignettes[number]
        match = index.find(_note(vignette))
        if match:
            other = vignettes[val[match.number]].vignette_id
            yield CrossSplitPair(vignette.vignette_id, other, round(match.similarity, 3))


def _used(split: SplitRows) -> array[int]:
    return array("q", np.unique(split.numbers).astype(np.int64).tobytes())


def _note(vignette: Vignette) -> str:
    return vignette.clean_note or vignette.error_note or ""
