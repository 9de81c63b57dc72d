"""The opponent's worth: ``python -m experiments.opponent.run`` trains the arms, measures them,
writes CSV files.

Teaches the novice to put in errors of the kinds that it does not see as rarely as asked, and trains
from there with verl's ``main_ppo``: by self-play, against that same player frozen, and on labelled
notes alone. What is in the CSV files is not made again, and a run that was interrupted is resumed.
Run it from the root of the repository.
"""

from __future__ import annotations

import asyncio
import csv
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import torch
import typer
from rich.console import Console

from experiments.learning.measure import BUDGETS, Case, Measurement, Rate, held_out_cases, spec_of
from experiments.learning.run import EIGHT_NOTES, ONE_AT_A_TIME, PROFILE, prepare_data, train
from experiments.learning.transcripts import CURRICULA, error_of, sample_transcript
from experiments.learning.warm_start import WarmStart
from experiments.opponent.results import DRAWN, FIGURES, PANEL, START
from experiments.shortcuts.run import teach
from medserl_agentloop.evaluation.local_models import LocalModel, load_player
from medserl_agentloop.evaluation.play import play_match
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.types import Category, Label

RUNS = Path("runs/opponent")
CASES_SEED = 90_003
CHOICE_SEED = 90_004  # of the cases that settings were chosen on
CASES, PANEL_CASES = 300, 200
LESSON = CURRICULA["novice"][1]
# A fifth of the warm start that made the novice, from its weights.
LESSONS = WarmStart(
    steps=400,
    batch=32,
    lr=3e-3,
    note_weight=0.1,
    lessons=(LESSON, LESSON),
    first_lesson=1.0,
    seed=0,
)
TAUGHT = {0.1: (0.09, 400), 0.05: (0.03, 400), 0.03: (0.0, 400), 0.01: (0.0, 800)}
"""Share of unseen kinds in the lesson, and its steps, by the share that the player then shows.

It remembers the novice's own lessons. What it shows was counted in its valid attacks on the notes
of the runs.
"""
NOTES = Path("data/opponent")
STEP_METRICS = (
    "selfplay/attacker/valid_rate",
    "selfplay/attacker/success_rate",
    "selfplay/attacker/effective_kinds",
    "selfplay/assessor/turns",
    "selfplay/assessor/accuracy",
    "actor/grad_norm",
    "timing_s/step",
)
HEADER = ("unseen", "start", "arm", "seed", "step")


@dataclass(frozen=True)
class Arm:
    """One way to train the assessor.

    Attributes:
        overrides: What is changed in ``recipes/quickstart.yaml``.
        frozen_attacker: Whether the starting player attacks in place of the policy.
        labelled: Whether notes are shown as they are, wrong ones with the errors of the starting
            player's kinds.
    """

    overrides: tuple[str, ...] = ()
    frozen_attacker: bool = False
    labelled: bool = False


ARMS = {
    "self_play": Arm(),
    "static": Arm(("selfplay.train=assessor",), frozen_attacker=True),
    "labels": Arm(("selfplay.train=assessor", *ONE_AT_A_TIME), labelled=True),
    "learnable": Arm(("selfplay.reward=learnable", "selfplay.assessments=4", *EIGHT_NOTES)),
}
console = Console()


def start_of(unseen: float, start: str) -> Path:
    """The player that all arms start from, which shows this share of unseen kinds among its
    errors."""
    return RUNS / f"start_{unseen:g}_{start}"


def prepare(unseen: float, start: str) -> None:
    """The starting player and the notes of all arms, unless they are there."""
    share, steps = TAUGHT[unseen]
    taught = replace(LESSON, unseen_share=share)
    lessons = replace(LESSONS, lessons=(taught, taught), steps=steps, seed=int(start.rstrip("b")))
    teach(start_of(unseen, start), lessons, sample_transcript)
    prepare_data(NOTES, "adversarial_benign=3,decoy_benign=2")
    draw = partial(error_of, lesson=replace(LESSON, unseen_share=unseen))
    prepare_data(
        _labelled(unseen), "vanilla_harmful=3,vanilla_benign=2", cases=4000, seed=8, draw=draw
    )


def _labelled(unseen: float) -> Path:
    return Path(f"{NOTES}_labelled_{unseen:g}")


