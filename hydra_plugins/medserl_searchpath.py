"""Lets Hydra find this package's recipes: ``python -m verl.trainer.main_ppo +recipes=NAME``.

Hydra imports every module of the ``hydra_plugins`` namespace by itself.
"""

import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from medserl_agentloop.paths import resource


class MedserlSearchPathPlugin(SearchPathPlugin):
    """Appends the folder that holds ``recipes/``; verl's own config groups come first."""

    checked = False  # composing a config to explain what is wrong with it comes here again

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(
            provider="medserl-agentloop", path=f"file://{resource('recipes').parent}"
        )
        if Path(sys.argv[0]).name == "main_ppo.py" and not MedserlSearchPathPlugin.checked:
            MedserlSearchPathPlugin.checked = True
            _refuse_in_one_sentence(sys.argv[1:])


def _refuse_in_one_sentence(overrides: list[str]) -> None:
    """Exit with one sentence where Hydra would print pages."""
    if any(override.startswith("-") for override in overrides):  # Hydra's own options
        return
    from medserl_agentloop.core import run_check

    wrong = run_check.without_a_recipe(overrides)
    if wrong is None and any("recipes=" in override for override in overrides):
        try:
            run_check.compose_explained(run_check.PPO, overrides)
        except ValueError as error:
            wrong = str(error)
    if wrong is not None:
        raise SystemExit(f"[medserl] {wrong}")


# The node takes any key, so that a misspelt one reaches the start-up check, which names it. Hydra
# itself would advise to write "+" before it, and with that the run would start without the setting.
ConfigStore.instance().store(
    group="recipes",
    name="selfplay_node",
    package="_global_",
    node=OmegaConf.create({"selfplay": OmegaConf.create({}, flags={"struct": False})}),
)
