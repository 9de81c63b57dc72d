"""Two runs side by side: what is measured, what is not, and what is no run."""

from pathlib import Path
from typing import Any

import pytest
from game.builders import paid
from invoking import invoke

from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.report.compare import NO_DIFFERENCE, NOT_MEASURED, compare, read_side

OUTCOMES = [Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION, Outcome.INVALID_ATTACK, Outcome.VOID]


def run(folder: Path, scheme: str = "zero_sum", outcomes: list[Outcome] = OUTCOMES) -> Path:
    """A run of two steps with the same games in both; a step takes 2 s."""
    numbers = {"timing_s/step": 2.0, "actor/perf/max_memory_allocated_gb": 3.0}
    for step in (1, 2):
        games = [paid(of, load_scheme(scheme), step=step, scheme=scheme) for of in outcomes]
        StepFile(folder / GAMES_FILE).append(game.to_json() for game in games)
        StepFile(folder / METRICS_FILE).append([{"step": step, **numbers}])
    return folder


def logged(role: str, reward: float, game: int = 0, **facts: Any) -> dict[str, Any]:
    return {"step": 1, "game_idx": game, "game_role": role, "reward": reward, **facts}


LOG = [
    logged("attacker", 2.5, game_outcomes=["attacker_error_undetected"]),
    logged("assessor", 0.0, game_outcomes=["assessor_missed_error"]),
    logged("assessor", 2.0, 1, cot_format_violation=False),
    {"train/global_step": 1, "_runtime": 10.0, "train/policy_loss": 0.5},
    {"train/global_step": 2, "_runtime": 30.0, "train/policy_loss": 0.25},
]


def tables(a: Path | str, b: Path | str) -> dict[str, list[str]]:
    """The rows of all sections but the first, by their first cell."""
    sections, _ = compare(read_side(str(a)), read_side(str(b)))
    return {row[0]: list(row[1:]) for _, _, rows, _ in sections[1:] for row in rows}


def test_a_run_and_itself_do_not_differ(tmp_path: Path) -> None:
    rows = tables(run(tmp_path), tmp_path)
    # zero_sum pays the attacker +1, -1 and, invalid, -1; twice.
    assert rows["attacker reward"][:2] == ["-0.3333 ± 0.9428 (6)"] * 2
    assert rows["attacker reward"][2].startswith("+0 [-1.")
    right = "50.0 % [15.0, 85.0] (4)"
    assert rows["right"] == [right, right, "+0.0 [-49.5, +49.5]"]
    assert rows["outcome: void"][0].startswith("25.0 % [")
    assert rows["seconds per step"] == ["2 ± 0 (2)", "2 ± 0 (2)", "+0 [+0, +0]"]
    assert rows["device memory, GB"][0] == "3 ± 0 (2)"
    _, verdict = compare(read_side(str(tmp_path)), read_side(str(tmp_path)))
    assert NO_DIFFERENCE in verdict


def test_other_steps_are_warned_of_and_can_be_left_out(tmp_path: Path) -> None:
    long, short = run(tmp_path / "long"), run(tmp_path / "short")
    late = paid(Outcome.MISSED_ERROR, load_scheme("zero_sum"), step=16)
    StepFile(long / GAMES_FILE).append([late.to_json()])
    runs = compare(read_side(str(long)), read_side(str(short)))[0][0]
    assert [row[2] for row in runs.rows] == ["1 to 16", "1 to 2"]
    assert "Warning" in runs.note and "--steps 1 2 compares" in runs.note
    done = invoke("compare", long, short, "--steps", 1, 2)
    assert done.exit_code == 0 and "Warning" not in done.output and "1 to 16" not in done.output
    with pytest.raises(ValueError, match="short has no games of steps 3 to 16"):
        read_side(str(short), (3, 16))


def test_the_verdict_says_what_differs_and_by_how_much(tmp_path: Path) -> None:
    caught = run(tmp_path / "a", outcomes=[Outcome.CORRECT_DETECTION] * 10)
    missed = run(tmp_path / "b", outcomes=[Outcome.MISSED_ERROR] * 10)
    rows = tables(caught, missed)
    assert rows["assessor reward"][2] == "-2 [-2, -2]"
    assert rows["error found"][2] == "-100.0 [-100.0, -77.2]"
    assert "note cleared" not in rows  # neither side has a safe note
    verdict = invoke("compare", caught, missed).output.splitlines()[-1]
    assert verdict == "error found 100.0 % in A, 0.0 % in B (-100.0 [-100.0, -77.2])"


def test_several_runs_on_both_sides_are_seeds(tmp_path: Path) -> None:
    found, missed = Outcome.CORRECT_DETECTION, Outcome.MISSED_ERROR
    sides = {"a": [[found] * 4, [found] * 3 + [missed]], "b": [[missed] * 4] * 2}
    for side, seeds in sides.items():
        for seed, outcomes in enumerate(seeds):
            run(tmp_path / side / str(seed), outcomes=outcomes)
    for side in (tmp_path / "a", tmp_path / "a" / "*"):
        # Student's t over two means of 100 % and 75 %, and two of 0 %: 12.5 points times 4.303.
        assert tables(side, tmp_path / "b")["error found"][2] == "-87.5 [-141.3, -33.7]"
        assert tables(side, tmp_path / "b" / "0")["error found"][2] == "-87.5 [-96.5, -47.4]"


def test_games_between_the_players_of_a_run_are_no_seed(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        run(tmp_path / "seeds" / seed)
        run(tmp_path / "seeds" / seed / "progress" / "2")
    runs = read_side(str(tmp_path / "seeds"))
    assert [each.name for each in runs] == [str(tmp_path / "seeds" / s) for s in "01"]


def test_openrlhf_log_reports_absent_numbers_as_not_measured(tmp_path: Path) -> None:
    StepFile(tmp_path / "log.jsonl").append(LOG)
    rows = tables(tmp_path / "log.jsonl", run(tmp_path / "run"))
    assert rows["assessor reward"][0] == "1 ± 1 (2)"
    assert rows["error found"][0] == "0.0 % [0.0, 79.3] (1)"
    assert rows["assessor format kept"][0] == "100.0 % [20.7, 100.0] (1)"
    for share in ("attacker format kept", "assessor readable", "outcome: void", "valid"):
        assert rows[share][0] == NOT_MEASURED
    assert rows["seconds per step"][:2] == ["20 ± 0 (1)", "2 ± 0 (2)"]
    assert rows["device memory, GB"][0] == NOT_MEASURED


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"loss": 1}, "line 1 is neither a turn nor the metrics of a step"),
        ({"game_role": "judge", "game_idx": 1, "reward": 1}, "'attacker' or 'assessor'"),
    ],
)
def test_a_log_with_a_line_that_cannot_be_read_is_named_with_the_line(
    tmp_path: Path, line: dict[str, Any], says: str
) -> None:
    StepFile(tmp_path / "log.jsonl").append([line])
    result = invoke("compare", tmp_path / "log.jsonl", run(tmp_path / "run"))
    assert result.exit_code == 2 and "log.jsonl, line 1" in result.output and says in result.output


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for side, says in ((tmp_path, "is not a run: nei"), (tmp_path / "none", "does not exist")):
        with pytest.raises(ValueError, match=says):
            read_side(str(side))


def test_the_comparison_is_printed_as_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(Path("a|b<i>"))
    result = invoke("compare", "a|b<i>", "a|b<i>")
    assert result.exit_code == 0 and r"| A    | a\|b<i> |" in result.output
    assert result.output.count("## ") == 2
