"""Step files: what is appended is read back, and a resumed run finds every step once."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from medserl_agentloop.core import step_file
from medserl_agentloop.core.advantages import Baselines
from medserl_agentloop.core.recorder import resume_wandb_run
from medserl_agentloop.core.step_file import (
    STATE_FILE,
    RunFiles,
    StepFile,
    load_state,
    lock_folder,
    save_state,
)

lines_of_steps = st.lists(st.integers(0, 5), max_size=8).map(sorted)


@pytest.fixture
def file(tmp_path: Path) -> StepFile:
    return StepFile(tmp_path / "games.jsonl")


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"step": n, "text": f"game of step {n}"} for n in numbers]


def raw(*numbers: int) -> bytes:
    return b"".join(b'{"step": %d}\n' % n for n in numbers)


# --- append and read ---


@given(st.text(st.characters()))
@example("a \udfff b")
@example("\ud83d alone, \\ud800")
@example("🙂")
def test_any_text_is_read_back_from_a_line_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = StepFile(tmp_path_factory.mktemp("any") / "new" / "games.jsonl")
    file.append([{"step": 1, "text": text}])
    file.append([{"step": 2, "text": text[::-1]}])
    assert [o["text"] for o in StepFile(str(file.path)).read()] == [text, text[::-1]]
    assert file.path.read_bytes().decode("utf-8").count("\n") == 2
    assert file.cut_after(1) == 1


@pytest.mark.parametrize(
    "line", [b"[1]", b"[" * 100_000, b'{"step": 1e400}', b'{"step": 1' + b"0" * 20 + b"}"]
)
def test_a_line_that_no_table_can_hold_is_named(file: StepFile, line: bytes) -> None:
    file.path.write_bytes(raw(1) + line + b"\n")
    with pytest.raises(ValueError, match=r"games\.jsonl, line 2 is no"):
        list(file.read())
    with pytest.raises(ValueError, match="line 2 has no step"):
        file.cut_after(1)


# --- cutting ---


def test_a_file_of_which_nothing_is_left_is_moved_aside(file: StepFile) -> None:
    file.append(steps(1, 2))
    before = file.path.read_bytes()
    assert file.cut_after(0) == 2 and file.path.read_bytes() == b""
    assert file.path.with_name("games.jsonl.1").read_bytes() == before


@contextmanager
def disk_that_is_full_after(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_names_the_file_and_a_resumed_run_cuts_a_partial_line(file: StepFile) -> None:
    file.append(steps(1, 2))
    full = disk_that_is_full_after(file.path.stat().st_size + 10)
    with full, pytest.raises(OSError, match=r"games\.jsonl"):
        file.append(steps(3, 3))
    assert file.path.read_bytes().endswith(b'{"step": 3')
    assert file.cut_after(2) == 1
    file.append(steps(3, 3))
    assert list(file.read()) == steps(1, 2, 3, 3)


def test_lock_waits_for_a_process_being_killed_and_not_for_its_forks(tmp_path: Path) -> None:
    other = (
        "import os, signal, sys, time; from medserl_agentloop.core.step_file import lock_folder;"
        "lock = lock_folder(sys.argv[1]); print(flush=True); os.fork() or time.sleep(9);"
        "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", other, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with lock_folder(tmp_path, wait_s=5):
            assert process.wait() == -signal.SIGKILL


half_lines = st.sampled_from([b"", b"{", b'{"step": 1, "te', b'{"step": 1}', b'{"text": "\xc3'])


@given(lines_of_steps, st.integers(0, 5), st.integers(0, 30), half_lines)
def test_a_run_killed_anywhere_resumes_with_every_step_once(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[int],
    checkpoint: int,
    lost: int,
    torn: bytes,
) -> None:
    file = StepFile(tmp_path_factory.mktemp("killed") / "games.jsonl")
    whole = raw(*(n for n in numbers if n <= checkpoint))
    later = raw(*(n for n in numbers if n > checkpoint))
    rest = later[: max(0, len(later) - lost)] + torn
    file.path.write_bytes(whole + rest)
    assert file.cut_after(checkpoint) == len(rest.splitlines())
    assert file.path.read_bytes() == whole


def test_resumed_run_keeps_its_wandb_run_and_a_new_one_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_id(*, resumed: bool) -> str:
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            monkeypatch.delenv(name, raising=False)
        resume_wandb_run(tmp_path, resumed=resumed)
        assert os.environ["WANDB_RESUME"] == "allow"
        return os.environ["WANDB_RUN_ID"]

    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")  # put back afterwards
    first = run_id(resumed=False)
    assert run_id(resumed=True) == first
    assert run_id(resumed=False) != first
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    resume_wandb_run(tmp_path, resumed=True)
    assert os.environ["WANDB_RUN_ID"] == "mine"


# --- a run's files ---


def test_two_runs_with_one_folder_of_checkpoints_do_not_run_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, same, second = (RunFiles(tmp_path / name) for name in ("a", "a", "b"))
    first.open("x: 1", checkpoints=tmp_path / "a")  # one folder for both, as the recipes have it
    monkeypatch.setattr(step_file, "lock_folder", partial(lock_folder, wait_s=0.1))
    for other in (same, second):
        with pytest.raises(ValueError, match="another process writes to"):
            other.open("x: 1", checkpoints=tmp_path / "a")


# --- state in a checkpoint ---


def state(value: float = 0.0) -> Baselines:
    return Baselines({"role": {"kind": value}})


def test_saved_parts_resume_unchanged_and_unknown_parts_are_named(tmp_path: Path) -> None:
    assert load_state(tmp_path, {"alarms": state()}) == ["alarms"]
    save_state(tmp_path / "global_step_3", {"baselines": state(0.1 + 0.2), "alarms": state(7)})
    parts = {"baselines": state(), "alarms": state(), "a_new_part": state(4)}
    assert load_state(tmp_path / "global_step_3", parts) == ["a_new_part"]
    assert list(parts.values()) == [state(0.1 + 0.2), state(7), state(4)]
    assert [path.name for path in (tmp_path / "global_step_3").iterdir()] == [STATE_FILE]
