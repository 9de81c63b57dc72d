"""Files of the OpenRLHF system: its rows as cases, and its logs for ``medserl compare``.

A row is ``{prompt, completion, data_type}`` or ``{vanilla, adversarial, completion, data_type}``: a
note and a category without an id, which is found by looking the note up in MEDEC's own files. What
such rows are made from, ``{game_category, error_note, clean_note, error_type}``, lacks the id
alone. Rows of one case become one case that serves exactly the categories of its rows, so that
``--mix`` chooses among the rows given and a case stays in one split.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import AliasChoices, BaseModel, Field

from medserl_agentloop import report
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.data.cases import Case, NearDuplicateIndex
from medserl_agentloop.data.reader import Intake, NoteJoin
from medserl_agentloop.data.tables import NOTE, NoteRow, Table, error_type
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.games.medical.records import CLEARED, FOUND, GAMES, Outcome
from medserl_agentloop.report.compare import SECONDS

_CLOCK = "_runtime"  # seconds since the start, in every row of W&B's history
_STEPS = ("step", "global_step", "train/global_step", "_step")
_WITH_BOTH_NOTES = ("game_category", "error_note", "clean_note", "error_type")
_KEYS = ("prompt", "vanilla", "adversarial", "completion", "data_type", *_WITH_BOTH_NOTES)
# Which collection a file's or folder's name speaks of, and other values of a row, such as an id.
_COLLECTION = re.compile(r"(?:(?<![a-z])|(?<=medec))(ms|uw)(?![a-z])", re.IGNORECASE)
_OF_COLLECTION = re.compile(r"(?:medec[-_ ]?)?(ms|uw)(?:[-_]\S*)?", re.IGNORECASE)
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty


def read_rows(path: Path, table: Table, intake: Intake, join: NoteJoin | None) -> Iterator[Case]:
    """Every row with the case that its note belongs to."""
    joined: dict[str, Case] = {}
    alone: dict[tuple[str | int, ...], Case] = {}
    asked: defaultdict[str, set[Category]] = defaultdict(set)
    stem = re.sub(r"[^0-9A-Za-z]+", "_", path.stem).strip("_") or "openrlhf"
    of_file = _COLLECTION.findall(f"{path.absolute().parent.name}/{path.name}")
    for number, row in enumerate(intake.rows(table), start=1):
        category, error, clean = _category_and_notes(row)
        kind = row.read("error_type", error_type)
        if category is None:
            intake.accepts(row, "")
            continue
        case = _case(category, error, clean, join)
        others = (str(value) for key, value in row.values.items() if key not in _KEYS)
        of_row = [match[1] for match in map(_OF_COLLECTION.fullmatch, others) if match]
        # The collection begins an id (Case.subset). In doubt it is the one with a licence.
        named = sorted({collection.lower() for collection in of_file + of_row})[-1:]
        if isinstance(case, Case):
            if case.categories is not None and not case.subset.startswith(
                "medec_"
            ):  # from a file without ids
                case = replace(case, case_id="_".join([*named, case.case_id]))
            if intake.accepts(row, f"{case.case_id}/{category.value}"):
                intake.report.joined += 1
                joined[case.case_id] = case
        else:
            name = f"{'_'.join([*named, stem])}-{number}"
            new = Case(name, error, clean, intake.report.sha256, error_type=kind)
            intake.accepts(row, name)
            intake.report.not_joined.append((name, case))
            key = (one_line(error), one_line(clean)) if error and clean else (number,)
            case = alone.setdefault(key, new)
        asked[case.case_id].add(category)
    for case in (*joined.values(), *_paired(list(alone.values()))):
        wanted = set[Category]().union(*(asked[text_id] for text_id in case.text_ids))
        in_order = tuple(category for category in Category if category in wanted)
        yield replace(case, categories=in_order, source_sha256=intake.report.sha256)


def _category_and_notes(row: NoteRow) -> tuple[Category | None, str | None, str | None]:
    """Return a row's category, error note and clean note; no category if the row is wrong."""
    values = {key: str(row.values.get(key) or "") for key in _KEYS}
    key = "game_category" if values["game_category"] else "data_type"
    known = [category.value for category in Category]
    if values[key] not in known:
        row.refuse(key, f"write one of {', '.join(known)}")
        return None, None, None
    category = Category(values[key])
    harmful = category.seed_label is Label.HARMFUL
    expected = _SAFE if category is Category.VANILLA_BENIGN else ""
    if key == "game_category":
        notes = (
            row.text("error_note", NOTE * harmful),
            row.text("clean_note", NOTE * (not harmful)),
        )
    else:
        key, other = "prompt", ""
        if not values["prompt"]:
            key, other = (
                ("adversarial", "vanilla") if category.has_attack else ("vanilla", "adversarial")
            )
        if other and values[other].strip():
            row.refuse(other, f"a {category.value} row has its note under {key!r} alone")
        elif values["completion"].strip() not in ("", expected):
            row.refuse("completion", f"the completion of a {category.value} row is {expected!r}")
        note = row.text(key, NOTE)
        notes = (note, None) if harmful else (None, note)
    return None if row.problems else category, *notes


