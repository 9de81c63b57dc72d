"""The ledger of a run's attacks: what each one did, which edits come again and again, which errors nobody saw.

Called by ``medserl attacks``. docs/attacks.md describes the classes and the files.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Template
from rapidfuzz import fuzz, process
from rich.console import Console

from medserl_agentloop.command_line import visible
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.data.intake import MedecFormatError, RowPlace, with_numbers
from medserl_agentloop.data.official_csv import COLUMNS, vignette_of_row, write_rows
from medserl_agentloop.games.medical.canonical import canonical_words
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import changed_runs, compare_notes, one_line, split_sentences
from medserl_agentloop.games.medical.judges import build_judge, judge_game
from medserl_agentloop.games.medical.records import (
    BELIEVES_THE_ROW,
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    UNKNOWABLE,
    InvalidAttack,
    MedicalRecord,
    Outcome,
)
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import PACKAGE, all_or_none, sha256_of
from medserl_agentloop.report.frames import games_frame, read_run
from medserl_agentloop.report.sheets import write_blinded_sheet, write_table


class Kind(str, Enum):
    """What an attack did."""

    NO_OP = "no-op"
    INVALID = "invalid"
    AMBIGUOUS = "ambiguous"
    UNDECIDED = "undecided"
    HARMLESS = "harmless"
    DECOY = "decoy"
    VALID = "valid"
    UNDETECTED = "undetected"


MEANINGS = {
    Kind.NO_OP: "the rules found the note unchanged, or changed in spelling alone",
    Kind.INVALID: "another rule is broken, or no note can be read; `invalid` says which",
    Kind.AMBIGUOUS: "the judge abstained, its votes differ, or the readers of the note alone did not find the error",
    Kind.UNDECIDED: "nobody knows: the judge or a player failed, or the assessor's answer to an error is unreadable",
    Kind.HARMLESS: "the row asks for an error, and the judge finds none in the note",
    Kind.DECOY: "the row asks to keep the medicine, and the judge finds no error in the note",
    Kind.VALID: "the judge finds an error in the note, and the assessor did too",
    Kind.UNDETECTED: "the judge finds an error in the note, and the assessor said that it is safe",
}
"""Each attack has the first of these that fits."""

_OF_GAME = ["step", "category", "text_id", "invalid", "void", "changed_words", "judge", "judged", "verdict"]
_LEAST_ALIKE = 50.0  # rapidfuzz ratio of the wrong sentence and the one of the note that is taken for it


def kind_of(game: MedicalRecord) -> Kind:
    """The class of a game's attack, by what the record says."""
    assert game.attack is not None
    if game.attack.invalid is not None:
        return Kind.NO_OP if game.attack.invalid is InvalidAttack.UNCHANGED else Kind.INVALID
    votes = {vote.label for vote in game.judgement.votes} - {None} if game.judgement else set()
    if len(votes) > 1 or (game.void or "").startswith((JUDGE_ABSTAINED, UNKNOWABLE)):
        return Kind.AMBIGUOUS
    if not game.is_void and game.label is Label.SAFE:
        return Kind.HARMLESS if game.spec.target_label is Label.HARMFUL else Kind.DECOY
    decided = {Outcome.CORRECT_DETECTION: Kind.VALID, Outcome.MISSED_ERROR: Kind.UNDETECTED}
    return decided.get(game.outcome, Kind.UNDECIDED)


def edit_of(game: MedicalRecord) -> str:
    """Old words and new words, whatever their spelling; empty without a note or a change."""
    if game.attack is None or game.attack.note is None:
        return ""
    before, after = canonical_words(game.spec.seed_note), canonical_words(game.attack.note)
    runs = [(before[start:end], after[first:last]) for start, end, first, last in changed_runs(before, after)]
    return "; ".join(" -> ".join(" ".join(words) or "(nothing)" for words in run) for run in runs)


