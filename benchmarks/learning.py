"""Self-play that learns, and what becomes of it without the parts that make it: train, measure, write CSV files.

`python benchmarks/learning.py headline` trains three seeds of ``+recipes=learn`` with verl's ``main_ppo``,
measures the checkpoints against the frozen novice (``medserl_agentloop.toy.measure``) and writes
``docs/learning/headline_rates.csv`` and ``headline_steps.csv``. A run that has ended is not run again, one
that was interrupted is resumed. `benchmarks/learning_pictures.py` draws the files; ``docs/learning.md`` says
what they show.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from learning_results import RESULTS
from rich.console import Console

from medserl_agentloop.evaluation.tournament import Player
from medserl_agentloop.paths import resource
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.toy.measure import Rate, held_out_cases, measure_player

ROOT = Path(__file__).parents[1]
DATA = Path("data/learn")
RUNS = Path("runs/learn")
PROFILE = "brief"
CASES, CASES_SEED = 500, 90_001
TEMPERATURES = (1.0, 0.0)
STEP_METRICS = (
    "selfplay/attacker/valid_rate",
    "selfplay/attacker/success_rate",
    "selfplay/attacker/parse_rate",
    "selfplay/attacker/reward",
    "selfplay/attacker/no_signal_rate",
    "selfplay/attacker/self_similarity",
    "selfplay/judge/no_error_rate",
    "selfplay/assessor/accuracy",
    "selfplay/assessor/accuracy/adversarial_benign",
    "selfplay/assessor/accuracy/decoy_benign",
    "selfplay/assessor/parse_rate",
    "selfplay/assessor/reward",
    "selfplay/assessor/no_signal_rate",
    "training/rollout_probs_diff_max",
    "actor/grad_norm",
    "timing_s/step",
)


@dataclass(frozen=True)
class Experiment:
    """One kind of run.

    Attributes:
        overrides: What is changed in ``recipes/learn.yaml``.
        measured: Steps whose checkpoints are measured; the last one always is.
    """

    overrides: tuple[str, ...] = ()
    measured: tuple[int, ...] = ()


def _one_role(estimator: str, role: str) -> Experiment:
    other = "assessor" if role == "attacker" else "attacker"
    anchor = ("actor_rollout_ref.actor.use_kl_loss=True", f"selfplay.anchor.{other}={ANCHOR}")
    steps = (f"trainer.total_training_steps={ONE_ROLE_STEPS}", f"trainer.save_freq={ONE_ROLE_STEPS}")
    return Experiment((f"algorithm.adv_estimator={estimator}", f"selfplay.train={role}", *anchor, *steps))


ANCHOR = 0.05
ONE_ROLE_STEPS = 40
ESTIMATORS = ("role_reinforce_pp", "role_grpo", "role_rloo", "role_rae", "role_gae")
EXPERIMENTS = {
    "headline": Experiment(measured=(20, 40, 60)),
    "reinforce_plus_plus": Experiment(("algorithm.adv_estimator=reinforce_plus_plus",)),
    "shared": Experiment(("selfplay.context=shared",)),
    "unchecked": Experiment(
        ("selfplay.judge=labels", "selfplay.edits.max_changed_sentences=100", "selfplay.edits.max_changed_words=1000")
    ),
    **{f"{e}_{role}": _one_role(e, role) for e in ESTIMATORS for role in ("attacker", "assessor")},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


def prepare_data(folder: Path = DATA) -> None:
    """The toy clinic's notes for self-play, in seen wordings and with seen facts, as parquet."""
    if (folder / "manifest.json").exists():
        return
    tools, notes = ROOT / "data_prep", folder / "toy_clinic.csv"
    sample = ["--vignettes", "1500", "--split", "seen", "--overlap", "1", "--seed", "7", "--output", notes]
    mix = ["--mix", "adversarial_benign=1,decoy_benign=1"]
    rows = ["--input", notes, "--profile", PROFILE, *mix, "--output", folder]
    for command in ([tools / "make_sample.py", *sample], [tools / "medec_to_parquet.py", *rows]):
        subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)


