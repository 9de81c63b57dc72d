"""The formats with one JSON object per line: pairs, and OpenRLHF rows in their three shapes.

Called by ``reader.py``. A pair is an error note and its corrected note. An OpenRLHF row,
``{prompt, completion, data_type}`` or ``{vanilla, adversarial, completion, data_type}``, has a note and a
category but no id and no error type; these are found by looking the note up in MEDEC's own files. What such rows are
made from, ``{game_category, error_note, clean_note, error_type}``, lacks the id alone. Rows of one case become one
vignette that serves exactly the categories of its rows, so that ``--mix`` chooses among the rows given and a case
stays in one split.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from medserl_agentloop.data import intake as cell
from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace, SourceFile
from medserl_agentloop.data.vignettes import NearDuplicateIndex, Vignette
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Category, Label

REQUIRED_KEYS = ("note_id", "incorrect_note", "correct_note")
_PAIR_KEYS = (*REQUIRED_KEYS, "error_type", "error_sentence", "corrected_sentence")
_WITH_BOTH_NOTES = ("game_category", "error_note", "clean_note", "error_type")
_OPENRLHF_KEYS = ("prompt", "vanilla", "adversarial", "completion", "data_type", *_WITH_BOTH_NOTES)
_NO_TYPE = ("unknown", "none")
# Which collection a file's or folder's name speaks of, and a value beside the notes, such as an id.
_COLLECTION = re.compile(r"(?:(?<![a-z])|(?<=medec))(ms|uw)(?![a-z])", re.IGNORECASE)
_OF_COLLECTION = re.compile(r"(?:medec[-_ ]?)?(ms|uw)(?:[-_]\S*)?", re.IGNORECASE)
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty

NoteJoin = Mapping[str, Vignette]  # text of a note, white space aside -> the first case that has it


def read_pair_jsonl(source: SourceFile, intake: Intake) -> Iterator[Vignette]:
    """Read one vignette per line."""
    for place, values, _ in _objects(source, intake, _PAIR_KEYS):
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


def has_key(source: SourceFile, *keys: str) -> bool:
    """Whether the first object of a JSONL file has one of the keys."""
    first = next((line for line in source.lines(newline="\n") if line.strip()), "")
    return any(f'"{key}"' in first for key in keys)


def read_openrlhf_jsonl(source: SourceFile, intake: Intake, join: NoteJoin | None) -> Iterator[Vignette]:
    """Read the rows and give each the case that its note belongs to."""
    joined: dict[str, Vignette] = {}
    alone: dict[tuple[str | int, ...], Vignette] = {}
    asked: defaultdict[str, set[Category]] = defaultdict(set)
    stem = re.sub(r"[^0-9A-Za-z]+", "_", PurePath(source.name).stem).strip("_") or "openrlhf"
    of_file = _COLLECTION.findall(f"{source.folder}/{source.name}")
    for place, values, others in _objects(source, intake, _OPENRLHF_KEYS):
        category, error, clean = _category_and_notes(place, values)
        case = _case((error if category.seed_label is Label.HARMFUL else clean) or "", category, join)
        of_row = [match[1] for match in map(_OF_COLLECTION.fullmatch, others) if match]
        # The collection is the beginning of an id: see Vignette.subset. In doubt it is the one with a licence.
        named = sorted({collection.lower() for collection in of_file + of_row})[-1:]
        if isinstance(case, Vignette):
            if case.categories is not None and not case.subset.startswith("medec_"):  # from a file without ids
                intake.report.unknown_origin += not named
                case = replace(case, vignette_id="_".join([*named, case.vignette_id]))
            intake.claim(place.of(f"{case.vignette_id}/{category.value}"))
            intake.report.joined += 1
            joined[case.vignette_id] = case
        else:
            intake.report.unknown_origin += not named
            name = f"{'_'.join([*named, stem])}-{place.row}"
            intake.claim(place.of(name))
            intake.report.not_joined.append((name, case))
            kind = "" if values["error_type"].lower() in _NO_TYPE else values["error_type"]
            error_type = cell.error_type(place, "error_type", kind)
            key = (one_line(error), one_line(clean)) if error and clean else (place.row,)
            case = alone.setdefault(key, Vignette(name, error, clean, source.sha256, error_type=error_type))
        asked[case.vignette_id].add(category)
    for case in (*joined.values(), *_paired(list(alone.values()))):
        wanted = set[Category]().union(*(asked[text_id] for text_id in case.text_ids))
        in_order = tuple(category for category in Category if category in wanted)
        yield replace(case, categories=in_order, source_sha256=source.sha256)


def _category_and_notes(place: RowPlace, values: dict[str, str]) -> tuple[Category, str | None, str | None]:
    """What a row asks for, its error note and its clean note."""
    key = "game_category" if values["game_category"] else "data_type"
    known = [category.value for category in Category]
    if values[key] not in known:
        raise place.error(key, values[key], f"write one of {', '.join(known)}")
    category = Category(values[key])
    harmful = category.seed_label is Label.HARMFUL
    if key == "game_category":
        _note(place, "error_note" if harmful else "clean_note", values)
        notes = {name: cell.optional_text(place, name, values[name]) for name in ("error_note", "clean_note")}
        return category, notes["error_note"], notes["clean_note"]
    expected = _SAFE if category is Category.VANILLA_BENIGN else ""
    if values["completion"].strip() not in ("", expected):
        instead = f"the completion of a {category.value} row is {expected!r}"
        raise place.error("completion", values["completion"], instead)
    if values["prompt"]:
        note = _note(place, "prompt", values)
    else:
        key, other = ("adversarial", "vanilla") if category.has_attack else ("vanilla", "adversarial")
        if values[other].strip():
            raise place.error(other, values[other], f"a {category.value} row has its note under {key!r} alone")
        note = _note(place, key, values)
    return (category, note, None) if harmful else (category, None, note)


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


def _paired(cases: list[Vignette]) -> Iterator[Vignette]:
    """The cases; an error note without a clean one gets the most similar clean note that has no error note.

    Without ids this is how the two rows of a case are known, which must not stand in two splits.
    """
    wrong, right = ([c for c in cases if getattr(c, other) is None] for other in ("clean_note", "error_note"))
    index = NearDuplicateIndex(case.error_note or "" for case in wrong)
    matches = [(-similar, n, at) for at, c in enumerate(right) for n, similar in index.matches(c.clean_note or "")]
    twin_of: dict[str, Vignette] = {}
    taken: set[str] = set()
    for _, number, at in sorted(matches):
        if wrong[number].vignette_id not in twin_of and right[at].vignette_id not in taken:
            twin_of[wrong[number].vignette_id] = right[at]
            taken.add(right[at].vignette_id)
    for case in cases:
        if twin := twin_of.get(case.vignette_id):
            case = replace(case, clean_note=twin.clean_note, twin_text_id=twin.vignette_id, clean_from_twin=True)
        if case.vignette_id not in taken:
            yield case


def _objects(
    source: SourceFile, intake: Intake, keys: tuple[str, ...]
) -> Iterator[tuple[RowPlace, dict[str, str], list[str]]]:
    """The texts of every line's object, absent ones as ``""``, and those of other keys; passes over blank lines."""
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON strings.
    for row, line in enumerate(source.lines(newline="\n"), start=1):
        place = RowPlace(source.name, row)
        if not line.strip():
            intake.drop_empty()
            continue
        try:
            found = json.loads(line, object_pairs_hook=_once)
        except MedecFormatError as error:
            raise MedecFormatError(f"{place}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise MedecFormatError(f"{place}: not valid JSON ({error}); write one object per line.") from error
        if not isinstance(found, dict):
            raise MedecFormatError(
                f"{place}: found a JSON {type(found).__name__}; write an object with the keys {', '.join(keys)}."
            )
        for key in keys:
            if not isinstance(found.get(key), str | None):
                raise place.error(key, str(found[key]), "write a JSON string")
        others = [value for key, value in found.items() if key not in keys and isinstance(value, str)]
        yield place, intake.text_of({key: found.get(key) or "" for key in keys}), others


def _once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):  # json would keep the last value
        key = Counter(key for key, _ in items).most_common(1)[0][0]
        raise MedecFormatError(f"key {cell.shown(key)} occurs twice; write every key of an object once.")
    return found


def _note(place: RowPlace, key: str, values: dict[str, str]) -> str:
    return cell.required_text(place, key, values[key], "the text of the note")
