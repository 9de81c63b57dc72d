"""The rules of the medical game know no framework: importing all of them loads none."""

import subprocess
import sys

import pytest

IMPORT_THE_RULES = """
import importlib, pkgutil, sys
import medserl_agentloop.games.medical as game
for module in pkgutil.iter_modules(game.__path__):
    if module.name not in ("config", "interaction", "judges", "prompting"):
        importlib.import_module(f"{game.__name__}.{module.name}")
print(*sys.modules)
"""


@pytest.mark.slow
def test_importing_the_rules_loads_no_framework() -> None:
    command = [sys.executable, "-c", IMPORT_THE_RULES]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    rules = ("rules", "parsing", "edits", "rewards", "records")
    assert {f"medserl_agentloop.games.medical.{name}" for name in rules} <= loaded
    assert not {"torch", "verl", "ray", "transformers", "tensordict", "hydra", "omegaconf"} & loaded
