"""A wrong configuration stops before anything starts, and says what to write instead."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from medserl_agentloop.config import ConfigError, SelfPlayConfig, check_run
from medserl_agentloop.game.types import Role
from medserl_agentloop.plugin import check_verl_version
from medserl_agentloop.testing.tiny import compose_run


def run(**changes: Any) -> Any:
    config = compose_run("+recipes=quickstart")
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def test_the_base_recipe_states_the_defaults_of_the_config_class() -> None:
    composed = OmegaConf.to_container(compose_run("+recipes=base").selfplay, resolve=True)
    assert isinstance(composed, dict)
    defaults = SelfPlayConfig().model_dump()
    assert set(composed) == set(defaults)
    assert {k: v for k, v in composed.items() if k != "records"} == {
        k: v for k, v in defaults.items() if k != "records"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selfplay__contxt": "shared"}, "selfplay.contxt is not a key of this node (did you mean 'context'?)"),
        ({"selfplay__budget__asessor": 5}, "selfplay.budget.asessor is not a key of this node (did you mean 'asses"),
        ({"selfplay__context": "isolatd"}, "selfplay.context='isolatd': Input should be 'isolated' or 'shared'"),
        ({"selfplay__budget__assessor": "many"}, "selfplay.budget.assessor='many': Input should be a valid integer"),
        ({"selfplay__reward": "zerosum"}, "expected one of medserl, zero_sum (did you mean 'zero_sum'?)"),
        ({"selfplay__judge": "label"}, "expected one of labels (did you mean 'labels'?)"),
        ({"selfplay__profile": "nonesuch"}, "no prompt profile 'nonesuch': expected one of baseline, classic, medserl"),
        ({"trainer__v1__trainer_mode": "sync"}, "trainer.v1.trainer_mode to one of selfplay_sync"),
        ({"trainer__use_v1": False}, "Set trainer.use_v1=True"),
        ({"reward__reward_manager__source": "register"}, "reward.reward_manager.source=importlib"),
        (
            {"selfplay__train": "attacker", "algorithm__adv_estimator": "grpo"},
            "algorithm.adv_estimator=grpo does not (did you mean 'role_grpo'?)",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"actor_rollout_ref__model__use_remove_padding": False}, {"actor_rollout_ref__actor__strategy": "megatron"}],
)
def test_isolated_refuses_engines_that_ignore_position_restarts_and_names_both_ways_out(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError) as error:
        check_run(run(**changes))
    assert "use_remove_padding=True" in str(error.value)
    assert "selfplay.context=shared" in str(error.value)
    assert check_run(run(**changes, selfplay__context="shared")).context == "shared"


def test_a_run_without_the_node_is_told_to_start_from_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"\+recipes=quickstart"):
        check_run(compose_run())


def test_the_hydra_callback_stops_the_run_itself(tmp_path: Path) -> None:
    """Hydra would turn an ordinary exception into a warning and go on."""
    run = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=quickstart", "+selfplay.contxt=shared"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode != 0
    assert "selfplay.contxt is not a key of this node (did you mean 'context'?)" in run.stderr
    assert "Started a local Ray instance" not in run.stdout + run.stderr


def test_a_wrong_verl_version_is_an_error_that_verl_cannot_swallow() -> None:
    with pytest.raises(SystemExit, match=re.escape("pip install 'verl==0.9.1'")):
        check_verl_version("0.8.0")


@pytest.mark.parametrize(
    ("train", "attacker", "assessor"),
    [("both", True, True), ("attacker", True, False), ("assessor", False, True)],
)
def test_train_names_the_roles_that_the_loss_sees(train: Any, attacker: bool, assessor: bool) -> None:
    config = SelfPlayConfig(train=train)
    assert (config.trains(Role.ATTACKER), config.trains(Role.ASSESSOR)) == (attacker, assessor)
