"""Lets Hydra find this package's recipes: ``python -m verl.trainer.main_ppo +recipes=NAME``.

Hydra imports every module of the ``hydra_plugins`` namespace by itself.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from medserl_agentloop.paths import resource


class MedserlSearchPathPlugin(SearchPathPlugin):
    """Appends the folder that holds ``recipes/``; verl's own config groups come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="medserl-agentloop", path=f"file://{resource('recipes').parent}")
