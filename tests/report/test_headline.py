"""What a run has gained, as one sentence, and the list of runs."""

import json
from pathlib import Path

import pytest
from invoking import invoke

from medserl_agentloop.core.step_file import CONFIG_FILE, METRICS_FILE, StepFile
from medserl_agentloop.report import curves, headline


def run_at(folder: Path, *validations: dict[str, float], game: str = "medical") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"selfplay": {"game": game}}))
    rows = ({"step": 4 * number} | row for number, row in enumerate(validations))
    StepFile(folder / METRICS_FILE).append(rows)
    return folder


def validated(
    recall: float, alarms: float, notes: int = 200, data: str = "toy"
) -> dict[str, float]:
    return {
        f"val-aux/{data}/recall": recall,
        f"val-aux/{data}/false_positive_rate": alarms,
        f"val-aux/{data}/notes": notes,
        f"val-core/{data}/f1": 0.5,
    }


def test_the_headline_goes_from_the_first_validation_to_the_last(tmp_path: Path) -> None:
    run = run_at(tmp_path, validated(0.55, 0.15), validated(0.7, 0.1), validated(0.89, 0.0))
    assert headline(run) == "errors found 55 → 89 %, false alarms 15 → 0 %, 200 held-out notes"
    found = {one.label: one.values[4] for one in curves(run)}
    assert found == {"errors found": 0.7, "false alarms": 0.1}


def test_one_validation_is_one_number_and_none_is_no_headline(tmp_path: Path) -> None:
    once = headline(run_at(tmp_path / "once", validated(0.55, 0.15)))
    assert once == "errors found 55 %, false alarms 15 %, 200 held-out notes"
    assert headline(run_at(tmp_path / "never", {"selfplay/games": 8.0})) is None
    other = run_at(tmp_path / "other", validated(0.5, 0.1), game="kuhn_poker")
    assert headline(other) is None


def test_each_of_two_data_sets_has_its_own_part(tmp_path: Path) -> None:
    both = validated(0.5, 0.1) | validated(0.6, 0.2, 30, "medec")
    said = headline(run_at(tmp_path, both)) or ""
    assert "toy: errors found 50 %" in said and "medec: errors found 60 %" in said


def test_show_without_a_name_lists_the_runs_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("show").exit_code == 2
    run_at(Path("runs/one"), validated(0.5, 0.1), validated(0.9, 0.0))
    run_at(Path("runs/seeds/1"), {"selfplay/games": 8.0})
    listed = invoke("show")
    assert listed.exit_code == 0
    first, second = (line for line in listed.output.splitlines() if "runs/" in line)
    assert "runs/seeds/1" in first and "runs/one" in second and "4" in second
    assert "50 → 90" in second
