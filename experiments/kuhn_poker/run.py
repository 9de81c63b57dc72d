"""Self-play in Kuhn poker, measured: ``python -m experiments.kuhn_poker.run``.

Trains with three estimators and three seeds, computes the exploitability of every checkpoint, and writes
``figures/exploitability.csv`` and ``.svg``. What is in the file already is not run again.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.kuhn_poker.exploitability import information_sets, nash_conv, policy_of
from experiments.pages import with_table

FIGURES = Path(__file__).parent / "figures"
TABLE = FIGURES / "exploitability.csv"
ESTIMATORS = ("role_rae", "role_reinforce_pp", "reinforce_plus_plus")
SEEDS = (0, 1, 2)
PAGE = Path(__file__).with_name("README.md")
START = Path("models/kuhn_poker")


def train(estimator: str, seed: int, folder: Path) -> None:
    """One run of ``+recipes=kuhn_poker``; the last of verl's three estimators is its own, for comparison."""
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=kuhn_poker"),
        f"algorithm.adv_estimator={estimator}",
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        "selfplay.certify=warn",  # verl's own estimator does not keep the roles apart
        f"trainer.default_local_dir={folder}",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            command, check=True, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "WANDB_MODE": "disabled"}
        )


def measure(folder: Path) -> dict[int, float]:
    """NashConv by step, the model that the run started from being step 0."""
    by_step = {}
    for model in (START, *folder.glob("global_step_*/actor/huggingface")):
        step = 0 if model == START else int(model.parts[-3].removeprefix("global_step_"))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        by_step[step] = nash_conv(policy_of(loaded, AutoTokenizer.from_pretrained(START)))
    return dict(sorted(by_step.items()))


def read() -> dict[tuple[str, int], dict[int, float]]:
    """What was measured before: by estimator and seed, NashConv by step."""
    runs: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    if TABLE.exists():
        with TABLE.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                runs[row["estimator"], int(row["seed"])][int(row["step"])] = float(row["nash_conv"])
    return dict(runs)


def write(runs: dict[tuple[str, int], dict[int, float]]) -> None:
    """Write the table."""
    FIGURES.mkdir(exist_ok=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["estimator", "seed", "step", "nash_conv"])
        for (estimator, seed), by_step in sorted(runs.items()):
            out.writerows([estimator, seed, step, f"{value:.4f}"] for step, value in by_step.items())


def draw(runs: dict[tuple[str, int], dict[int, float]]) -> None:
    """Draw exploitability by step, a panel for each estimator and a line for each seed."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(ESTIMATORS), figsize=(10, 3.2), sharey=True)
    for panel, estimator in zip(panels, ESTIMATORS, strict=True):
        panel.axhline(
            nash_conv(dict.fromkeys(information_sets(), 0.5)), color="grey", linestyle=":", label="uniform play"
        )
        panel.axhline(0, color="grey", linewidth=0.8, label="equilibrium")
        for (name, seed), by_step in sorted(runs.items()):
            if name == estimator:
                panel.plot(list(by_step), list(by_step.values()), marker="o", markersize=3, label=f"seed {seed}")
        panel.set_title(estimator, fontsize=10)
        panel.set_xlabel("step")
    panels[0].set_ylabel("NashConv, chips per game")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURES / "exploitability.svg", metadata={"Date": None})


def table(runs: dict[tuple[str, int], dict[int, float]]) -> str:
    """Best, average and last NashConv of each run, as a table of the page."""
    if not runs:
        return "Nothing has been measured yet."
    lines = ["![NashConv by step](figures/exploitability.svg)\n"]
    lines += ["| estimator | seed | start | best | average | last |", "|---|---|---|---|---|---|"]
    for (estimator, seed), by_step in sorted(runs.items()):
        start, *later = (by_step[step] for step in sorted(by_step))
        numbers = (start, min(later), sum(later) / len(later), later[-1])
        lines.append(f"| `{estimator}` | {seed} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and write table and picture."""
    runs = read()
    for seed in SEEDS:
        for estimator in ESTIMATORS:
            if (estimator, seed) in runs:
                continue
            folder = Path("runs") / "kuhn_poker" / f"{estimator}_{seed}"
            train(estimator, seed, folder)
            runs[estimator, seed] = measure(folder)
            write(runs)
            print(estimator, seed, {step: round(value, 3) for step, value in runs[estimator, seed].items()}, flush=True)
    draw(runs)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "nash_conv", table(runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
