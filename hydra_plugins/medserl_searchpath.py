"""Lets Hydra find this package's recipes: ``python -m verl.trainer.main_ppo +recipes=NAME``.

Hydra imports every module of the ``hydra_plugins`` namespace by itself.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from medserl_agentloop.paths import resource


class MedserlSearchPathPlugin(SearchPathPlugin):
    """Appends the folder that holds ``recipes/``; verl's own config groups come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(
            provider="medserl-agentloop", path=f"file://{resource('recipes').parent}"
        )


# The node takes any key, so that a misspelt one reaches the start-up check, which names it. Hydra
# itself would advise to write "+" before it, and with that the run would start without the setting.
ConfigStore.instance().store(
    group="recipes",
    name="selfplay_node",
    package="_global_",
    node=OmegaConf.create({"selfplay": OmegaConf.create({}, flags={"struct": False})}),
)
