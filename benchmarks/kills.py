"""A run that is killed twenty times at random moments and resumed each time, beside one that nobody kills.

    PYTHONPATH=tests python benchmarks/kills.py [--kills 20] [--steps 30] [--seed 1] [--folder FOLDER]

Real runs of the tiny player on the CPU, with a checkpoint after each step. Every other SIGKILL comes between the start
of the processes and their first games, the others while they train; each goes to the whole run. Exits with 1 unless
every step and every game is there once, with the games and the rewards of the whole run, and nothing else is left.

Measured once, on 2 CPU cores with other work on them, 24 minutes: after 20 kills, 6 to 114 s after their starts, 10 of
them before the first game, the 30 steps and 480 games are those of the whole run, each once, with the same rewards.
The last weights differ by 7e-7, as float32 rounds. No temporary file was left. No kill came between a step's games and
its checkpoint, which are a moment apart; tests/test_main_ppo.py writes what that would leave.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from note_files import SAMPLE
from real_runs import GAMES_PER_STEP, REPOSITORY, Run

from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, STATE_FILE
from medserl_agentloop.games.medical.records import read_games

POLL_S = 0.05


def size(run: Run) -> int:
    """Bytes of the games file; it grows with each step."""
    games = run.folder / "run" / GAMES_FILE
    return games.stat().st_size if games.exists() else 0


def wait_for_games(run: Run, before: int) -> None:
    """Until a step is written beyond ``before`` bytes, or the run is over."""
    while size(run) <= before and run.process.poll() is None:
        time.sleep(POLL_S)
        before = min(before, size(run))  # a resumed run cuts off the steps that it plays again


def kill_at(run: Run, chance: random.Random, *, start_s: float, step_s: float, while_training: bool) -> float:
    """Kill a run that has just been started; return after how many seconds."""
    began, before = time.monotonic(), size(run)
    if while_training:
        wait_for_games(run, before)
    end = time.monotonic() + chance.uniform(0, 2 * step_s if while_training else start_s)
    while time.monotonic() < end and run.process.poll() is None:
        time.sleep(POLL_S)
        if not while_training and size(run) > before:  # the machine is faster now: few steps, so many kills fit
            break
    if run.process.poll() is not None:
        sys.exit(f"the run ended with {run.process.returncode} before it could be killed: {run.log}")
    run.kill()
    return time.monotonic() - began


def games_of(run: Run) -> Counter[tuple[int, str, str, str]]:
    """Step, row, note and rewards of each game."""
    path = run.folder / "run" / GAMES_FILE
    return Counter((g.step, str(g.spec.text_id), str(g.presented_note), str(g.rewards)) for g in read_games(path))


def faults(whole: Run, killed: Run, steps: int) -> list[str]:
    """What is not as in the run that nobody killed, as sentences."""
    found = []
    for name, run in (("whole", whole), ("killed", killed)):
        if run.steps_of_games() != dict.fromkeys(range(1, steps + 1), GAMES_PER_STEP):
            found.append(f"{name}: not {GAMES_PER_STEP} games in each step: {run.steps_of_games()}")
        if [numbers["step"] for numbers in run.metrics] != list(range(1, steps + 1)):
            found.append(f"{name}: {METRICS_FILE} does not have every step once")
    if different := games_of(whole) - games_of(killed):
        found.append(f"{different.total()} games or rewards differ, the first in step {min(different)[0]}")
    files = [
        {str(path.relative_to(run.folder / "run")) for path in (run.folder / "run").rglob("*")}
        for run in (whole, killed)
    ]
    # verl deletes no checkpoint of before a resume; games of a first step that was never saved are moved aside.
    expected = re.compile(rf"global_step_\d+(/(actor|{STATE_FILE}|data\.pt).*)?|({GAMES_FILE}|{METRICS_FILE})\.\d+")
    if left := [name for name in files[1] ^ files[0] if not expected.fullmatch(name)]:
        found.append(f"files that only one run has: {sorted(left)}")
    return found


def main() -> None:
    """Run, kill, resume, compare; exit with 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    convert = [sys.executable, REPOSITORY / "data_prep" / "medec_to_parquet.py", "--input", SAMPLE]
    subprocess.run([*convert, "--output", folder / "data"], check=True, stdout=subprocess.DEVNULL)
    overrides = [f"data.{kind}_files={folder}/data/{kind}.parquet" for kind in ("train", "val")]
    overrides += ["trainer.total_epochs=100", f"trainer.total_training_steps={asked.steps}", "trainer.save_freq=1"]
    overrides += ["algorithm.adv_estimator=role_rae", "trainer.max_actor_ckpt_to_keep=2"]
    for name in ("whole", "killed"):
        (folder / name).mkdir(parents=True)

    began = time.monotonic()
    whole = Run(folder / "whole", *overrides)
    wait_for_games(whole, 0)
    start_s = time.monotonic() - began
    whole.wait()
    step_s = (time.monotonic() - began - start_s) / asked.steps
    print(f"not killed: {start_s:.0f} s to the first games, {step_s:.1f} s for a step", flush=True)

    chance = random.Random(asked.seed)
    for number in range(asked.kills):
        run = Run(folder / "killed", *overrides)
        after = kill_at(run, chance, start_s=start_s, step_s=step_s, while_training=number % 2 == 1)
        games = sum(1 for _ in (run.folder / "run" / GAMES_FILE).open("rb")) if size(run) else 0
        print(f"kill {number + 1} after {after:.1f} s: checkpoint of step {run.reached}, {games} games", flush=True)
    killed = Run(folder / "killed", *overrides)
    killed.wait()

    found = faults(whole, killed, asked.steps)
    for fault in found:
        print(fault)
    if not found:
        print(f"{asked.steps} steps and {asked.steps * GAMES_PER_STEP} games, each once, as in the run not killed")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
