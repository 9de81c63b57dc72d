"""Real runs of verl's own entry point with rollouts by the real SGLang engine: nothing is faked
here.
"""

import re
import time
from pathlib import Path

import get_smollm2
import psutil
import pytest
import torch
from medec.builders import run as in_this_process
from note_files import SAMPLE
from real_runs import AGREEMENT, CERTIFIED, GAMES_PER_STEP, Run, environment, log_probs
from transformers import AutoModelForCausalLM

from medserl_agentloop.paths import resource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(
    folder: Path,
    data: tuple[str, ...],
    *overrides: str,
    recipe: str = "[own_notes,sglang_cpu]",
    **probe: str,
) -> Run:
    env = {"PROBE_" + name.upper(): value for name, value in probe.items()}
    if env:
        env["VERL_USE_EXTERNAL_MODULES"] = "probe"
    env = environment(Path(__file__).parent, **env)
    return Run(folder, *data, *overrides, recipe=recipe, env=env)


def kill_scheduler(run: Run) -> psutil.Process:
    children = psutil.Process(run.process.pid).children(recursive=True)
    [scheduler] = [child for child in children if child.name().startswith("sglang::sched")]
    scheduler.kill()
    return scheduler


def test_sglang_run_is_on_policy_and_resumes_after_its_scheduler_died(
    tmp_path: Path,
    data: tuple[str, ...],
) -> None:
    tensors = tmp_path / "step1.pt"
    first = start(tmp_path, data, "trainer.total_training_steps=50", tensors=str(tensors))
    first.wait_for_checkpoint(2)
    scheduler = kill_scheduler(first)
    killed = time.monotonic()
    assert first.process.wait(timeout=60) != 0
    print(f"the run ended {time.monotonic() - killed:.0f} s after its scheduler")

    log = first.train_log.read_text()
    # SGLang's own watch says it, or the run's, whichever looks first.
    assert f"(pid={scheduler.pid}) crashed with exit code -9" in log
    [line] = {line for line in first.lines() if "died" in line}
    assert re.match(
        r"rollout server 0 died \(class AdapterServer, named sglang_server_0_0, pid \d+\) in step "
        r"\d+",
        line,
    )

    reached = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    last = reached + 2
    second = start(tmp_path, data, f"trainer.total_training_steps={last}")
    second.wait()
    assert second.steps_of_games() == dict.fromkeys(range(1, last + 1), GAMES_PER_STEP)
    assert [step["step"] for step in second.metrics] == list(range(1, last + 1))
    for step in second.metrics:
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert step["actor/grad_norm"] > 0

    check_log_probs(tensors)


def check_log_probs(tensors: Path) -> None:
    """Engine, actor and Transformers agree on every token of every packed trajectory of a step."""
    model = AutoModelForCausalLM.from_pretrained(
        resource("assets/tiny_player"), dtype=torch.float32
    ).eval()
    rows = torch.load(tensors)
    packed = 0
    columns = (
        "input_ids",
        "position_ids",
        "responses",
        "response_mask",
        "rollout_log_probs",
        "old_log_probs",
    )
    for ids, positions, response, mask, engine, actor in zip(
        *(rows[name] for name in columns), strict=True
    ):
        reference = log_probs(model, ids, positions)[-len(response) :]
        ours = mask.bool()
        packed += int((positions == 0).sum() == 2)
        assert (engine - reference)[ours].abs().max() < AGREEMENT
        assert (actor - reference)[ours].abs().max() < AGREEMENT
    assert packed > 0  # some trajectory holds two contexts


@pytest.mark.parametrize("push", ["off", "no-flush"])
def test_log_prob_difference_shows_a_missing_push_or_a_stale_prefix_cache(
    tmp_path: Path,
    data: tuple[str, ...],
    push: str,
) -> None:
    run = start(tmp_path, data, "trainer.total_training_steps=3", "trainer.save_freq=-1", push=push)
    run.wait()
    first, *later = [step["training/rollout_probs_diff_max"] for step in run.metrics]
    print(
        f"push {push}: largest differences {first:.2e}, then {', '.join(f'{x:.2e}' for x in later)}"
    )
    assert first < AGREEMENT
    assert max(later) > 100 * first


def test_an_adapter_for_each_role_reaches_the_engine_in_every_step(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    largest = {}
    for push in ("", "swapped"):
        folder = tmp_path / (push or "right")
        folder.mkdir()
        run = start(
            folder,
            data,
            "trainer.total_training_steps=4",
            "trainer.save_freq=-1",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            recipe="[own_notes,sglang_cpu,adapter_per_role]",
            **({"push": push} if push else {}),
        )
        run.wait()
        assert any(
            "certificate: isolation of actor" in line and "holds" in line for line in run.lines()
        )
        differences = [step["training/rollout_probs_diff_max"] for step in run.metrics]
        print(f"adapters {push or 'right'}: {', '.join(f'{found:.2e}' for found in differences)}")
        assert len(differences) == 4
        largest[push] = max(differences)
    assert largest[""] < AGREEMENT
    assert largest["swapped"] > 100 * largest[""]


def test_a_pretrained_model_plays_two_steps_in_the_toy_clinic(tmp_path: Path) -> None:
    get_smollm2.main(tmp_path / "smollm2")
    rows = (
        "--input",
        SAMPLE,
        "--profile",
        "brief",
        "--mix",
        "adversarial_benign=1,vanilla_benign=1",
    )
    assert in_this_process("medec_to_parquet", *rows, "--output", tmp_path / "data").exit_code == 0
    files = (f"data.{split}_files={tmp_path}/data/{split}.parquet" for split in ("train", "val"))
    overrides = (
        f"actor_rollout_ref.model.path={tmp_path}/smollm2",
        "trainer.total_training_steps=2",
    )
    run = start(tmp_path, (*files,), *overrides, "trainer.save_freq=-1", recipe="learn_smollm2")
    run.wait()
    assert run.steps_of_games() == dict.fromkeys((1, 2), GAMES_PER_STEP)
    assert any(CERTIFIED in line and "holds" in line for line in run.lines())
    for step in run.metrics:
        print(
            ", ".join(
                f"{name} {value:.3g}"
                for name, value in step.items()
                if name.startswith("timing_s/")
            )
        )
        assert step["training/rollout_probs_diff_mean"] < 0.01  # bf16 in two implementations
