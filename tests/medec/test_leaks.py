"""White space, ids, row order and length: none of them tells error notes from clean ones in the files.

A tree is cross-validated with the notes of a case in one fold: with one of them to learn from, the
other would be guessed wrong. How well it does on labels shuffled at random says what chance is. The bound
is that of a one-sided test at 5 % over all comparisons together (Bonferroni, normal approximation).
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, medec_file

from medserl_agentloop.data.cases import MedecFormatError
from medserl_agentloop.data.conversion import write_parquet
from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.data.rows import DEFAULT_MIX, RowPlan, build_rows
from medserl_agentloop.games.medical.types import Category

FOLDS = 5
SHUFFLES = 100
KINDS = ("white space", "id", "row order", "length")
# Which rows, and which of their labels: that of the note they start from, or that of the note presented.
LABELS = {
    "vanilla, presented": ("vanilla", "target_label"),
    "attacked, start": ("adversarial decoy", "seed_label"),
    "attacked, presented": ("adversarial decoy", "target_label"),
    "all, start": ("vanilla adversarial decoy", "seed_label"),
    "all, presented": ("vanilla adversarial decoy", "target_label"),
}
ALPHA = 0.05 / (len(KINDS) * len(LABELS))
CLEARLY = 0.01  # a leak has a chance below this


def features(kind, ids, notes, harmful):
    """What a classifier of ``kind`` sees of each row; (rows, features)."""
    if kind == "white space":
        return [white_space(note) for note in notes]
    if kind == "length":
        return [[len(note), len(note.split())] for note in notes]
    if kind == "id":
        numbers = [int(text_id.rsplit("-", 1)[1]) for text_id in ids]
        return [[number, number % 2] for number in numbers]
    # The label of the row before: in MEDEC's files a clean note mostly follows its error note.
    return [[at, at % 2, before] for at, before in enumerate([-1, *harmful[:-1]])]


def white_space(note):
    inner, tail = note.strip(), note[len(note.rstrip()) :]
    before = len(note) - len(note.lstrip())
    return [before, len(tail), "\n" in tail, *(inner.count(mark) for mark in ("  ", "\n", "\t", " \n", "\xa0"))]


def chance_of(values, harmful, cases):
    """Probability that a classifier without any information does as well as one on ``values``."""
    model_selection = pytest.importorskip("sklearn.model_selection")
    trees = pytest.importorskip("sklearn.tree")
    values, harmful = np.asarray(values, dtype=float), np.asarray(harmful, dtype=bool)
    folds = list(model_selection.GroupKFold(FOLDS, shuffle=True, random_state=0).split(values, groups=cases))
    model = trees.DecisionTreeClassifier(max_depth=3, min_samples_leaf=10, class_weight="balanced", random_state=0)

    def accuracy(labels):
        guess = np.zeros(len(labels), dtype=bool)
        for fit, held_out in folds:
            guess[held_out] = model.fit(values[fit], labels[fit]).predict(values[held_out])
        return (guess[labels].mean() + 1 - guess[~labels].mean()) / 2

    rng = np.random.default_rng(0)
    by_chance = [accuracy(rng.permutation(harmful)) for _ in range(SHUFFLES)]
    return 1 - NormalDist(np.mean(by_chance), np.std(by_chance, ddof=1)).cdf(accuracy(harmful))


@pytest.fixture(scope="module")
def vignettes():
    return read_files([medec_file(OFFICIAL)]).vignettes


@pytest.fixture(scope="module")
def converted(vignettes):
    """Facts of the rows of all five categories."""
    plan = RowPlan(mix=f"{DEFAULT_MIX},decoy_benign=1", val_fraction=0.0)
    return [
        row["extra_info"] | {"seed_label": Category(row["extra_info"]["category"]).seed_label.value}
        for row in build_rows(vignettes, plan).train
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "leaks"), [("white space", True), ("id", True), ("row order", True), ("length", False)]
)
def test_what_tells_the_label_in_the_official_file(vignettes, kind, leaks):
    """Case 5, and the structure of MEDEC's files. Length tells nothing there to begin with."""
    with (medec_file(OFFICIAL)).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    case_of = {text_id: vignette.vignette_id for vignette in vignettes for text_id in vignette.text_ids}
    ids, harmful = [row["Text ID"] for row in rows], [row["Error Flag"] == "1" for row in rows]
    values = features(kind, ids, [row["Text"] for row in rows], harmful)
    chance = chance_of(values, harmful, [case_of[text_id] for text_id in ids])
    assert (chance < CLEARLY) == leaks, chance


@pytest.mark.slow
@pytest.mark.parametrize("which", LABELS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_tells_the_label_in_converted_rows(converted, kind, which):
    """Case 5, in games that present a note as it is and in those that start an attack from it."""
    families, label = LABELS[which]
    rows = [facts for facts in converted if facts["category"].split("_")[0] in families.split()]
    harmful = [facts[label] == "harmful" for facts in rows]
    values = features(kind, [facts["text_id"] for facts in rows], [facts["seed_note"] for facts in rows], harmful)
    chance = chance_of(values, harmful, [facts["vignette_id"] for facts in rows])
    assert chance > ALPHA, chance


TEXT = st.text(st.characters() | st.sampled_from('\r\n",\x00\ud800 '), max_size=30)


@examples(100)
@given(notes=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), newline=st.sampled_from(["\n", "\r\n"]))
def test_csv_comes_back_unchanged_from_the_parquet_or_is_refused_with_its_row(notes, newline):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "notes.csv")
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.writer(file, lineterminator=newline, quoting=csv.QUOTE_ALL)
            writer.writerow(COLUMNS)
            for n, (wrong, right) in enumerate(notes):
                writer.writerow([f"t-{2 * n}", f"{wrong}x", "NA", "1", "NA", "0", "NA", "NA", f"{right}y"])
        unusable = [
            n for n, pair in enumerate(notes) if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in "".join(pair))
        ]
        if unusable:
            with pytest.raises(MedecFormatError, match=f"notes.csv, row {unusable[0] + 1}"):
                read_files([path])
            return
        games = build_rows(read_files([path]).vignettes, RowPlan(mix="adversarial_benign=1", val_fraction=0.0))
        write_parquet(games.train, Path(folder, "out.parquet"))
        rows = pq.read_table(Path(folder, "out.parquet"))["extra_info"].to_pylist()
        found = {row["vignette_id"]: (row["error_note"], row["clean_note"]) for row in rows}

    def as_read(text):
        return text.replace("\r\n", "\n").replace("\r", "\n").strip()

    assert found == {f"t-{2 * n}": (as_read(f"{a}x"), as_read(f"{b}y")) for n, (a, b) in enumerate(notes)}
