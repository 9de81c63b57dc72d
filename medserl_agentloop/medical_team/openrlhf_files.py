"""Files of the OpenRLHF system: its rows as cases, and its logs for ``medserl compare``.

A row is ``{prompt, completion, data_type}`` or ``{vanilla, adversarial, completion, data_type}``: a
note and a category without an id, which is found by looking the note up in MEDEC's own files. What
such rows are made from, ``{game_category, error_note, clean_note, error_type}``, lacks only the id.
Rows of one case become one case that serves exactly the categories of its rows, so that ``--mix``
chooses among the rows given and a case stays in one split.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import AliasChoices, BaseModel, Field

from medserl_agentloop import report
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.data.cases import Case, NearDuplicateIndex, cell
from medserl_agentloop.data.reader import Layout, NoteJoin, Source, refusal
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.games.medical.records import CLEARED, FOUND, GAMES, Outcome
from medserl_agentloop.report.compare import SECONDS

_CLOCK = "_runtime"  # seconds since the start, in every row of W&B's history
_STEPS = ("step", "global_step", "train/global_step", "_step")
_WITH_BOTH_NOTES = ("game_category", "error_note", "clean_note", "error_type")
_KEYS = ("prompt", "vanilla", "adversarial", "completion", "data_type", *_WITH_BOTH_NOTES)
# Which collection a file's or folder's name means, and other values of a row, such as an id.
_COLLECTION = re.compile(r"(?:(?<![a-z])|(?<=medec))(ms|uw)(?![a-z])", re.IGNORECASE)
_OF_COLLECTION = re.compile(r"(?:medec[-_ ]?)?(ms|uw)(?:[-_]\S*)?", re.IGNORECASE)
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty


def read_rows(source: Source, join: NoteJoin | None) -> Iterator[Case]:
    """Every row with the case that its note belongs to."""
    joined: dict[str, Case] = {}
    alone: dict[tuple[str, str | int], Case] = {}
    asked: defaultdict[str, set[Category]] = defaultdict(set)
    path, report = source.path, source.report
    stem = re.sub(r"[^0-9A-Za-z]+", "_", path.stem).strip("_") or "openrlhf"
    of_file = _COLLECTION.findall(f"{path.absolute().parent.name}/{path.name}")
    for number, (place, values) in enumerate(source.rows(), start=1):
        others = (str(value) for key, value in values.items() if key not in _KEYS)
        of_row = [match[1] for match in map(_OF_COLLECTION.fullmatch, others) if match]
        # The collection begins an id (Case.subset). If in doubt, it is the one with a license.
        named = sorted({collection.lower() for collection in of_file + of_row})[-1:]
        category, facts, columns = _row(place, {key: cell(value) for key, value in values.items()})
        facts["id"] = f"{'_'.join([*named, stem])}-{number}"
        new = source.case(place, facts, columns)
        case = _case(category, new, join)
        if isinstance(case, Case):
            # from a file without ids
            if case.categories is not None and not case.subset.startswith("medec_"):
                case = replace(case, id="_".join([*named, case.id]))
            source.claim(f"{case.case_id}/{category.value}", place)
            report.joined += 1
            joined[case.case_id] = case
        else:
            source.claim(new.id, place)
            report.not_joined.append((new.id, case))
            key = (one_line(new.note), one_line(new.corrected) if new.corrected else number)
            case = alone.setdefault(key, new)
        asked[case.case_id].add(category)
    for case in (*joined.values(), *_paired(list(alone.values()))):
        wanted = set[Category]().union(*(asked[text_id] for text_id in case.text_ids))
        in_order = tuple(category for category in Category if category in wanted)
        if case.case_id in joined:  # which another input may also have
            source.claim(case.case_id, path.name)
        yield replace(case, categories=in_order, source_sha256=report.sha256)


def _row(place: str, values: Mapping[str, Any]) -> tuple[Category, dict[str, Any], Layout]:
    """A row's category, the facts of its case and their columns."""
    names = {category.value: category for category in Category}
    key = "game_category" if values.get("game_category") else "data_type"
    category = names.get(str(values.get(key)))
    if category is None:
        raise refusal(place, key, values.get(key), f"write one of {', '.join(names)}")
    harmful = category.seed_label is Label.HARMFUL
    error, clean, kind = (values.get(name) for name in ("error_note", "clean_note", "error_type"))
    if key == "game_category":
        if harmful or (error and clean):
            facts = {"note": error, "has_error": True, "corrected": clean, "error_type": kind}
            return category, facts, {"note": "error_note", "corrected": "clean_note"}
        return category, {"note": clean, "has_error": False}, {"note": "clean_note"}
    key, other = "prompt", ""
    if not values.get("prompt"):
        key, other = "vanilla", "adversarial"
        if category.has_attack:
            key, other = other, key
    if values.get(other):
        why = f"a {category.value} row has its note under {key!r} alone"
        raise refusal(place, other, values[other], why)
    expected = _SAFE if category is Category.VANILLA_BENIGN else ""
    if values.get("completion") not in (None, expected):
        why = f"the completion of a {category.value} row is {expected!r}"
        raise refusal(place, "completion", values["completion"], why)
    facts = {"note": values.get(key), "has_error": harmful, "error_type": kind if harmful else None}
    return category, facts, {"note": key}


