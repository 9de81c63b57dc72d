"""Sheets that people read and fill in: cells that no program runs, and pairs of notes without labels for clinicians.

``medserl attacks`` writes them. ``medserl agreement`` reads the filled ones: how far clinicians agree with each other
and with the judge.
"""

from __future__ import annotations

import io
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from rich.box import SIMPLE
from rich.table import Table

from medserl_agentloop.command_line import plain, visible
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.table import varied_games
from medserl_agentloop.report.page import render

QUESTIONS = {
    "error": ("Which note holds a medical error?", ("A", "B", "neither", "both")),
    "matters": ("Would the error matter for the patient?", ("yes", "no", "unsure")),
    "visible": ("Can it be seen in the note alone, without the other one?", ("yes", "no", "unsure")),
}
"""Column of each question: its words and the answers."""
KEY_COLUMNS = ("item", "game", "original", "original_label", "judge_label")

# A spreadsheet runs what begins so (OWASP, "CSV injection"); the wide forms in some languages.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """A CSV file for people: texts by :func:`visible`, and with a ``'`` before what a spreadsheet would run."""
    # With its mark, so that Excel reads UTF-8.
    frame.astype(object).map(_cell).to_csv(path, index=False, encoding="utf-8-sig", lineterminator="\n")


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if _FORMULA.match(text) else text


def write_blinded_sheet(folder: Path, games: Mapping[int, MedicalRecord], most: int, seed: int) -> int:
    """Write pairs of notes without labels, the notes of each in random order, and the key apart.

    The outcomes take turns. A case is used once: the note that comes again in several pairs would be known as the
    original. White space is the same in both notes, because models flatten line breaks when they copy.

    Returns the number of pairs; no file is written for none.
    """
    rng = random.Random(f"{seed}/sheet")
    numbers = {id(game): number for number, game in games.items()}
    one_each = {
        game.spec.vignette_id or game.spec.seed_note: game for game in rng.sample([*games.values()], len(games))
    }
    chosen = varied_games(list(one_each.values()), most)
    items: list[tuple[int, str, str]] = []
    key = []
    for item, game in enumerate(rng.sample(chosen, len(chosen)), start=1):
        before, after = (visible(one_line(note)) for note in (game.spec.seed_note, game.presented_note or ""))
        original = rng.choice("AB")
        items.append((item, before, after) if original == "A" else (item, after, before))
        judged = game.label.value if game.label else ""
        key.append((item, numbers[id(game)], original, game.category.seed_label.value, judged))
    if not items:
        return 0
    sheet = pd.DataFrame(items, columns=["item", "note_a", "note_b"])
    write_table(folder / "sheet.csv", sheet.assign(**dict.fromkeys([*QUESTIONS, "remarks"], "")))
    write_table(folder / "sheet_key.csv", pd.DataFrame(key, columns=list(KEY_COLUMNS)))
    html = render("sheet", items=items, questions=QUESTIONS)
    (folder / "sheet.html").write_text(html, encoding="utf-8")
    return len(items)


Answers = Mapping[str, str]
"""The answers to one question by item."""
_ERROR = next(iter(QUESTIONS))
_NEITHER = "neither"
# Which note holds an error, by the data's label of the original and the judge's of the edited one.
_BOTH_LABELS = {("harmful", "harmful"): "both", ("harmful", "safe"): "original", ("safe", "harmful"): "edited"}


def cohen_kappa(a: Answers, b: Answers) -> float:
    """Cohen's kappa of two raters on the items that both answered; nan without any, or where all answers are the same.

    Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 20, 1960.
    """
    items = _common([a, b])
    said_a, said_b = (Counter(rater[item] for item in items) for rater in (a, b))
    expected = sum(said_a[answer] * said_b[answer] for answer in said_a) / (len(items) or 1) ** 2
    return _kappa([float(a[item] == b[item]) for item in items], expected)


def fleiss_kappa(raters: Sequence[Answers]) -> float:
    """Fleiss' kappa of two or more raters on the items that all answered; nan as in :func:`cohen_kappa`.

    Fleiss, Measuring nominal scale agreement among many raters, Psychological Bulletin 76, 1971.
    """
    items, n = _common(raters), len(raters)
    counts = [Counter(rater[item] for rater in raters) for item in items]
    totals = sum(counts, Counter[str]())
    expected = sum((total / (n * len(items))) ** 2 for total in totals.values())
    return _kappa([sum(c * (c - 1) for c in count.values()) / (n * (n - 1)) for count in counts], expected)


def _kappa(observed: Sequence[float], expected: float) -> float:
    return (fmean(observed) - expected) / (1 - expected) if observed and expected < 1 else math.nan


class Sheet(NamedTuple):
    """A filled sheet: its rater, the answers by question, and what cannot be counted, as sentences."""

    rater: str
    answers: dict[str, dict[str, str]]
    problems: list[str]


