"""The reward manager: judges one finished game and rewards each role for its own turn.

verl runs it in its reward-loop workers, beside the generation of other games, and keeps two things
of the answer: ``reward_score`` and ``reward_extra_info``. The judged record travels in the latter
to :meth:`SelfPlayOutput.as_dict`, which places the rewards.
"""

from __future__ import annotations

from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.judges import build_judge, judge_game
from medserl_agentloop.games.medical.judges.report import read_report
from medserl_agentloop.games.medical.records import GameRecord, Outcome
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.games.medical.rewards.correction import corrected
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.games.medical.validation import answer_facts


class PerTurnRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl is untyped
    """Rewards per role, chosen by ``reward.reward_manager.source=importlib``.

    Args:
        config: The whole run's config.
        tokenizer: The policy's tokenizer; unused, records hold text.
        compute_score: verl's custom reward function; unused, schemes take its place.
        reward_router_address: Where verl serves a reward model, for judges that ask one.
        reward_model_tokenizer: That model's tokenizer.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        selfplay = SelfPlayConfig.from_run(config)
        self._judge = build_judge(selfplay, reward_router_address, config.reward.reward_model.model_path)
        self._scheme_name, self._scheme = selfplay.reward, load_scheme(selfplay.reward)
        if selfplay.correct_judge:
            rates = read_report(selfplay.judge_report or "").rates
            assert rates is not None  # judges.startup
            self._scheme_name, self._scheme = f"{selfplay.reward}, corrected", corrected(self._scheme, rates)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Judge and score the game of one trajectory.

        Returns:
            ``reward_score``: both roles' rewards summed, 0.0 for a void game. ``reward_extra_info``:
            the judged record, the texts that the official scores need, and the numbers that verl turns
            into validation metrics (None where a game has no such number).
        """
        fields = data[len(data) - 1].non_tensor_batch["tool_extra_fields"]
        if GAME_KEY not in fields:
            raise ValueError(
                "this trajectory holds no game: PerTurnRewardManager only scores rows with "
                "agent_name=medserl_selfplay (see tool_configs/agent_loop.yaml)"
            )
        record = GameRecord.model_validate(fields[GAME_KEY])
        await judge_game(self._judge, record)
        record.scheme, record.rewards = self._scheme_name, self._scheme(record)
        rewards = {role: record.reward(role) for role in Role}
        return {
            "reward_score": sum(r for r in rewards.values() if r is not None),
            "reward_extra_info": {**validation_numbers(record), **answer_facts(record), GAME_KEY: record.to_json()},
        }


def validation_numbers(record: GameRecord) -> dict[str, float | None]:
    """One game as numbers for verl's validation metrics.

    ``acc`` is the assessor's accuracy; verl reports it as the core metric of each category.
    """
    outcome = record.outcome
    assessed = record.assessment is not None and outcome is not Outcome.VOID
    right = outcome in (Outcome.CORRECT_DETECTION, Outcome.CORRECT_REJECTION)
    attack = record.attack
    return {
        "acc": float(right) if assessed else None,
        "attacker_reward": record.reward(Role.ATTACKER),
        "assessor_reward": record.reward(Role.ASSESSOR),
        "attack_valid": None if attack is None else float(attack.invalid is None),
        "undetected": float(outcome is Outcome.MISSED_ERROR) if attack and assessed else None,
        "void": float(outcome is Outcome.VOID),
    }