@contextmanager
def frozen_attacker(folder: Path) -> Iterator[str]:
    """The address of a server of the player in ``folder``, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "experiments.opponent.frozen_player", str(folder), str(port)]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/openapi.json", server)
            yield url
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urlopen(url).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise RuntimeError("the frozen attacker's server ended; its message is above")


def training_command(
    arm: str,
    unseen: float,
    start: str,
    seed: int,
    steps: int,
    url: str | None,
    extra: Sequence[str],
) -> list[str]:
    """The ``main_ppo`` command of one run."""
    folder, notes = (
        _folder(unseen, start, arm, seed),
        _labelled(unseen) if ARMS[arm].labelled else NOTES,
    )
    opponent = ("selfplay.opponent.kind=endpoint", f"selfplay.opponent.url={url}") if url else ()
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=quickstart"),
        *(f"trainer.total_training_steps={steps}", "trainer.save_freq=20"),
        "selfplay.credit.normalize.assessor=kind",  # as the recipe was when this was measured
        *ARMS[arm].overrides,
        *opponent,
        f"actor_rollout_ref.model.path={start_of(unseen, start)}",
        *(f"data.{name}_files={notes}/{name}.parquet" for name in ("train", "val")),
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.experiment_name=opponent_{unseen:g}_{start}_{arm}_{seed}",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder / 'hydra'}",
        *extra,
    ]


def _folder(unseen: float, start: str, arm: str, seed: int) -> Path:
    return RUNS / f"{unseen:g}_{start}" / arm / str(seed)


def train_arm(
    arm: str, unseen: float, start: str, seed: int, steps: int, extra: Sequence[str] = ()
) -> None:
    """One run to ``steps``, unless it has come that far; the server of its opponent lives as long
    as it does.
    """
    folder = _folder(unseen, start, arm, seed)
    if (folder / f"global_step_{steps}").exists():
        return
    (folder / ".complete").unlink(missing_ok=True)
    name = f"{unseen:g} {start} {arm} {seed}"
    if not ARMS[arm].frozen_attacker:
        train(name, folder, training_command(arm, unseen, start, seed, steps, None, extra))
        return
    with frozen_attacker(start_of(unseen, start)) as url:
        train(name, folder, training_command(arm, unseen, start, seed, steps, url, extra))


def measure_seed(
    unseen: float,
    start: str,
    arms: Sequence[str],
    seed: int,
    measured: Sequence[int],
    cases_seed: int,
) -> list[tuple[object, ...]]:
    """The rows of ``rates.csv`` for arms of one seed: on held-out cases, then against the panel at
    the last step.

    ``panel/ATTACKER/STEP`` counts the valid attacks of a member of the panel that an assessor
    finds. All assessors of a seed meet the same attacks. Without self-play's player of the last
    step there is no panel.
    """
    torch.set_num_threads(1)
    cases, last = held_out_cases(CASES, cases_seed), max(measured)
    first = load_player(start_of(unseen, start))
    measurement = Measurement(first, cases, load_profile(PROFILE), 1.0, seed)
    players = {(START, 0): first}
    for arm in arms:
        for step in measured:
            players[arm, step] = load_player(
                _folder(unseen, start, arm, seed) / f"global_step_{step}"
            )
    rates = {key: measurement.each_role(player) for key, player in players.items()}
    trained_there = all(
        (_folder(unseen, start, m, seed) / f"global_step_{last}").exists()
        for m in PANEL
        if m != START
    )
    for member in PANEL if trained_there else ():
        trained = 0 if member == START else last
        at_step = _folder(unseen, start, member, seed) / f"global_step_{trained}"
        folder = at_step if trained else start_of(unseen, start)
        attacker, attacks = load_player(folder), dict[int, Any]()
        for (name, step), assessor in players.items():
            if step in (0, last):
                found = found_of(attacker, assessor, cases[:PANEL_CASES], seed, attacks)
                rates[name, step].append(replace(found, measure=f"panel/{member}/{trained}"))
    return [
        (f"{unseen:g}", start, arm, seed, step, rate.measure, rate.hits, rate.items)
        for (arm, step), each in rates.items()
        for rate in each
    ]


def found_of(
    attacker: LocalModel,
    assessor: LocalModel,
    cases: Sequence[Case],
    seed: int,
    attacks: dict[int, Any],
) -> Rate:
    """The valid attacks of one player that another one finds; ``attacks`` keeps them for the next
    assessor.
    """
    specs = [spec_of(case, Category.ADVERSARIAL_BENIGN, i) for i, case in enumerate(cases)]
    config = MedicalConfig(profile=PROFILE, judge="medserl_agentloop.games.clinic:OracleJudge")
    match = play_match(
        attacker,
        assessor,
        specs,
        config,
        temperature=1.0,
        budgets=BUDGETS,
        seed=seed,
        attacks=attacks,
    )
    games = asyncio.run(match)
    valid = [
        g
        for g in games
        if g.judgement and g.judgement.realistic and g.judgement.label is Label.HARMFUL
    ]
    found = Counter(game.outcome is Outcome.CORRECT_DETECTION for game in valid)
    return Rate("panel", found[True], len(valid))


def _steps(unseen: float, start: str, arm: str, seed: int) -> Iterator[tuple[object, ...]]:
    for line in (_folder(unseen, start, arm, seed) / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        values = (metrics.get(name) for name in STEP_METRICS)
        yield (
            f"{unseen:g}",
            start,
            arm,
            seed,
            metrics["step"],
            *("" if v is None else f"{v:.6g}" for v in values),
        )


def one_seed(
    unseen: float,
    start: str,
    arms: Sequence[str],
    seed: int,
    measured: Sequence[int],
    extra: Sequence[str],
    cases_seed: int,
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Train arms from one seed and measure them; the panel needs self-play's last player."""
    for arm in arms:
        train_arm(arm, unseen, start, seed, max(measured), extra)
    steps = [row for arm in arms for row in _steps(unseen, start, arm, seed)]
    return measure_seed(unseen, start, arms, seed, measured, cases_seed), steps


