"""The output of ``--json`` is JSON and nothing else, whatever is logged beside it."""

import json
import subprocess
import sys

import pytest
import typer

from medserl_agentloop.cli import app

COMMANDS = {"doctor": [], "plan": ["quickstart"]}
BORDER = "-- the next --\n"
ALL = f"""
import sys
from medserl_agentloop.cli import app
for command in sys.argv[1:]:
    app([*command.split(), "--json"], standalone_mode=False)
    sys.stdout.write({BORDER!r})
"""


def test_every_command_with_json_is_here() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with_json = [name for name, command in commands.items() if any("--json" in param.opts for param in command.params)]
    assert sorted(with_json) == sorted(COMMANDS)


@pytest.mark.slow
def test_json_can_be_piped() -> None:
    program = [sys.executable, "-c", ALL, *(" ".join([name, *words]) for name, words in COMMANDS.items())]
    done = subprocess.run(program, capture_output=True, text=True)
    *printed, rest = done.stdout.split(BORDER)
    assert len(printed) == len(COMMANDS) and not rest and all(map(json.loads, printed)), done.stderr
    assert "runs on the CPU" in done.stderr
