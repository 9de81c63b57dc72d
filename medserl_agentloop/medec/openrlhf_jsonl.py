"""OpenRLHF rows in both shapes: ``{prompt, completion, data_type}`` and ``{vanilla, adversarial, ...}``.

Called by ``reader.py``. The rows have a note and a category but no id and no error type; these are found
by looking the note up in MEDEC's own files. Rows of one case become one vignette that serves exactly the
categories of its rows, so that ``--mix`` chooses among the rows given and a case stays in one split.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.types import Category, Label
from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import RowPlace
from medserl_agentloop.medec.intake import Intake
from medserl_agentloop.medec.pair_jsonl import json_objects, text_values
from medserl_agentloop.medec.sources import SourceFile
from medserl_agentloop.medec.vignettes import EditTag, PairSource, Vignette, subset_of

ONE_TEXT_KEYS = ("prompt", "completion", "data_type")
TWO_TEXT_KEYS = ("vanilla", "adversarial", "completion", "data_type")
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty


@dataclass(frozen=True)
class _Row:
    place: RowPlace
    note: str
    category: Category


class NoteJoin:
    """The cases of other files by the text of their notes, white space aside."""

    def __init__(self, vignettes: Sequence[Vignette]) -> None:
        self._vignettes = vignettes
        self._numbers: dict[bytes, int] = {}
        for number, vignette in enumerate(vignettes):
            for note in vignette.notes:
                self._numbers.setdefault(_digest(note), number)

    def find(self, note: str) -> int | None:
        """Number of the first case that has ``note``."""
        return self._numbers.get(_digest(note))

    def __getitem__(self, number: int) -> Vignette:
        return self._vignettes[number]


def is_openrlhf(source: SourceFile) -> bool:
    """Whether the first object of a JSONL file is an OpenRLHF row."""
    for line in source.lines(newline="\n"):
        if line.strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                return False
            return isinstance(found, dict) and "data_type" in found
    return False


def read_openrlhf_jsonl(source: SourceFile, intake: Intake, join: NoteJoin | None) -> Iterator[Vignette]:
    """Read the rows and give each the case that its note belongs to.

    Raises:
        MedecFormatError: A line is not such a row, contradicts itself, or repeats another.
    """
    categories: dict[int, list[Category]] = {}
    for row in _rows(source, intake):
        number, reason = _case(row, join)
        if number is None:
            name = _own_id(row)
            intake.claim(RowPlace(row.place.file, row.place.row, name))
            intake.not_joined.append((name, reason))
            yield _lone(row, name, source.sha256)
        else:
            assert join is not None
            name = f"{join[number].vignette_id}/{row.category.value}"
            intake.claim(RowPlace(row.place.file, row.place.row, name))
            intake.joined += 1
            categories.setdefault(number, []).append(row.category)
    for number, asked in categories.items():
        assert join is not None
        in_order = tuple(category for category in Category if category in asked)
        yield replace(join[number], categories=in_order, source_sha256=source.sha256)


def _rows(source: SourceFile, intake: Intake) -> Iterator[_Row]:
    for place, found in json_objects(source, intake, TWO_TEXT_KEYS):
        keys = TWO_TEXT_KEYS if "prompt" not in found else ONE_TEXT_KEYS
        values = text_values(place, found, "an OpenRLHF row", keys)
        yield _row(place, intake.text_of(values, ("prompt", "vanilla", "adversarial")), found)


def _row(place: RowPlace, values: dict[str, str], found: dict[str, Any]) -> _Row:
    try:
        category = Category(values["data_type"])
    except ValueError:
        known = ", ".join(c.value for c in Category)
        raise place.error("data_type", values["data_type"], f"write one of {known}") from None
    expected = _SAFE if category is Category.VANILLA_BENIGN else ""
    if values["completion"].strip() not in ("", expected):
        raise place.error(
            "completion", values["completion"], f"the completion of a {category.value} row is {expected!r}"
        )
    if "prompt" in found:
        key = "prompt"
    else:
        key = "adversarial" if category.has_attack else "vanilla"
        other = "vanilla" if category.has_attack else "adversarial"
        if values[other].strip():
            raise place.error(other, values[other], f"a {category.value} row has its note under {key!r} alone")
    return _Row(place, fields.required_text(place, key, values[key], "the text of the note"), category)


def _case(row: _Row, join: NoteJoin | None) -> tuple[int | None, str]:
    """The number of the row's case in ``join``; None and the reason where there is none."""
    if join is None:
        return None, "no --join file was given"
    number = join.find(row.note)
    if number is None:
        return None, "its note is in no --join file"
    case = join[number]
    seed = case.error_note if row.category.seed_label is Label.HARMFUL else case.clean_note
    if seed is None or one_line(seed) != one_line(row.note):
        return None, f"{row.category.value} does not start from this note of {case.vignette_id}"
    return number, ""


def _own_id(row: _Row) -> str:
    stem = re.sub(r"[^0-9A-Za-z]+", "_", PurePath(row.place.file).stem).strip("_")
    return f"{stem or 'openrlhf'}-{row.place.row}"


def _lone(row: _Row, name: str, sha256: str) -> Vignette:
    harmful = row.category.seed_label is Label.HARMFUL
    return Vignette(
        vignette_id=name,
        text_ids=(name,),
        subset=subset_of(name),
        error_note=row.note if harmful else None,
        clean_note=None if harmful else row.note,
        error_text_id=name if harmful else None,
        clean_text_id=None if harmful else name,
        pair_source=PairSource.UNPAIRED,
        edit_tag=EditTag.NO_PAIR,
        source_sha256=sha256,
        categories=(row.category,),
    )


def _digest(note: str) -> bytes:
    return hashlib.blake2b(one_line(note).encode(), digest_size=16).digest()
