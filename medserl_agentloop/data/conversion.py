"""Cases -> a folder with ``train.parquet``, ``val.parquet`` and ``manifest.json``, and what is kept out of it.

Called by ``medserl data convert``, which reads the command line and prints the summary. A screen keeps a case out
although it could serve: because it is nearly the same as another, or because its prompt is too long.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from medserl_agentloop.core.manifest import MANIFEST, sha256_of
from medserl_agentloop.data.intake import MedecFormatError, first_line
from medserl_agentloop.data.reader import ReadResult
from medserl_agentloop.data.rows import Bar, GameRows, Row, RowPlan, Screen, build_rows, seed_note
from medserl_agentloop.data.vignettes import NearDuplicateIndex, Vignette
from medserl_agentloop.data.writing import all_or_none, write_parquet
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile

_FORMAT = 1
_PACKAGES = ("medserl-agentloop", "pyarrow", "numpy", "jinja2")
_OVERLONG = "overlong prompt"
_NAMED_IN_A_MESSAGE = 10


@dataclass(frozen=True)
class Prepared:
    """The input, and the rows that are not yet written."""

    read: ReadResult
    games: GameRows
    near_duplicates: list[dict[str, Any]]  # ids of a training and a validation case, and their similarity


def prepare(
    read: ReadResult, vignettes: Iterable[Vignette], plan: RowPlan, screens: Sequence[Screen], exclude_overlong: bool
) -> Prepared:
    """Screen the ``vignettes`` that were read, make the rows and compare the splits.

    Raises:
        ValueError: The package's own errors, each a sentence; overlong prompts unless ``exclude_overlong``.
    """
    games = build_rows(vignettes, plan, screens)
    overlong = games.exclusions.get(_OVERLONG, [])
    if overlong and not exclude_overlong:
        named = ", ".join(f"{text_id} ({detail})" for text_id, detail in overlong[:_NAMED_IN_A_MESSAGE])
        more = f" and {len(overlong) - _NAMED_IN_A_MESSAGE} more" if len(overlong) > _NAMED_IN_A_MESSAGE else ""
        raise ValueError(
            f"{len(overlong)} prompts are overlong: {named}{more}; "
            "raise --max-prompt-tokens, or leave them out with --on-overlong exclude."
        )
    return Prepared(read, games, list(_across_splits(read.vignettes, games)))


def write(prepared: Prepared, folder: Path, command: str, options: dict[str, Any]) -> None:
    """Write all three files into ``folder``, or none; the same data set gives the same bytes.

    ``command`` and ``options`` are for the manifest; paths stand in them as the user typed them.

    Raises:
        ValueError: They cannot be written, or a prompt lacks its note.
    """
    games = prepared.games
    for row in (*games.train, *games.val):
        # A profile that forgets the note would train on nothing.
        if row["extra_info"]["seed_note"] not in row["prompt"][-1]["content"]:
            raise MedecFormatError(
                f"the prompt of {row['extra_info']['text_id']} does not contain its note; "
                "write {{ note }} in every template of the profile."
            )
    with all_or_none(folder) as place:
        outputs = {}
        for split, rows in (("train", games.train), ("val", games.val)):
            path = place / f"{split}.parquet"
            write_parquet(rows, path)
            outputs[path.name] = {"rows": len(rows), "labels": games.labels(split), "sha256": sha256_of(path)}
        account = {
            "format": _FORMAT,
            "command": command,
            "options": options,
            "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
            "sources": [asdict(source) for source in prepared.read.reports],
            "outputs": outputs,
            "splits": {name: asdict(report) for name, report in games.reports.items()},
            "near_duplicates_across_splits": prepared.near_duplicates,
        }
        # One line for each excluded id, so that a long list can be read and searched.
        reasons = [
            f'\n  {{"reason": {_json(reason)}, "count": {len(rows)}, "rows": [\n   '
            + ",\n   ".join(_json({"id": i} if detail is None else {"id": i, "detail": detail}) for i, detail in rows)
            + "]}"
            for reason, rows in games.exclusions.items()
        ]
        text = _json(account, indent=1)[:-2] + f',\n "exclusions": [{",".join(reasons)}\n ]\n}}\n'
        (place / MANIFEST).write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, indent=indent)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _across_splits(vignettes: list[Vignette], games: GameRows) -> Iterator[dict[str, Any]]:
    """Compares one note per case: its correct one, or its error note where that is all there is."""

    def used(rows: list[Row]) -> list[tuple[str, str]]:
        ids = {row["extra_info"]["vignette_id"] for row in rows}
        return [(v.vignette_id, v.clean_note or v.error_note or "") for v in vignettes if v.vignette_id in ids]

    val = used(games.val)
    index = NearDuplicateIndex(note for _, note in val)
    for name, note in used(games.train):
        if match := index.find(note):
            number, similarity = match
            yield {"train": name, "val": val[number][0], "similarity": round(similarity, 3)}


def near_duplicates_of(others: Sequence[Vignette]) -> Screen:
    """Keeps out every case one of whose notes is a near-duplicate of a note of ``others``."""
    notes = [(other.vignette_id, note) for other in others for note in other.notes]
    index = NearDuplicateIndex(note for _, note in notes)

    def bars(vignette: Vignette) -> Iterator[Bar]:
        matches = [match for note in vignette.notes if (match := index.find(note))]
        if matches:
            number, similarity = max(matches, key=lambda match: match[1])
            detail = f"{notes[number][0]} (4-gram Jaccard {similarity:.2f})"
            yield Bar("near-duplicate of a case to stay clear of", detail)

    return bars


def prompt_length(limit: int, exclude: bool, tokenizer: str | None, plan: RowPlan) -> Screen:
    """Notes, and bars if ``exclude``, what has a first prompt of more than ``limit`` tokens, template included.

    Raises:
        ValueError: The tokenizer cannot be loaded, or has no chat template.
    """
    if tokenizer is None:
        raise ValueError("--max-prompt-tokens needs --tokenizer: the name or folder of the model to train.")
    encoder = ProfileEncoder(load_tokenizer(tokenizer), load_profile(plan.profile))

    def bars(vignette: Vignette) -> Iterator[Bar]:
        for category in plan.mix:
            note = seed_note(vignette, category)
            if note is None:
                continue
            length = len(encoder.of(category.first_role(plan.vanilla_attacker), category, note).ids)
            if length > limit:
                detail = f"{category.value}: {length} tokens, limit {limit}"
                yield Bar(_OVERLONG, detail, (category,) if exclude else ())

    return bars


def load_tokenizer(path: str) -> Any:
    """A model's tokenizer.

    Raises:
        ValueError: It cannot be loaded, or has no chat template.
    """
    # Imported here: it takes seconds, and conversion needs it for --max-prompt-tokens alone.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library's errors have no common base
        raise ValueError(
            f"tokenizer {path}: cannot be loaded ({first_line(error)}); "
            "give --tokenizer the folder or name of the model to train."
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer {path}: it has no chat template; give --tokenizer that of an instruct model.")
    return tokenizer
