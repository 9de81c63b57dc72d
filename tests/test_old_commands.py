"""The old systems' quick start, as docs/migration.md gives it, on the CPU with the tiny player.

The page's other run is composed and checked by test_docs.py; a judge that is a model and two epochs
over a batch run in test_main_ppo_nodes.py.
"""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from medec.test_openrlhf_jsonl import four_way
from note_files import SAMPLE
from omegaconf import OmegaConf
from real_runs import REPOSITORY, environment
from serving import serving
from test_docs import blocks

from medserl_agentloop.core.step_file import CONFIG_FILE, GAMES_FILE
from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.records import read_games
from medserl_agentloop.medical_team.remote_judge import create_app

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

QUICK_START = next(
    block for block in blocks(REPOSITORY / "docs/migration.md", "bash") if "main_ppo" in block
)
NOT_RUN = "make quickstart"  # test_newcomer.py runs it
TABLE = {"detection", "realism", "format"}  # the parts of the old rewards
SHORT = (
    "selfplay.budget.attacker_reasoning=32 selfplay.budget.assessor=32 "
    "actor_rollout_ref.rollout.n=1 "
    "trainer.total_training_steps=1 data.val_max_samples=4 data.train_batch_size=32"
)
"""Overrides that shorten a page's run.

The recipe's model and engine become the tiny player's: cpu, tiny.
"""


@pytest.fixture
def judges() -> Iterator[str]:
    """The address of a server that offers the old judge's protocol."""
    app = create_app(LabelJudge())
    with serving(app) as url:
        yield url


def old_rows() -> Iterator[dict[str, str]]:
    """Rows as the OpenRLHF system had them: two of every case, in turn vanilla and adversarial."""
    with SAMPLE.open(encoding="utf-8") as file:
        pairs = [row for row in csv.DictReader(file) if row["Error Flag"] == "1"]
    for number, pair in enumerate(pairs[:40]):
        for label in ("harmful", "benign"):
            kind = "adversarial" if number % 2 else "vanilla"
            yield four_way(f"{kind}_{label}", pair["Text"], pair["Corrected Text"])


def typed(block: str, url: str, folder: Path) -> list[str]:
    """Runs the commands of a block in ``folder``, and returns them as they were typed on the
    page."""
    lines = [
        line
        for line in block.replace("\\\n", " ").splitlines()
        if not line.startswith(("#", NOT_RUN))
    ]
    for line in lines:
        command = re.sub(r"http://localhost:\d+", url, line)
        if "main_ppo" in command:
            command = (
                re.sub(r"\+recipes=\[?(\w+)\S*", r"+recipes=[\1,cpu,tiny]", command) + f" {SHORT}"
            )
        shell = ["bash", "-euc", f"export PATH={sys.prefix}/bin:$PATH\n{command} 2>&1"]
        done = subprocess.run(shell, cwd=folder, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}"
    return lines


def test_quick_start_of_the_older_system_runs_as_the_page_gives_it(
    judges: str, tmp_path: Path
) -> None:
    old = tmp_path / "data/medical_openrlhf/medec_ms_train.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text("".join(json.dumps(row) + "\n" for row in old_rows()))
    *_, command = typed(QUICK_START, judges, tmp_path)
    run = OmegaConf.load(tmp_path / "runs/old" / CONFIG_FILE)
    for key, value in re.findall(r"(?:^| )([a-z_]+\.[\w.]+)=(\S+)", command):
        if key != "selfplay.judge_server.url" and f"{key}=" not in SHORT:
            assert OmegaConf.select(run, key) == OmegaConf.create(f"x: {value}").x, key
    games = list(read_games(tmp_path / "runs/old" / GAMES_FILE))
    assert len(games) == 32
    labels = {(str(game.category.value), str(game.spec.target_label.value)) for game in games}
    assert ("adversarial_benign", "safe") in labels and len(labels) == 4
    assert {game.scheme for game in games} == {"medical_general_sum"}
    assert {name for game in games for parts in game.rewards.values() for name in parts} <= TABLE
