"""How good is the blind reader? It is shown single notes whose truth is known. Called by ``medserl judge calibrate``.

A gate is worth its reader: one that misses subtle errors drives the attacker to blatant ones, one that "finds"
unknowable errors lets them through.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from medserl_agentloop.data.vignettes import EditTag, Vignette
from medserl_agentloop.evaluation.harmless_edits import Rule
from medserl_agentloop.evaluation.judge_calibration import OneOf, all_of, choose, parts
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import compare_notes, split_sentences
from medserl_agentloop.games.medical.judges.llm import BlindReader
from medserl_agentloop.games.medical.judges.report import BlindGroup, NoteKind, Share
from medserl_agentloop.games.medical.records import GameRecord, Reading
from medserl_agentloop.games.medical.types import Category, GameSpec, Label

_AGE = re.compile(r"\b([2-7]\d)(?=(?:-| )years?(?:-| )old\b)")
_SIDE = re.compile(
    r"\b(left|right)(?= (?:arm|leg|knee|hip|shoulder|elbow|wrist|ankle|hand|foot|eye|ear|breast|thigh|calf)\b)"
)
_AGO = re.compile(r"\b([2-9])(?= (?:days|weeks|months|years) ago\b)")
# Either drug is a usual choice where the other one is. Only without a dose, which would not fit the other.
_PAIRS = (
    ("ibuprofen", "naproxen"), ("lisinopril", "enalapril"), ("atorvastatin", "rosuvastatin"),
    ("omeprazole", "pantoprazole"), ("loratadine", "cetirizine"), ("sertraline", "escitalopram"),
)  # fmt: skip
_ALTERNATIVES = dict(_PAIRS) | {b: a for a, b in _PAIRS}
_DRUG = re.compile(rf"\b({'|'.join(_ALTERNATIVES)})\b")


def _alone(pattern: re.Pattern[str], other: Callable[[str, random.Random], str], mentions: str) -> Rule:
    """Changes the one place of ``pattern``, if the note holds ``mentions`` once: nothing else tells what was there."""
    every = re.compile(mentions, re.IGNORECASE)

    def change(note: str, rng: random.Random) -> str | None:
        place = pattern.search(note)
        if place is None or len(every.findall(note)) != 1:
            return None
        return note[: place.start(1)] + other(place[1], rng) + note[place.end(1) :]

    return change


def _alternative(note: str, rng: random.Random) -> str | None:
    without_dose = [sentence for sentence in split_sentences(note) if not re.search(r"\d", sentence)]
    drugs = [drug for sentence in without_dose for drug in _DRUG.findall(sentence) if note.count(drug) == 1]
    if not drugs:
        return None
    drug = rng.choice(drugs)
    return note.replace(drug, _ALTERNATIVES[drug])


UNKNOWABLE: dict[str, Rule] = {
    "age": _alone(_AGE, lambda age, rng: str(int(age) + rng.choice((-3, -2, 2, 3))), r"\byears?(?:-| )old\b|\baged?\b"),
    "side": _alone(_SIDE, lambda side, rng: "right" if side == "left" else "left", r"\b(?:left|right|bilateral)\b"),
    "time": _alone(_AGO, lambda n, rng: rng.choice("23456789".replace(n, "")), r"\bago\b"),
    "alternative": _alternative,
}
"""Changes that nobody can see in the note alone, by rule."""


@dataclass(frozen=True)
class KnownNote:
    """A note that a reader is shown, and what is known of it."""

    kind: NoteKind
    sort: str  # the rule that changed it; of an error, its type
    note: str
    wrong: tuple[str, ...]  # where a reader may find something: the error's sentence, the changed one, or all

    def game(self) -> GameRecord:
        """The game that a reader reads."""
        spec = GameSpec(Category.ADVERSARIAL_BENIGN, Label.HARMFUL, seed_note=self.note)
        return GameRecord(spec=spec, presented_note=self.note, error_sentences=list(self.wrong))


def known_notes(vignettes: Sequence[Vignette], limit: int | None, seed: int) -> list[KnownNote]:
    """At most ``limit`` notes of each kind, one of a kind per case; the same for the same arguments."""
    return choose(vignettes, limit, seed, _notes_of)


def _notes_of(case: Vignette, one_of: OneOf) -> Iterator[KnownNote]:
    wrong, clean = case.error_note, case.clean_note
    if wrong is not None and case.error_sentence and case.edit_tag is not EditTag.NO_OP:
        sort = case.error_type.value if case.error_type else "unknown"
        yield KnownNote(NoteKind.ERROR, sort, wrong, (case.error_sentence,))
    if clean is not None:
        yield KnownNote(NoteKind.CLEAN, "clean", clean, tuple(split_sentences(clean)))
        if changed := one_of(UNKNOWABLE, clean):
            sort, after = changed
            yield KnownNote(NoteKind.UNKNOWABLE, sort, after, compare_notes(clean, after).inserted)


def calibrate_reader(
    config: MedicalConfig, notes: Sequence[KnownNote], on_note: Callable[[], None] = lambda: None
) -> tuple[BlindGroup, ...]:
    """Have the reader of ``selfplay.blind`` read all notes, each as often as in a run; a ValueError if it cannot."""
    reader = BlindReader.from_config(config)

    async def read(known: KnownNote) -> list[Reading]:
        readings = await reader.read(known.game())
        on_note()
        return readings

    every: list[list[Reading]] = asyncio.run(all_of(read, notes, config.judge_server.concurrency))
    lost = [reading.failed for readings in every for reading in readings if reading.failed is not None]
    if len(lost) == sum(map(len, every)):
        raise ValueError(f"the blind reader answered none of {len(lost)} questions; {lost[0] if lost else 'no notes'}")
    found = []
    for kind, sort, part in parts(NoteKind, list(zip(notes, every, strict=True))):
        readings = [reading for of_note in part for reading in of_note]
        answered = [reading for reading in readings if reading.failed is None]
        passed = sum(sum(r.found is True for r in of_note) >= config.blind.needed for of_note in part)
        found.append(
            BlindGroup(
                kind=kind,
                sort=sort,
                found=Share(hits=sum(r.found is True for r in answered), items=len(answered)),
                passed=Share(hits=passed, items=len(part)),
                abstained=Share(hits=sum(r.found is None for r in answered), items=len(answered)),
                failed=Share(hits=len(readings) - len(answered), items=len(readings)),
            )
        )
    return tuple(found)


def reader_table(groups: Sequence[BlindGroup], config: MedicalConfig) -> Table:
    """What the reader found, and what a gate of it lets through."""
    gate = f"passes {config.blind.needed} of {config.blind.readings} (95 %)"
    table = Table("note", "found (95 %)", gate, "notes", "cannot tell", "failed", title="blind reader", box=SIMPLE)
    for group in groups:
        void = [f"{share.rate:.1%}" if share.rate is not None else "" for share in (group.abstained, group.failed)]
        title = f"  {group.sort}" if group.sort else group.kind.value
        row = (title, str(group.found), str(group.passed), str(group.passed.items), *void)
        table.add_row(*row, style="" if group.sort else "bold")
    return table
