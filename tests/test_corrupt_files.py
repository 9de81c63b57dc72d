"""Files of a run with a byte changed or the end cut off: what was written, or an error that names
the file.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from game.builders import finished
from invoking import invoke
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from training.test_step_file import disk_that_is_full_after

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.step_file import (
    GAMES_FILE,
    LATEST,
    METRICS_FILE,
    STATE_FILE,
    StepFile,
    load_state,
    save_state,
)
from medserl_agentloop.core.trainer import SelfPlayTrainer
from medserl_agentloop.games.medical.records import Outcome, read_games
from medserl_agentloop.report import metrics

DRAWS = 100
LAST = 3


def damages(content: bytes, draws: int = DRAWS) -> Iterator[bytes]:
    """Every fourth is cut short, the others have one byte changed."""
    chance = random.Random(7)
    for number in range(draws):
        place = chance.randrange(len(content))
        changed = bytes([content[place] ^ chance.randrange(1, 256)])
        yield (
            content[:place] if number % 4 == 0 else content[:place] + changed + content[place + 1 :]
        )


@pytest.fixture
def games(tmp_path: Path) -> StepFile:
    file = StepFile(tmp_path / "games.jsonl")
    for step in range(1, LAST + 1):
        game = finished(Outcome.CORRECT_DETECTION).to_json()
        file.append({**game, "step": step, "uid": f"{step}/{n}"} for n in range(4))
    return file


def test_a_damaged_games_file_loses_no_game_without_a_word(games: StepFile) -> None:
    whole = list(read_games(games.path))
    for content in damages(good := games.path.read_bytes()):
        games.path.write_bytes(content)
        cut = good.startswith(content)
        try:
            found = list(read_games(games.path))
        except ValueError as error:
            assert re.match(
                rf"{games.path}, line \d+ (is not a game record|is not JSON|is no JSON object)",
                str(error),
            )
        else:
            differ = [now != then for now, then in zip(found, whole, strict=False)]
            assert sum(differ) <= (0 if cut else 1)  # a letter in a text, or a figure
            assert cut or len(found) == len(whole)
        try:
            removed = games.cut_after(LAST)
        except ValueError as error:
            assert f"{games.path}, line " in str(error)
        else:
            assert removed <= 1  # the last line, if it is cut off or says another step
            assert good.startswith(games.path.read_bytes()) or not cut


@pytest.mark.parametrize("command", ["show", "report", "compare"])
@pytest.mark.parametrize("name", [GAMES_FILE, METRICS_FILE])
def test_half_a_last_line_is_left_out_and_said(games: StepFile, command: str, name: str) -> None:
    """A run that was killed, or copied while it wrote."""
    StepFile(games.path.with_name(METRICS_FILE)).append(
        {"step": s, "actor/grad_norm": 0.5} for s in (1, 2, 3)
    )
    file = games.path.with_name(name)
    file.write_bytes(whole := file.read_bytes()[:-9])
    run = games.path.parent
    done = invoke(command, run, *([run] if command == "compare" else []))
    number = whole.count(b"\n") + 1
    assert (
        done.exit_code,
        f"{file} ends within line {number}: the line is skipped" in done.stderr,
    ) == (
        0,
        True,
    ), done.output
    played = 12 - (name == GAMES_FILE)
    assert {"show": f"of {played}", "report": f"{played} games", "compare": f"| {played} "}[
        command
    ] in done.stdout
    file.write_bytes(whole + b"\n")  # within the file a line may not be half
    assert invoke(command, run, *([run] if command == "compare" else [])).exit_code == 2


def test_metrics_without_a_step_are_named(tmp_path: Path) -> None:
    file = StepFile(tmp_path / METRICS_FILE)
    file.append([{"step": 1, "a": 1.0}, {"a": 1.0}])
    with pytest.raises(ValueError, match=re.escape(f"{file.path}, line 2 has no step")):
        metrics(tmp_path)


def test_a_damaged_state_of_a_checkpoint_is_named_or_taken_up(tmp_path: Path) -> None:
    saved = {"baselines": {"attacker": {"adversarial_benign": 0.25}}, "alarms": {"streaks": {}}}
    save_state(tmp_path, saved)
    file = tmp_path / STATE_FILE
    for content in damages(file.read_bytes()):
        file.write_bytes(content)
        try:
            load_state(tmp_path, {"baselines": {}, "alarms": {}})
        except ValueError as error:
            assert str(error).startswith(f"{file} does not hold the state of a self-play run: ")


def test_checkpoint_that_cannot_be_written_is_named_with_the_free_space(tmp_path: Path) -> None:
    trainer: Any = object.__new__(SelfPlayTrainer)
    keep = dict.fromkeys(("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "default_hdfs_dir"))
    trainer.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), **keep}})
    trainer.global_steps, trainer.run_state, trainer.kept_checkpoints = LAST, {}, None
    trainer.selfplay = SelfPlayConfig(game="medical", records=str(tmp_path))

    def save_checkpoint(folder: str, *_: Any, **__: Any) -> None:
        Path(folder).mkdir(parents=True)
        torch.save({"weight": torch.arange(300.0)}, Path(folder) / "model.pt")

    trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=save_checkpoint)
    message = rf"^the checkpoint {tmp_path}/global_step_{LAST} cannot .* MB are free"
    with disk_that_is_full_after(1000), pytest.raises(RuntimeError, match=message):
        trainer._save_checkpoint()
    assert not (tmp_path / LATEST).exists()


def test_a_damaged_checkpoint_is_named_with_the_way_to_the_one_before(tmp_path: Path) -> None:
    trainer: Any = object.__new__(SelfPlayTrainer)
    settings = {"default_local_dir": str(tmp_path), "resume_mode": "auto"}
    settings["del_local_ckpt_after_load"] = False
    trainer.config = OmegaConf.create({"trainer": settings})
    trainer.trainer_mode, trainer.total_training_steps, trainer.use_critic = "sync", LAST, False
    trainer.run_state, trainer.pool = {}, None
    trainer.selfplay = SimpleNamespace(certify="only", records=tmp_path)
    trainer.actor_rollout_wg = SimpleNamespace(
        load_checkpoint=lambda local_path, **_: torch.load(f"{local_path}/model.pt")
    )
    trainer.train_dataloader = StatefulDataLoader(list(range(64)), batch_size=8, num_workers=0)
    folder = tmp_path / f"global_step_{LAST}"
    (folder / "actor").mkdir(parents=True)
    (tmp_path / LATEST).write_text(str(LAST))
    files = (folder / "actor" / "model.pt", folder / "data.pt")
    torch.save({"weight": torch.arange(300.0)}, files[0])
    torch.save(trainer.train_dataloader.state_dict(), files[1])
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:-99])
        with pytest.raises(ValueError, match=re.escape(f"the checkpoint {folder} cannot be load")):
            trainer._load_checkpoint()
        file.write_bytes(whole)
    trainer._load_checkpoint()
