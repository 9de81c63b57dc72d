"""``medserl config``: every value of a run with its origin, and what the start would refuse."""

from typing import Any

import pytest
from run_check.runs import run
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.run_check.composition import Composition, Setting, compose_recipe, problems
from medserl_agentloop.core.run_check.run import wrong_types
from medserl_agentloop.testing.tiny import compose_run

SCHEMA = compose_run()


def settings(recipe: str, *overrides: str) -> dict[str, Setting]:
    return {setting.key: setting for setting in compose_recipe(recipe, list(overrides)).settings}


def test_every_value_names_what_set_it_last() -> None:
    found = settings("qwen3_4b", "actor_rollout_ref.rollout.n=8", "+trainer.v1.mine={a: 1}")
    assert found["actor_rollout_ref.rollout.n"] == Setting("actor_rollout_ref.rollout.n", 8, "command line", True)
    assert found["trainer.v1.mine.a"].origin == "command line"
    assert found["data.train_batch_size"].origin == "recipes/qwen3_4b.yaml"
    assert found["trainer.use_v1"].origin == "recipes/core.yaml"
    assert found["algorithm.gamma"] == Setting("algorithm.gamma", 1.0, "verl's ppo_trainer.yaml", False)
    assert found["actor_rollout_ref.actor.clip_ratio"].origin == "verl's actor/actor.yaml"
    assert found["selfplay.context"].changed is False  # a recipe writes it down, as the game has it
    assert found["selfplay.anchor.attacker"].changed is True
    # follows from rollout.n
    assert (found["critic.rollout_n"].value, found["critic.rollout_n"].changed) == (8, False)


def test_a_later_recipe_takes_precedence() -> None:
    mode = settings("quickstart,colocate_async")["trainer.v1.trainer_mode"]
    assert (mode.value, mode.origin) == ("selfplay_colocate_async", "recipes/colocate_async.yaml")


def said(changes: dict[str, Any], recipe: str = "qwen3_4b") -> str:
    judge = {"selfplay.judge_server.url": "http://localhost:1/v1", "selfplay.judge_server.model": "m"}
    refused, warned = problems(Composition(run({**judge, **changes}, recipe), SCHEMA, "ppo_trainer", []))
    return "\n".join([*refused, *warned])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.total_epochs", "many", "trainer.total_epochs='many' is not of type int, which verl needs here"),
        ("data.train_batch_size", 1.5, "data.train_batch_size=1.5 is not of type int"),
        ("actor_rollout_ref.actor.optim.lr", "fast", "actor_rollout_ref.actor.optim.lr='fast' is not of type float"),
        ("actor_rollout_ref.actor.shuffle", 3, "actor_rollout_ref.actor.shuffle=3 is not of type bool"),
        ("trainer.v1", 3, "trainer.v1=3: this node holds keys (trainer_mode, "),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "four", "is not of type Optional[int]"),
        ("trainer.n_gpus_per_node", 7, "which 7 data-parallel workers cannot share evenly"),
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            8192,
            "ppo_max_token_len_per_gpu=8192 is less than a trajectory may have (data.max_prompt_length=1024 and "
            "data.max_response_length=8192), and the run would end at the first longer one. Set it to 9216 or more",
        ),
        ("selfplay.budget.assessor", "short", "selfplay.budget.assessor='short': Input should be a valid integer"),
        ("trainer.total_step", 5, "trainer.total_step (did you mean 'total_epochs'?) is not a key of verl's config"),
    ],
)
def test_what_a_start_would_refuse_is_said_with_its_key(key: str, value: Any, message: str) -> None:
    assert message in said({key: value})


@pytest.mark.parametrize("recipe", ["quickstart", "qwen3_4b"])
def test_a_recipe_that_starts_has_no_problems(recipe: str) -> None:
    assert said({}, recipe) == ""


def test_values_that_verl_accepts_are_of_no_wrong_type() -> None:
    accepted = {"trainer.logger": "console", "critic.optim.lr": 1, "data.train_files": ["a", "b"], "data.seed": None}
    assert list(wrong_types(run(accepted), SCHEMA)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["qwen3_4"],
            "Could not load 'recipes/qwen3_4'. (did you mean 'qwen3_4b'?); the recipes are adapter_per_role, ",
        ),
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
    answer = CliRunner().invoke(app, ["config", "quickstart", "--all", "trainer.nnodes=two"])
    assert answer.exit_code == 1
    assert "verl's ppo_trainer.yaml" in answer.stdout
    assert "refused: trainer.nnodes='two' is not of type int" in answer.stderr
