"""The command ``medserl`` in the test's own process."""

from typing import Any

from typer.testing import CliRunner, Result

from medserl_agentloop.cli import app


def invoke(*arguments: Any) -> Result:
    """What ``medserl`` prints with these arguments into a wide file, and its exit code, whatever runs the tests."""
    return CliRunner(env={"COLUMNS": "200", "TTY_COMPATIBLE": "0"}).invoke(
        app, [str(argument) for argument in arguments]
    )
