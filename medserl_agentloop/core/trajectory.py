"""One game as one trajectory: turns in, verl's ``AgentLoopOutput`` with per-role columns out.

A trajectory is ``attacker prompt | attacker response | assessor prompt | assessor response``; what
follows the first prompt is verl's *response*, masked 0 on the assessor prompt. Called by the agent
loop; verl's TransferQueue worker calls :meth:`SelfPlayOutput.as_dict` after the reward manager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import NO_ROLE_ID, Role

GAME_KEY = "medserl_game"
"""Key of the game's record, in ``extra_fields`` and, judged, in ``reward_extra_info``."""


@dataclass
class TrajectoryTurn:
    """One generated turn: the tokens it was generated from and the tokens it gave.

    Attributes:
        prompt_ids: What stands before the response and after the turn before it.
        response_ids: The generated tokens.
        log_probs: Log-probability of each of them under the sampling distribution; None where the
            server did not give them.
    """

    role: Role
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float] | None


@dataclass
class Trajectory:
    """The turns of one game, in order.

    Attributes:
        isolated: Whether every turn had a context of its own.
        has_log_probs: Whether verl gets the sampled tokens' log-probs. One answer for the whole run: its
            rows share their columns.
    """

    isolated: bool
    has_log_probs: bool
    turns: list[TrajectoryTurn] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All tokens so far, as one conversation."""
        return [t for turn in self.turns for t in (*turn.prompt_ids, *turn.response_ids)]

    @property
    def response_tokens(self) -> int:
        """Tokens so far that verl counts as response: all but the first prompt."""
        return sum(len(t.prompt_ids) + len(t.response_ids) for t in self.turns) - (
            len(self.turns[0].prompt_ids) if self.turns else 0
        )

    def to_output(
        self, record: GameRecord, metrics: AgentLoopMetrics, extra_fields: dict[str, Any], pad_token_id: int
    ) -> SelfPlayOutput:
        """The trajectory as verl wants it, not yet judged.

        verl can hold neither an empty prompt nor an empty response. A game in which the policy took no
        turn, or was aborted before its first token, gets a masked padding token instead. A turn without
        log-probs gets zeros where its run has them; its game must be void, so that nobody reads them.
        """
        first = self.turns[0] if self.turns else TrajectoryTurn(Role.ASSESSOR, [pad_token_id], [], None)
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        role_ids: list[int] = []
        turns = self.turns or [first]
        for turn in turns:
            if turn is not first:
                ids += turn.prompt_ids
                mask += [0] * len(turn.prompt_ids)
                log_probs += [0.0] * len(turn.prompt_ids)
                role_ids += [NO_ROLE_ID] * len(turn.prompt_ids)
            ids += turn.response_ids
            mask += [1] * len(turn.response_ids)
            log_probs += [0.0] * len(turn.response_ids) if turn.log_probs is None else turn.log_probs
            role_ids += [turn.role.id] * len(turn.response_ids)
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in turns]
        if not ids:
            ids, mask, log_probs, role_ids = [pad_token_id], [0], [0.0], [NO_ROLE_ID]
            lengths[-1] += 1
        return SelfPlayOutput(
            prompt_ids=first.prompt_ids,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs if self.has_log_probs else None,
            role_ids=role_ids,
            context_lengths=lengths if self.isolated else [sum(lengths)],
            num_turns=2 * len(self.turns),
            metrics=metrics,
            extra_fields={**extra_fields, GAME_KEY: record.to_json()},
        )


class SelfPlayOutput(AgentLoopOutput):  # type: ignore[misc]  # verl is untyped
    """An agent-loop output whose columns tell the roles apart.

    Attributes:
        role_ids: For each response token its role's id, ``NO_ROLE_ID`` on observations.
        context_lengths: Lengths of the private contexts in order; they sum to the whole sequence.
    """

    role_ids: list[int]
    context_lengths: list[int]

    def as_dict(self) -> dict[str, Any]:
        """Columns for the TransferQueue: verl's, and

        - ``rm_scores`` (T,) float32: each role's reward on the last token of its own response;
        - ``role_ids`` (T,) int64;
        - ``context_lengths`` (number of contexts,) int64.

        A void game has a mask of zeros and no rewards.

        Raises:
            ValueError: The reward manager did not return a judged game.
        """
        columns: dict[str, Any] = super().as_dict()
        role_ids = columns["role_ids"] = torch.tensor(columns["role_ids"], dtype=torch.int64)
        columns["context_lengths"] = torch.tensor(columns["context_lengths"], dtype=torch.int64)
        extra = columns["extra_fields"]
        info = dict(extra.get("reward_extra_info") or {})
        judged = info.pop(GAME_KEY, None)
        if judged is None:
            raise ValueError(
                "the reward manager returned no judged game: self-play needs "
                "reward.reward_manager.name=PerTurnRewardManager, or a subclass of it"
            )
        record = GameRecord.model_validate(judged)
        # The record leaves reward_extra_info: verl turns all that stays there into metrics.
        columns["extra_fields"] = {**extra, "reward_extra_info": info, GAME_KEY: judged}

        rm_scores = torch.zeros(role_ids.shape, dtype=torch.float32)
        for role, components in record.rewards.items():
            own = (role_ids == role.id).nonzero()
            if len(own):  # an opponent is rewarded in the record alone
                rm_scores[own[-1]] = sum(components.values())
        columns["rm_scores"] = rm_scores
        if record.void is not None:
            columns["response_mask"] = torch.zeros_like(columns["response_mask"])
        return columns
