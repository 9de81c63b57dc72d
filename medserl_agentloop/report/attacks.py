"""The ledger of a run's attacks: what each one did, which edits come again and again, which errors nobody saw.

Called by ``medserl attacks``. docs/attacks.md describes the classes and the files.
"""

from __future__ import annotations

import asyncio
import csv
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from jinja2 import Template
from rapidfuzz import fuzz, process
from rich.console import Console
from rich.progress import Progress

from medserl_agentloop.core.manifest import sha256_of
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.data.intake import MedecFormatError, RowPlace
from medserl_agentloop.data.official_csv import COLUMNS, vignette_of_row
from medserl_agentloop.data.writing import all_or_none
from medserl_agentloop.games.medical.canonical import canonical_words
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import changed_runs, compare_notes, one_line, split_sentences
from medserl_agentloop.games.medical.judges import build_judge, judge_game
from medserl_agentloop.games.medical.records import (
    BELIEVES_THE_ROW,
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    UNKNOWABLE,
    AttackRecord,
    GameRecord,
    InvalidAttack,
    Outcome,
)
from medserl_agentloop.games.medical.table import varied_games
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import PACKAGE
from medserl_agentloop.report.frames import read_run
from medserl_agentloop.report.sheets import Pair, write_blinded_sheet, write_table


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
    Kind.INVALID: "another rule is broken, or no note can be read; `reason` says which",
    Kind.AMBIGUOUS: "the judge abstained, its votes differ, or the readers of the note alone did not find the error",
    Kind.UNDECIDED: "nobody knows: the judge or a player failed, or the assessor's answer to an error is unreadable",
    Kind.HARMLESS: "the row asks for an error, and the judge finds none in the note",
    Kind.DECOY: "the row asks to keep the medicine, and the judge finds no error in the note",
    Kind.VALID: "the judge finds an error in the note, and the assessor did too",
    Kind.UNDETECTED: "the judge finds an error in the note, and the assessor said that it is safe",
}
"""Each attack has the first of these that fits."""

LEDGER_COLUMNS = (
    "game", "step", "category", "case", "class", "reason", "pattern", "edit", "changed_words", "judge", "label",
    "verdict", "hard_note",
)  # fmt: skip
_NOTHING = "(nothing)"
_LEAST_ALIKE = 50.0  # rapidfuzz ratio of the wrong sentence and the one of the note that is taken for it


@dataclass(frozen=True)
class Attack:
    """A game in which the attacker rewrote the note, and the line of its file."""

    number: int
    game: GameRecord

    @property
    def turn(self) -> AttackRecord:
        assert self.game.attack is not None
        return self.game.attack

    @property
    def case(self) -> str:
        return self.game.spec.vignette_id or self.game.spec.seed_note

    @cached_property
    def kind(self) -> Kind:
        """Its class, by what the record says."""
        game, said = self.game, self.game.judgement
        if self.turn.invalid is not None:
            return Kind.NO_OP if self.turn.invalid is InvalidAttack.UNCHANGED else Kind.INVALID
        if (game.void or "").startswith((JUDGE_ABSTAINED, UNKNOWABLE)) or (
            said is not None and len({vote.label for vote in said.votes if vote.label is not None}) > 1
        ):
            return Kind.AMBIGUOUS
        if game.is_void:
            return Kind.UNDECIDED
        if game.label is Label.SAFE:
            return Kind.HARMLESS if game.spec.target_label is Label.HARMFUL else Kind.DECOY
        decided = {Outcome.CORRECT_DETECTION: Kind.VALID, Outcome.MISSED_ERROR: Kind.UNDETECTED}
        return decided.get(game.outcome, Kind.UNDECIDED)

    @cached_property
    def edit(self) -> str:
        """Old words and new words, whatever their spelling; empty without a note or a change."""
        if self.turn.note is None:
            return ""
        before, after = canonical_words(self.game.spec.seed_note), canonical_words(self.turn.note)
        return "; ".join(
            f"{' '.join(before[start:end]) or _NOTHING} -> {' '.join(after[first:last]) or _NOTHING}"
            for start, end, first, last in changed_runs(before, after)
        )


