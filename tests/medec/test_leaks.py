"""White space, ids, row order and length: none of them tells error notes from clean ones in the files."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medserl_agentloop.medec.allocation import parse_mix
from medserl_agentloop.medec.fields import MedecFormatError
from medserl_agentloop.medec.reader import read_files
from medserl_agentloop.medec.rows import RowPlan, build_rows
from medserl_agentloop.medec.writing import write_parquet

MARGIN = 0.04  # of balanced accuracy over chance: two standard errors of 574 rows are 0.042


def white_space(note):
    tail = note[len(note.rstrip()) :]
    return [len(tail), "\n" in tail, note.count("  "), note.count("\n"), note.count("\t"), note.count(" \n")]


def accuracy(features, labels, cases):
    """Balanced accuracy by cross-validation of a tree, which finds thresholds.

    The notes of a case are in one fold: with one of them to learn from, the other would be guessed wrong.
    """
    model_selection = pytest.importorskip("sklearn.model_selection")
    trees = pytest.importorskip("sklearn.tree")
    folds = model_selection.StratifiedGroupKFold(5, shuffle=True, random_state=0)
    model = trees.DecisionTreeClassifier(max_depth=4, min_samples_leaf=10, class_weight="balanced", random_state=0)
    scores = model_selection.cross_val_score(
        model, features, labels, groups=cases, cv=folds, scoring="balanced_accuracy"
    )
    return scores.mean()


@pytest.fixture
def converted(medec_dir):
    vignettes = read_files([next(medec_dir.glob("MEDEC*.csv"))]).vignettes
    plan = RowPlan(parse_mix("vanilla_harmful=1,vanilla_benign=1"), val_fraction=0.0)
    return list(build_rows(vignettes, plan).train)


def test_white_space_gives_the_label_away_before_conversion_and_not_after(medec_dir, converted):
    with next(medec_dir.glob("MEDEC*.csv")).open(encoding="utf-8", newline="") as file:
        raw = list(csv.DictReader(file))
    before = accuracy([white_space(r["Text"]) for r in raw], [r["Error Flag"] for r in raw], range(len(raw)))
    notes = [row["extra_info"]["seed_note"] for row in converted]
    after = accuracy([white_space(note) for note in notes], labels(converted), cases(converted))
    assert before > 0.5 + MARGIN > after


def test_row_order_index_and_length_do_not_give_the_label_away(converted):
    order = [[at, at % 2, at % 3, row["extra_info"]["index"]] for at, row in enumerate(converted)]
    assert accuracy(order, labels(converted), cases(converted)) < 0.5 + MARGIN
    lengths = [[len(row["extra_info"]["seed_note"]), len(row["extra_info"]["seed_note"].split())] for row in converted]
    assert accuracy(lengths, labels(converted), cases(converted)) < 0.5 + MARGIN


def test_note_ids_do_not_give_the_label_away(converted):
    ids = [[int(row["extra_info"]["text_id"].rsplit("-", 1)[1])] for row in converted]
    assert accuracy([[i[0], i[0] % 2] for i in ids], labels(converted), cases(converted)) < 0.5 + MARGIN


def labels(rows):
    return [row["reward_model"]["ground_truth"] for row in rows]


def cases(rows):
    return [row["extra_info"]["vignette_id"] for row in rows]


COLUMNS = (
    "Text ID,Text,Sentences,Error Flag,Error Type,Error Sentence ID,Error Sentence,Corrected Sentence,Corrected Text"
)
TEXT = st.text(st.characters() | st.sampled_from('\r\n",\x00\ud800 '), max_size=30)


@settings(max_examples=60, deadline=None)
@given(notes=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), newline=st.sampled_from(["\n", "\r\n"]))
def test_csv_comes_back_unchanged_from_the_parquet_or_is_refused_with_its_row(notes, newline):
    pq = pytest.importorskip("pyarrow.parquet")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "notes.csv")
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.writer(file, lineterminator=newline, quoting=csv.QUOTE_ALL)
            writer.writerow(COLUMNS.split(","))
            for n, (wrong, right) in enumerate(notes):
                writer.writerow([f"t-{2 * n}", f"{wrong}x", "NA", "1", "NA", "0", "NA", "NA", f"{right}y"])
        unusable = [
            n for n, pair in enumerate(notes) if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in "".join(pair))
        ]
        if unusable:
            with pytest.raises(MedecFormatError, match=f"notes.csv, row {unusable[0] + 1}"):
                read_files([path])
            return
        games = build_rows(read_files([path]).vignettes, RowPlan(parse_mix("adversarial_benign=1"), val_fraction=0.0))
        write_parquet(games.train, Path(folder, "out.parquet"))
        rows = pq.read_table(Path(folder, "out.parquet"))["extra_info"].to_pylist()
        found = {row["vignette_id"]: (row["error_note"], row["clean_note"]) for row in rows}

    def as_read(text):
        return text.replace("\r\n", "\n").replace("\r", "\n").strip()

    assert found == {f"t-{2 * n}": (as_read(f"{a}x"), as_read(f"{b}y")) for n, (a, b) in enumerate(notes)}
