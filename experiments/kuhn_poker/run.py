"""Self-play in Kuhn poker, measured: ``python -m experiments.kuhn_poker.run [ARM SEED | measure]``.

Trains every arm with three seeds, or one arm with one seed, or measures how far the runs have come,
and writes the policies of the checkpoints to ``figures/policies.csv``, from which ``python -m
experiments.pages`` computes the page's numbers. A run that is whole in the file is not run again,
and with open-spiel installed the file gets the solution of CFR, for comparison.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.kuhn_poker.exploitability import (
    Place,
    average_policy,
    information_sets,
    nash_conv,
    policy_of,
    value_of,
)

FIGURES = Path(__file__).parent / "figures"
TABLE = FIGURES / "policies.csv"
ESTIMATORS = ("role_rae", "role_reinforce_pp", "reinforce_plus_plus")
VERLS_LOSS = (
    "selfplay.certify=warn",
    "selfplay.credit.loss=verl",
)  # which does not keep the roles apart
ARMS = {
    "recipe": (),
    **{name: (f"algorithm.adv_estimator={name}", *VERLS_LOSS) for name in ESTIMATORS},
    "no anchor": ("selfplay.anchor={first: 0.0, second: 0.0}", *VERLS_LOSS),
}
"""The overrides of each arm; ``reinforce_plus_plus`` is verl's own estimator."""
SOLVED = "CFR"
_BY_CARD = {"J": 0.0, "Q": 0.5, "K": 1.0}
HAND_RULE = {
    (card, moves): _BY_CARD[card] * ("bet" in moves or card == "K")
    for card, moves in information_sets()
}
HAND_RULE |= {("J", ""): 0.25, ("J", "check"): 0.25}
"""Plays without any learning:

J bets one time in four, Q calls one time in two, K always bets and calls.
"""
SEEDS = (0, 1, 2)
STEPS = 200
PAGE = Path(__file__).with_name("README.md")
START = Path("models/kuhn_poker")

Runs = dict[tuple[str, int], dict[int, dict[Place, float]]]
"""By arm and seed, the policy by step."""


def train(arm: str, seed: int, folder: Path) -> None:
    """One run of ``+recipes=kuhn_poker``; a run that was broken off goes on."""
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=kuhn_poker"),
        *ARMS[arm],
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={folder}",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            command,
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "WANDB_MODE": "disabled"},
        )


def measure(folder: Path) -> dict[int, dict[Place, float]]:
    """The policy by step, the model that the run started from being step 0."""
    by_step = {}
    for model in (START, *folder.glob("global_step_*/actor/huggingface")):
        step = 0 if model == START else int(model.parts[-3].removeprefix("global_step_"))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        by_step[step] = policy_of(loaded, AutoTokenizer.from_pretrained(START))
    return dict(sorted(by_step.items()))


def read() -> Runs:
    """Read earlier measurements."""
    runs: Runs = defaultdict(dict)
    if TABLE.exists():
        with TABLE.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                policy = {
                    (card, moves): float(row[f"{card} {moves}".strip()])
                    for card, moves in information_sets()
                }
                runs[row["arm"], int(row["seed"])][int(row["step"])] = policy
    return dict(runs)


