"""A game from outside the repository, taken from its page, trains through verl's own entry point and is shown."""

import re
import subprocess
from pathlib import Path

import pytest
from real_runs import environment

from medserl_agentloop.paths import PACKAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (PACKAGE.parent / "docs" / "extending.md").read_text(encoding="utf-8").partition("## A game")[2]
SMALL = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4"


def test_the_commands_of_the_page_train_a_game_and_show_it(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    train, look = re.findall(r"^```bash\n(.*?)^```", PAGE, re.S | re.M)
    (tmp_path / "rps.py").write_text(code, encoding="utf-8")
    here, outputs = environment(tmp_path), []
    for commands in (train.replace("total_training_steps=2", f"total_training_steps=2 {SMALL}"), look):
        command = ["bash", "-ec", commands.replace("PYTHONPATH=. ", "")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=here)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        outputs.append(done.stdout)
    assert "certificate: isolation of actor" in outputs[0] and "left reward" in outputs[0]
    assert all(
        text in outputs[1]
        for text in ("left · ", "right · ", "moves:", "selfplay/right/reward", "32 games: runs/rps/report.html")
    )
    lines = (tmp_path / "runs" / "rps" / "games.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 * 4 * 4
    assert all('"left"' in line and '"right"' in line for line in lines)
