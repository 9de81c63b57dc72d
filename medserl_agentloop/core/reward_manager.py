"""The reward manager: has one finished game scored, in verl's reward-loop workers.

The scored record travels in ``reward_extra_info`` to :meth:`SelfPlayOutput.as_dict`, which places
the rewards.
"""

from __future__ import annotations

from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from medserl_agentloop.core.config import SelfPlayConfig, game_class
from medserl_agentloop.core.liveness import ends_the_run
from medserl_agentloop.core.trajectory import GAME_KEY


class PerTurnRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl is untyped
    """Rewards per role (``reward.reward_manager.source=importlib``).

    ``compute_score`` is unused: the game scores.
    """

    def __init__(
        self, config: Any, tokenizer: Any, compute_score: Any = None, **of_verl: Any
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        selfplay = SelfPlayConfig.from_run(config)
        self._game = game_class(selfplay.game)(selfplay)
        self._game.use_reward_model(
            of_verl.get("reward_router_address"), config.reward.reward_model.model_path
        )

    @ends_the_run
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one game: the sum of its rewards (0.0 if void), and with it the record and
        validation's numbers.
        """
        fields = data[len(data) - 1].non_tensor_batch["tool_extra_fields"]
        record: Any = fields[GAME_KEY].model_copy(deep=True)
        turns = [turn.role for turn in record.turns]
        await self._game.score(record)
        # A user's code may have put anything into it; what is paid must be what is written down.
        record = self._game.Record.model_validate(record.model_dump())
        if not set(record.rewards) <= set(self._game.roles):
            raise ValueError(
                f"the game rewards {list(record.rewards)}, and its roles are {self._game.roles}"
            )
        for number in record.turn_rewards:
            if not (0 <= number < len(turns) and turns[number] in record.rewards):
                raise ValueError(
                    f"the game has turn_rewards for turn {number}, and its turns, counted from 0, "
                    f"are of {turns}; rewarded are {list(record.rewards)}"
                )
        record.void_unless_rewards_are_numbers()
        numbers = self._game.view.validation_numbers(record)
        return {
            "reward_score": sum(sum(components.values()) for components in record.rewards.values()),
            "reward_extra_info": {**numbers, GAME_KEY: record},
        }
