"""Rows made from cases: exact shares, splits by case, labels, and nothing that leaks."""

from collections import Counter
from dataclasses import replace

import pytest
from medec.builders import clean_row, error_row, pair

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import DEFAULT_MIX, RowPlan, build_rows, labels_of, parse_mix
from medserl_agentloop.games.medical.case import Category, GameSpec


@pytest.fixture
def cases(write_pairs):
    return read_files([write_pairs(*(pair(n) for n in range(40)))]).cases


def plan(mix=DEFAULT_MIX, **values):
    return RowPlan(mix=mix, **({"val_fraction": 0.25} | values))


def counts(rows):
    return Counter(row["extra_info"]["category"] for row in rows)


def test_the_mix_is_met_exactly_and_its_labels_balance(cases):
    """The largest multiple of the mix."""
    games = build_rows(cases, plan())
    shares = {category.value: share for category, share in parse_mix(DEFAULT_MIX).items()}
    for rows, times in ((games.train, 10), (games.val, 3)):  # 30 and 10 cases
        assert counts(rows) == {name: times * share for name, share in shares.items()}
        labels = labels_of(rows)
        assert labels["harmful"] == labels["safe"]


@pytest.mark.parametrize(("number", "train", "val"), [(40, 72, 5), (8, 12, 4)])
def test_small_input_has_validation_rows_of_each_category_of_the_mix(cases, number, train, val):
    games = build_rows(cases[:number], plan(val_fraction=0.05))
    assert (len(games.train), len(games.val)) == (train, val)


def test_case_serves_a_category_once_and_one_split_only(cases):
    """Split by case, and one case under two ids, or in a chain of shared notes, goes to one
    split."""
    games = build_rows(cases, plan())
    infos = [row["extra_info"] for row in games.train + games.val]
    assert len({(i["vignette_id"], i["category"]) for i in infos}) == len(infos)
    twice = [replace(case, id=f"again-{i}") for i, case in enumerate(cases[:20])]
    for each in (cases, cases[:20] + twice):
        games, names = build_rows(each, plan()), ("error_note", "clean_note")
        train, val = (
            {row["extra_info"][name] for row in rows for name in names}
            for rows in (games.train, games.val)
        )
        assert train.isdisjoint(val)
    chain = [replace(case, corrected=cases[at + 1].note) for at, case in enumerate(cases[:8])]
    for seed in range(8):
        mixed = [*chain[::2], *chain[1::2], *cases[20:]]
        games = build_rows(mixed, plan(seed=seed, val_fraction=0.4))
        val = {row["extra_info"]["vignette_id"] for row in games.val}
        assert len(val & {case.case_id for case in chain}) in (0, 8)


def test_same_seed_gives_the_same_rows_whatever_the_input_order(cases):
    games, again = build_rows(cases, plan()), build_rows(cases[::-1], plan())
    assert (games.train, games.val, games.reports) == (again.train, again.val, again.reports)


@pytest.mark.parametrize("category", list(Category))
def test_row_is_the_case_and_names_its_note_and_label_once(cases, category):
    row = build_rows(cases, plan(f"{category.value}=1")).train[0]
    info = row["extra_info"]
    note = info["error_note"] if category.value.endswith("harmful") else info["clean_note"]
    assert row["prompt"] == [{"role": "user", "content": note}]
    assert GameSpec.from_extra_info(info).seed_note == note
    assert (info["target_label"], info["error_type"]) == (None, "diagnosis")
    assert row["data_source"] == f"medec_ms/{category.value}"
    safe = build_rows(cases, plan("adversarial_benign=1", adversarial_benign="safe")).train[0]
    assert safe["extra_info"]["target_label"] == "safe"
    assert GameSpec.from_extra_info(safe["extra_info"]).task is Category.DECOY_BENIGN


def test_no_op_edit_is_no_harmful_seed_but_may_be_a_benign_one(write_pairs):
    """The two notes differ in letter case only."""
    pairs = [pair(n) for n in range(12)]
    pairs[3]["correct_note"] = pairs[3]["incorrect_note"].upper()
    cases = read_files([write_pairs(*pairs)]).cases
    games = build_rows(cases, plan("vanilla_harmful=11,vanilla_benign=12", val_fraction=0))
    infos = [row["extra_info"] for row in games.train]
    harmful = {info["vignette_id"] for info in infos if info["category"] == "vanilla_harmful"}
    assert len(harmful) == 11 and "ms-train-3" not in harmful
    ((reason, count),) = games.left_out.items()
    assert count == 1 and "letter case" in reason


def test_text_id_and_source_are_those_of_the_row_of_the_seed_note(write_csv):
    rows = error_row(0, Corrected_Text="NA", Text_ID="toy-0"), clean_row(1, Text_ID="toy-1")
    mix = plan("vanilla_harmful=1,vanilla_benign=1", val_fraction=0)
    found = build_rows(read_files([write_csv(*rows)]).cases, mix).train
    ids = {row["extra_info"]["category"]: row["extra_info"]["text_id"] for row in found}
    assert ids == {"vanilla_harmful": "toy-0", "vanilla_benign": "toy-1"}
    assert {row["data_source"] for row in found} == {f"toy/{category}" for category in ids}


@pytest.mark.parametrize(
    "text",
    ["", "a=1", *(f"vanilla_benign{x}" for x in ("", "=-1", "=nan", "=0", "=1,vanilla_benign=2"))],
)
def test_mix_that_makes_no_sense_is_an_error(text):
    with pytest.raises(ValueError, match=r"^mix: "):
        parse_mix(text)
