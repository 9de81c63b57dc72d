"""Names that verl looks up when the engines are up are looked up at start-up, with the nearest right one."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import verl
from run_check.runs import refusal, run
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, agg_loss, get_kl_controller, kl_penalty
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from medserl_agentloop.core.run_check.run import AGGREGATIONS, CHECKPOINT_CONTENTS, KL_ESTIMATORS, STRATEGIES

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SAMPLER = "trainer.v1.sampler.custom_sampler"


@pytest.mark.parametrize(
    ("key", "slip", "right"),
    [
        ("algorithm.adv_estimator", "role_grp", "role_grpo"),
        ("algorithm.kl_penalty", "low_var", "low_var_kl"),
        ("algorithm.kl_ctrl.type", "fix", "fixed"),
        ("algorithm.rollout_correction.rollout_is", "tokens", "token"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1,token_k4", "token_k3"),
        ("algorithm.rollout_correction.loss_type", "reinforced", "reinforce"),
        (f"{ACTOR}.policy_loss.loss_mode", "vanila", "vanilla"),
        (f"{ACTOR}.loss_agg_mode", "token_mean", "token-mean"),
        ("critic.loss_agg_mode", "token-men", "token-mean"),
        (f"{ACTOR}.kl_loss_type", "low_var_k", "low_var_kl"),
        (f"{ACTOR}.strategy", "fsdp_2", "fsdp2"),
        (f"{ACTOR}.optim.lr_scheduler_type", "cosin", "cosine"),
        (f"{ACTOR}.optim.optimizer", "AdamV", "Adam"),
        (f"{ACTOR}.checkpoint.save_contents", ["modl", "optimizer"], "model"),
        (f"{ROLLOUT}.name", "sgland", "sglang"),
        ("trainer.logger", ["console", "wandbb"], "wandb"),
        ("trainer.logger", "tensorbord", "tensorboard"),
        ("trainer.resume_mode", "disabled", "disable"),
        ("reward.reward_manager.name", "PerTurnRewardManger", "PerTurnRewardManager"),
        (f"{SAMPLER}.name", "SelfPlayReplayBufer", "SelfPlayReplayBuffer"),
    ],
)
def test_a_slip_is_found_with_the_nearest_right_name(key: str, slip: Any, right: str) -> None:
    answer = refusal({key: slip})
    assert f"{key}=" in answer
    assert f"(did you mean {right!r}?)" in answer


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.reward_manager.module.path", "pkg://medserl_agentloop.core.no_such_module"),
        ("reward.custom_reward_function.path", "no/such/file.py"),
        (f"{SAMPLER}.path", "pkg://no_such_package.sampler"),
        (f"{ACTOR}.optim.optimizer_impl", "no_such_package.optim"),
        (f"{ROLLOUT}.agent.agent_loop_manager_class", "no_such_package.Manager"),
        ("trainer.checkpoint_callback_class", "Callback"),
        ("actor_rollout_ref.model.external_lib", "no_such_package"),
    ],
)
def test_a_module_that_verl_could_not_load_is_named(key: str, value: str) -> None:
    assert f"{key}: verl cannot load " in refusal({key: value})


def test_a_misspelt_name_is_told_alone() -> None:
    assert len(refusal({f"{ACTOR}.strategy": "fsdp3", "distillation.enabled": True}).splitlines()) == 1


def test_what_a_user_has_registered_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "estimators_of_mine.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est\n"
        "register_adv_est('estimator_of_mine')(lambda **columns: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes: dict[str, Any] = {"algorithm.adv_estimator": "estimator_of_mine"}
    assert "VERL_USE_EXTERNAL_MODULES=your.module" in refusal(changes)
    assert refusal({**changes, "actor_rollout_ref.model.external_lib": "estimators_of_mine"}) == ""
    del ADV_ESTIMATOR_REGISTRY["estimator_of_mine"]


def test_the_cpu_server_is_known_to_runs_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_ROLLOUT_REGISTRY, ("cpu_hf", "async"), raising=False)  # other tests register it
    assert refusal({}) == ""
    assert f"{ROLLOUT}.name=cpu_hf: verl knows no such name" in refusal({f"{ROLLOUT}.name": "cpu_hf"}, "qwen3_4b")


# The lists of names that verl has no registry for.


def test_the_aggregations_are_verls() -> None:
    ones = torch.ones(2, 3)
    for mode in AGGREGATIONS:
        agg_loss(ones, ones, mode)
    with pytest.raises(ValueError, match="Invalid loss_agg_mode"):
        agg_loss(ones, ones, "token_mean")


def test_the_kl_estimators_are_verls() -> None:
    for name in KL_ESTIMATORS:
        kl_penalty(torch.ones(2), torch.ones(2), name)
    with pytest.raises(NotImplementedError):
        kl_penalty(torch.ones(2), torch.ones(2), "full")  # asks for the logits of the whole vocabulary


def test_the_contents_of_checkpoints_are_verls() -> None:
    prefix = "should_load_"
    known = {name.removeprefix(prefix) for name in dir(BaseCheckpointManager) if name.startswith(prefix)}
    assert known == set(CHECKPOINT_CONTENTS)


def test_the_strategies_are_those_of_verls_engines() -> None:
    folder = Path(verl.__file__).parent / "workers" / "engine"
    registered = re.findall(
        r"EngineRegistry\.register\(.*backend=(\[.*?\]|\".*?\")",
        "".join(file.read_text(encoding="utf-8") for file in folder.rglob("*_impl.py")),
    )
    assert {name for names in registered for name in re.findall(r"\w+", names)} == set(STRATEGIES)


def test_the_schedules_and_kl_controllers_are_verls() -> None:
    for schedule in ("constant", "cosine"):
        FSDPOptimizerConfig(lr=1.0, lr_scheduler_type=schedule)
    with pytest.raises(AssertionError):
        FSDPOptimizerConfig(lr=1.0, lr_scheduler_type="linear")
    kl_ctrl = run({}).algorithm.kl_ctrl
    for kind in ("fixed", "adaptive"):
        kl_ctrl.type = kind
        get_kl_controller(kl_ctrl)
    kl_ctrl.type = "linear"
    with pytest.raises(NotImplementedError):
        get_kl_controller(kl_ctrl)