def _case(category: Category, row: Case, join: NoteJoin | None) -> Case | str:
    """The row's case in ``join``, or the reason why there is none."""
    if join is None:
        return "no --join file was given"
    harmful = category.seed_label is Label.HARMFUL
    note = one_line((row.error_note if harmful else row.clean_note) or "")
    case = join.get(note)
    if case is None:
        return "its note is in no --join file"
    if one_line((case.error_note if harmful else case.clean_note) or "") != note:
        return f"{category.value} does not start from this note of {case.case_id}"
    return case


def _paired(cases: list[Case]) -> Iterator[Case]:
    """The cases, each error note with the most similar clean note: there are no ids."""
    wrong = [case for case in cases if case.clean_note is None]
    right = [case for case in cases if not case.has_error]
    index = NearDuplicateIndex(case.note for case in wrong)
    matches = [
        (-similar, n, at) for at, c in enumerate(right) for n, similar in index.matches(c.note)
    ]
    twin_of: dict[str, Case] = {}
    taken: set[str] = set()
    for _, number, at in sorted(matches):
        if wrong[number].id not in twin_of and right[at].id not in taken:
            twin_of[wrong[number].id] = right[at]
            taken.add(right[at].id)
    yield from (replace(case, twin=twin_of.get(case.id)) for case in cases if case.id not in taken)


# -- logs ------------------------------------------------------------------------------------------


class _LoggedTurn(BaseModel):
    game_idx: int
    game_role: Role
    reward: float
    game_outcomes: list[str] = []
    cot_format_violation: bool | None = None
    length_cot_and_answer: tuple[int | None, int | None] = (None, None)
    step: int | None = Field(default=None, validation_alias=AliasChoices(*_STEPS))


def read_log(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The games and metrics of a log of turns or steps; a ValueError names a wrong line."""
    games: dict[tuple[Any, ...], dict[str, Any]] = {}
    numbers: list[dict[str, Any]] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, row in enumerate(StepFile(path).read(), start=1):
        try:
            if "game_role" not in row:
                steps = [int(row[name]) for name in _STEPS if name in row]
                if not steps:
                    raise ValueError(f"it has neither game_role nor {' nor '.join(_STEPS)}")
                numbers.append({**row, "step": steps[0]})
                continue
            turn = _LoggedTurn.model_validate(row)
            columns = _columns_of(turn)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is neither a turn nor the metrics of a step: {error}"
            ) from None
        game = (turn.step, turn.game_idx)
        seen[*game, turn.game_role] += 1  # without steps, a game's index repeats in every batch
        games.setdefault((*game, seen[*game, turn.game_role]), {}).update(columns)
    by_step = pd.DataFrame(numbers).groupby("step").last() if numbers else pd.DataFrame()
    if SECONDS not in by_step and _CLOCK in by_step:
        by_step[SECONDS] = by_step[_CLOCK].diff()
    return report.typed_frame(list(games.values()), GAMES), by_step


def _columns_of(turn: _LoggedTurn) -> dict[str, Any]:
    """The columns of a turn, and of its game as far as the turn tells."""
    role, lengths = turn.game_role.value, turn.length_cot_and_answer
    columns: dict[str, Any] = {"step": turn.step, f"{role}_reward": turn.reward}
    columns[f"{role}_tokens"] = None if None in lengths else sum(filter(None, lengths))
    if turn.cot_format_violation is not None:
        columns[f"{role}_format_kept"] = not turn.cot_format_violation
    for name in turn.game_outcomes:  # assessor_…, or MedicalGameOutcome.ASSESSOR_…
        player, _, outcome = name.rpartition(".")[2].lower().partition("_")
        if player == Role.ASSESSOR.value:
            # Not the outcome: the log leaves out games without a result, so shares would be wrong.
            ended = Outcome(outcome)
            columns |= {"right": ended.is_right, "error_found": FOUND.get(ended)}
            columns["note_cleared"] = CLEARED.get(ended)
    return columns
