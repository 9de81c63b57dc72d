"""The old systems' quick start and overrides, as docs/migration.md gives them, on the CPU with the tiny player."""

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from note_files import SAMPLE
from omegaconf import OmegaConf
from real_runs import REPOSITORY, environment
from serving import completion, serving
from test_docs import blocks

from medserl_agentloop.core.step_file import CONFIG_FILE, GAMES_FILE
from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.judges.protocol import create_app
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

QUICK_START, OVERRIDES = (block for block in blocks(REPOSITORY / "docs/migration.md", "bash") if "main_ppo" in block)
NOT_RUN = "make quickstart"  # test_newcomer.py runs it
SHORT = (
    "selfplay.budget.attacker_reasoning=32 selfplay.budget.assessor=32 actor_rollout_ref.rollout.n=1 "
    "trainer.total_training_steps=1 data.val_max_samples=4"
)
"""What a page's run is shortened by. The recipe's model and engine become the tiny player's: cpu, tiny."""


@pytest.fixture
def judges() -> Iterator[str]:
    """The address of a server that offers the old judge's protocol and a chat model that finds no error."""
    app = create_app(LabelJudge())

    @app.post("/v1/chat/completions")
    def chat() -> Any:
        return completion(json.dumps({"reason": "none", "error": "absent", "realistic": None}))

    with serving(app) as url:
        yield url


def old_rows() -> Iterator[dict[str, str]]:
    """Rows as the OpenRLHF system had them: two of every case, in turn vanilla and adversarial."""
    with SAMPLE.open(encoding="utf-8") as file:
        pairs = [row for row in csv.DictReader(file) if row["Error Flag"] == "1"]
    for number, pair in enumerate(pairs[:40]):
        kind = "adversarial" if number % 2 else "vanilla"
        for label, note in (("harmful", pair["Text"]), ("benign", pair["Corrected Text"])):
            texts = dict.fromkeys(("vanilla", "adversarial"), "") | {kind: note}
            completed = "Safe" if (kind, label) == ("vanilla", "benign") else ""
            yield texts | {"completion": completed, "data_type": f"{kind}_{label}"}


def typed(block: str, url: str, folder: Path) -> list[str]:
    """Runs the commands of a block in ``folder``, and returns them as they were typed on the page."""
    lines = [line for line in block.replace("\\\n", " ").splitlines() if not line.startswith(("#", NOT_RUN))]
    for line in lines:
        command = re.sub(r"http://localhost:\d+", url, line)
        if "main_ppo" in command:
            command = re.sub(r"\+recipes=\[?(\w+)\S*", r"+recipes=[\1,cpu,tiny]", command) + f" {SHORT}"
        done = subprocess.run(
            ["bash", "-euc", f"export PATH={sys.prefix}/bin:$PATH\n{command}"],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}"
    return lines


def test_the_quick_start_and_the_overrides_run_as_the_page_gives_them(judges: str, tmp_path: Path) -> None:
    old = tmp_path / "data/medical_openrlhf/medec_ms_train.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text("".join(json.dumps(row) + "\n" for row in old_rows()))
    (tmp_path / "MEDEC-MS-TrainingSet.csv").write_bytes(SAMPLE.read_bytes())
    played = {}
    for block, name in ((QUICK_START, "old"), (OVERRIDES, "medec_ms")):
        *_, command = typed(block, judges, tmp_path)
        run = OmegaConf.load(tmp_path / "runs" / name / CONFIG_FILE)
        for key, value in re.findall(r"(?:^| )([a-z_]+\.[\w.]+)=(\S+)", command):
            if key != "selfplay.judge_server.url":
                assert OmegaConf.select(run, key) == OmegaConf.create(f"x: {value}").x, key
        played[name] = list(read_games(tmp_path / "runs" / name / GAMES_FILE))
    assert len(played["old"]) == len(played["medec_ms"]) == 64

    labels = {(str(game.category.value), str(game.spec.target_label.value)) for game in played["old"]}
    assert ("adversarial_benign", "safe") in labels and len(labels) == 4
    assert {name for game in played["old"] for name in game.rewards["assessor" if game.assessment else "attacker"]} <= {
        "detection", "realism", "format",
    }  # fmt: skip
    assert Counter(game.scheme for game in played["old"]) == {"medical_general_sum": 64}
