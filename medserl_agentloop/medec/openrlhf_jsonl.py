"""OpenRLHF rows in both shapes: ``{prompt, completion, data_type}`` and ``{vanilla, adversarial, ...}``.

Called by ``reader.py``. The rows have a note and a category but no id and no error type; these are found
by looking the note up in MEDEC's own files. Rows of one case become one vignette that serves exactly the
categories of its rows, so that ``--mix`` chooses among the rows given and a case stays in one split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.types import Category, Label
from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import RowPlace
from medserl_agentloop.medec.pair_jsonl import json_objects, text_values
from medserl_agentloop.medec.sources import Intake, SourceFile
from medserl_agentloop.medec.vignettes import EditTag, PairSource, Vignette, subset_of

ONE_TEXT_KEYS = ("prompt", "completion", "data_type")
TWO_TEXT_KEYS = ("vanilla", "adversarial", "completion", "data_type")
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty

NoteJoin = Mapping[str, Vignette]  # text of a note, white space aside -> the first case that has it


def note_join(vignettes: Sequence[Vignette]) -> NoteJoin:
    """The cases by the text of their notes."""
    cases: dict[str, Vignette] = {}
    for vignette in vignettes:
        for note in vignette.notes:
            cases.setdefault(one_line(note), vignette)
    return cases


def is_openrlhf(source: SourceFile) -> bool:
    """Whether the first object of a JSONL file is an OpenRLHF row."""
    first = next((line for line in source.lines(newline="\n") if line.strip()), "")
    try:
        found = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "data_type" in found


def read_openrlhf_jsonl(source: SourceFile, intake: Intake, join: NoteJoin | None) -> Iterator[Vignette]:
    """Read the rows and give each the case that its note belongs to.

    Raises:
        MedecFormatError: A line is not such a row, contradicts itself, or repeats another.
    """
    cases: dict[str, tuple[Vignette, set[Category]]] = {}
    for place, found in json_objects(source, intake, TWO_TEXT_KEYS):
        keys = TWO_TEXT_KEYS if "prompt" not in found else ONE_TEXT_KEYS
        values = text_values(place, found, "an OpenRLHF row", keys)
        note, category = _row(place, intake.text_of(values, ("prompt", "vanilla", "adversarial")), found)
        case = _case(note, category, join)
        if isinstance(case, Vignette):
            intake.claim(RowPlace(place.file, place.row, f"{case.vignette_id}/{category.value}"))
            intake.joined += 1
            cases.setdefault(case.vignette_id, (case, set()))[1].add(category)
        else:
            stem = re.sub(r"[^0-9A-Za-z]+", "_", PurePath(place.file).stem).strip("_")
            name = f"{stem or 'openrlhf'}-{place.row}"
            intake.claim(RowPlace(place.file, place.row, name))
            intake.not_joined.append((name, case))
            yield _lone(note, category, name, source.sha256)
    for case, asked in cases.values():
        in_order = tuple(category for category in Category if category in asked)
        yield replace(case, categories=in_order, source_sha256=source.sha256)


def _row(place: RowPlace, values: dict[str, str], found: dict[str, Any]) -> tuple[str, Category]:
    """The row's note and category."""
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
        key, other = ("adversarial", "vanilla") if category.has_attack else ("vanilla", "adversarial")
        if values[other].strip():
            raise place.error(other, values[other], f"a {category.value} row has its note under {key!r} alone")
    return fields.required_text(place, key, values[key], "the text of the note"), category


def _case(note: str, category: Category, join: NoteJoin | None) -> Vignette | str:
    """The row's case in ``join``, or the reason why there is none."""
    if join is None:
        return "no --join file was given"
    case = join.get(one_line(note))
    if case is None:
        return "its note is in no --join file"
    seed = case.error_note if category.seed_label is Label.HARMFUL else case.clean_note
    if seed is None or one_line(seed) != one_line(note):
        return f"{category.value} does not start from this note of {case.vignette_id}"
    return case


def _lone(note: str, category: Category, name: str, sha256: str) -> Vignette:
    harmful = category.seed_label is Label.HARMFUL
    return Vignette(
        vignette_id=name,
        text_ids=(name,),
        subset=subset_of(name),
        error_note=note if harmful else None,
        clean_note=None if harmful else note,
        error_text_id=name if harmful else None,
        clean_text_id=None if harmful else name,
        pair_source=PairSource.UNPAIRED,
        edit_tag=EditTag.NO_PAIR,
        source_sha256=sha256,
        categories=(category,),
    )
