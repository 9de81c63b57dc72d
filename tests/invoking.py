"""The command ``medserl`` in the test's own process."""

from typing import Any

from typer.testing import CliRunner, Result

from medserl_agentloop.cli import app


def invoke(*arguments: Any) -> Result:
    """Run ``medserl`` with these arguments; its output goes to a wide file, whatever runs the
    tests.
    """
    return CliRunner(env={"COLUMNS": "200", "TTY_COMPATIBLE": "0"}).invoke(
        app, [str(argument) for argument in arguments]
    )