def training_command(experiment: str, seed: int, extra: Iterable[str] = ()) -> list[str]:
    """The ``main_ppo`` command of one run."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=learn"),
        *EXPERIMENTS[experiment].overrides,
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"+actor_rollout_ref.rollout.seed={seed}",
        f"trainer.experiment_name={experiment}_{seed}",
        f"trainer.default_local_dir={RUNS / experiment / str(seed)}",
        f"hydra.run.dir={RUNS / experiment / str(seed) / 'hydra'}",
        *extra,
    ]


def train(experiment: str, seed: int, extra: Iterable[str]) -> None:
    """One run, its log beside its checkpoints, unless it has ended before."""
    folder = RUNS / experiment / str(seed)
    if (folder / ".complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (folder / "train.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            training_command(experiment, seed, extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if "[medserl] step" in line:
                console.print(f"{experiment} {seed}:{line.partition('[medserl]')[2].rstrip()}", soft_wrap=True)
    if process.wait() != 0:
        raise RuntimeError(f"the run failed; read {folder / 'train.log'}")
    (folder / ".complete").write_text(f"{time.monotonic() - started:.0f} s\n")


def train_and_measure(experiment: str, seed: int, extra: list[str]) -> None:
    """One run, then its checkpoints and what it started from, each measured once."""
    train(experiment, seed, extra)
    _measured_once(RUNS / "novice" / str(seed) / "rates_0.csv", resource("assets/novice"), seed)
    folder = RUNS / experiment / str(seed)
    steps = [int(json.loads(line)["step"]) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in sorted({*EXPERIMENTS[experiment].measured, max(steps)}):
        checkpoint = folder / f"global_step_{step}" / "actor" / "huggingface"
        _measured_once(folder / f"rates_{step}.csv", checkpoint, seed)


def _measured_once(output: Path, model: Path, seed: int) -> None:
    if output.exists():
        return
    torch.set_num_threads(1)
    profile = load_profile(PROFILE)
    frozen, player = Player.load(resource("assets/novice"), profile), Player.load(model, profile)
    cases = held_out_cases(CASES, CASES_SEED)
    rows = []
    for temperature in TEMPERATURES:
        rates = measure_player(player, frozen, cases, profile=profile, temperature=temperature, seed=seed)
        rows += [(temperature, rate.measure, rate.hits, rate.items) for rate in rates]
        console.print(f"{output}: temperature {temperature:g}, {_summary(rates)}", soft_wrap=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    _write_csv(output, ("temperature", "measure", "hits", "items"), rows)


def _summary(rates: list[Rate]) -> str:
    shares = {rate.measure: rate.hits / max(1, rate.items) for rate in rates}
    shown = ("assessor/clean", "assessor/error", "attacker/valid", "attacker/undetected")
    return ", ".join(f"{name} {shares[name]:.3f}" for name in shown)


def collect(experiment: str, seeds: Iterable[int], results: Path) -> None:
    """Gather the files of one experiment's runs in the folder ``results``."""
    rates: list[tuple[object, ...]] = []
    steps: list[tuple[object, ...]] = []
    for seed in seeds:
        folder = RUNS / experiment / str(seed)
        files = [RUNS / "novice" / str(seed) / "rates_0.csv", *folder.glob("rates_*.csv")]
        for file in sorted(files, key=lambda f: int(f.stem.split("_")[1])):
            with file.open(newline="") as lines:
                rates += [(seed, file.stem.split("_")[1], *row) for row in list(csv.reader(lines))[1:]]
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            metrics = json.loads(line)
            values = (metrics.get(name) for name in STEP_METRICS)
            steps.append((seed, metrics["step"], *("" if v is None else f"{v:.6g}" for v in values)))
    results.mkdir(parents=True, exist_ok=True)
    header = ("seed", "step", "temperature", "measure", "hits", "items")
    _write_csv(results / f"{experiment}_rates.csv", header, rates)
    _write_csv(results / f"{experiment}_steps.csv", ("seed", "step", *STEP_METRICS), steps)


def _write_csv(path: Path, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


@app.command()
def main(
    experiments: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(EXPERIMENTS)}.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    jobs: Annotated[int, typer.Option(help="Runs at a time; each keeps one core busy.")] = os.cpu_count() or 1,
    results: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = RESULTS,
    override: Annotated[list[str] | None, typer.Option(help="A further override of the runs; may be repeated.")] = None,
) -> None:
    """Train and measure experiments and write their CSV files."""
    unknown = sorted(set(experiments) - set(EXPERIMENTS))
    if unknown:
        raise typer.BadParameter(f"no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    numbers = [int(seed) for seed in seeds.split(",")]
    prepare_data()

    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(train_and_measure, e, s, override or []) for e in experiments for s in numbers]:
            done.result()
    for experiment in experiments:
        collect(experiment, numbers, results)


if __name__ == "__main__":
    app()
