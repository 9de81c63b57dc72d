"""The harder toy clinic: what attacks did, who calls it what, and a short run of its experiment."""

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import REPOSITORY, SMALL_EXPERIMENT, environment

from experiments.learning.results import markdown
from experiments.pages import with_table
from experiments.shortcuts import run as shortcuts
from experiments.shortcuts.clinic import STYLE, Effect, effect, sentences, with_another_age, with_style
from experiments.shortcuts.judges import GatedPairOracle, PairOracle
from experiments.shortcuts.transcripts import LESSON, styled_transcript
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.games.medical.clinic import inject_error, reworded, sample_clean_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, Role
from medserl_agentloop.testing.tiny import compose_run

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
def test_an_attack_did_what_it_did_in_either_style(seed: int, did: Effect) -> None:
    game = attacked(seed, did)
    assert game.presented_note is not None
    assert STYLE in game.presented_note
    assert effect(game.spec.seed_note, game.presented_note) is did
    assert effect(game.spec.seed_note, game.presented_note.replace(STYLE, "")) is did


@given(SEEDS, st.sampled_from(Effect))
def test_who_compares_with_the_original_calls_the_unknowable_an_error(seed: int, did: Effect) -> None:
    judgement = judged(PairOracle(), attacked(seed, did))
    assert (judgement.label is Label.HARMFUL) == (did in (Effect.ERROR, Effect.UNKNOWABLE))
    assert judgement.realistic == (did is not Effect.NO_NOTE)


@pytest.mark.parametrize(("did", "passed"), [(Effect.ERROR, 0.896), (Effect.UNKNOWABLE, 0.028)])
def test_the_gate_passes_as_many_as_two_of_three_such_readings_do(did: Effect, passed: float) -> None:
    found = [judged(GatedPairOracle(), attacked(seed, did)).knowable for seed in range(600)]
    assert sum(map(bool, found)) / len(found) == pytest.approx(passed, abs=0.04)


@given(SEEDS)
def test_every_lesson_is_read_and_shows_its_style_where_it_was_rewritten(seed: int) -> None:
    turn = styled_transcript(random.Random(seed), LESSON)
    if turn.role is Role.ASSESSOR:
        answer = MEDSERL.assessment(turn.answer)
        assert not answer.violations
        assert answer.sentence is None or answer.sentence in sentences(turn.note)
        return
    attack = MEDSERL.attack(turn.answer)
    assert attack.note is not None
    changed = set(sentences(attack.note)) - set(sentences(turn.note))
    assert [sentence.endswith(f"{STYLE}.") for sentence in changed] == [True]


def test_the_page_holds_the_table_of_the_committed_counts() -> None:
    page = shortcuts.PAGE.read_text(encoding="utf-8")
    for name, arms in shortcuts.TABLES.items():
        assert with_table(page, name, markdown(shortcuts.arms_table(arms))) == page
    assert re.search("`decoys_gate` | [123] ", page)


@pytest.mark.slow
@pytest.mark.parametrize("arm", shortcuts.EVERY)
def test_every_command_composes_and_passes_the_start_up_check(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = shortcuts.training_command(arm, seed=1, extra=["actor_rollout_ref.model.path=${medserl:assets/novice}"])
    assert check_run(compose_run(*(word for word in command[3:] if not word.startswith("hydra."))))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_short_run_is_taught_trained_and_measured(tmp_path: Path) -> None:
    results = tmp_path / "results"
    options = [
        "--seeds=3",
        "--cases=8",
        "--lessons=3",
        f"--results={results}",
        "--override=trainer.total_training_steps=1",
        *SMALL_EXPERIMENT,
    ]
    command = [sys.executable, "-m", shortcuts.__name__, "decoys_gate", *options]
    process = {"cwd": tmp_path, "env": environment(REPOSITORY), "check": True, "capture_output": True, "text": True}
    assert "decoys_gate 3: step 1/1" in subprocess.run(command, **process).stdout
    [_, start, arm] = shortcuts.arms_table(results=results)
    assert (start[0], arm[0]) == ("`start`", "`decoys_gate`")
    assert sum(map(float, arm[7:])) == pytest.approx(100, abs=0.3), "every attack has one effect"
    assert "selfplay/judge/knowable_rate" in (results / "steps.csv").read_text()
