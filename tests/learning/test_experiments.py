"""The commands of the learning runs and what is read from their files, without running them."""

import csv
import random
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from game.builders import finished
from note_files import SAMPLE
from real_runs import AGREEMENT, GAMES_PER_STEP, REPOSITORY, SMALL_EXPERIMENT, environment
from support import extra_info

from experiments.learning import context_leak, pictures
from experiments.learning import run as learning
from experiments.learning.results import FIGURES, PAGE, Rates, Share, in_training, with_tables
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.games.medical.clinic import sample_clean_note
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.rewards import medserl
from medserl_agentloop.testing.tiny import compose_run


@pytest.mark.slow
@pytest.mark.parametrize("experiment", learning.EXPERIMENTS)
def test_every_command_composes_and_passes_the_start_up_check(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if learning.CORRECTED[-1] in learning.EXPERIMENTS[experiment].overrides:
        report = Path(learning.LIAR_REPORT)
        report.parent.mkdir(parents=True)
        shutil.copy(SAMPLE, report.parent / "toy_clinic.csv")
        learning.calibrate_liar(report)
    command = learning.training_command(experiment, seed=1)
    run = compose_run(*(word for word in command[3:] if not word.startswith("hydra.")))
    selfplay = check_run(run)
    assert selfplay.profile == learning.PROFILE
    mix = learning.MIXES[str(Path(run.data.train_files).parent)]
    assert ("decoy_benign" in mix) == (selfplay.judge != "labels"), "labels cannot tell a decoy from an error"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_short_run_is_trained_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    options = [
        "--seeds",
        "4",
        "--cases",
        "12",
        "--results",
        str(results),
        "--override",
        "trainer.total_training_steps=2",
        *SMALL_EXPERIMENT,
    ]
    command = [sys.executable, "-m", learning.__name__, "headline", *options]
    process = {"cwd": tmp_path, "env": environment(REPOSITORY), "check": True, "capture_output": True, "text": True}
    printed = subprocess.run(command, **process).stdout
    assert "headline 4: step 2/2" in printed
    rates = Rates.of("headline", results)
    assert (rates.seeds, rates.steps) == ([4], [0, 2])
    for step, temperature in product((0, 2), (0.0, 1.0)):
        assert rates.balanced(step, temperature).items == 24
        assert rates.share("attacker/valid_decoys", step, temperature).items == 12
    assert in_training("headline", "attacker", "valid_rate", slice(0, None), results).items == 2 * GAMES_PER_STEP
    with (results / "headline_steps.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert float(row["training/rollout_probs_diff_max"]) < AGREEMENT
            assert float(row["actor/grad_norm"]) > 0
            assert float(row[learning.GAME_SUM]) < 1e-6
    monkeypatch.chdir(tmp_path)
    learning.train_and_measure("headline", 4, [], 12)
    assert capsys.readouterr().out == "", "what has ended is not run or measured again"


@pytest.mark.slow
def test_the_leak_of_a_shared_context_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(7)
    rows = [extra_info("adversarial_benign", seed_note=sample_clean_note(rng).text) for _ in range(4)]
    pq.write_table(pa.Table.from_pylist([{"extra_info": row} for row in rows]), tmp_path / "notes.parquet")
    monkeypatch.setattr(sys, "argv", ["context_leak", "--data", str(tmp_path / "notes.parquet")])
    context_leak.main()
    assert "of 4 attacks were valid" in capsys.readouterr().out


@pytest.mark.slow
def test_all_pictures_are_drawn_from_the_committed_files(tmp_path: Path) -> None:
    for file in FIGURES.glob("*.csv"):
        shutil.copy(file, tmp_path)
    pictures.main(results=tmp_path)
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in FIGURES.glob("*.svg")}


def test_what_both_roles_win_together_is_nothing_in_a_zero_sum_game(tmp_path: Path) -> None:
    records = [finished(o) for o in (Outcome.CORRECT_DETECTION, Outcome.MISSED_ERROR, Outcome.INVALID_ATTACK)]
    for record in records:
        record.rewards, record.step = medserl(record), 3
    games = tmp_path / "games.jsonl"
    games.write_text("".join(record.model_dump_json() + "\n" for record in records))
    assert learning.largest_game_sums(games) == {3: 0.0}
    records[0].rewards = {role: {"game": 0.5} for role in records[0].rewards}
    games.write_text(records[0].model_dump_json() + "\n")
    assert learning.largest_game_sums(games) == {3: 1.0}


def test_rates_are_pooled_by_their_counts(tmp_path: Path) -> None:
    lines = ["seed,step,temperature,measure,hits,items", "0,5,1.0,assessor/clean,1,2", "1,5,1.0,assessor/clean,8,8"]
    (tmp_path / "x_rates.csv").write_text("\n".join([*lines, "1,5,0.0,assessor/clean,0,8"]))
    rates = Rates.of("x", tmp_path)
    assert rates.share("assessor/clean", 5, 1.0) == Share(9, 10)
    assert rates.share("assessor/clean", 5, 1.0, seeds=(0,)) == rates.balanced(5, 1.0, (0,)) == Share(1, 2)
    assert (rates.seeds, rates.steps) == ([0, 1], [5])
    assert str(Share(9, 10)) == "90.0 (59.6 to 98.2)"


def test_accuracy_in_training_is_that_of_the_last_steps_turns(tmp_path: Path) -> None:
    header = "seed,step,selfplay/assessor/turns,selfplay/assessor/accuracy"
    (tmp_path / "x_steps.csv").write_text("\n".join([header, "0,1,100,0.0", "0,2,10,0.5", "1,2,30,1.0"]))
    assert in_training("x", "assessor", "accuracy", slice(-1, None), tmp_path) == Share(35, 40)


def test_a_table_that_was_edited_by_hand_is_put_right() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page.replace("| novice |", "| novices |")) == with_tables(page)
