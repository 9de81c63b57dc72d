"""One game as one trajectory: turns in, verl's ``AgentLoopOutput`` with per-role columns out.

A trajectory is a list of conversations, each owned by a role, in the order in which they began:
``prompt | response | next prompt | response | ...``. Everything after the first prompt is verl's
*response*, masked 0 on all later prompts. verl's TransferQueue worker calls
:meth:`SelfPlayOutput.as_dict` after the reward manager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from medserl_agentloop.core.columns import context_ids
from medserl_agentloop.core.interaction import NO_ROLE_ID
from medserl_agentloop.core.records import GameRecord

# key of the game's record, in ``extra_fields`` and, scored, in ``reward_extra_info``
RECORD_KEY = "medserl_game"


@dataclass
class TrajectoryTurn:
    """One generated turn."""

    role: str
    prompt_ids: list[int]  # what is between the conversation's previous turn and the response
    response_ids: list[int]
    log_probs: list[float] | None  # under the sampling distribution; None if the server gave none
    conversation: str | None = None  # as in ``Turn``, and the number
    number: int = 0
    weights: int | None = None  # their version, where the server says it

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class Trajectory:
    """The turns of one game, in the order of play; without ``isolated`` one conversation.

    ``has_log_probs`` says whether verl gets the sampled tokens' log-probs: all rows of a run do, or
    none.
    """

    roles: Sequence[str]
    isolated: bool
    has_log_probs: bool
    turns: list[TrajectoryTurn] = field(default_factory=list)

    @property
    def conversations(self) -> list[list[TrajectoryTurn]]:
        """The turns of each context, in the order in which the contexts began."""
        contexts: dict[Any, list[TrajectoryTurn]] = {}
        for turn in self.turns:
            owner = (turn.role, turn.conversation) if self.isolated else None
            contexts.setdefault(owner, []).append(turn)
        return list(contexts.values())

    def before(self, role: str, conversation: str | None) -> list[TrajectoryTurn]:
        """The turns that the next turn of ``role`` continues; empty if it opens a context."""
        if not self.isolated:
            return self.turns
        return [
            turn for turn in self.turns if (turn.role, turn.conversation) == (role, conversation)
        ]

    @property
    def response_tokens(self) -> int:
        """Tokens so far that verl counts as response: all but the first prompt."""
        return sum(map(len, self.turns)) - (len(self.turns[0].prompt_ids) if self.turns else 0)

    def to_output(
        self,
        record: GameRecord,
        pad_token_id: int,
        metrics: AgentLoopMetrics | None = None,
        extra_fields: Mapping[str, Any] = {},
    ) -> SelfPlayOutput:
        """The trajectory in verl's format, not yet scored.

        verl does not allow an empty prompt or response, so such a game gets a masked padding token.
        A turn without log-probs gets zeros if the run has log-probs; its game is void, so they are
        not used.
        """
        contexts = self.conversations or [[TrajectoryTurn(self.roles[0], [pad_token_id], [], None)]]
        first = contexts[0][0]
        ids, mask, role_ids, log_probs = list[int](), list[int](), list[int](), list[float]()
        ends: list[PlacedTurn] = []
        for turn in (turn for context in contexts for turn in context):
            prompt_ids, response_ids = [] if turn is first else turn.prompt_ids, turn.response_ids
            asked, said = len(prompt_ids), len(response_ids)
            ids += [*prompt_ids, *response_ids]
            mask += [0] * asked + [1] * said
            log_probs += [0.0] * asked + (turn.log_probs or [0.0] * said)
            role_ids += [NO_ROLE_ID] * asked + [self.roles.index(turn.role) + 1] * said
            if said:
                ends.append((turn.number, turn.role, len(ids) - 1))
        lengths = [sum(map(len, context)) for context in contexts]
        if not ids:
            ids, mask, log_probs, role_ids = [pad_token_id], [0], [0.0], [NO_ROLE_ID]
            lengths[-1] += 1
        return SelfPlayOutput(
            prompt_ids=first.prompt_ids,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs if self.has_log_probs else None,
            role_ids=role_ids,
            context_lengths=lengths,
            turn_ends=ends,
            kind=record.kind,
            num_turns=2 * len(self.turns),
            metrics=metrics or AgentLoopMetrics(),
            extra_fields={**extra_fields, RECORD_KEY: record},
        )


# a turn's number in the game, its role, and where in the response its last token is
PlacedTurn = tuple[int, str, int]


class SelfPlayOutput(AgentLoopOutput):  # type: ignore[misc]  # verl is untyped
    """An agent-loop output with columns that separate the roles."""

    role_ids: list[int]  # per response token
    context_lengths: list[int]  # they sum to the whole sequence
    turn_ends: list[PlacedTurn]  # of the policy's turns
    kind: str

    def as_dict(self) -> dict[str, Any]:
        """Columns for the TransferQueue: verl's, ``rm_scores`` (T,), ``role_ids`` (T,) and
        ``context_lengths``. ValueError if the reward manager did not return a scored game.

        Each turn's reward is on its last token; a role without a reward, and a void game, have a
        mask of zeros.
        """
        # verl's dump would turn the record into a dict, and makes metrics of everything in
        # reward_extra_info.
        info = dict(self.extra_fields.get("reward_extra_info") or {})
        record: GameRecord | None = info.pop(RECORD_KEY, None)
        if record is None:
            raise ValueError(
                "the reward manager returned no scored game: self-play needs "
                "reward.reward_manager.name=PerTurnRewardManager, or a subclass of it"
            )
        fields = {**self.extra_fields, "reward_extra_info": info, RECORD_KEY: None}
        plain = self.model_copy(update={"extra_fields": fields})
        columns: dict[str, Any] = super(SelfPlayOutput, plain).as_dict()
        columns["extra_fields"][RECORD_KEY] = record
        role_ids = columns["role_ids"] = torch.tensor(columns["role_ids"], dtype=torch.int64)
        columns["context_lengths"] = torch.tensor(columns["context_lengths"], dtype=torch.int64)
        ends = {number: (role, end) for number, role, end in columns.pop("turn_ends")}
        rm_scores = torch.zeros(role_ids.shape, dtype=torch.float32)
        # An opponent's turns have no tokens here: what it earns is only in the record.
        earned = record.reward_of_turns({n: role for n, (role, _) in ends.items()})
        for number, reward in earned.items():
            rm_scores[ends[number][1]] = reward
        columns["rm_scores"] = rm_scores
        # Whitening would make a return of 0 an advantage. Rewards of turns may leave out one
        # conversation of a role.
        learners = role_ids
        if record.turn_rewards:
            contexts = context_ids(columns["context_lengths"], len(role_ids))
            learners = role_ids + contexts * (role_ids.max() + 1)
        paid = torch.isin(learners, learners[[ends[number][1] for number in earned]])
        columns["response_mask"] = columns["response_mask"] * paid * (not record.is_void)
        return columns
