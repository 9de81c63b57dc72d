"""A real run on verl's colocated asynchronous trainer, with one merged LoRA adapter, killed and resumed."""

from pathlib import Path

import pytest
from real_runs import AGREEMENT, GAMES_PER_STEP, Run

from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


LORA = ("lora_rank=4", "lora_alpha=8", "target_modules=all-linear", "lora.merge=True")


def test_games_that_go_on_while_weights_change_are_trained_on_once_each(tmp_path: Path, data: tuple[str, ...]) -> None:
    recipes, lora = "[own_notes,colocate_async]", [f"actor_rollout_ref.model.{override}" for override in LORA]
    first = Run(tmp_path, *data, *lora, "trainer.total_training_steps=50", recipe=recipes)
    try:
        first.wait_for_checkpoint(2)
    finally:
        first.kill()
    last = first.reached + 2
    second = Run(tmp_path, *data, *lora, f"trainer.total_training_steps={last}", recipe=recipes)
    second.wait()

    assert any("certificate: isolation of actor" in line and "holds" in line for line in first.lines())
    assert not any(line.startswith("alarm rollout_mismatch") for run in (first, second) for line in run.lines())
    steps = range(1, last + 1)
    assert [step["step"] for step in second.metrics] == list(steps)
    assert second.steps_of_games() == dict.fromkeys(steps, GAMES_PER_STEP)
    games = list(read_games(tmp_path / "run" / GAMES_FILE))
    assert len({(game.uid, game.session) for game in games}) == len(games)
    assert all(game.void is None and game.step - 2 <= game.policy_version < game.step for game in games)
    assert {game.attack is None for game in games} == {True, False}

    assert second.metrics[0]["training/rollout_probs_diff_max"] < AGREEMENT  # nothing is stale yet
    for step in second.metrics[1:]:
        assert 0 <= step["selfplay/staleness"] <= 1
        assert step["rollout_corr/rollout_is_mean"] != 1.0
