"""A game from outside the repository, taken from its page, trains through verl's own entry point."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import environment

from medserl_agentloop.paths import PACKAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (PACKAGE.parent / "docs" / "extending.md").read_text(encoding="utf-8")


def test_the_game_of_the_page_trains_two_steps(tmp_path: Path) -> None:
    [code] = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M) if "(Interaction)" in block]
    assert "+recipes=own_game selfplay.game=rps:RockPaperScissors" in PAGE
    (tmp_path / "rps.py").write_text(code, encoding="utf-8")
    here = environment(tmp_path)
    subprocess.run([sys.executable, "rps.py"], cwd=tmp_path, check=True, env=here)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=own_game", "selfplay.game=rps:RockPaperScissors"),
        *("data.train_files=rps.parquet", "trainer.total_training_steps=2"),
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "certificate: isolation of actor" in done.stdout
    [games] = tmp_path.glob("runs/*/games.jsonl")
    lines = games.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 * 4 * 4
    assert all('"left"' in line and '"right"' in line for line in lines)
