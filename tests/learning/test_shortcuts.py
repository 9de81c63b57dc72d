"""The harder toy clinic: what attacks did, who calls it what, and a short run of its experiment."""

import asyncio
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.clinic import inject_error, reworded, sample_clean_note
from experiments.learning.results import markdown
from experiments.pages import with_table
from experiments.shortcuts import run as shortcuts
from experiments.shortcuts.clinic import STYLE, Effect, effect, with_another_age, with_style
from experiments.shortcuts.judges import GatedPairOracle, PairOracle
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Category, GameSpec, Label

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
