"""Sheets that people read and fill in: cells that no program runs, and pairs of notes without labels for clinicians.

Called by ``medserl attacks``. ``agreement.py`` reads the filled sheets back.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from medserl_agentloop.command_line import visible
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.records import GameRecord
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


def write_blinded_sheet(folder: Path, games: Mapping[int, GameRecord], most: int, seed: int) -> int:
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
