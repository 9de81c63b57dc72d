"""A run in other tools' forms: a dataset folder that `datasets` loads, and a log that Inspect reads.

Inspect cannot live beside verl. Give the tests its environment with MEDSERL_INSPECT_PYTHON=/path/to/its/python.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from report.test_page import HOSTILE, STEPS, hostile, scored, write_run
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.report import games, turns
from medserl_agentloop.report.export import NOTES
from medserl_agentloop.report.frames import GAMES, TURNS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [scored(o, n, s) for n, o in enumerate(STEPS, start=1) for s in range(2)]
    records += [hostile(), scored(Outcome.CORRECT_REJECTION, 120, category="vanilla_benign")]
    return write_run(tmp_path_factory.mktemp("runs") / "first", records)


def export(run: Path, to: str, output: Path) -> str:
    done = CliRunner().invoke(app, ["export", str(run), "--to", to, "-o", str(output)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_dataset_folder_loads_offline_with_the_columns_of_the_frames(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    export(run, "dataset", tmp_path / "folder")
    loaded = {
        name: datasets.load_dataset(str(tmp_path / "folder"), name, split="train", cache_dir=str(tmp_path / "cache"))
        for name in ("games", "turns")
    }
    assert loaded["games"].column_names[: len(GAMES)] == list(GAMES)
    assert loaded["games"].column_names[-2:] == list(NOTES)
    assert loaded["turns"].column_names == list(TURNS)
    assert [len(loaded["games"]), len(loaded["turns"])] == [len(games(run)), len(turns(run))]
    assert loaded["games"]["outcome"][:] == games(run)["outcome"].tolist()
    of_game = loaded["games"][loaded["turns"]["game"][-1]]
    assert of_game["step"] == 120 and of_game["presented_note"]
    assert HOSTILE.replace("\ud800", "\\ud800") in loaded["turns"]["response"][-2]


def test_the_card_asks_for_the_licence_and_warns(run: Path, tmp_path: Path) -> None:
    export(run, "dataset", tmp_path)
    card = (tmp_path / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["license"] == "unknown" and "Licence: fill in" in card
    assert [config["config_name"] for config in header["configs"]] == ["games", "turns"]
    assert "Not for clinical use" in card and "steps 1 to 120" in card
    assert "- outcomes: missed_error (3)" in card
    assert all(f"| `{name}` |" in card for name in [*GAMES, *NOTES, *TURNS])


def test_a_folder_with_files_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = CliRunner().invoke(app, ["export", str(run), "--to", "dataset", "-o", str(tmp_path)])
    assert done.exit_code == 2 and "is not empty" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_without_inspect_the_user_is_told_how_to_get_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.delitem(sys.modules, "medserl_agentloop.report.inspect_log", raising=False)
    done = CliRunner().invoke(app, ["export", str(run), "--to", "inspect", "-o", str(tmp_path / "x.eval")])
    assert done.exit_code == 2 and "pip install inspect_ai" in done.output


@pytest.mark.slow
def test_export_loads_nothing_that_trains() -> None:
    code = "import sys, medserl_agentloop.cli, medserl_agentloop.report.export; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "verl", "ray", "transformers", "datasets"} & set(loaded)


READ = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1], resolve_attachments=True)
print(json.dumps({
    "trusted": log.eval.viewer.trust_content,
    "clock": log.eval.metadata,
    "means": [score.name for score in log.results.scores],
    "samples": [{
        "calls": [[e.role, e.output.message.text, e.input[-1].text] for e in s.events if e.event == "model"],
        "spans": [[e.name, e.type] for e in s.events if e.event == "span_begin"],
        "times": [e.timestamp.isoformat() for e in s.events],
        "scores": {name: score.value for name, score in s.scores.items()},
        "note": s.input,
    } for s in log.samples],
}))
"""


@pytest.fixture(scope="module")
def inspect_python() -> str:
    python = os.environ.get("MEDSERL_INSPECT_PYTHON")
    if python is None:
        pytest.skip("set MEDSERL_INSPECT_PYTHON to the Python of an environment with inspect_ai, see docs/report.md")
    return python


@pytest.mark.slow
def test_inspect_reads_a_log_with_both_roles_in_order(inspect_python: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.eval"
    command = "from medserl_agentloop.cli import app; app()"
    subprocess.run(
        [inspect_python, "-c", command, "export", str(run), "--to", "inspect", "-o", str(file)], check=True, timeout=250
    )
    done = subprocess.run([inspect_python, "-c", READ, str(file)], check=True, capture_output=True, timeout=250)
    log = json.loads(done.stdout)
    assert log["trusted"] is False and "no clock" in log["clock"]["clock"]
    samples = log["samples"]
    frame = games(run)
    assert [sample["scores"]["outcome"] for sample in samples] == frame["outcome"].tolist()
    assert {"attacker", "assessor"} <= set(log["means"])
    missed, vanilla, wicked = samples[0], samples[-1], samples[-2]
    assert [role for role, *_ in missed["calls"]] == ["attacker", "assessor"]
    assert missed["spans"] == [[name, "role"] for name in ("attacker", "assessor", "judge", "scores")]
    assert [role for role, *_ in vanilla["calls"]] == ["assessor"]
    assert missed["note"] in missed["calls"][0][2] and missed["note"] not in missed["calls"][1][2]
    assert missed["scores"]["assessor"] == pytest.approx(frame["assessor_reward"][0], abs=1e-4)
    assert all(sample["times"] == sorted(set(sample["times"])) for sample in samples)
    assert [text for _, text, _ in wicked["calls"]][1] == HOSTILE.replace("\ud800", "?")