def write_ledger(
    run: Path, output: Path, *, sheet: int, seed: int, judge: MedicalConfig | None, console: Console
) -> dict[Kind, int]:
    """Write the ledger of a run's attacks.

    Args:
        run: Folder of the run, or a file of games.
        output: New or empty folder for the files.
        sheet: Most pairs of notes in the sheet for clinicians.
        seed: Of their choice and order.
        judge: Node with the judge that is asked again about every valid attack; None keeps the run's own words.
        console: Shows the progress.

    Returns:
        The number of attacks of each class.

    Raises:
        ValueError: The run has no attacks, the judge cannot be asked, or the folder holds files.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} already holds files, filled sheets perhaps: give a new folder")
    games = read_run(run)
    attacks = [Attack(n, g) for n, g in enumerate(games, start=1) if g.attack is not None and g.category.has_attack]
    if not attacks:
        raise ValueError(
            f"{run}: none of its {len(games)} games has an attack: give a run that plays adversarial games"
        )
    if judge is not None:
        _judge_again([attack.game for attack in attacks], judge, console)
    counts = Counter(attack.kind for attack in attacks)
    patterns = _patterns(attacks)
    rows, hard_note_of, left_out, uw = _hard_notes(attacks)
    pairs = _pairs(attacks, sheet, seed)
    with all_or_none(output) as place:
        write_table(place / "ledger.csv", LEDGER_COLUMNS, [_line(a, patterns, hard_note_of) for a in attacks])
        write_table(place / "patterns.csv", _pattern_columns(), _pattern_rows(attacks, patterns))
        with (place / "hard_notes.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        if pairs:
            write_blinded_sheet(place, pairs, seed)
        template = (PACKAGE / "report" / "ledger.md").read_text(encoding="utf-8")
        facts = {
            "run": run,
            "sha256": sha256_of(run / GAMES_FILE if run.is_dir() else run),
            "games": len(games),
            "copies": sum(g.attack is not None for g in games) - len(attacks),
            "attacks": len(attacks),
            "classes": [(kind.value, counts[kind], MEANINGS[kind]) for kind in Kind],
            "reasons": Counter(a.turn.invalid.value for a in attacks if a.turn.invalid).most_common(),
            "judges": sorted({a.game.judgement.judge for a in attacks if a.game.judgement}),
            "unread": BELIEVES_THE_ROW,
            "patterns": len(patterns),
            "undetected": counts[Kind.UNDETECTED],
            "hard": len(rows),
            "uw": uw,
            "left_out": left_out.most_common(),
            "pairs": len(pairs),
            "seed": seed,
        }
        text = Template(template, trim_blocks=True, keep_trailing_newline=True).render(facts)
        (place / "README.md").write_text(text, encoding="utf-8")
    return {kind: counts[kind] for kind in Kind}


def _judge_again(games: Sequence[GameRecord], config: MedicalConfig, console: Console) -> None:
    """Put another judge's word into the records, asked as in a run."""
    judge, slots = build_judge(config), asyncio.Semaphore(config.judge_server.concurrency)
    asked = [game for game in games if game.attack and game.attack.invalid is None and game.assessment]
    for game in asked:
        game.judgement = None
        if (game.void or "").startswith((JUDGE_FAILED, JUDGE_ABSTAINED, UNKNOWABLE)):
            game.void = None

    async def ask(game: GameRecord) -> None:
        async with slots:
            await judge_game(judge, game)
        progress.advance(bar)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, asked))

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("judging", total=len(asked))
        asyncio.run(ask_all())
    if asked and all((game.void or "").startswith(JUDGE_FAILED) for game in asked):
        raise ValueError(f"the judge answered none of {len(asked)} questions; the first: {asked[0].void}")


def _patterns(attacks: Sequence[Attack]) -> dict[str, int]:
    """A number for each edit, from 1, the most frequent first."""
    counts = Counter(attack.edit for attack in attacks if attack.edit)
    return {edit: number for number, (edit, _) in enumerate(counts.most_common(), start=1)}


def _pattern_columns() -> list[str]:
    return [
        "pattern", "edit", "attacks", "cases", "first_step", "last_step", "undetected_share", *(k.value for k in Kind)
    ]  # fmt: skip


def _pattern_rows(attacks: Sequence[Attack], patterns: dict[str, int]) -> list[list[object]]:
    uses: dict[str, list[Attack]] = defaultdict(list)
    for attack in attacks:
        uses[attack.edit].append(attack)
    rows: list[list[object]] = []
    for edit, number in patterns.items():
        steps = [attack.game.step for attack in uses[edit]]
        kinds = Counter(attack.kind for attack in uses[edit])
        answered = kinds[Kind.UNDETECTED] + kinds[Kind.VALID]
        share = round(kinds[Kind.UNDETECTED] / answered, 4) if answered else ""
        cases = len({attack.case for attack in uses[edit]})
        rows.append([number, edit, len(steps), cases, min(steps), max(steps), share, *(kinds[k] for k in Kind)])
    return rows


