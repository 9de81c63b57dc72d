"""Real runs certify themselves before they train, watch for leaks in bf16 and mix their
mini-batches.

A certificate with a critic and of two ranks is in test_main_ppo_nodes.py.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import Run, environment

from medserl_agentloop.core.certificate import CERTIFICATE_FILE
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

MODULES = Path(__file__).parent / "training"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BF16 = (f"{ROLLOUT}.dtype=bfloat16", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16")
ONE_STEP = ("trainer.total_training_steps=1", "trainer.save_freq=-1")
ONE_STEP = (
    *ONE_STEP,
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ROLLOUT}.n=4",
)


def with_module(name: str, **changes: str) -> dict[str, str]:
    """Environment of a run that loads a module of the tests in all its processes."""
    return environment(MODULES, VERL_USE_EXTERNAL_MODULES=name, **changes)


def test_bf16_raises_no_alarm_and_mini_batches_share_two_turn_games_evenly(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    """Also the attacker alone, paid by zero_sum, with role_rloo, while the assessor is held to the
    reference policy.
    """
    counts = tmp_path / "mini_batches"
    one_role = (
        "algorithm.adv_estimator=role_rloo",
        "selfplay.train=attacker",
        "selfplay.reward=zero_sum",
    )
    anchor = (
        "selfplay.anchor.assessor=0.1",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.0",
    )
    watched = with_module("mini_batches", MINI_BATCHES=str(counts))
    run = Run(
        tmp_path,
        *data,
        *BF16,
        *ONE_STEP,
        *one_role,
        *anchor,
        "selfplay.alarms.patience=1",
        env=watched,
    )
    run.wait()
    (step,) = run.metrics
    assert not {"selfplay/alarm/context_leak", "selfplay/alarm/rollout_mismatch"} & set(step)
    assert step["training/rollout_probs_diff_max"] > 1e-3  # it is bf16
    assert step["selfplay/context_leak_games"] >= 8
    assert max(step[f"selfplay/certificate/isolation/{of}"] for of in ("actor", "reference")) < 0.1

    assert {game.scheme for game in read_games(tmp_path / "run" / GAMES_FILE)} == {"zero_sum"}
    assert step["actor/grad_norm"] > 0
    assert step["selfplay/attacker/trained_tokens"] > 0 == step["selfplay/assessor/trained_tokens"]
    assert (
        step["actor/anchor_kl_loss"] > 0
    )  # from the second mini-batch on the policy differs from the reference

    batches = [tuple(map(int, line.split())) for line in counts.read_text().splitlines()]
    assert [rows for _, rows in batches] == [16] * 4
    share = sum(two for two, _ in batches) / 64
    # Three standard deviations of a draw of 16 out of the 64 rows.
    allowed = 3 * math.sqrt(16 * share * (1 - share) * 48 / 63)
    assert all(abs(two - 16 * share) <= allowed for two, _ in batches), batches


def test_certify_names_each_coupling_of_the_roles_without_training(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+recipes=own_notes",
        *data,
        *ONE_STEP,
    ]
    command += ["selfplay.certify=only", "algorithm.adv_estimator=grpo"]
    command += ["selfplay.credit.loss=verl"]
    command += [f"trainer.default_local_dir={tmp_path}/run", f"hydra.run.dir={tmp_path}/hydra"]
    done = subprocess.run(
        command, cwd=tmp_path, env=with_module("broken_roles"), capture_output=True, text=True
    )
    assert done.returncode != 0
    for sentence in (
        "certificate: the actor reads across the border of the private contexts",
        "position ids do not restart",
        "rewards, log-probs or tokens change what the other role is trained with",
        "algorithm.adv_estimator=grpo",
        "advantages, log-probs or tokens change the gradient of the other role's tokens",
    ):
        assert sentence in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} == {CERTIFICATE_FILE, "train.log"}
