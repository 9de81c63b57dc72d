"""White space, row order and length tell error notes from clean ones in MEDEC's files, and not in their rows."""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.cases import MedecFormatError
from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.data.rows import DEFAULT_MIX, RowPlan, build_rows, write_parquet
from medserl_agentloop.data.verify import find_leaks
from medserl_agentloop.games.medical.types import Category, GameSpec, Label


def test_white_space_tells_the_label_in_all_real_pairs() -> None:
    """Case 5: the leak as it was published, which the rows must not have."""
    official, pairs = medec_file(OFFICIAL), medec_file(PAIRS)
    with official.open(encoding="utf-8", newline="") as file:
        notes = [(row["Text"], row["Corrected Text"]) for row in csv.DictReader(file) if row["Error Flag"] == "1"]
    lines = pairs.read_text(encoding="utf-8").split("\n")
    notes += [(pair["incorrect_note"], pair["correct_note"]) for pair in map(json.loads, filter(None, lines))]
    kinds = (Category.VANILLA_HARMFUL, Category.VANILLA_BENIGN)
    raw = [
        GameSpec(kind, kind.seed_label, note) for pair in notes for kind, note in zip(kinds, pair, strict=True) if note
    ]
    assert any(leak.startswith("white space after the note tells the target_label") for leak in find_leaks(raw))


@pytest.mark.parametrize("games", ["vanilla", "adversarial decoy", "vanilla adversarial decoy"])
@pytest.mark.parametrize("files", [(OFFICIAL,), (PAIRS,), (OFFICIAL, PAIRS)])
def test_nothing_tells_the_label_in_converted_rows(files, games):
    """Case 5, in games that present a note as it is and in those that start an attack from it."""
    cases = read_files([medec_file(name) for name in files]).cases
    mix = f"{DEFAULT_MIX},decoy_benign=1" if "adversarial" in games else "vanilla_harmful=1,vanilla_benign=1"
    rows = build_rows(cases, RowPlan(mix=mix, val_fraction=0.0)).train
    specs = [GameSpec.from_extra_info(row["extra_info"]) for row in rows]
    kept = [spec for spec in specs if spec.category.value.split("_")[0] in games.split()]
    assert {spec.category.seed_label for spec in kept} == set(Label)
    assert list(find_leaks(kept)) == []


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
        games = build_rows(read_files([path]).cases, RowPlan(mix="adversarial_benign=1", val_fraction=0.0))
        write_parquet(games.train, Path(folder, "out.parquet"))
        rows = pq.read_table(Path(folder, "out.parquet"))["extra_info"].to_pylist()
        found = {row["vignette_id"]: (row["error_note"], row["clean_note"]) for row in rows}

    def as_read(text):
        return text.replace("\r\n", "\n").replace("\r", "\n").strip()

    assert found == {f"t-{2 * n}": (as_read(f"{a}x"), as_read(f"{b}y")) for n, (a, b) in enumerate(notes)}