def write(runs: Runs) -> None:
    """Write the table: probabilities of the active move, bet or call, by card and moves so far."""
    FIGURES.mkdir(exist_ok=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(
            ["arm", "seed", "step", *(" ".join(place).strip() for place in information_sets())]
        )
        for (arm, seed), by_step in sorted(runs.items()):
            for step, policy in by_step.items():
                out.writerow(
                    [arm, seed, step, *(f"{policy[place]:.5f}" for place in information_sets())]
                )


def draw(runs: Runs) -> None:
    """Draw NashConv by step, a panel for each arm; each seed has a line, and a dashed one for the
    average so far.
    """
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "kuhn_poker"  # or each drawing has other ids
    figure, panels = plt.subplots(1, len(ARMS), figsize=(12, 3.2), sharey=True)
    for panel, arm in zip(panels, ARMS, strict=True):
        uniform = nash_conv(dict.fromkeys(information_sets(), 0.5))
        panel.axhline(uniform, color="grey", linestyle=":", label="uniform play")
        panel.axhline(0, color="grey", linewidth=0.8, label="equilibrium")
        for (name, seed), by_step in sorted(runs.items()):
            steps = list(by_step)
            if name == SOLVED:
                solved = [nash_conv(policy) for policy in by_step.values()]
                panel.plot(steps, solved, color="black", linewidth=0.8, label="CFR, by iteration")
            if name == arm:
                policies = list(by_step.values())
                last = [nash_conv(policy) for policy in policies]
                (line,) = panel.plot(steps, last, linewidth=1, label=f"seed {seed}")
                so_far = [nash_conv(average_policy(policies[: n + 1])) for n in range(len(steps))]
                panel.plot(steps, so_far, color=line.get_color(), linestyle="--", linewidth=1)
        panel.set_title(arm, fontsize=10)
        panel.set_xlabel("step")
        panel.set_xlim(0, STEPS)
    panels[0].set_ylabel("NashConv, chips per game")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURES / "exploitability.svg", metadata={"Date": None})


def table(runs: Runs) -> str:
    """Each run's NashConv, traits of its average policy, and two errors of its last one, as a table
    of the page.
    """
    if not runs:
        return "Nothing has been measured yet."
    lines = ["![NashConv by step](figures/exploitability.svg)\n"]
    traits = "value | J bets | J calls | K calls | last: K checks behind | last: Q opens with a bet"
    lines += [f"| arm | seed | steps | last | average | {traits} |"]
    lines += ["|---|" + "---:|" * 10]
    ordered = sorted(runs.items(), key=lambda run: (run[0][0] == SOLVED, run[0]))
    for (arm, seed), by_step in [*ordered, (("hand rule", 0), {0: HAND_RULE})]:
        if arm == SOLVED:  # its policies are averages already
            by_step = {max(by_step): by_step[max(by_step)]}
        policies = list(by_step.values())
        average = average_policy(policies)
        numbers = [nash_conv(policies[-1]), nash_conv(average), value_of(average)]
        numbers += [average[place] for place in (("J", ""), ("J", "bet"), ("K", "bet"))]
        numbers += [1 - policies[-1]["K", "check"], policies[-1]["Q", ""]]
        written = " | ".join(f"{number:.3f}" for number in numbers)
        lines.append(f"| `{arm}` | {seed} | {max(by_step)} | {written} |")
    return "\n".join(lines)


def main(
    arm: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(ARMS)}, or measure; without it, all.")
    ] = None,
    seed: Annotated[int, typer.Argument(help="The seed of that arm.")] = 0,
) -> None:
    """Run what is missing, and write file and picture; ``measure`` only reads how far all runs have
    come.
    """
    wanted = [(name, number) for number in SEEDS for name in ARMS]
    if arm in ARMS:
        wanted = [(arm, seed)]
    elif arm not in (None, "measure"):
        raise typer.BadParameter(f"no arm {arm}; there are {', '.join(ARMS)}, and measure")
    for name, number in wanted:
        folder = Path("runs") / "kuhn_poker" / f"{name.replace(' ', '_')}_{number}"
        if STEPS in read().get((name, number), {}):
            continue
        if arm != "measure" and not (folder / f"global_step_{STEPS}").exists():
            train(name, number, folder)
        if folder.exists():
            write(read() | {(name, number): measure(folder)})
    if (SOLVED, 0) not in read() and find_spec("pyspiel"):
        from experiments.kuhn_poker.solution import cfr

        write(read() | {(SOLVED, 0): cfr(range(0, STEPS + 1, 5))})
    draw(read())


if __name__ == "__main__":
    typer.run(main)
