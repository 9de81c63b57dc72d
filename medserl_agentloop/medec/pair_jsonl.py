"""The pair format: one JSON object per line with an error note and its corrected note.

Called by ``reader.py``.
"""

from __future__ import annotations

import json

from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import MedecFormatError, Parsed, RowPlace, SourceFile
from medserl_agentloop.medec.vignettes import PairSource, Vignette, subset_of, tag_edit

REQUIRED_KEYS = ("note_id", "incorrect_note", "correct_note")
OPTIONAL_KEYS = ("error_type", "error_sentence", "corrected_sentence")


def read_pair_jsonl(source: SourceFile) -> Parsed:
    """Read one vignette per line.

    Raises:
        MedecFormatError: A line is not such an object, or a pair cannot be right.
    """
    places: list[RowPlace] = []
    vignettes: list[Vignette] = []
    # str.splitlines would also split at U+2028 and U+0085, which are valid inside JSON strings.
    lines = source.text.removesuffix("\n").split("\n")
    blank = 0
    for row, line in enumerate(lines, start=1):
        if not line.strip():
            blank += 1
            continue
        place, values = _object(RowPlace(source.name, row), line)
        places.append(place)
        vignettes.append(_vignette(place, values, source.sha256))
    fields.require_unique(places)
    return Parsed(tuple(places), tuple(vignettes), blank)


def _object(place: RowPlace, line: str) -> tuple[RowPlace, dict[str, str]]:
    """The pair's values as text (absent ones as ``""``) and its place with the pair's id."""
    try:
        pair = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MedecFormatError(f"{place}: not valid JSON ({error}); write one object per line.") from error
    if not isinstance(pair, dict):
        raise MedecFormatError(
            f"{place}: found a JSON {type(pair).__name__}; write an object with the keys "
            f"{', '.join(REQUIRED_KEYS + OPTIONAL_KEYS)}."
        )
    values: dict[str, str] = {}
    for key in REQUIRED_KEYS + OPTIONAL_KEYS:
        value = pair.get(key)
        if value is None and key in REQUIRED_KEYS:
            raise MedecFormatError(
                f"{place}: key {key!r} is missing; a pair needs {', '.join(REQUIRED_KEYS)} "
                f"and may have {', '.join(OPTIONAL_KEYS)}."
            )
        if value is not None and not isinstance(value, str):
            raise place.error(key, str(value), "write a JSON string")
        values[key] = value or ""
    text_id = fields.required_text(place, "note_id", values["note_id"], "the pair's id, such as ms-train-0")
    return RowPlace(place.file, place.row, text_id), values


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
