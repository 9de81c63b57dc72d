"""The rules of the medical game know no framework: importing all of them loads none."""

import json
import subprocess
import sys

import pytest

LIST_LOADED = """
import importlib, json, pkgutil, sys
import medserl_agentloop.games.medical as game
NOT_RULES = ("config", "interaction", "judges", "prompting")
names = [m.name for m in pkgutil.iter_modules(game.__path__, game.__name__ + ".")
         if m.name.split(".")[3] not in NOT_RULES]
for name in names:
    importlib.import_module(name)
print(json.dumps({"game": names, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""
FRAMEWORKS = {"torch", "verl", "ray", "transformers", "tensordict", "hydra", "omegaconf"}


@pytest.mark.slow
def test_importing_the_rules_loads_no_framework() -> None:
    answer = subprocess.run([sys.executable, "-c", LIST_LOADED], capture_output=True, text=True, check=True).stdout
    found = json.loads(answer.splitlines()[-1])
    assert {f"medserl_agentloop.games.medical.{m}" for m in ("rules", "parsing", "edits", "rewards", "records")} <= set(
        found["game"]
    )
    assert not FRAMEWORKS & set(found["loaded"])
