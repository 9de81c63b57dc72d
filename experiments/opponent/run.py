"""The opponent's worth: ``python -m experiments.opponent.run`` trains the arms and measures them.

Each arm starts from the same player, taught to put in errors of the kinds that it does not see as
rarely as asked, and is trained with verl's ``main_ppo``. What is in the CSV files is not made
again, and an interrupted run is resumed. Run it from the root of the repository. The README holds
the plan.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import torch
import typer
from rich.console import Console

from experiments.learning.measure import Case, Measurement, Rate, held_out_cases
from experiments.learning.run import PROFILE, train
from experiments.opponent.clinic import LESSON, NOTES, RUNS, TAUGHT, prepare, start_of
from experiments.opponent.frozen_player import SEARCHED_FILE, is_valid
from experiments.opponent.results import FIGURES
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, read_games

CASES_SEED = 90_005
CASES = 300
EVERY = 5  # steps between two checkpoints
DRAWS = 4  # attacks that ``search`` draws for a note
KEY = ("unseen", "start", "arm", "step")
RATES = (*KEY, "measure", "hits", "items")
STEPS = (
    *KEY,
    "attacker_turns",
    "valid_attacks",
    "unseen_shown",
    "unseen_found",
    "doses_shown",
    "assessments",
    "extra_attacks",
    "extra_assessments",
    "seconds",
)
"""Of one step: turns of the attacker; attacks that put an error in, those of unseen kinds, and
those of them that were found; what the search drew and had assessed besides."""


@dataclass(frozen=True)
class Arm:
    """One way to train the assessor.

    Attributes:
        overrides: What is changed in ``recipes/quickstart.yaml``.
        draws: Attacks that the frozen starting player draws for a note; 0 where the policy attacks.
    """

    overrides: tuple[str, ...] = ()
    draws: int = 0


ASSESSOR_ALONE = ("selfplay.train=assessor",)
ARMS = {
    "self_play": Arm(),
    "static": Arm(ASSESSOR_ALONE, draws=1),
    "search": Arm(ASSESSOR_ALONE, draws=DRAWS),
    "optimism": Arm(("selfplay.reward=experiments.rewards:Optimism",)),
    "static_half_lr": Arm((*ASSESSOR_ALONE, "actor_rollout_ref.actor.optim.lr=1.5e-4"), draws=1),
}
console = Console()


@contextmanager
def frozen_attacker(folder: Path, run: Path, draws: int) -> Iterator[str]:
    """The address of a server of the player in ``folder``, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "experiments.opponent.frozen_player", folder, port]
    if draws > 1:
        run.mkdir(parents=True, exist_ok=True)
        command += ["--draws", draws, "--rows", NOTES / "train.parquet", "--run", run]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(list(map(str, command)), env=environment) as server:
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
    arm: str, unseen: float, start: int, steps: int, url: str | None, extra: Sequence[str]
) -> list[str]:
    """The ``main_ppo`` command of one run."""
    folder = folder_of(unseen, start, arm)
    opponent: tuple[str, ...] = ()
    if url:
        opponent = (f"selfplay.opponent.url={url}",)
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=quickstart"),
        *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={EVERY}"),
        *("trainer.test_freq=-1", "trainer.val_before_train=False"),
        *ARMS[arm].overrides,
        *opponent,
        f"actor_rollout_ref.model.path={start_of(unseen, start)}",
        *(f"data.{name}_files={NOTES}/{name}.parquet" for name in ("train", "val")),
        *("trainer.test_freq=-1", "trainer.val_before_train=false"),  # measured afterwards
        f"data.seed={start}",
        f"actor_rollout_ref.actor.data_loader_seed={start}",
        f"actor_rollout_ref.rollout.seed={start}",
        f"trainer.experiment_name=opponent_{unseen:g}_{start}_{arm}",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder / 'hydra'}",
        *extra,
    ]


def folder_of(unseen: float, start: int, arm: str) -> Path:
    """The folder of one run."""
    return RUNS / f"{unseen:g}_{start}" / arm


def train_arm(arm: str, unseen: float, start: int, steps: int, extra: Sequence[str] = ()) -> None:
    """One run to ``steps``, unless it has come that far; its opponent's server lives as long."""
    folder, draws = folder_of(unseen, start, arm), ARMS[arm].draws
    if (folder / f"global_step_{steps}").exists():
        return
    (folder / ".complete").unlink(missing_ok=True)
    name = f"{unseen:g} {start} {arm}"
    if not draws:
        train(name, folder, training_command(arm, unseen, start, steps, None, extra))
        return
    with frozen_attacker(start_of(unseen, start), folder, draws) as url:
        train(name, folder, training_command(arm, unseen, start, steps, url, extra))