def add(path: Path, header: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    """Add rows to a CSV file and sort it; a row with the same key takes the place of the one that
    is there.
    """
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    keys = len(HEADER) + ("measure" in header)
    for row in [*_read(path), *(tuple(map(str, row)) for row in rows)]:
        known[row[:keys]] = row
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        ordered = sorted(
            known.values(), key=lambda r: (float(r[0]), *r[1:3], int(r[3]), int(r[4]), r[5:keys])
        )
        csv.writer(file, lineterminator="\n").writerows([tuple(header), *ordered])
    unfinished.replace(path)


def _read(path: Path) -> list[tuple[str, ...]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(row) for row in list(csv.reader(file))[1:]]


def main(
    unseen: Annotated[
        str,
        typer.Option(
            help="Shares of unseen kinds among the start's errors, of "
            f"{', '.join(map(str, TAUGHT))}."
        ),
    ] = "0.05,0.03",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2,3,4",
    start: Annotated[
        str, typer.Option(help="The start: the seed of its lessons, and b on another processor.")
    ] = "0",
    steps: Annotated[
        str, typer.Option(help="Steps to measure, multiples of 20; the last one ends the run.")
    ] = "20,40",
    arms: Annotated[
        str, typer.Option(help=f"Any of {', '.join(ARMS)}, with commas between.")
    ] = ",".join(DRAWN),
    jobs: Annotated[
        int, typer.Option(help="Seeds at a time; each keeps one core busy.")
    ] = os.cpu_count() or 1,
    results: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = FIGURES,
    cases_seed: Annotated[int, typer.Option(help="Seed of the held-out cases.")] = CASES_SEED,
    override: Annotated[
        list[str] | None, typer.Option(help="A further override of the runs; may be repeated.")
    ] = None,
) -> None:
    """Train, measure, and add the counts to the CSV files."""
    chosen, measured = arms.split(","), [int(step) for step in steps.split(",")]
    if unknown := sorted(set(chosen) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    shares = [float(share) for share in unseen.split(",")]
    if unknown_shares := sorted(set(shares) - set(TAUGHT)):
        raise typer.BadParameter(
            f"no start shows {unknown_shares}; there are {', '.join(map(str, TAUGHT))}"
        )
    done = {row[:5] for row in _read(results / "rates.csv")}
    work = [
        (share, start, missing, seed, measured, override or [], cases_seed)
        for share in shares
        for seed in map(int, seeds.split(","))
        if (
            missing := [
                arm
                for arm in chosen
                if (f"{share:g}", start, arm, str(seed), str(measured[-1])) not in done
            ]
        )
    ]
    for share in {unit[0] for unit in work}:
        prepare(share, start)
    results.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for unit in as_completed([pool.submit(one_seed, *each) for each in work]):
            rates, of_steps = unit.result()
            add(results / "rates.csv", (*HEADER, "measure", "hits", "items"), rates)
            add(results / "steps.csv", (*HEADER, *STEP_METRICS), of_steps)
            console.print(f"added {rates[0][0]}, start {start}, seed {rates[0][3]}, to {results}")


if __name__ == "__main__":
    typer.run(main)
