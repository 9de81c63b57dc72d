"""What the pages of the experiments say is what their committed files say, and what the code makes of them."""

import asyncio
import io
import random
import re
from itertools import product

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from experiments.clinic import inject_error, reworded, sample_clean_note
from experiments.incentives import payoffs, simulate
from experiments.incentives.assumptions import Assumptions
from experiments.incentives.payoffs import matrix
from experiments.incentives.simulate import FIGURES, Table, as_csv, as_markdown
from experiments.learning.results import ESTIMATORS, PAGES, TABLES, Rates, markdown, with_tables
from experiments.pages import with_table
from experiments.shortcuts import run as shortcuts
from experiments.shortcuts.clinic import STYLE, Effect, effect, with_another_age, with_style
from experiments.shortcuts.judges import GatedPairOracle, PairOracle
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Category, GameSpec, Label

ASSUMED = Assumptions()


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return simulate.tables(ASSUMED)


@pytest.mark.parametrize("name", ["dynamics", "gate", "validity", "assessments", "robustness"])
def test_the_page_shows_the_committed_tables_which_are_what_the_code_makes(tables: dict[str, Table], name: str) -> None:
    page, file = simulate.PAGE.read_text(encoding="utf-8"), FIGURES / f"{name}.csv"
    rows = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
    assert with_table(page, name, as_markdown(rows)) == page
    if name != "robustness":  # half a minute
        made = pd.read_csv(io.StringIO(as_csv(tables[name])))
        pd.testing.assert_frame_equal(pd.read_csv(file), made, rtol=0, atol=0.03)  # another numpy may round otherwise


def test_other_assumptions_are_taken_by_their_key_and_leave_the_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ASSUMED.changed(["subtle.blind=0.3", "steps=20"]).subtle.blind == 0.3
    with pytest.raises(ValidationError, match=r"subtle\.blnd"):
        ASSUMED.changed(["subtle.blnd=0.3"])
    before = simulate.PAGE.stat().st_mtime_ns
    simulate.main(["steps=10", "games=100"])
    assert "| pair | all four changes |" in capsys.readouterr().out
    assert before == simulate.PAGE.stat().st_mtime_ns


def test_the_page_shows_the_payoffs_of_today() -> None:
    page = payoffs.PAGE.read_text(encoding="utf-8")
    assert "| unknowable (`right lower` → `left lower`) |" in page
    assert with_table(page, "payoffs", matrix()) == page, "run python -m experiments.incentives.payoffs"


ALONE = [f"{name}_{role}" for name, role in product(ESTIMATORS, ("attacker", "assessor"))]


def test_every_table_of_the_pages_is_made_from_the_files() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert set(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == set(TABLES)
    for page in pages:
        assert with_tables(page) == page == with_tables(page.replace("95.3 (94.4 to 96.0)", "99.9"))


def test_both_roles_of_the_quickstart_gain_outside_the_intervals_with_every_seed() -> None:
    rates = Rates.of("quickstart")
    first, last = rates.steps[0], rates.steps[-1]
    for seed in rates.seeds:
        missed, missed_later = (rates.share("attacker/undetected", step, 1.0, (seed,)) for step in (first, last))
        assert missed.interval[1] < missed_later.interval[0]
        found = rates.share("assessor/frozen_attacks", last, 1.0, (seed,))
        assert missed.complement.interval[1] < found.interval[0]
        right, right_later = (rates.share("assessor/clean", step, 1.0, (seed,)) for step in (first, last))
        assert right.interval[1] < right_later.interval[0], "it does not find more by suspecting everything"


# --- the harder toy clinic: what attacks did, who calls it what ---


SEEDS = st.integers(0, 2**32)


def attacked(seed: int, did: Effect) -> MedicalRecord:
    """A game whose attack had this effect, in the attacker's style."""
    rng = random.Random(seed)
    note = sample_clean_note(rng)
    after = {
        Effect.ERROR: inject_error(rng, note)[0].text,
        Effect.UNKNOWABLE: with_another_age(rng, note).text,
        Effect.HARMLESS: reworded(rng, note, 2).text,
        Effect.NO_NOTE: f"{note.text} The patient is well.",
    }[did]
    spec = GameSpec(category=Category.ADVERSARIAL_BENIGN, target_label=Label.HARMFUL, seed_note=note.text)
    return MedicalRecord(spec=spec, presented_note=with_style(note.text, after))


def judged(judge: PairOracle | GatedPairOracle, game: MedicalRecord) -> Judgement:
    return asyncio.run(judge.judge(game))


@given(SEEDS, st.sampled_from(Effect))
def test_an_attack_is_told_apart_in_either_style_and_judged_by_comparison(seed: int, did: Effect) -> None:
    game = attacked(seed, did)
    assert game.presented_note is not None and STYLE in game.presented_note
    for note in (game.presented_note, game.presented_note.replace(STYLE, "")):
        assert effect(game.spec.seed_note, note) is did
    judgement = judged(PairOracle(), game)
    assert (judgement.label is Label.HARMFUL) == (did in (Effect.ERROR, Effect.UNKNOWABLE))
    assert judgement.realistic == (did is not Effect.NO_NOTE)


@pytest.mark.parametrize(("did", "passed"), [(Effect.ERROR, 0.896), (Effect.UNKNOWABLE, 0.028)])
def test_the_gate_passes_as_many_as_two_of_three_such_readings_do(did: Effect, passed: float) -> None:
    found = [judged(GatedPairOracle(), attacked(seed, did)).knowable for seed in range(600)]
    assert sum(map(bool, found)) / len(found) == pytest.approx(passed, abs=0.04)


def test_the_page_holds_the_table_of_the_committed_counts() -> None:
    page = shortcuts.PAGE.read_text(encoding="utf-8")
    for name, arms in shortcuts.TABLES.items():
        assert with_table(page, name, markdown(shortcuts.arms_table(arms))) == page
    assert re.search("`decoys_gate` | [123] ", page)
