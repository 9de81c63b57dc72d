"""Seconds of a step of SmolLM2 in the toy clinic: as its recipe is, and without one of its savings at a time.

    python -m benchmarks.smollm2_step [--rows 8] [--steps 3]

Real runs of verl's, after the warm start of experiments/learning ("With a pretrained model"). Printed are medians of
all steps but the first, which warms up, and the ratio to the recipe's.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import typer

from experiments.learning.run import EXPERIMENTS, MIXES, prepare_data, train, training_command

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUNS = {
    "the recipe": [],
    "SGLang's scheduler never sleeps": [f"{ROLLOUT}.engine_kwargs.sglang.sleep_on_idle=false"],
    "log-probs in a pass of their own": ["selfplay.reuse_log_probs=false"],
    "glibc gives memory back": [f"~hydra.job.env_set.MALLOC_{of}_THRESHOLD_" for of in ("MMAP", "TRIM")],
    "update in fp32": [f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32"],
}
PHASES = ("gen", "old_log_prob", "update_actor", "update_weights", "step")


def main(rows: int = 8, steps: int = 3) -> None:
    data = EXPERIMENTS["smollm2"].data
    prepare_data(Path(data), MIXES[data])
    recipe = 0.0
    for name, changed in RUNS.items():
        with TemporaryDirectory() as folder:
            short = [f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "selfplay.certify=warn"]
            short += [f"data.train_batch_size={rows}", f"{ACTOR}.ppo_mini_batch_size={rows}"]
            short += [f"trainer.default_local_dir={folder}"]
            train(name, Path(folder), training_command("smollm2", 0, [*changed, *short]))
            metrics = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        took = {phase: median(step.get(f"timing_s/{phase}", 0.0) for step in metrics[1:]) for phase in PHASES}
        recipe = recipe or took["step"]
        print(
            f"{name}: {took['step'] / recipe:.2f} x;",
            ", ".join(f"{of} {s:.1f} s" for of, s in took.items()),
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
