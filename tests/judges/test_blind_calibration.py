"""The blind reader, measured: real errors, clean notes, and changes that nobody can see in the note."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from judges.local_server import serving
from note_files import SAMPLE
from serving import completion
from typer.testing import CliRunner

from experiments.clinic import oracle
from medserl_agentloop.cli import app
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.edit_rules import UNKNOWABLE
from medserl_agentloop.evaluation.judge_calibration import NOTES, known_notes
from medserl_agentloop.games.medical.edits import compare_notes, split_sentences
from medserl_agentloop.games.medical.judges.report import read_report

ORACLE = "experiments.clinic:OracleJudge"
NOTE = "A 54-year-old man has a swollen left knee since 5 days ago. He takes ibuprofen at home. Gout is likely."


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("age", r"A 5[1267]-year-old man"),
        ("side", "right knee"),
        ("time", r"since [2-46-9] days ago"),
        ("alternative", "takes naproxen at"),
    ],
)
def test_a_rule_changes_one_fact_and_nothing_else(rule: str, changed: str) -> None:
    after = UNKNOWABLE[rule](NOTE, random.Random(0))
    assert after is not None and re.search(changed, after)
    edit = compare_notes(NOTE, after)
    assert (edit.sentences, edit.words) == (1, 1)


@pytest.mark.parametrize(
    ("rule", "note"),
    [
        ("age", NOTE + " He is old for his age of 54."),
        ("age", "A 4-year-old boy has fever."),
        ("side", NOTE + " The left knee is warm."),
        ("side", "Both knees are swollen, the left hemisphere is not."),
        ("time", NOTE + " It began long ago."),
        ("alternative", "He takes ibuprofen 400 mg at home."),
        ("alternative", "He takes ibuprofen at home. Stop ibuprofen."),
    ],
)
def test_a_fact_that_something_else_in_the_note_decides_is_left_alone(rule: str, note: str) -> None:
    assert UNKNOWABLE[rule](note, random.Random(0)) is None


def test_each_kind_is_limited_and_the_choice_can_be_repeated() -> None:
    cases = read_files([SAMPLE]).cases
    notes = known_notes(cases, 7, seed=3)
    assert notes == known_notes(cases, 7, seed=3)
    assert Counter(known.kind for known in notes) == dict.fromkeys(NOTES, 7)
    assert all(set(known.wrong) <= set(split_sentences(known.after)) for known in notes)


def read_by_the_oracle(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """A reader that knows the toy clinic, and cannot tell in every fifth question."""
    lines = re.findall(r"^(\d+)\| (.*)$", body["messages"][0]["content"], re.MULTILINE)
    truth = oracle(" ".join(text for _, text in lines))
    wrong = truth.errors[0][0] + 1 if truth.errors else None
    error = "abstain" if number % 5 == 4 else "present" if wrong else "absent"
    return completion(json.dumps({"reason": "", "error": error, "sentence": wrong if error == "present" else None}))


def calibrate(output: Path, *settings: str) -> Any:
    command = ["judge", "calibrate", "--judge", ORACLE, "--input", str(SAMPLE), "--limit", "10"]
    command += ["--output", str(output), *(part for setting in settings for part in ("--set", setting))]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, command)


def test_the_command_measures_recall_false_alarms_and_unknowable_errors(tmp_path: Path) -> None:
    with serving(read_by_the_oracle) as server:
        options = [f"blind.url={server.url}/v1", "blind.model=reader", "blind.readings=2", "blind.needed=1"]
        done = calibrate(tmp_path / "report.json", *options)
    assert done.exit_code == 0, done.output
    report = read_report(tmp_path / "report.json")
    groups = {group.kind: group for group in report.blind if group.sort is None}
    assert {kind: group.passed.items for kind, group in groups.items()} == dict.fromkeys(NOTES, 10)
    assert groups["error"].passed.hits >= 9 and groups["error"].found.hits >= 14
    assert groups["clean"].found.hits == groups["unknowable"].passed.hits == 0
    assert sum(group.abstained.hits for group in groups.values()) == 12
    assert report.specificity.hits == report.specificity.items  # the gate does not change the judge's own rates
    assert "no answer" not in done.output  # nor void any of its games
    assert "blind reader" in done.output and "passes 1 of 2" in done.output


def test_a_reader_that_never_answers_is_an_error(tmp_path: Path) -> None:
    with serving(lambda number, body: {"nothing": 1}) as server:
        options = [f"blind.url={server.url}/v1", "blind.model=reader", "blind.readings=1", "judge_server.retries=0"]
        done = calibrate(tmp_path / "report.json", *options)
    assert done.exit_code == 2 and "the blind reader answered none of 30 questions" in done.output
