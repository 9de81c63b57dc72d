"""What ``--json`` prints is JSON and nothing else, whatever is logged beside it."""

import json
import subprocess
import sys

import pytest
import typer

from medserl_agentloop.cli import app

COMMANDS = {"doctor": [], "plan": ["quickstart"]}


def test_every_command_with_json_is_here() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with_json = [name for name, command in commands.items() if any("--json" in param.opts for param in command.params)]
    assert sorted(with_json) == sorted(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_json_can_be_piped(command: str) -> None:
    program = [sys.executable, "-c", "from medserl_agentloop.cli import app; app()", command, *COMMANDS[command]]
    done = subprocess.run([*program, "--json"], capture_output=True, text=True)
    assert json.loads(done.stdout), done.stderr
    assert ("runs on the CPU" in done.stderr) == (command == "plan")
