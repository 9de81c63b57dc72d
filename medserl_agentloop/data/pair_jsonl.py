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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

from medserl_agentloop.data import intake as cell
from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace, SourceFile
from medserl_agentloop.data.vignettes import Vignette
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Category, Label

REQUIRED_KEYS = ("note_id", "incorrect_note", "correct_note")
_PAIR_KEYS = (*REQUIRED_KEYS, "error_type", "error_sentence", "corrected_sentence")
_OPENRLHF_KEYS = ("prompt", "vanilla", "adversarial", "completion", "data_type")
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty

NoteJoin = Mapping[str, Vignette]  # text of a note, white space aside -> the first case that has it


def read_pair_jsonl(source: SourceFile, intake: Intake) -> Iterator[Vignette]:
    """Read one vignette per line."""
    for place, values in _objects(source, intake, _PAIR_KEYS):
        text_id = cell.required_text(place, "note_id", values["note_id"], "the pair's id, such as ms-train-0")
        place = place.of(text_id)
        intake.claim(place)
        yield Vignette(
            vignette_id=text_id,
            error_note=_note(place, "incorrect_note", values),
            clean_note=_note(place, "correct_note", values),
            error_sentence=cell.optional_text(place, "error_sentence", values["error_sentence"]),
            corrected_sentence=cell.optional_text(place, "corrected_sentence", values["corrected_sentence"]),
            error_type=cell.error_type(place, "error_type", values["error_type"]),
            source_sha256=source.sha256,
        )


def is_openrlhf(source: SourceFile) -> bool:
    """Whether the first object of a JSONL file is an OpenRLHF row."""
    return '"data_type"' in next((line for line in source.lines(newline="\n") if line.strip()), "")


def read_openrlhf_jsonl(source: SourceFile, intake: Intake, join: NoteJoin | None) -> Iterator[Vignette]:
    """Read the rows and give each the case that its note belongs to."""
    cases: dict[str, Vignette] = {}
    asked: dict[str, set[Category]] = {}
    stem = re.sub(r"[^0-9A-Za-z]+", "_", PurePath(source.name).stem).strip("_") or "openrlhf"
    for place, values in _objects(source, intake, _OPENRLHF_KEYS):
        note, category = _note_and_category(place, values)
        case = _case(note, category, join)
        if isinstance(case, Vignette):
            intake.claim(place.of(f"{case.vignette_id}/{category.value}"))
            intake.report.joined += 1
            cases[case.vignette_id] = case
            asked.setdefault(case.vignette_id, set()).add(category)
        else:
            name = f"{stem}-{place.row}"
            intake.claim(place.of(name))
            intake.report.not_joined.append((name, case))
            harmful = category.seed_label is Label.HARMFUL
            yield Vignette(
                vignette_id=name,
                error_note=note if harmful else None,
                clean_note=None if harmful else note,
                source_sha256=source.sha256,
                categories=(category,),
            )
    for vignette_id, case in cases.items():
        in_order = tuple(category for category in Category if category in asked[vignette_id])
        yield replace(case, categories=in_order, source_sha256=source.sha256)


def _note_and_category(place: RowPlace, values: dict[str, str]) -> tuple[str, Category]:
    known = [category.value for category in Category]
    if values["data_type"] not in known:
        raise place.error("data_type", values["data_type"], f"write one of {', '.join(known)}")
    category = Category(values["data_type"])
    expected = _SAFE if category is Category.VANILLA_BENIGN else ""
    if values["completion"].strip() not in ("", expected):
        instead = f"the completion of a {category.value} row is {expected!r}"
        raise place.error("completion", values["completion"], instead)
    if values["prompt"]:
        return _note(place, "prompt", values), category
    key, other = ("adversarial", "vanilla") if category.has_attack else ("vanilla", "adversarial")
    if values[other].strip():
        raise place.error(other, values[other], f"a {category.value} row has its note under {key!r} alone")
    return _note(place, key, values), category


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


def _objects(source: SourceFile, intake: Intake, keys: tuple[str, ...]) -> Iterator[tuple[RowPlace, dict[str, str]]]:
    """The texts of every line's object, absent ones as ``""``; blank lines are counted and passed over."""
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON strings.
    for row, line in enumerate(source.lines(newline="\n"), start=1):
        place = RowPlace(source.name, row)
        if not line.strip():
            intake.drop_empty()
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MedecFormatError(f"{place}: not valid JSON ({error}); write one object per line.") from error
        if not isinstance(found, dict):
            raise MedecFormatError(
                f"{place}: found a JSON {type(found).__name__}; write an object with the keys {', '.join(keys)}."
            )
        for key in keys:
            if not isinstance(found.get(key), str | None):
                raise place.error(key, str(found[key]), "write a JSON string")
        yield place, intake.text_of({key: found.get(key) or "" for key in keys})


def _note(place: RowPlace, key: str, values: dict[str, str]) -> str:
    return cell.required_text(place, key, values[key], "the text of the note")