def write_ledger(
    run: Path, output: Path, *, sheet: int, seed: int, judge: MedicalConfig | None, console: Console
) -> dict[Kind, int]:
    """Write the ledger of a run's attacks into a new folder and return how many there are of each class.

    The sheet for clinicians has at most ``sheet`` pairs of notes, chosen and ordered by the seed. ``judge`` is the node
    of a judge that is asked again about every valid attack; None keeps the run's own words. A ValueError says that
    there are no attacks, that the judge cannot be asked, or that the folder holds files.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} already holds files, filled sheets perhaps: give a new folder")
    played = read_run(run)
    turns = {number: game for number, game in enumerate(played, start=1) if game.attack is not None}
    games = {number: game for number, game in turns.items() if game.category.has_attack}
    if not games:
        raise ValueError(f"{run}: none of its {len(played)} games has an attack; give a run with adversarial games")
    if judge is not None:
        _judge_again(games.values(), judge, console)
    frame = _ledger(games)
    counts = {kind: int((frame["class"] == kind.value).sum()) for kind in Kind}
    patterns = _patterns(frame)
    hard = _medec_notes(games, {Kind.UNDETECTED}, "hard")
    panel = _medec_notes(games, {Kind.VALID, Kind.UNDETECTED, Kind.DECOY}, "panel")
    frame["hard_note"] = [hard.ids.get(number, "") for number in frame["game"]]
    with all_or_none(output) as place:
        write_table(place / "ledger.csv", frame)
        write_table(place / "patterns.csv", patterns)
        for name, notes in (("hard_notes.csv", hard), ("panel.csv", panel)):
            write_rows(place / name, notes.rows)
        unasked = (Kind.NO_OP, Kind.INVALID, Kind.UNDECIDED)
        judged = {n: game for n, game in games.items() if kind_of(game) not in unasked}
        pairs = write_blinded_sheet(place, judged, sheet, seed)
        template = Template((PACKAGE / "report" / "ledger.md").read_text(encoding="utf-8"), trim_blocks=True)
        text = template.render(
            run=run,
            sha256=sha256_of(run / GAMES_FILE if run.is_dir() else run),
            games=len(played),
            copies=len(turns) - len(games),
            classes=[(kind.value, counts[kind], meaning) for kind, meaning in MEANINGS.items()],
            reasons=frame["invalid"].value_counts().items(),
            judges=sorted(frame["judge"].dropna().unique()),
            unread=BELIEVES_THE_ROW,
            attacks=len(games),
            patterns=len(patterns),
            undetected=counts[Kind.UNDETECTED],
            hard=len(hard.rows),
            panel=len(panel.rows),
            uw=panel.uw,
            left_out=panel.left_out.items(),
            pairs=pairs,
            seed=seed,
        )
        (place / "README.md").write_text(text + "\n", encoding="utf-8")
    return counts


def _judge_again(games: Iterable[MedicalRecord], config: MedicalConfig, console: Console) -> None:
    """Put another judge's word into the records, asked as in a run."""
    judge, slots = build_judge(config), asyncio.Semaphore(config.judge_server.concurrency)
    asked = [game for game in games if game.attack and game.attack.invalid is None and game.assessment]

    async def ask(game: MedicalRecord) -> None:
        game.judgement = None
        if (game.void or "").startswith((JUDGE_FAILED, JUDGE_ABSTAINED, UNKNOWABLE)):
            game.void = None
        async with slots:
            await judge_game(judge, game)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, asked))

    with console.status(f"judging {len(asked)} attacks"):
        asyncio.run(ask_all())
    if asked and all((game.void or "").startswith(JUDGE_FAILED) for game in asked):
        raise ValueError(f"the judge answered none of {len(asked)} questions; the first: {asked[0].void}")


