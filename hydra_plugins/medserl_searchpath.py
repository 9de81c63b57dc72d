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

CONFIGS = {
    "main_ppo.py": "ppo_trainer",
    "sft_trainer_ray.py": "sft_trainer_engine",
}  # of verl's programs


class MedserlSearchPathPlugin(SearchPathPlugin):
    """Appends the folder that holds ``recipes/``; verl's own config groups come first."""

    checked = False

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(
            provider="medserl-agentloop", path=f"file://{resource('recipes').parent}"
        )
        config, overrides = CONFIGS.get(Path(sys.argv[0]).name), sys.argv[1:]
        options = any(one.startswith("-") for one in overrides)
        if config and not (options or self.checked):
            MedserlSearchPathPlugin.checked = True  # composing asks this plugin again
            from medserl_agentloop.core.run_check import composition

            try:
                if missing := composition.without_a_recipe(config, overrides):
                    raise ValueError(missing)
                if any("recipes=" in one for one in overrides):
                    composition.compose_explained(config, *overrides)
            except ValueError as error:  # Hydra would say it in up to 40 lines, "+" its advice
                raise SystemExit(f"[medserl] {error}") from None


# The node takes any key, so that a misspelt one reaches the start-up check, which names the nearest
# right one. Hydra itself would advise to write "+" before it, and with that the run would start
# without the setting.
ConfigStore.instance().store(
    group="recipes",
    name="selfplay_node",
    package="_global_",
    node=OmegaConf.create({"selfplay": OmegaConf.create({}, flags={"struct": False})}),
)
