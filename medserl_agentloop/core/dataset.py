"""The data set of a run: verl's own, which measures rows by the games that they start.

``recipes/core.yaml`` names it in ``data.custom_cls``.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from medserl_agentloop.core.config import SelfPlayConfig, game_class
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import overlong
from medserl_agentloop.terminal import announce


class SelfPlayDataset(RLHFDataset):  # type: ignore[misc]  # verl is untyped
    """verl's data set. With ``data.filter_overlong_prompts`` it leaves out and counts the rows whose game is too long.

    verl's own filter measures the column ``prompt``; a game renders its prompts itself.
    """

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        if not self.filter_overlong_prompts:
            return dataframe
        selfplay = SelfPlayConfig.from_run(OmegaConf.select(self.config, ".."))
        encoder = ChatEncoder.of_run(self.tokenizer, self.config)
        game = game_class(selfplay.game)(selfplay, encoder)
        rows = list(dataframe["extra_info"])
        fitting = [number for number, facts in enumerate(rows) if not overlong(game.plan(facts, encoder), self.config)]
        announce(
            f"{', '.join(self.data_files)}: data.filter_overlong_prompts leaves out {len(rows) - len(fitting)} of "
            f"{len(rows)} rows"
        )
        return dataframe.select(fitting)