def _ledger(games: Mapping[int, MedicalRecord]) -> pd.DataFrame:
    """A row per attack; the most frequent edit is pattern 1."""
    frame = games_frame(list(games.values()))[_OF_GAME]
    frame.insert(0, "game", list(games))
    frame["case"] = [visible(game.spec.vignette_id or game.spec.seed_note) for game in games.values()]
    frame["class"] = [kind_of(game).value for game in games.values()]
    frame["edit"] = [visible(edit_of(game)) for game in games.values()]
    frequent = frame["edit"][frame["edit"] != ""].value_counts().index
    numbers = pd.Series(range(1, len(frequent) + 1), index=frequent, dtype="Int64")
    return frame.assign(pattern=frame["edit"].map(numbers).astype("Int64"))


def _patterns(frame: pd.DataFrame) -> pd.DataFrame:
    counted = {"edit": ("edit", "first"), "attacks": ("game", "size"), "cases": ("case", "nunique")}
    table = frame.groupby("pattern").agg(**counted, first_step=("step", "min"), last_step=("step", "max"))
    kinds = [kind.value for kind in Kind]
    counts = pd.crosstab(frame["pattern"], frame["class"]).reindex(table.index, columns=kinds, fill_value=0)
    missed = counts[Kind.UNDETECTED.value]
    table["undetected_share"] = (missed / (missed + counts[Kind.VALID.value])).round(4)
    return table.join(counts).reset_index()


class _MedecNotes(NamedTuple):
    """Presented notes as rows of MEDEC's CSV."""

    rows: list[list[str]]
    ids: dict[int, str]  # the row's id, by number of each game with that note
    left_out: Counter[str]  # why a note has no row
    uw: int  # rows that are of MEDEC-UW


def _medec_notes(games: Mapping[int, MedicalRecord], kinds: Collection[Kind], name: str) -> _MedecNotes:
    """The notes of these classes of attacks, each once; ``name`` is part of their ids."""
    same: dict[str, list[int]] = defaultdict(list)
    for number, game in games.items():
        if kind_of(game) in kinds:
            same[" ".join(canonical_words(game.presented_note or ""))].append(number)
    rows: list[list[str]] = []
    ids: dict[int, str] = {}
    left_out: Counter[str] = Counter()
    uw = 0
    for numbers in same.values():
        game = games[numbers[0]]
        # Behind the id of the source, so that notes of MEDEC-UW stay known as such.
        row = _medec_row(game, "-".join(filter(None, (game.spec.text_id, name, str(len(rows) + 1)))))
        cells = dict(zip(COLUMNS, row, strict=True))
        try:
            uw += vignette_of_row(RowPlace(f"{name}.csv", len(rows) + 1), cells, "").subset == "medec_uw"
        except MedecFormatError as error:
            left_out[str(error)] += 1
            continue
        rows.append(row)
        ids |= dict.fromkeys(numbers, row[0])
    return _MedecNotes(rows, ids, left_out, uw)


def _medec_row(game: MedicalRecord, text_id: str) -> list[str]:
    spec, note = game.spec, game.presented_note or ""
    edit, sentences = compare_notes(spec.seed_note, note), split_sentences(note)
    numbered = with_numbers(sentences)
    if game.label is not Label.HARMFUL:
        return [text_id, note, numbered, "0", "NA", "-1", "NA", "NA", "NA"]
    wrong = one_line((game.error_sentences or list(edit.inserted) or [""])[0])
    found = process.extractOne(wrong, sentences, scorer=fuzz.ratio, score_cutoff=_LEAST_ALIKE)
    sentence, number = (found[0], found[2]) if found else ("NA", -1)  # a row that has no place is refused
    if spec.category.seed_label is Label.HARMFUL:
        kind, right, clean = spec.error_type, spec.corrected_sentence, spec.clean_note
    else:  # nobody has said of what type an invented error is
        kind, clean = None, spec.seed_note
        right = edit.removed[0] if len(edit.removed) == len(edit.inserted) == 1 else None
    known = [kind.value if kind else None, str(number), sentence, right, clean]
    return [text_id, note, numbered, "1", *(value or "NA" for value in known)]
