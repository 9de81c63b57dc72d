"""Real runs in one folder: killed before a validation, gone on, and not written over."""

from pathlib import Path

import pytest
from real_runs import Run

from medserl_agentloop.core.step_file import METRICS_FILE, StepFile

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LAST = 2


@pytest.fixture(scope="module")
def settings(data: tuple[str, ...]) -> tuple[str, ...]:
    return (
        *data,
        f"trainer.total_training_steps={LAST}",
        f"trainer.test_freq={LAST}",
        "algorithm.adv_estimator=role_grpo",
        "selfplay.assessments=3",
        "data.max_response_length=8192",
    )


@pytest.fixture(scope="module")
def whole(settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run to its end; in the folder ``killed`` next to it what a SIGKILL would leave between the
    last save and the validation.
    """
    folder: Path = tmp_path_factory.mktemp("folder")
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    run = Run(folder / "whole", *settings)
    run.copy_after_step(LAST, folder / "killed")
    run.wait()
    return run


def validated(folder: Path) -> list[int]:
    """The steps of a run whose validation is in its metrics."""
    rows = StepFile(folder / "run" / METRICS_FILE).read()
    return [row["step"] for row in rows if "selfplay/games" not in row]


def test_a_run_killed_before_its_last_validation_makes_it(
    whole: Run, settings: tuple[str, ...]
) -> None:
    killed = whole.folder.with_name("killed")
    assert (validated(whole.folder), validated(killed)) == ([LAST], [])
    resumed = Run(killed, *settings)
    resumed.wait()
    assert f"the validation of step {LAST} was not done: it runs now" in resumed.lines()
    assert validated(killed) == [LAST]
    assert len(resumed.steps_of_games()) == LAST


def test_groups_of_several_assessments_say_how_many_teach_nothing(whole: Run) -> None:
    for step in whole.metrics:
        assert step["selfplay/assessor/groups"] > 0
        assert 0 <= step["selfplay/assessor/no_signal_rate"] <= 1


def test_a_finished_run_is_not_written_over(whole: Run, settings: tuple[str, ...]) -> None:
    before = sorted(path.name for path in (whole.folder / "run").iterdir())
    again = Run(whole.folder, *settings, "trainer.resume_mode=disable")
    assert again.wait_for_end() != 0
    assert "trainer.resume_mode=disable would overwrite the run in" in again.log.read_text()
    after = {path.name for path in (whole.folder / "run").iterdir()}
    assert after == {*before}
