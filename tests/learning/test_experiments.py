"""The commands of the learning runs and what is read from their files, without running them."""

import random
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from real_runs import AGREEMENT, REPOSITORY, SMALL, environment, printed_by
from support import extra_info

from experiments.learning import context_leak, pictures
from experiments.learning import run as learning
from experiments.learning.results import FIGURES, Rates, Share, gain, in_training
from experiments.opponent import run as opponent
from experiments.shortcuts import run as shortcuts
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.clinic import sample_clean_note
from medserl_agentloop.games.medical.records import read_games
from medserl_agentloop.scoring.metrics import wilson_interval
from medserl_agentloop.testing import compose_run


def opponent_command(arm: str, seed: int, extra: list[str]) -> list[str]:
    url = "http://127.0.0.1:1" if opponent.ARMS[arm].draws else None
    return opponent.training_command(arm, 0.03, seed, 60, url, extra)


NOVICE = "actor_rollout_ref.model.path=${medserl:assets/novice}"
ARMS = [
    *((learning.training_command, name, []) for name in learning.EXPERIMENTS),
    *((shortcuts.training_command, name, [NOVICE]) for name in shortcuts.ARMS),
    *((opponent_command, name, [NOVICE]) for name in opponent.ARMS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name", "extra"), ARMS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_composes_and_passes_the_start_up_check(
    command: Any, name: str, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = command(name, 1, extra)[3:]
    run = compose_run(*(word for word in words if not word.startswith("hydra.")))
    selfplay = check_run(run)
    if command is learning.training_command:
        mix = learning.MIXES[str(Path(run.data.train_files).parent)]
        assert "decoy_benign" not in mix or selfplay.judge != "labels", (
            "labels cannot tell a decoy from an error"
        )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_both_experiments_teach_train_measure_and_write_a_short_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run, in the shared context with a merged adapter; to the learning runs it is one of
    theirs that has ended.
    """
    results = tmp_path / "results"
    options = ["--seeds=3", "--cases=8", "--lessons=3", f"--results={results}"]
    merged = learning.EXPERIMENTS["adapter_shared"].overrides
    for override in ("selfplay.context=shared", *merged, *SMALL, "trainer.total_training_steps=1"):
        options.append(f"--override={override}")
    printed = printed_by(
        tmp_path, "-m", shortcuts.__name__, "decoys_gate", *options, **environment(REPOSITORY)
    )
    assert "decoys_gate 3: step 1/1" in printed
    [_, start, arm] = shortcuts.arms_table(results=results)
    assert (start[0], arm[0]) == ("`start`", "`decoys_gate`")
    assert sum(map(float, arm[7:])) == pytest.approx(100, abs=0.3), "every attack has one effect"
    assert "selfplay/judge/knowable_rate" in (results / "steps.csv").read_text()

    monkeypatch.chdir(tmp_path)
    folder = learning.RUNS / "headline" / "4"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path / shortcuts.RUNS / "decoys_gate" / "3")
    for _ in range(2):
        learning.train_and_measure("headline", 4, [], 12)
    said = capsys.readouterr().out
    assert "step 1/1" not in said and said.count("rates_1.csv: temperature 1") == 1, (
        "what has ended is not done again"
    )
    learning.collect("headline", [4], results)
    rates = Rates.of("headline", results)
    assert (rates.seeds, rates.steps) == ([4], [0, 1])
    for step, temperature in product((0, 1), (0.0, 1.0)):
        assert rates.balanced(step, temperature).items == 24
        assert rates.share("attacker/valid_decoys", step, temperature).items == 12
    attacked = sum(
        game.attack is not None and game.void is None for game in read_games(folder / GAMES_FILE)
    )
    assert (
        in_training("headline", "attacker", "valid_rate", slice(0, None), results).items
        == attacked
        > 0
    )
    logged = pd.read_csv(results / "headline_steps.csv")
    assert (logged["training/rollout_probs_diff_max"] < AGREEMENT).all() and (
        logged["actor/grad_norm"] > 0
    ).all()
    assert (logged[learning.GAME_SUM] < 1e-6).all()


@pytest.mark.slow
def test_the_leak_of_a_shared_context_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(7)
    rows = [
        extra_info("adversarial_benign", clean_note=sample_clean_note(rng).text) for _ in range(4)
    ]
    pq.write_table(
        pa.Table.from_pylist([{"extra_info": row} for row in rows]), tmp_path / "notes.parquet"
    )
    monkeypatch.setattr(sys, "argv", ["context_leak", "--data", str(tmp_path / "notes.parquet")])
    context_leak.main()
    assert "of 4 attacks were valid" in capsys.readouterr().out


@pytest.mark.slow
def test_all_pictures_are_drawn_from_the_committed_files(tmp_path: Path) -> None:
    for file in FIGURES.glob("*.csv"):
        shutil.copy(file, tmp_path)
    pictures.main(results=tmp_path)
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        path.name for path in FIGURES.glob("*.svg")
    }


def test_seeds_with_the_same_cases_do_not_narrow_an_interval() -> None:
    start = {(seed, 0, 0.0, "assessor/clean"): (756, 1000) for seed in range(3)}
    assert (
        str(Rates(start).share("assessor/clean", 0, 0.0)) == "75.6 (72.8 to 78.2)"
    )  # one player, one answer
    low, high = wilson_interval(756, 1000)
    same, apart = Share(((756, 1000),) * 3), Share(((706, 1000), (756, 1000), (806, 1000)))
    assert same.interval == pytest.approx((low, high))
    assert apart.interval[0] < low - 0.02 and apart.interval[1] > high + 0.02
    assert gain(apart, Share(((716, 1000), (776, 1000), (836, 1000))))[1] == "+1.0, +2.0, +3.0"


def test_interval_of_three_seeds_that_differ_holds_the_truth_in_19_cases_of_20() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.binomial(500, rng.normal(0.5, 0.1, (400, 3)).clip(0, 1)).tolist()
    intervals = [Share(tuple((hits, 500) for hits in each)).interval for each in seeds]
    assert 0.92 < sum(low < 0.5 < high for low, high in intervals) / 400 < 0.98
