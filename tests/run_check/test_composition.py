"""``medserl config``: every value of a run with its origin, and what the start would refuse."""

import pytest
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.run_check.composition import Setting, settings


def by_key(recipe: str, *overrides: str) -> dict[str, Setting]:
    return {setting.key: setting for setting in settings(recipe, list(overrides))}


def test_every_value_names_what_set_it_last() -> None:
    found = by_key("qwen3_4b", "actor_rollout_ref.rollout.n=8", "+trainer.v1.mine={a: 1}")
    assert found["actor_rollout_ref.rollout.n"] == Setting("actor_rollout_ref.rollout.n", 8, "command line", True)
    assert found["trainer.v1.mine.a"].origin == "command line"
    assert found["data.train_batch_size"].origin == "recipes/qwen3_4b.yaml"
    assert found["trainer.use_v1"].origin == "recipes/core.yaml"
    assert found["algorithm.gamma"] == Setting("algorithm.gamma", 1.0, "verl's ppo_trainer.yaml", False)
    assert found["actor_rollout_ref.actor.clip_ratio"].origin == "verl's actor/actor.yaml"
    assert found["selfplay.context"] == Setting("selfplay.context", "isolated", "default of the game", False)
    assert found["selfplay.anchor.attacker"].changed is True
    # follows from rollout.n
    assert (found["critic.rollout_n"].value, found["critic.rollout_n"].changed) == (8, False)


@pytest.mark.parametrize("recipes", ["quickstart,colocate_async", "[quickstart,colocate_async]"])
def test_a_later_recipe_takes_precedence(recipes: str) -> None:
    mode = by_key(recipes)["trainer.v1.trainer_mode"]
    assert (mode.value, mode.origin) == ("selfplay_colocate_async", "recipes/colocate_async.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3_4"], "Could not load 'recipes/qwen3_4'. (did you mean 'qwen3_4b'?); the recipes are adapter_per_ro"),
        (["quickstart", "trainer.total_epoch=3"], "Could not override 'trainer.total_epoch'. (did you mean 'trainer."),
        (["quickstart", "nonsense"], "Error parsing override 'nonsense'"),
    ],
)
def test_what_hydra_cannot_compose_is_said_in_one_line(arguments: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["config", *arguments])
    assert answer.exit_code == 2
    assert message in answer.stderr and answer.stderr.count("\n") == 1


def test_the_command_prints_what_was_changed_and_refuses_as_the_start_does() -> None:
    answer = CliRunner().invoke(app, ["config", "quickstart", "trainer.total_epochs=3"])
    assert answer.exit_code == 0
    lines = {line.split()[-1]: line.split("  ")[0].strip() for line in answer.stdout.splitlines()}
    assert lines["trainer.total_epochs=3"] == "command line"
    assert lines["data.train_batch_size=16"] == "recipes/tiny.yaml"
    assert not any(line.startswith("verl") for line in lines.values())
    answer = CliRunner().invoke(app, ["config", "quickstart", "--all", "trainer.use_v1=False"])
    assert answer.exit_code == 1
    assert "verl's ppo_trainer.yaml" in answer.stdout and "selfplay.context=isolated" in answer.stdout
    assert "refused: trainer.v1.trainer_mode=selfplay_sync (trainer.use_v1=False) does not know" in answer.stderr