def _case(
    category: Category, error: str | None, clean: str | None, join: NoteJoin | None
) -> Case | str:
    """The row's case in ``join``, or the reason why there is none."""
    if join is None:
        return "no --join file was given"
    harmful = category.seed_label is Label.HARMFUL
    note = one_line((error if harmful else clean) or "")
    case = join.get(note)
    if case is None:
        return "its note is in no --join file"
    if one_line((case.error_note if harmful else case.clean_note) or "") != note:
        return f"{category.value} does not start from this note of {case.case_id}"
    return case


def _paired(cases: list[Case]) -> Iterator[Case]:
    """The cases; a lone error note is paired with the most similar lone clean note, because there
    are no ids.
    """
    wrong, right = (
        [c for c in cases if getattr(c, other) is None] for other in ("clean_note", "error_note")
    )
    index = NearDuplicateIndex(case.error_note or "" for case in wrong)
    matches = [
        (-similar, n, at)
        for at, c in enumerate(right)
        for n, similar in index.matches(c.clean_note or "")
    ]
    twin_of: dict[str, Case] = {}
    taken: set[str] = set()
    for _, number, at in sorted(matches):
        if wrong[number].case_id not in twin_of and right[at].case_id not in taken:
            twin_of[wrong[number].case_id] = right[at]
            taken.add(right[at].case_id)
    for case in cases:
        if twin := twin_of.get(case.case_id):
            case = replace(
                case, clean_note=twin.clean_note, twin_text_id=twin.case_id, clean_from_twin=True
            )
        if case.case_id not in taken:
            yield case


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
    """The games and metrics of a log of the OpenRLHF system, turns or steps; a ValueError names a
    wrong line.
    """
    games: dict[tuple[Any, ...], dict[str, Any]] = {}
    numbers: list[dict[str, Any]] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, row in enumerate(StepFile(path).read(), start=1):
        try:
            if "game_role" not in row:
                numbers.append(
                    {**row, "step": next(int(row[name]) for name in _STEPS if name in row)}
                )
                continue
            turn = _LoggedTurn.model_validate(row)
            columns = _columns_of(turn)
        except (ValueError, TypeError, StopIteration) as error:
            why = str(error) or f"it has neither game_role nor {' nor '.join(_STEPS)}"
            raise ValueError(
                f"{path}, line {number} is neither a turn nor the metrics of a step: {why}"
            ) from None
        game = (turn.step, turn.game_idx)
        seen[*game, turn.game_role] += 1  # without steps, a game's index comes again in every batch
        games.setdefault((*game, seen[*game, turn.game_role]), {}).update(columns)
    by_step = pd.DataFrame(numbers).groupby("step").last() if numbers else pd.DataFrame()
    if SECONDS not in by_step and _CLOCK in by_step:
        by_step[SECONDS] = by_step[_CLOCK].diff()
    return report.typed_frame(list(games.values()), GAMES), by_step


def _columns_of(turn: _LoggedTurn) -> dict[str, Any]:
    """The columns of a turn, and of its game as far as the turn tells."""
    role, (thinking, answer) = turn.game_role.value, turn.length_cot_and_answer
    tokens = None if thinking is None or answer is None else thinking + answer
    columns: dict[str, Any] = {
        "step": turn.step,
        f"{role}_reward": turn.reward,
        f"{role}_tokens": tokens,
    }
    if turn.cot_format_violation is not None:
        columns[f"{role}_format_kept"] = not turn.cot_format_violation
    for name in turn.game_outcomes:
        player, _, outcome = (
            name.rpartition(".")[2].lower().partition("_")
        )  # or MedicalGameOutcome.ASSESSOR_…
        if player == Role.ASSESSOR.value:
            # No outcome: the log leaves out games without a result, so it has no share of all
            # games.
            ended = Outcome(outcome)
            columns |= {
                "right": ended.is_right,
                "error_found": FOUND.get(ended),
                "note_cleared": CLEARED.get(ended),
            }
    return columns
