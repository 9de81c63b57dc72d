"""A wrong ``selfplay`` node stops before anything starts, and says what to write instead.

The rest of the run is checked in tests/run_check.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from judges.games import printed_at_start_up
from real_runs import environment
from support import run_with
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run, problems
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.testing.tiny import compose_run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selfplay__contxt": "shared"}, "selfplay.contxt is not a key of this node (did you mean 'context'?)"),
        ({"selfplay__budget__asessor": 5}, "selfplay.budget.asessor is not a key of this node (did you mean 'asses"),
        ({"selfplay__context": "isolatd"}, "selfplay.context='isolatd': Input should be 'isolated' or 'shared'"),
        ({"selfplay__alarms__limits": {"void_game": 0.9}}, "selfplay.alarms.limits.void_game is not a key of this"),
        ({"selfplay__reward": "zerosum"}, "selfplay.reward: no reward scheme 'zerosum' (did you mean 'zero_sum'?)"),
        ({"selfplay__profile": "nonesuch"}, "no prompt profile 'nonesuch': expected one of baseline, brief, classic"),
        ({"selfplay__credit__role_weights__judge": 1.0}, "selfplay.credit.role_weights.judge is not a key"),
        (
            {f"selfplay__credit__role_weights__{role.value}": 0.0 for role in Role},
            "selfplay.credit.role_weights: every role that is trained has weight 0",
        ),
        *(
            ({f"selfplay__{key}": math.inf}, f"{key.replace('__', '.')}=inf: Input should be a finite number")
            for key in ("judge_server__timeout_s", "budget__note_growth", "opponent__sampling__temperature")
        ),
        ({"selfplay__alarms__limits": {"void_games": math.nan}}, "limits.void_games=nan: Input should be a finite"),
        ({"selfplay__assessments": 2, "selfplay__context": "shared"}, "Set selfplay.context=isolated"),
        ({"selfplay__reward": "learnable"}, "Set selfplay.assessments to 2 or more"),
        ({"selfplay__assessments": 0}, "selfplay.assessments"),
    ],
)
def test_a_wrong_key_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_with(**changes))


@pytest.mark.parametrize("recipe", ["warm_start", "warm_start_base", "warm_start_smollm2", "warm_start_qwen3_4b"])
def test_a_warm_start_of_no_steps_is_refused_before_ray(recipe: str) -> None:
    def refused(*overrides: str) -> list[str]:
        sft = "sft_trainer_engine"
        return problems(compose_run(f"+recipes={recipe}", *overrides, config_name=sft), compose_run(config_name=sft))[0]

    assert refused() == []
    for override in ("trainer.total_training_steps=three", "trainer.total_epochs=0"):
        assert [line.partition(" ")[0] for line in refused(override)] == [override]


def test_start_up_names_a_role_that_is_whitened_by_a_kind_it_cannot_see(capsys: pytest.CaptureFixture[str]) -> None:
    def said(**normalize: str) -> bool:
        keys = (f"selfplay.credit.normalize.{role}={how}" for role, how in normalize.items())
        return any("assessor reads the same prompt" in line for line in printed_at_start_up(capsys, *keys))

    assert said(assessor="kind", attacker="batch")
    assert not said(assessor="mean", attacker="kind")


@pytest.mark.parametrize(("estimator", "enabled"), [("role_gae", True), ("role_grpo", False)])
def test_the_recipes_bring_a_critic_where_the_estimator_reads_its_values(estimator: str, enabled: bool) -> None:
    composed = compose_run("+recipes=own_notes", f"algorithm.adv_estimator={estimator}")
    assert composed.critic.enable is enabled
    assert composed.critic.model.path == composed.actor_rollout_ref.model.path


def test_an_anchor_is_accepted_with_either_way_to_a_reference_policy() -> None:
    for key in ("actor_rollout_ref__actor__use_kl_loss", "algorithm__use_kl_in_reward"):
        anchored = check_run(run_with(selfplay__anchor__assessor=0.1, selfplay__anchor_end=0.5, **{key: True}))
        assert [anchored.anchors(done) for done in (0.0, 1.0)] == [{"assessor": 0.1}, {"assessor": 0.05}]


def test_a_run_without_the_node_is_told_to_start_from_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"\+recipes=quickstart"):
        check_run(compose_run())


@pytest.mark.slow
def test_the_hydra_callback_stops_the_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would turn an ordinary exception into a warning and go on. ``medserl certify`` starts verl's main_ppo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    done = CliRunner().invoke(app, ["certify", "quickstart", "+selfplay.contxt=shared"])
    assert done.exit_code == 1
    assert "selfplay.contxt is not a key of this node (did you mean 'context'?)" in done.stderr
    assert "Started a local Ray instance" not in done.output