def _line(attack: Attack, patterns: dict[str, int], hard_note_of: dict[int, str]) -> list[object]:
    game, turn, judgement = attack.game, attack.turn, attack.game.judgement
    return [
        attack.number,
        game.step,
        game.category.value,
        attack.case,
        attack.kind.value,
        turn.invalid.value if turn.invalid else game.void or "",
        patterns.get(attack.edit, ""),
        attack.edit,
        turn.changed_words,
        judgement.judge if judgement else "",
        game.label.value if game.label else "",
        game.assessment.verdict.value if game.assessment and game.assessment.verdict else "",
        hard_note_of.get(attack.number, ""),
    ]


def _hard_notes(attacks: Sequence[Attack]) -> tuple[list[list[str]], dict[int, str], Counter[str], int]:
    """The undetected errors in MEDEC's columns, each note once.

    Returns:
        The rows, the id of the note by the number of each of its games, what was left out and why, and how many rows
        are of MEDEC-UW.
    """
    rows: list[list[str]] = []
    ids: dict[str, str] = {}
    of_game: dict[int, str] = {}
    left_out: Counter[str] = Counter()
    uw = 0
    for attack in (a for a in attacks if a.kind is Kind.UNDETECTED):
        note = " ".join(canonical_words(attack.game.presented_note or ""))
        if note not in ids:
            # Behind the id of the source, so that notes of MEDEC-UW stay known as such.
            text_id = "-".join(filter(None, (attack.game.spec.text_id, "hard", str(len(ids) + 1))))
            row = _hard_row(attack.game, text_id)
            try:
                vignette = vignette_of_row(
                    RowPlace("hard_notes.csv", len(rows) + 1), dict(zip(COLUMNS, row, strict=True)), ""
                )
            except MedecFormatError as error:
                left_out[str(error)] += 1
                continue
            ids[note] = text_id
            uw += vignette.subset == "medec_uw"
            rows.append(row)
        of_game[attack.number] = ids[note]
    return rows, of_game, left_out, uw


def _hard_row(game: GameRecord, text_id: str) -> list[str]:
    spec, note = game.spec, game.presented_note or ""
    edit, sentences = compare_notes(spec.seed_note, note), split_sentences(note)
    wrong = one_line((game.error_sentences or list(edit.inserted) or [""])[0])
    found = process.extractOne(wrong, sentences, scorer=fuzz.ratio, score_cutoff=_LEAST_ALIKE)
    sentence, number = (found[0], found[2]) if found else ("NA", -1)  # a row that has no place is refused
    if spec.category.seed_label is Label.HARMFUL:
        kind, right, clean = spec.error_type, spec.corrected_sentence, spec.clean_note
    else:  # nobody has said of what type an invented error is
        kind, clean = None, spec.seed_note
        right = edit.removed[0] if len(edit.removed) == len(edit.inserted) == 1 else None
    numbered = "\n".join(f"{n} {text}" for n, text in enumerate(sentences))
    known = [kind.value if kind else None, str(number), sentence, right, clean]
    return [text_id, note, numbered, "1", *(value or "NA" for value in known)]


def _pairs(attacks: Sequence[Attack], count: int, seed: int) -> list[Pair]:
    """Attacks that a judge was asked about, the outcomes in turn.

    A case is used once: the note that comes again in several pairs would be known as the original.
    """
    judged = [a for a in attacks if a.kind not in (Kind.NO_OP, Kind.INVALID, Kind.UNDECIDED)]
    of_case: dict[str, list[Attack]] = defaultdict(list)
    for attack in judged:
        of_case[one_line(attack.game.spec.seed_note)].append(attack)
    rng = random.Random(f"{seed}/pairs")
    one_each = {id(a.game): a for a in (rng.choice(same) for _, same in sorted(of_case.items()))}
    games = [attack.game for attack in one_each.values()]
    rng.shuffle(games)
    return [
        Pair(
            one_each[id(game)].number,
            game.spec.seed_note,
            game.presented_note or "",
            game.category.seed_label,
            game.label,
        )
        for game in varied_games(games, count)
    ]
