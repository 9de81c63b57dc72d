"""A game as text: readable, complete, and safe whatever the model wrote."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import REWRITTEN, assessment_text, attack_text, extra_info
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import GameRecord, Judgement
from medserl_agentloop.games.medical.rewards import medserl
from medserl_agentloop.games.medical.rules import EditLimits, Game
from medserl_agentloop.games.medical.types import GameSpec
from medserl_agentloop.report.terminal import show_run


def game(step: int = 1, *, attack: str | None = None, assessment: str | None = None) -> GameRecord:
    played = Game(GameSpec.from_extra_info(extra_info("adversarial_benign")), EditLimits(), MEDSERL)
    played.play(attack_text() if attack is None else attack)
    if played.next_role is not None:
        played.play(assessment_text() if assessment is None else assessment)
    record = played.record
    record.step = step
    record.judgement = Judgement(judge="labels", label=record.spec.target_label)
    record.rewards = medserl(record)
    return record


def shown(folder: Path, records: list[GameRecord], **kwargs: Any) -> str:
    StepFile(folder / GAMES_FILE).append(r.to_json() for r in records)
    out = io.StringIO()
    show_run(folder, Console(file=out, width=160, color_system=None), **kwargs)
    return out.getvalue()


def test_a_game_shows_the_change_the_verdict_and_every_reward_component(tmp_path: Path) -> None:
    text = shown(tmp_path, [game()])
    assert "[-candida.-] {+giardia.+}" in text
    assert "assessor: harmful" in text
    assert "attacker -1.01 = game -1.00  format +0.00  faithfulness -0.01" in text
    assert "assessor +1.50 = game +1.00  format +0.00  sentence +0.50" in text


def test_the_first_and_last_step_stand_side_by_side(tmp_path: Path) -> None:
    StepFile(tmp_path / METRICS_FILE).append({"step": s, "actor/grad_norm": s / 10} for s in (1, 2, 3))
    text = shown(tmp_path, [game(1), game(2), game(3, assessment=assessment_text("safe"))])
    assert "step 1" in text and "step 3" in text and "step 2" not in text.split("role metrics")[1]
    assert "0.1" in text and "0.3" in text


@pytest.mark.parametrize("hostile", ["[bold red]markup[/]", "\x1b[31mescape", "[/]", "\x07bell"])
def test_model_text_is_shown_as_text(tmp_path: Path, hostile: str) -> None:
    text = shown(tmp_path, [game(attack=attack_text(REWRITTEN.replace("giardia", hostile), reasoning=hostile))])
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold red]" in text or "bold" not in hostile


def test_a_chosen_game_is_shown(tmp_path: Path) -> None:
    text = shown(tmp_path, [game(1), game(2, attack="nothing")], game=2)
    assert "game 2 of 2" in text and "invalid: unparsed" in text


@pytest.mark.parametrize("number", [0, 3])
def test_a_game_that_is_not_there_is_an_error_with_the_range(tmp_path: Path, number: int) -> None:
    with pytest.raises(ValueError, match="holds games 1 to 2"):
        shown(tmp_path, [game(), game()], game=number)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert result.exit_code == 2
    assert "give the folder of a run" in result.output
