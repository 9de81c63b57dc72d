"""A live run in the terminal: what its files say, whatever state they are in."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.step_file import METRICS_FILE, StepFile, to_line
from medserl_agentloop.report.watch import WIDTH, sparkline, steps_of, watch_run


def row(step: int, **more: Any) -> dict[str, Any]:
    numbers = {"selfplay/attacker/reward": step / 10, "actor/grad_norm": 1.0, "timing_s/step": 30.0}
    return {"step": step, "steps": 10, **numbers, **more}


def seen(run: Path) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["watch", str(run), "--once"])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_shows_its_step_the_time_left_its_curves_and_alarms(tmp_path: Path) -> None:
    rows = [row(n, **({"selfplay/alarm/void_games": 1.0} if n == 3 else {})) for n in (1, 2, 3, 4)]
    StepFile(tmp_path / METRICS_FILE).append(rows)
    text = seen(tmp_path)
    assert "step 4 of 10, 30 s per step, 0:03:00 left" in text
    assert "▁▃▆█" in text and "selfplay/assessor/accuracy" not in text
    assert "alarms: void_games (step 3)" in text


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    assert "waiting for the first step" in " ".join(seen(tmp_path / "nonesuch").split())


def test_half_written_lines_are_left_out(tmp_path: Path) -> None:
    half = to_line(row(2))[:40]
    (tmp_path / METRICS_FILE).write_bytes(to_line(row(1)) + half)
    assert "step 1 of 10" in seen(tmp_path)


def test_a_resumed_run_is_followed_from_where_it_goes_on(tmp_path: Path) -> None:
    file = StepFile(tmp_path / METRICS_FILE)
    file.append(map(row, (1, 2, 3, 4)))
    assert [r["step"] for r in steps_of(tmp_path)] == [1, 2, 3, 4]
    file.cut_after(2)
    assert [r["step"] for r in steps_of(tmp_path)] == [1, 2]
    file.append([row(2, **{"actor/grad_norm": 9.0})])  # and where its file was not cut, the later line counts
    assert [r["actor/grad_norm"] for r in steps_of(tmp_path)] == [1.0, 9.0]


def test_a_run_of_an_earlier_release_says_no_end(tmp_path: Path) -> None:
    StepFile(tmp_path / METRICS_FILE).append([{"step": 3, "actor/grad_norm": 1.0}])
    assert "step 3\n" in seen(tmp_path)


@pytest.mark.parametrize(
    "garbage",
    [
        b"[]\n",
        b"{}\n",
        b"\xff\xfe\n",
        b'{"step": "x"}\n',
        b"[" * 100_000 + b"\n",
        b'{"step": 1e400}\n',
        b'{"step": Infinity}\n',
    ],
)
def test_lines_that_are_no_steps_stop_nothing(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / METRICS_FILE).write_bytes(to_line(row(1)) + garbage)
    assert "step 1 of 10" in seen(tmp_path)


def watched(run: Path) -> str:
    out = io.StringIO()
    watch_run(run, Console(file=out, force_terminal=True, width=200), every=1.0)
    return out.getvalue()


def test_it_follows_until_the_last_step_or_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, to_come = StepFile(tmp_path / METRICS_FILE), [[row(1)], [row(10)]]

    def sleep(seconds: float) -> None:
        file.append(to_come.pop(0))

    monkeypatch.setattr(time, "sleep", sleep)
    text = watched(tmp_path)
    assert text.index("waiting") < text.index("step 1 of 10") < text.index("step 10 of 10")

    def ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", ctrl_c)
    file.cut_after(1)
    assert "step 1 of 10" in watched(tmp_path)


def test_a_sparkline_has_the_lowest_and_the_highest_bar_and_fits_its_width() -> None:
    assert sparkline([0.0, 1.0]) == "▁█" and sparkline([2.0, 2.0]) == "▁▁"
    for count in (1, WIDTH, WIDTH + 1, 1000):
        assert len(sparkline([float(n) for n in range(count)])) <= WIDTH


def test_names_in_the_files_are_shown_as_text(tmp_path: Path) -> None:
    line = {"step": 1, "selfplay/\x1b[2J/reward": 1.0, "selfplay/alarm/\x9b2J": 1.0}
    (tmp_path / METRICS_FILE).write_text(json.dumps(line) + "\n")
    text = seen(tmp_path)
    assert not set("\x1b\x9b\x07") & set(text)
    assert "\\x1b[2J" in text


def test_of_a_long_run_nothing_is_held_that_is_not_shown_and_nothing_read_again_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {f"actor/{number}": 0.5 for number in range(200)}
    file = StepFile(tmp_path / METRICS_FILE)
    file.append(row(step, **others) for step in range(1, 4))
    assert steps_of(tmp_path) == [row(step) for step in range(1, 4)]
    looks, reads = [], []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            file.append([row(10)])

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("medserl_agentloop.report.watch.steps_of", lambda run: reads.append(run) or steps_of(run))
    watch_run(tmp_path, Console(file=io.StringIO(), force_terminal=True), every=2.0)
    assert (len(looks), len(reads)) == (3, 2)
