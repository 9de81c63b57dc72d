"""The formats with one JSON object per line: pairs, and OpenRLHF rows in both of their shapes.

Called by ``reader.py``. A pair is an error note and its corrected note. An OpenRLHF row,
``{prompt, completion, data_type}`` or ``{vanilla, adversarial, completion, data_type}``, has a note and a
category but no id and no error type; these are found by looking the note up in MEDEC's own files. Rows of
one case become one vignette that serves exactly the categories of its rows, so that ``--mix`` chooses among
the rows given and a case stays in one split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from medserl_agentloop.data import intake as cell
from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace, SourceFile
from medserl_agentloop.data.vignettes import Vignette
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Category, Label

REQUIRED_KEYS = ("note_id", "incorrect_note", "correct_note")
OPTIONAL_KEYS = ("error_type", "error_sentence", "corrected_sentence")
TEXT_KEYS = ("incorrect_note", "correct_note", "error_sentence", "corrected_sentence")
ONE_TEXT_KEYS = ("prompt", "completion", "data_type")
TWO_TEXT_KEYS = ("vanilla", "adversarial", "completion", "data_type")
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty

NoteJoin = Mapping[str, Vignette]  # text of a note, white space aside -> the first case that has it


def read_pair_jsonl(source: SourceFile, intake: Intake) -> Iterator[Vignette]:
    """Read one vignette per line."""
    for place, found in _objects(source, intake, REQUIRED_KEYS + OPTIONAL_KEYS):
        values = _text_values(place, found, "a pair", REQUIRED_KEYS, OPTIONAL_KEYS)
        text_id = cell.required_text(place, "note_id", values["note_id"], "the pair's id, such as ms-train-0")
        named = RowPlace(place.file, place.row, text_id)
        intake.claim(named)
        yield _pair(named, intake.text_of(values, TEXT_KEYS), source.sha256)


def _pair(place: RowPlace, values: dict[str, str], sha256: str) -> Vignette:
    error_note, clean_note = (
        cell.required_text(place, key, values[key], "the text of the note")
        for key in ("incorrect_note", "correct_note")
    )
    error_sentence, corrected_sentence = (
        cell.optional_text(place, key, values[key]) for key in ("error_sentence", "corrected_sentence")
    )
    return Vignette(
        vignette_id=place.text_id,
        error_note=error_note,
        clean_note=clean_note,
        error_text_id=place.text_id,
        clean_text_id=place.text_id,
        error_type=cell.error_type(place, "error_type", values["error_type"]),
        error_sentence=error_sentence,
        corrected_sentence=corrected_sentence,
        source_sha256=sha256,
    )


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
    """Read the rows and give each the case that its note belongs to."""
    cases: dict[str, tuple[Vignette, set[Category]]] = {}
    for place, found in _objects(source, intake, TWO_TEXT_KEYS):
        keys = TWO_TEXT_KEYS if "prompt" not in found else ONE_TEXT_KEYS
        values = _text_values(place, found, "an OpenRLHF row", keys)
        note, category = _openrlhf_row(place, intake.text_of(values, ("prompt", "vanilla", "adversarial")), found)
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


def _openrlhf_row(place: RowPlace, values: dict[str, str], found: dict[str, Any]) -> tuple[str, Category]:
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
    return cell.required_text(place, key, values[key], "the text of the note"), category


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
        error_note=note if harmful else None,
        clean_note=None if harmful else note,
        error_text_id=name if harmful else None,
        clean_text_id=None if harmful else name,
        source_sha256=sha256,
        categories=(category,),
    )


def _objects(source: SourceFile, intake: Intake, keys: tuple[str, ...]) -> Iterator[tuple[RowPlace, dict[str, Any]]]:
    """The object of every line; blank lines are counted and passed over."""
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON strings.
    for row, line in enumerate(source.lines(newline="\n"), start=1):
        place = RowPlace(source.name, row)
        if not line.strip():
            intake.dropped_empty += 1
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MedecFormatError(f"{place}: not valid JSON ({error}); write one object per line.") from error
        if not isinstance(found, dict):
            raise MedecFormatError(
                f"{place}: found a JSON {type(found).__name__}; write an object with the keys {', '.join(keys)}."
            )
        yield place, found


def _text_values(
    place: RowPlace, found: dict[str, Any], what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, str]:
    """The object's values as text, absent ones as ``""``."""
    values: dict[str, str] = {}
    for key in required + optional:
        value = found.get(key)
        if value is None and key in required:
            may = f" and may have {', '.join(optional)}" if optional else ""
            raise MedecFormatError(f"{place}: key {key!r} is missing; {what} needs {', '.join(required)}{may}.")
        if value is not None and not isinstance(value, str):
            raise place.error(key, str(value), "write a JSON string")
        values[key] = value or ""
    return values
