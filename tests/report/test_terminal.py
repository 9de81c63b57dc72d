"""A game as text: readable, complete, and safe whatever the model wrote."""

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, paid
from hypothesis import given
from hypothesis import strategies as st
from invoking import invoke
from rich.console import Console

from medserl_agentloop.command_line import visible
from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.evaluation.tournament import ratings, shares, tables
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.report import show_run

game = partial(paid, Outcome.CORRECT_DETECTION, step=1)


def shown(folder: Path, records: list[MedicalRecord], width: int = 160, **kwargs: Any) -> str:
    StepFile(folder / GAMES_FILE).append(r.to_json() for r in records)
    out = io.StringIO()
    show_run(folder, Console(file=out, width=width, color_system=None), **kwargs)
    return out.getvalue()


def test_a_game_shows_the_change_the_verdict_and_every_reward_component(tmp_path: Path) -> None:
    text = shown(tmp_path, [game(attack={"note": ERROR_NOTE})])
    assert "[-heparin-] {+warfarin+}" in text and "assessor: harmful" in text
    assert re.search(r"attacker -1\.\d\d = game -1\.00  format \+0\.00  faithfulness -0", text)
    assert "assessor +1.00 = game +1.00  format +0.00" in text


def test_the_first_and_last_step_stand_side_by_side(tmp_path: Path) -> None:
    StepFile(tmp_path / METRICS_FILE).append({"step": s, "actor/grad_norm": s / 10} for s in (1, 2, 3))
    text = shown(tmp_path, [game(step=step) for step in (1, 2, 3)])
    assert "step 1" in text and "step 3" in text and "step 2" not in text.split("metric")[1]
    assert "0.1" in text and "0.3" in text
    StepFile(tmp_path / "of one step" / METRICS_FILE).append([{"step": 4, "actor/grad_norm": 1.0}])
    one = shown(tmp_path / "of one step", [game(step=4)])
    assert one.count("step 4 ") == 2  # the game's, and one column


HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""What a terminal obeys or does not show, other than a newline."""


@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b\x0e\0\x7f\x9b\u202e\u2066\u200f\ud800\r\t[]")))
def test_no_text_reaches_the_terminal_with_what_it_would_obey(text: str) -> None:
    assert not HIDDEN.search(visible(text))
    assert visible(text).count("\n") == text.count("\n")
    assert not text.isascii() or not text.isprintable() or visible(text) == text


HOSTILE = "[bold red]x[/] [/] \x1b[31m \x07 \x0e \0 \x7f \x9b2J \u202e \u2066 \u200f \ud800 \r"


def hostile() -> MedicalRecord:
    """A game with such text wherever others than we may write."""
    wrote = {"attack": {"note": f"{CLEAN_NOTE} {HOSTILE}", "reasoning": HOSTILE}, "players": {"assessor": HOSTILE}}
    opponent = OpponentRecord(role="attacker", kind="endpoint", version=HOSTILE)
    record = game(scheme=HOSTILE, opponent=opponent, **wrote)
    return record.model_copy(update={"void": HOSTILE, "rewards": {role: {HOSTILE: 1.0} for role in Role}})


def test_what_others_wrote_is_shown_as_text_wherever_it_stands(tmp_path: Path) -> None:
    text = shown(tmp_path, [hostile()], width=1000)
    assert not HIDDEN.search(text)
    # In the reasoning and the rewritten note, as component of two roles, as reason, player and opponent.
    assert text.count("[bold red]x[/] [/] \\x1b[31m \\x07 \\x0e \\x00 \\x7f \\x9b2J \\u202e") == 7


@pytest.mark.parametrize("command", ["show", "report", "compare"])
def test_half_characters_stop_no_command(tmp_path: Path, command: str) -> None:
    run = tmp_path / "run"
    StepFile(run / GAMES_FILE).append([hostile().to_json()])
    result = invoke(command, run, *([run] if command == "compare" else []))
    assert result.exit_code == 0, result.output


def test_the_names_of_served_players_are_shown_as_text() -> None:
    names = [HOSTILE.replace("\ud800", "") + number for number in "12"]
    record = game().model_copy(update={"players": dict(zip(("attacker", "assessor"), names, strict=True))})
    out = io.StringIO()
    found = shares([record])
    for table in tables(found, ratings(found), names):
        Console(file=out, width=400, color_system=None).print(table)
    assert "[bold red]x[/] [/] \\x1b[31m" in out.getvalue() and not HIDDEN.search(out.getvalue())


def test_the_chosen_game_is_shown_or_the_latest_that_was_decided(tmp_path: Path) -> None:
    records = [game(), game(), paid(Outcome.INVALID_ATTACK)]
    for number, title in ((None, "game 2 of 3"), (1, "game 1 of 3"), (3, "game 3 of 3")):
        assert title in shown(tmp_path / str(number), records, number=number)
    for wrong in (0, 4):
        with pytest.raises(ValueError, match="holds games 1 to 3"):
            shown(tmp_path / str(wrong), records, number=wrong)