def measure(unseen: float, start: int, arm: str, steps: int, cases: Sequence[Case]) -> list[Any]:
    """The rows of ``RATES``: the assessor of each checkpoint on the held-out cases."""
    torch.set_num_threads(1)
    first, rows = load_player(start_of(unseen, start)), []
    measurement = Measurement(first, cases, load_profile(PROFILE), 1.0, seed=start)
    for step in range(0, steps + 1, EVERY):
        at = folder_of(unseen, start, arm) / f"global_step_{step}"
        rates: list[Rate] = measurement.assessor(load_player(at) if step else first)
        rows += [(f"{unseen:g}", start, arm, step, r.measure, r.hits, r.items) for r in rates]
    return rows


def steps_of(unseen: float, start: int, arm: str) -> Iterator[tuple[Any, ...]]:
    """The rows of ``STEPS`` of one run."""
    folder = folder_of(unseen, start, arm)
    games: dict[int, list[MedicalRecord]] = {}
    for game in read_games(folder / "games.jsonl"):
        games.setdefault(game.step, []).append(game)
    searched = _searched(folder / SEARCHED_FILE)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "selfplay/games" not in metrics:  # of a validation
            continue
        step = metrics["step"]
        counts = attacks_of(games[step])
        saved = (step - 1) // EVERY * EVERY  # the search knows the assessor of this step alone
        extra = [searched[saved, name] / EVERY for name in ("attacks", "assessed")]
        yield (
            *(f"{unseen:g}", start, arm, step),
            *(counts[name] for name in STEPS[len(KEY) : -3]),
            *(f"{each:g}" for each in extra),
            f"{metrics['timing_s/step']:.2f}",
        )


def attacks_of(games: Sequence[MedicalRecord]) -> Counter[str]:
    """Count the attacks of one step, as ``STEPS`` names them."""
    counts: Counter[str] = Counter()
    for game in games:
        counts["attacker_turns"] += game.attack is not None
        counts["assessments"] += game.assessment is not None
        if game.spec.target_label.value != "harmful" or not is_valid(game):
            continue
        kind = game.judgement.error_type if game.judgement else None
        counts["valid_attacks"] += 1
        if kind in LESSON.overlooked:
            counts["unseen_shown"] += 1
            counts["unseen_found"] += game.outcome is Outcome.CORRECT_DETECTION
            counts["doses_shown"] += kind == "dose"
    return counts


def _searched(file: Path) -> Counter[tuple[int, str]]:
    counts: Counter[tuple[int, str]] = Counter()
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        for name in ("attacks", "assessed"):
            counts[row["step"], name] += row[name]
    return counts


def add(path: Path, header: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    """Add rows to a CSV file and sort it; a row with the same key takes the place of an older."""
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    keys = len(KEY) + ("measure" in header)
    for row in [*_read(path), *(tuple(map(str, row)) for row in rows)]:
        known[row[:keys]] = row
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        ordered = sorted(known.values(), key=_order)
        csv.writer(file, lineterminator="\n").writerows([tuple(header), *ordered])
    unfinished.replace(path)


def _order(row: tuple[str, ...]) -> tuple[Any, ...]:
    return (float(row[0]), int(row[1]), row[2], int(row[3]), row[4])


def _read(path: Path) -> list[tuple[str, ...]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(row) for row in list(csv.reader(file))[1:]]


def main(
    unseen: Annotated[
        float,
        typer.Option(
            help=f"Share of unseen kinds: {', '.join(map(str, TAUGHT))}; 0 for the novice itself."
        ),
    ] = 0.03,
    starts: Annotated[str, typer.Option(help="Seeds of the starts' lessons.")] = ",".join(
        map(str, range(12, 28))
    ),
    arms: Annotated[str, typer.Option(help=f"Any of {', '.join(ARMS)}.")] = ",".join(
        list(ARMS)[:4]
    ),
    steps: Annotated[int, typer.Option(help=f"Steps, a multiple of {EVERY}.")] = 60,
    results: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = FIGURES,
    cases_seed: Annotated[int, typer.Option(help="Seed of the held-out cases.")] = CASES_SEED,
    override: Annotated[list[str] | None, typer.Option(help="Override of the runs.")] = None,
) -> None:
    """Train and measure run after run, and add each one's counts to the CSV files."""
    chosen = arms.split(",")
    if unknown := sorted(set(chosen) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    done = {row[:4] for row in _read(results / "study_rates.csv")}
    results.mkdir(parents=True, exist_ok=True)
    cases = held_out_cases(CASES, cases_seed)
    for start in map(int, starts.split(",")):
        for arm in chosen:
            if (f"{unseen:g}", str(start), arm, str(steps)) in done:
                continue
            prepare(unseen, start)
            train_arm(arm, unseen, start, steps, override or [])
            rates = measure(unseen, start, arm, steps, cases)
            add(results / "study_rates.csv", RATES, rates)
            add(results / "study_steps.csv", STEPS, list(steps_of(unseen, start, arm)))
            folder = folder_of(unseen, start, arm)
            for step in range(EVERY, steps, EVERY):  # measured; the last one can go on
                shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)
            console.print(f"added {unseen:g}, start {start}, {arm}, to {results}")


if __name__ == "__main__":
    typer.run(main)