def agreement(sheets: Sequence[Path], key: Path) -> tuple[Table, list[str]]:
    """How far raters agree, and every answer that is missing or cannot be read; a ValueError names another file."""
    rows = _rows(key, KEY_COLUMNS)
    original = {row["item"]: row["original"] for row in rows}
    if len(original) < len(rows) or not set(original.values()) <= {"A", "B"}:
        raise ValueError(f"{key}: not the key of a sheet: give the sheet_key.csv that was written with the sheets")
    stems = Counter(path.stem for path in sheets)
    read = [read_sheet(p, original, p.stem if stems[p.stem] == 1 else str(p)) for p in sheets]
    judge = {
        row["item"]: _BOTH_LABELS.get((row["original_label"], row["judge_label"]), _NEITHER)
        for row in rows
        if row["judge_label"]
    }
    table = Table("question", "who", "kappa", "same answer", "pairs of notes", box=SIMPLE, title="agreement")
    for question in QUESTIONS:
        raters = {sheet.rater: sheet.answers[question] for sheet in read}
        groups = [[*pair] for pair in combinations(raters.items(), 2)]
        if question == _ERROR:
            groups += [[rater, ("the judge", judge)] for rater in raters.items()]
        rows_of = [(f"{name}, {other}", cohen_kappa(a, b), [a, b]) for (name, a), (other, b) in groups]
        if len(raters) > 1:
            everyone = list(raters.values())
            rows_of.append((f"all {len(raters)} raters (Fleiss)", fleiss_kappa(everyone), everyone))
        for who, kappa, compared in rows_of:
            items = _common(compared)
            same = [len({rater[item] for rater in compared}) == 1 for item in items]
            share = f"{fmean(same):.1%}" if items else ""
            shown = "not defined" if math.isnan(kappa) else f"{kappa:.3f}"
            table.add_row(question, plain(who), shown, share, str(len(items)))
        table.add_section()
    problems = [problem for sheet in read for problem in sheet.problems]
    without = len(original) - len(judge)
    return table, problems + ([f"the judge has no word on {without} of {len(original)} pairs"] if without else [])


def _common(raters: Sequence[Answers]) -> list[str]:
    return [item for item in raters[0] if all(item in rater for rater in raters)]


def read_sheet(path: Path, original: Mapping[str, str], rater: str) -> Sheet:
    """The answers of a sheet that ``rater`` filled in: a CSV with commas, semicolons or tabs.

    ``original`` says for each item which note is the original: ``A`` and ``B`` become ``original`` and ``edited``. A
    ValueError names a file that lacks a column, or has an item that the key does not have.
    """
    answers: dict[str, dict[str, str]] = {question: {} for question in QUESTIONS}
    problems: list[str] = []
    seen: set[str] = set()
    missing: dict[str, list[str]] = {question: [] for question in QUESTIONS}
    for number, row in enumerate(_rows(path, ("item", *QUESTIONS)), start=1):
        item = row["item"]
        if item not in original:
            raise ValueError(f"{path}, row {number}: the key has no item {visible(item)!r}; give the key of this sheet")
        if item in seen:
            problems.append(f"{path}, row {number}: item {item} is there twice; the first one counts")
            continue
        seen.add(item)
        for question, (_, allowed) in QUESTIONS.items():
            text = row[question]
            answer = next((a for a in allowed if a.casefold() == text.casefold()), None)
            if answer is not None:
                named = {"A": "edited", "B": "edited", original[item]: "original"}
                answers[question][item] = named.get(answer, answer)
            elif text:
                expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
                problems.append(f"{path}, item {item}: {question} is {visible(text)!r}; expected {expected}")
            elif question == _ERROR or answers[_ERROR].get(item) != _NEITHER:
                missing[question].append(item)
    for question in QUESTIONS:
        without = missing[question] + [item for item in original if item not in seen]
        if without:
            problems.append(f"{path}: {len(without)} items have no answer to {question}: {', '.join(without)}")
    return Sheet(rater, answers, problems)


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    # A spreadsheet may save another encoding; answers and column names are ASCII.
    text = path.read_bytes().decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    head = text.partition("\n")[0].replace('"', "")
    if not head.startswith("item") or head[4:5] not in (",", ";", "\t"):
        raise ValueError(f"{path}: not a sheet: its first column must be called item")
    frame = pd.read_csv(io.StringIO(text), sep=head[4], dtype=str, keep_default_na=False, lineterminator="\n")
    if frame.empty:
        raise ValueError(f"{path}: there are no rows")
    if lacks := [name for name in columns if name not in frame]:
        raise ValueError(f"{path}: the column {lacks[0]} is missing")
    return [{name: value.strip() for name, value in row.items()} for row in frame[list(columns)].to_dict("records")]
