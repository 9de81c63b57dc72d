"""The pair format: one JSON object per line with an error note and its corrected note.

Called by ``reader.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import MedecFormatError, RowPlace
from medserl_agentloop.medec.sources import Intake, SourceFile
from medserl_agentloop.medec.vignettes import PairSource, Vignette, subset_of, tag_edit

REQUIRED_KEYS = ("note_id", "incorrect_note", "correct_note")
OPTIONAL_KEYS = ("error_type", "error_sentence", "corrected_sentence")
TEXT_KEYS = ("incorrect_note", "correct_note", "error_sentence", "corrected_sentence")


def read_pair_jsonl(source: SourceFile, intake: Intake) -> Iterator[Vignette]:
    """Read one vignette per line.

    Raises:
        MedecFormatError: A line is not such an object, or a pair cannot be right.
    """
    for place, found in json_objects(source, intake, REQUIRED_KEYS + OPTIONAL_KEYS):
        values = text_values(place, found, "a pair", REQUIRED_KEYS, OPTIONAL_KEYS)
        text_id = fields.required_text(place, "note_id", values["note_id"], "the pair's id, such as ms-train-0")
        named = RowPlace(place.file, place.row, text_id)
        intake.claim(named)
        yield _vignette(named, intake.text_of(values, TEXT_KEYS), source.sha256)


def json_objects(
    source: SourceFile, intake: Intake, keys: tuple[str, ...]
) -> Iterator[tuple[RowPlace, dict[str, Any]]]:
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


def text_values(
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


def _vignette(place: RowPlace, values: dict[str, str], sha256: str) -> Vignette:
    error_note, clean_note = (
        fields.required_text(place, key, values[key], "the text of the note")
        for key in ("incorrect_note", "correct_note")
    )
    error_sentence, corrected_sentence = (
        fields.optional_text(place, key, values[key]) for key in ("error_sentence", "corrected_sentence")
    )
    return Vignette(
        vignette_id=place.text_id,
        text_ids=(place.text_id,),
        subset=subset_of(place.text_id),
        error_note=error_note,
        clean_note=clean_note,
        error_text_id=place.text_id,
        clean_text_id=place.text_id,
        error_type=fields.error_type(place, "error_type", values["error_type"]),
        error_sentence=error_sentence,
        corrected_sentence=corrected_sentence,
        pair_source=PairSource.IN_ROW,
        edit_tag=tag_edit(error_note, clean_note, error_sentence, corrected_sentence),
        source_sha256=sha256,
    )
