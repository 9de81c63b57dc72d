"""Self-play that learns, and what becomes of it without the parts that make it: train, measure,
write CSV files.

`python -m experiments.learning.run headline` trains three seeds of ``+recipes=quickstart`` for 40
steps with verl's ``main_ppo``, measures the checkpoints against the frozen novice
(``experiments.learning.measure``) and writes ``headline_rates.csv`` and ``headline_steps.csv`` to
``experiments/learning/figures``. A run that has ended is not run again, one that was interrupted is
resumed. ``experiments.learning.pictures`` draws the files; the README says what they show. Run it
from the root of the repository, where Ray's workers find the judge.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from experiments.learning.measure import Case, Measurement, Rate, held_out_cases
from experiments.learning.results import FIGURES, ROOT
from medserl_agentloop.data.sample import Draw, write_sample
from medserl_agentloop.evaluation.local_models import LocalModel, load_player
from medserl_agentloop.games.clinic import Note, Split, error_detail, with_error
from medserl_agentloop.games.medical.case import ErrorType
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import resource

# A judge that trusts labels takes no reworded notes, so there the safe notes are untouched ones.
MIXES = {
    "data/learn": "adversarial_benign=3,decoy_benign=2",
    "data/learn_no_rewordings": "adversarial_benign=3,vanilla_benign=2",
    "data/learn_untouched": "adversarial_benign=1,vanilla_benign=1",
    "data/learn_doses": "vanilla_harmful=1,vanilla_benign=1",
}
RUNS = Path("runs/learn")
PROFILE = "brief"
NOVICE = resource("assets/novice")
SMOLLM2 = Path("runs/learn_smollm2_sft/global_step_100/huggingface")
CASES_SEED = 90_001
STEP_METRICS = (
    "selfplay/attacker/turns",
    "selfplay/attacker/valid_rate",
    "selfplay/attacker/success_rate",
    "selfplay/attacker/parse_rate",
    "selfplay/attacker/reward",
    "selfplay/attacker/no_signal_rate",
    "selfplay/attacker/self_similarity",
    "selfplay/attacker/effective_kinds",
    "selfplay/judge/no_error_rate",
    "selfplay/assessor/turns",
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
GAME_SUM = "largest sum of both roles' game reward"


@dataclass(frozen=True)
class Experiment:
    """One kind of run.

    Attributes:
        overrides: What is changed in the recipe.
        data: Folder of the notes.
        measured: Steps whose checkpoints are measured; the last one always is.
        temperatures: What they are measured at; 0 is greedy.
        with_games: Whether they also play themselves.
        recipe: What is run.
        start: The player that training starts from, which is also the frozen opponent.
        profile: Prompts and parser of all of them.
        dtype: What players are measured in.
    """

    overrides: tuple[str, ...] = ()
    data: str = "data/learn"
    measured: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (1.0,)
    with_games: bool = True
    recipe: str = "quickstart"
    start: Path = NOVICE
    profile: str = PROFILE
    dtype: torch.dtype = torch.float32


def _assessor_credit(normalization: str) -> Experiment:
    of_assessor = f"selfplay.credit.normalize.assessor={normalization}"
    return Experiment((*FORTY_STEPS, of_assessor), measured=(20,), with_games=False)


def _long(*overrides: str) -> Experiment:
    return Experiment((*HUNDRED_STEPS, *overrides), measured=(40,))


def _untuned(*overrides: str) -> Experiment:
    """Today's game without what was tuned in the recipe's credit: no normalisation by kind, equal
    weights.
    """
    equal = (
        "selfplay.credit.normalize.attacker=batch",
        "selfplay.credit.role_weights.assessor=1.0",
    )
    return Experiment((*TWENTY_STEPS, *equal, *overrides), with_games=False)


SUMMED = ("algorithm.adv_estimator=reinforce_plus_plus", "selfplay.certify=warn")
NO_BONUS = ("selfplay.reward_terms.sentence=0", "selfplay.reward_terms.error_type=0")
TWENTY_STEPS = ("trainer.total_training_steps=20", "trainer.save_freq=20")
FORTY_STEPS = ("trainer.total_training_steps=40", "trainer.save_freq=20")
HUNDRED_STEPS = ("trainer.total_training_steps=100", "trainer.save_freq=20")
ONE_AT_A_TIME = (  # as many assessments in a step as self-play has, each of another note
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.n=1",
)
# With four assessments of an attack, 160 turns in a step; the recipe's 16 notes with one have 128.
EIGHT_NOTES = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
# SmolLM2 was measured with verl's loss, a mean over the tokens of both roles, which the certificate
# refuses, and with an assessor whitened by a kind that it cannot see.
AS_MEASURED = (
    "selfplay.credit.loss=verl",
    "selfplay.certify=warn",
    "selfplay.credit.normalize.assessor=kind",
)
# An adapter of rank 16 has a sixth of the novice's parameters, and wants a larger step.
LORA = (
    *(
        f"actor_rollout_ref.model.{of}"
        for of in ("lora_rank=16", "lora_alpha=32", "target_modules=all-linear")
    ),
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
)
EXPERIMENTS = {
    "quickstart": Experiment(measured=(8,)),
    "headline": Experiment(FORTY_STEPS, measured=(20,), temperatures=(1.0, 0.0)),
    "assessor_kind": _assessor_credit("kind"),
    "assessor_mean": _assessor_credit("mean"),
    "doses": Experiment(
        ("selfplay.train=assessor", *ONE_AT_A_TIME, *FORTY_STEPS),
        data="data/learn_doses",
        measured=(20,),
        with_games=False,
    ),
    "long": _long(),
    "long_assessments": _long("selfplay.assessments=4", *EIGHT_NOTES),
    "long_coverage": _long("selfplay.reward=experiments.learning.coverage:Coverage"),
    "long_entropy": _long("actor_rollout_ref.actor.entropy_coeff=0.01"),
    "long_learnable": _long(
        "selfplay.reward=experiments.rewards:Learnable", "selfplay.assessments=4", *EIGHT_NOTES
    ),
    "shared": Experiment((*TWENTY_STEPS, "selfplay.context=shared")),
    "credit_by_role": _untuned(),
    "credit_summed": _untuned(*SUMMED),
    "credit_by_role_no_bonus": _untuned(*NO_BONUS),
    "credit_summed_no_bonus": _untuned(*SUMMED, *NO_BONUS),
    "adapter_shared": Experiment(
        (*FORTY_STEPS, *LORA, "actor_rollout_ref.model.lora.merge=True"), measured=(20,)
    ),
    "adapter_per_role": Experiment(
        (*FORTY_STEPS, *LORA, "selfplay.adapters=per_role"), measured=(20,)
    ),
    "rules_alone": Experiment(
        (*FORTY_STEPS, "selfplay.judge=labels"), data="data/learn_no_rewordings", measured=(20,)
    ),
    "smollm2": Experiment(
        AS_MEASURED,
        data="data/learn_untouched",
        measured=(10,),
        temperatures=(1.0, 0.0),
        with_games=False,
        recipe="learn_smollm2",
        start=SMOLLM2,
        dtype=torch.bfloat16,
    ),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


def prepare_data(
    folder: Path, mix: str, cases: int = 1500, seed: int = 7, draw: Draw | None = None
) -> None:
    """The toy clinic's notes, in seen wordings and with seen facts, as parquet; ``draw`` as in
    ``write_sample``.
    """
    if (folder / "manifest.json").exists():
        return
    notes = folder / "toy_clinic.csv"
    write_sample(notes, cases, seed, Split.SEEN, overlap=1, draw=draw)
    rows = ["--input", notes, "--mix", mix, "--output", folder]
    command = [sys.executable, ROOT / "data_prep" / "medec_to_parquet.py", *rows]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def wrong_dose(rng: random.Random, clean: Note) -> tuple[Note, int] | None:
    """A note with a wrong dose, and the sentence; None for a note without a drug."""
    drugs = [
        i
        for i, sentence in enumerate(clean.sentences)
        if sentence.kind is ErrorType.PHARMACOTHERAPY
    ]
    while drugs:
        shown = with_error(rng, clean, drugs[0])
        if error_detail(shown, drugs[0]) == "dose":
            return shown, drugs[0]
    return None


def training_command(experiment: str, seed: int, extra: Iterable[str] = ()) -> list[str]:
    """The ``main_ppo`` command of one run."""
    kind = EXPERIMENTS[experiment]
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", f"+recipes={kind.recipe}"),
        *kind.overrides,
        f"selfplay.profile={kind.profile}",
        f"actor_rollout_ref.model.path={kind.start}",
        f"data.train_files={kind.data}/train.parquet",
        f"data.val_files={kind.data}/val.parquet",
        *("trainer.test_freq=-1", "trainer.val_before_train=false"),  # measured afterwards
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.experiment_name={experiment}_{seed}",
        f"trainer.default_local_dir={RUNS / experiment / str(seed)}",
        f"hydra.run.dir={RUNS / experiment / str(seed) / 'hydra'}",
        *extra,
    ]


def train(name: str, folder: Path, command: list[str]) -> None:
    """One run, its log beside its checkpoints in ``folder``, unless it has ended before."""
    if (folder / ".complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[medserl] step"):
                console.print(f"{name}:{line.partition('[medserl]')[2].rstrip()}", soft_wrap=True)
    if process.returncode:
        raise RuntimeError(f"the run failed; read {folder / 'train.log'}")
    (folder / ".complete").write_text(f"{time.monotonic() - started:.0f} s\n")


def train_and_measure(experiment: str, seed: int, extra: list[str], count: int) -> None:
    """One run, then its checkpoints and what it started from, each measured once."""
    train(
        f"{experiment} {seed}",
        RUNS / experiment / str(seed),
        training_command(experiment, seed, extra),
    )
    torch.set_num_threads(1)
    cases, kind = held_out_cases(count, CASES_SEED), EXPERIMENTS[experiment]
    start = replace(
        kind, temperatures=(1.0, 0.0), with_games=kind.with_games or kind.start == NOVICE
    )
    _measured_once(_start_rates(kind, seed), kind.start, seed, start, cases)
    folder = RUNS / experiment / str(seed)
    last = max(
        int(json.loads(line)["step"])
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    )
    for step in sorted({last, *(step for step in kind.measured if step < last)}):
        _measured_once(
            folder / f"rates_{step}.csv", folder / f"global_step_{step}", seed, kind, cases
        )


def _start_rates(kind: Experiment, seed: int) -> Path:
    name = kind.recipe if kind.start == SMOLLM2 else kind.start.name
    return RUNS / name / str(seed) / "rates_0.csv"


def _measured_once(
    output: Path, model: Path, seed: int, kind: Experiment, cases: list[Case]
) -> None:
    if output.exists():
        return
    profile, rows = load_profile(kind.profile), []
    frozen, player = _player(kind.start, kind), _player(model, kind)
    for temperature in kind.temperatures:
        measurement = Measurement(frozen, cases, profile, temperature, seed)
        rates = measurement.each_role(player) + (
            measurement.games(player) if kind.with_games else []
        )
        rows += [(temperature, rate.measure, rate.hits, rate.items) for rate in rates]
        console.print(f"{output}: temperature {temperature:g}, {_summary(rates)}", soft_wrap=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    _write_csv(output, ("temperature", "measure", "hits", "items"), rows)


def _player(folder: Path, kind: Experiment) -> LocalModel:
    player = load_player(folder)
    player.model.to(kind.dtype)
    return player


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
        files = [_start_rates(EXPERIMENTS[experiment], seed), *folder.glob("rates_*.csv")]
        for file in sorted(files, key=lambda f: int(f.stem.split("_")[1])):
            with file.open(newline="") as lines:
                rates += [
                    (seed, file.stem.split("_")[1], *row) for row in list(csv.reader(lines))[1:]
                ]
        game_sums = largest_game_sums(folder / "games.jsonl")
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            metrics = json.loads(line)
            values = [*(metrics.get(name) for name in STEP_METRICS), game_sums.get(metrics["step"])]
            steps.append(
                (seed, metrics["step"], *("" if v is None else f"{v:.6g}" for v in values))
            )
    results.mkdir(parents=True, exist_ok=True)
    header = ("seed", "step", "temperature", "measure", "hits", "items")
    _write_csv(results / f"{experiment}_rates.csv", header, rates)
    _write_csv(
        results / f"{experiment}_steps.csv", ("seed", "step", *STEP_METRICS, GAME_SUM), steps
    )


def largest_game_sums(games: Path) -> dict[int, float]:
    """By step, the largest magnitude of what both roles together win in a game that has a verdict.

    This is what an estimator that sums the rewards of a trajectory gives the attacker for it.
    """
    largest: dict[int, float] = {}
    with games.open(encoding="utf-8") as lines:
        for line in lines:
            record = MedicalRecord.model_validate_json(line)
            won = [components.get("game") for components in record.rewards.values()]
            if (
                record.attack
                and record.assessment
                and record.assessment.verdict
                and None not in won
            ):
                total = abs(sum(value or 0.0 for value in won))
                largest[record.step] = max(total, largest.get(record.step, 0.0))
    return largest


def _write_csv(path: Path, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


@app.command()
def main(
    experiments: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(EXPERIMENTS)}.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    jobs: Annotated[
        int, typer.Option(help="Runs at a time; each keeps one core busy.")
    ] = os.cpu_count() or 1,
    cases: Annotated[int, typer.Option(help="Held-out cases that players are measured on.")] = 500,
    results: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = FIGURES,
    override: Annotated[
        list[str] | None, typer.Option(help="A further override of the runs; may be repeated.")
    ] = None,
) -> None:
    """Train and measure experiments and write their CSV files."""
    unknown = sorted(set(experiments) - set(EXPERIMENTS))
    if unknown:
        raise typer.BadParameter(
            f"no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}"
        )
    numbers = [int(seed) for seed in seeds.split(",")]
    for folder in {EXPERIMENTS[experiment].data for experiment in experiments}:
        prepare_data(
            Path(folder), MIXES[folder], draw=wrong_dose if folder == "data/learn_doses" else None
        )
    runs = [(experiment, seed) for experiment in experiments for seed in numbers]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(train_and_measure, *run, override or [], cases) for run in runs]:
            done.result()
    for experiment in experiments:
        collect(experiment, numbers, results)


if __name__ == "__main__":
    app()
