"""Sheets that people read and fill in: cells that no program runs, and pairs of notes without labels for clinicians.

Called by ``medserl attacks``. ``agreement.py`` reads the filled sheets back.
"""

from __future__ import annotations

import csv
import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import PACKAGE
from medserl_agentloop.report.page import content_policy

QUESTIONS = {
    "error": ("Which note holds a medical error?", ("A", "B", "neither", "both")),
    "matters": ("Would the error matter for the patient?", ("yes", "no", "unsure")),
    "visible": ("Can it be seen in the note alone, without the other one?", ("yes", "no", "unsure")),
}
"""Column of each question: its words and the answers."""
KEY_COLUMNS = ("item", "game", "original", "original_label", "judge_label")

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# A spreadsheet runs what begins so (OWASP, "CSV injection"); the wide forms in some languages.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")


@dataclass(frozen=True)
class Pair:
    """An original note and what an attack made of it.

    Attributes:
        game: Line of the game in its file.
        original: The note before the attack.
        edited: The note after it.
        original_label: What the data says of the original.
        judge_label: What the judge says of the edited note; None if it cannot tell.
    """

    game: int
    original: str
    edited: str
    original_label: Label
    judge_label: Label | None


def shown(text: str) -> str:
    """Untrusted text with its control, format and private characters and half surrogates written out, as ``\\x1b``."""
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _HIDDEN and c not in "\n\t" else c
        for c in text
    )


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file for people: texts by :func:`shown`, and with a ``'`` before what a spreadsheet would run."""
    # With its mark, so that Excel reads UTF-8.
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(map(_cell, row) for row in rows)


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = shown(value)
    return f"'{text}" if _FORMULA.match(text) else text


def write_blinded_sheet(folder: Path, pairs: Sequence[Pair], seed: int) -> None:
    """Write ``sheet.html``, ``sheet.csv`` and ``sheet_key.csv``: the pairs and the notes of each in random order.

    White space is the same in both notes of a pair, because models flatten line breaks when they copy.
    """
    rng = random.Random(f"{seed}/sheet")
    items = []
    key = []
    for number, pair in enumerate(rng.sample(pairs, len(pairs)), start=1):
        original = rng.choice("AB")
        notes = [shown(one_line(note)) for note in (pair.original, pair.edited)]
        items.append((number, *(notes if original == "A" else reversed(notes))))
        judged = pair.judge_label.value if pair.judge_label else ""
        key.append((number, pair.game, original, pair.original_label.value, judged))
    columns = ("item", "note_a", "note_b", *QUESTIONS, "remarks")
    write_table(folder / "sheet.csv", columns, [(*item, *[""] * (len(QUESTIONS) + 1)) for item in items])
    write_table(folder / "sheet_key.csv", KEY_COLUMNS, key)
    script, style, page = (
        (PACKAGE / "report" / f"sheet.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html")
    )
    html = Template(page, autoescape=True).render(
        policy=content_policy(script, style), script=script, style=style, items=items, questions=QUESTIONS
    )
    (folder / "sheet.html").write_text(html, encoding="utf-8")
