"""The table of the page beside: MEDEC's sets and their sister benchmarks side by side, with floors
and overlap.

    python -m experiments.board.run SET ... --train medec_ms_train_pairs.jsonl [--answers FOLDER]

A set is a file that ``medserl score --reference`` takes; MedErrBench's are also cut by difficulty.
Where the folder of answers holds a folder with SET's name, as ``medserl evaluate --output
FOLDER/SET`` leaves it, the scores of its ``submission.txt`` are in the table too. It is written to
``board.csv``; nothing of the data is.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from medserl_agentloop.data.cases import near_duplicates
from medserl_agentloop.evaluation.score import read_reference, read_training
from medserl_agentloop.scoring.metrics import floors, grade, summarise
from medserl_agentloop.scoring.notes import ReferenceNote, read_submission

COLUMNS = (
    "notes",
    "with an error",
    "overlap",
    "always no error",
    "last sentence",
    "bag of words",
    "without overlap",
)


TABLE = Path(__file__).with_name("board.csv")
PAGE = Path(__file__).with_name("README.md")


def read() -> list[list[str]]:
    """The page's table as it was last made: whole sets, without the small parts by difficulty."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.reader(file) if ", " not in row[0]]


def parts(path: Path) -> Iterator[tuple[str, list[ReferenceNote]]]:
    """The set, and its notes by difficulty where the file says it."""
    notes = list(read_reference([path]).notes)
    yield path.stem, notes
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            difficulty = {
                row["Text ID"].strip(): (row.get("Difficulty") or "").strip()
                for row in csv.DictReader(file)
            }
        for level in sorted(set(difficulty.values()) - {"", "NA"}):
            yield (
                f"{path.stem}, {level.lower()}",
                [note for note in notes if difficulty.get(note.text_id) == level],
            )


def shares(notes: Sequence[ReferenceNote], training: Sequence[ReferenceNote]) -> list[str]:
    """Flag accuracy and sentence accuracy of the floors that the table shows; those of "always no
    error" are equal.
    """
    found, _ = floors(notes, training)
    cells = []
    for name in ("always no error", "last sentence is wrong", "bag of words"):
        measures = found[name].measures
        both = [f"{measures[of].value:.2f}" for of in ("flag_accuracy", "sentence_accuracy")]
        cells.append(
            " / ".join(dict.fromkeys(both)) if name == "always no error" else " / ".join(both)
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--train", type=Path, action="append", required=True)
    parser.add_argument("--answers", type=Path)
    arguments = parser.parse_args()
    taught, _ = read_training(arguments.train, [])
    names = [str(at) for at in range(len(taught))]
    trained_on = [(name, note.text) for name, note in zip(names, taught, strict=True)]
    rows = []
    for path in arguments.sets:
        answers = arguments.answers / path.stem / "submission.txt" if arguments.answers else None
        for name, notes in parts(path):
            training, _ = read_training(arguments.train, notes)
            near = {
                text_id
                for text_id, *_ in near_duplicates([(n.text_id, n.text) for n in notes], trained_on)
            }
            rest = [note for note in notes if note.text_id not in near]
            cells = [
                str(len(notes)),
                str(sum(note.flag for note in notes)),
                str(len(near)),
                *shares(notes, training),
            ]
            cells.append(shares(rest, training)[-1] if near and rest else "")
            if answers and answers.exists():
                given, _ = read_submission(answers, [note.text_id for note in notes])
                measures = summarise([grade(notes, given.values())]).measures
                cells += [
                    f"{m.value:.2f} [{m.low:.2f}, {m.high:.2f}]"
                    for m in (measures["flag_accuracy"], measures["sentence_accuracy"])
                ]
            rows.append([name, *cells])
            print(name, file=sys.stderr, flush=True)
    width = max(map(len, rows))
    headings = ["set", *COLUMNS, "flag accuracy", "sentence accuracy"][:width]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        lines = [headings, *(row + [""] * (width - len(row)) for row in rows)]
        csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
