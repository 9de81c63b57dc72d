"""What the benchmark of kills says of two finished runs; the runs themselves take half an hour."""

from pathlib import Path

import kills
from game.builders import finished
from real_runs import GAMES_PER_STEP, Run

from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.types import Role


def run(folder: Path, steps: list[int], reward: float = 1.0) -> Run:
    made = Run.__new__(Run)
    made.folder = folder
    game = finished(Outcome.MISSED_ERROR).model_copy(update={"rewards": {Role.ATTACKER: {"game": reward}}}).to_json()
    StepFile(folder / "run" / GAMES_FILE).append({**game, "step": n} for n in steps for _ in range(GAMES_PER_STEP))
    StepFile(folder / "run" / METRICS_FILE).append({"step": n} for n in steps)
    return made


def test_the_benchmark_of_kills_says_what_is_lost_doubled_invented_or_left(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", [1, 2])
    same = run(tmp_path / "same", [1, 2])
    (same.folder / "run" / "global_step_1" / "actor").mkdir(parents=True)
    (same.folder / "run" / f"{GAMES_FILE}.1").touch()
    assert kills.faults(whole, same, 2) == []
    for name, steps in (("lost", [1]), ("doubled", [1, 2, 2])):
        found = kills.faults(whole, run(tmp_path / name, steps), 2)
        assert [fault[:12] for fault in found[:2]] == ["killed: not ", "killed: metr"]
    [invented] = kills.faults(whole, run(tmp_path / "invented", [1, 2], reward=0.5), 2)
    assert invented.startswith(f"{2 * GAMES_PER_STEP} games or rewards differ")
    (same.folder / "run" / ".games.jsonl.7.tmp").touch()
    assert kills.faults(whole, same, 2) == ["files that only one run has: ['.games.jsonl.7.tmp']"]
