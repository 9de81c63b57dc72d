"""Which checkpoints are kept, which is the best, and when a run has seen enough."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.step_file import (
    CONFIG_FILE,
    LATEST,
    METRICS_FILE,
    RunFiles,
    StepFile,
    checkpoints,
    choose,
    remove_old,
    saved_steps,
)
from medserl_agentloop.core.trainer import SelfPlayTrainer


def save(folder: Path, *steps: int, latest: int) -> None:
    for step in steps:
        for part in ("actor/model.pt", "critic/model.pt", "data.pt"):
            file = folder / f"global_step_{step}" / part
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    (folder / LATEST).write_text(str(latest))


def validate(folder: Path, scores: dict[int, float]) -> None:
    """Metrics of a run with two data sets; steps without a validation are there, too."""
    rows: list[dict[str, Any]] = [
        {"step": step, "val-core/a/accuracy": score - 0.1, "val-core/b/accuracy": score + 0.1}
        for step, score in scores.items()
    ]
    rows += [{"step": step, "selfplay/games": 4} for step in range(1, max(scores) + 1)]
    StepFile(folder / METRICS_FILE).append(sorted(rows, key=lambda row: row["step"]))
    (folder / CONFIG_FILE).write_text("selfplay: {best_by: accuracy}")


@pytest.mark.parametrize(
    ("keep", "latest", "left"),
    [
        (2, 30, [30, 50]),
        (1, 30, [30, 50]),
        (3, 30, [20, 30, 50]),
        (2, 10, [10, 30, 50]),
        (None, 30, [10, 20, 30, 50]),
    ],
)
def test_a_resumed_run_removes_old_checkpoints_before_it_writes_another(
    tmp_path: Path, keep: int | None, latest: int, left: list[int]
) -> None:
    """All of them are of before the kill, so verl knows none; 50 is of a branch that was left."""
    save(tmp_path, 10, 20, 30, 50, latest=latest)
    remove_old(tmp_path, 40, keep, {})
    for engine in ("actor", "critic"):
        found = (path.parent.name[12:] for path in tmp_path.glob(f"global_step_*/{engine}"))
        assert sorted(map(int, found)) == left


def test_the_best_one_is_kept_with_the_newest_ones(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, latest=40)
    scores = {0: 0.9, 10: 0.5, 20: 0.7, 30: 0.7, 40: 0.6}
    remove_old(tmp_path, 50, 2, scores)  # 0 was never saved; of equals the earlier is the best
    assert saved_steps(tmp_path) == [20, 40]


def test_checkpoints_say_which_is_which_and_are_chosen_by_name(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6, latest=6)
    validate(tmp_path, {0: 0.2, 2: 0.4, 4: 0.6})
    named = ["step 2 (0.400)", "step 4 (best, 0.600)", "step 6 (newest)"]
    assert list(map(str, checkpoints(tmp_path))) == named
    assert [choose(tmp_path, name).step for name in ("best", "newest", "2")] == [4, 6, 2]
    with pytest.raises(ValueError, match=r"no checkpoint '8'.*step 4 \(best"):
        choose(tmp_path, "8")


@pytest.mark.parametrize(("patience", "last"), [(None, 9), (2, 4), (3, 9)])
def test_a_run_ends_when_the_best_validation_is_too_long_ago(
    tmp_path: Path, patience: int | None, last: int
) -> None:
    validate(tmp_path, {0: 0.2, 2: 0.6, 3: 0.5, 4: 0.6})
    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.selfplay = SelfPlayConfig(
        game="medical", records=str(tmp_path), best_by="accuracy", stop_after_evaluations=patience
    )
    trainer.global_steps, trainer.total_training_steps = 4, 9
    trainer._stop_if_nothing_got_better()
    assert trainer.total_training_steps == last


def test_verl_keeps_all_checkpoints_and_the_trainer_removes_them(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, latest=3)
    validate(tmp_path, {1: 0.9, 2: 0.1, 3: 0.2})
    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.selfplay = SelfPlayConfig(game="medical", records=str(tmp_path), best_by="accuracy")
    trainer.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    trainer.files, trainer.global_steps, trainer.kept_checkpoints = RunFiles(tmp_path), 4, 2
    trainer.run_state = {}
    with pytest.raises(RuntimeError, match="cannot be written"):  # there are no workers
        trainer._save_checkpoint()
    assert saved_steps(tmp_path) == [1, 3]
