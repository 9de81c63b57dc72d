"""Real runs of verl's own entry point: one that is killed and resumed, and one that is not."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from real_runs import AGREEMENT, GAMES_PER_STEP, Run

from medserl_agentloop.core.step_file import GAMES_FILE, STATE_FILE
from medserl_agentloop.games.medical.records import read_games
from medserl_agentloop.games.medical.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLED_AFTER, LAST, ROWS = 2, 4, 16
WEIGHTS = f"run/global_step_{LAST}/actor/model_world_size_1_rank_0.pt"


def test_a_killed_run_goes_on_as_one_that_was_never_killed_and_holds_every_step_once(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    few = tmp_path / "train.parquet"  # two steps of rows, so that the kill comes at the end of an epoch
    pq.write_table(pq.read_table(data[0].partition("=")[2]).slice(0, ROWS), few)
    overrides = (f"data.train_files={few}", data[1], "algorithm.adv_estimator=role_rae", "trainer.total_epochs=3")
    overrides = (*overrides, f"trainer.total_training_steps={LAST}")
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    whole = Run(folders["whole"], *overrides)
    whole.copy_after_step(KILLED_AFTER, folders["killed"])
    whole.wait()

    with (folders["killed"] / "run" / GAMES_FILE).open("a") as games:  # a kill between writing games and checkpointing
        games.write(json.dumps({"step": LAST + 1}) + "\n" + '{"step": ')
    killed = Run(folders["killed"], *overrides)
    reached = killed.reached
    killed.wait()

    assert KILLED_AFTER <= reached < LAST
    assert any(line.startswith(f"resuming after step {reached} of {LAST}: ") for line in killed.lines())
    assert any(f"plays all of its {ROWS} rows" in line for line in killed.lines())
    assert sum(line.startswith("judge labels: nobody reads") for line in killed.lines()) == 1
    for run in (whole, killed):
        assert run.steps_of_games() == dict.fromkeys(range(1, LAST + 1), GAMES_PER_STEP)
        assert [m["step"] for m in run.metrics] == list(range(1, LAST + 1))
        for step in run.metrics:
            assert step["actor/grad_norm"] > 0
            assert step["training/rollout_probs_diff_max"] < AGREEMENT
            assert step["selfplay/assessor/parse_rate"] >= 0.5
            assert step["selfplay/judge/unread_rate"] > 0.5
    rewards: dict[Role, set[float | None]] = {
        role: {g.reward(role) for g in read_games(folders["killed"] / "run" / GAMES_FILE)} for role in Role
    }
    assert all(len(values - {None}) > 1 for values in rewards.values())

    baselines = [
        [{k: v for k, v in step.items() if "/baseline/" in k} for step in run.metrics] for run in (whole, killed)
    ]
    for of_whole, of_killed in zip(*baselines, strict=True):
        assert of_whole and of_killed == pytest.approx(of_whole, abs=1e-6)
    states: dict[str, Any] = {
        name: json.loads((folder / "run" / f"global_step_{LAST}" / STATE_FILE).read_text())
        for name, folder in folders.items()
    }
    for role in Role:
        expected = states["whole"]["baselines"][role.value]
        assert states["killed"]["baselines"][role.value] == pytest.approx(expected, abs=1e-6)
    assert states["killed"]["alarms"]["streaks"] == states["whole"]["alarms"]["streaks"]

    played = {name: games_played(folder) for name, folder in folders.items()}
    assert played["killed"] == played["whole"]
    rows = [{text_id for text_id, _, _ in games} for games in played["whole"].values()]
    assert rows[0] | rows[1] == rows[2] | rows[3] and len(rows[0] | rows[1]) == ROWS  # each row once in an epoch
    weights = {name: torch.load(folder / WEIGHTS, weights_only=False) for name, folder in folders.items()}
    moved = 1e-3  # by the four steps; float32 rounds by 1e-7, in the order in which the games of a step were over
    for name, tensor in weights["whole"].items():
        assert (weights["killed"][name].to_local() - tensor.to_local()).abs().max() < moved / 1000, name


def games_played(folder: Path) -> dict[int, list[tuple[str, str, str]]]:
    """By step, the row, the note and the rewards of each game."""
    played: dict[int, list[tuple[str, str, str]]] = {}
    for game in read_games(folder / "run" / GAMES_FILE):
        played.setdefault(game.step, []).append(
            (str(game.spec.text_id), str(game.presented_note), json.dumps(game.rewards))
        )
    return {step: sorted(games) for step, games in sorted(played.items())}
