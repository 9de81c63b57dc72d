"""Plays and scores games in verl's workers.

verl builds a :class:`SelfPlayAgentLoop` per trajectory (named in ``tool_configs/agent_loop.yaml``)
and calls it with the row's columns; then a :class:`PerTurnRewardManager` scores the game, and
:meth:`SelfPlayOutput.as_dict` places the rewards.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from hydra.utils import instantiate
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.core.chat import ABORTED, BaseModelChat, ServedModel
from medserl_agentloop.core.config import ROUTER_ADDRESS, SelfPlayConfig, adapter_names, game_class
from medserl_agentloop.core.encoding import ChatEncoder, Message, end_ids
from medserl_agentloop.core.interaction import Interaction, NoReplyError, Reply, Turn, play_game
from medserl_agentloop.core.liveness import ends_the_run
from medserl_agentloop.core.records import GameRecord, OpponentRecord
from medserl_agentloop.core.trajectory import RECORD_KEY, SelfPlayOutput, Trajectory, TrajectoryTurn

logger = logging.getLogger(__name__)


class _Worker:
    """What all games of a worker share; reading it from the config takes longer than a game."""

    def __init__(self, run: Any, data: Any, tokenizer: Any, server: Any) -> None:
        self.config = config = SelfPlayConfig.from_run(run)
        self.server, self.rollout = server, run.actor_rollout_ref.rollout
        # Given the tokenizer, verl would overwrite the end of sequence in the model's config.
        model = instantiate(run.actor_rollout_ref.model, load_tokenizer=False, _convert_="partial")
        ends = end_ids(model.hf_config, model.generation_config)
        self.encoder = ChatEncoder.of_run(tokenizer, data, ends)
        self.game: Interaction[Any, Any] = game_class(config.game)(config, self.encoder)
        path = run.actor_rollout_ref.model.path
        self.game.use_base_model(BaseModelChat(path, server, self.encoder, config.turn_timeout_s))
        if address := run.reward.reward_model.get(ROUTER_ADDRESS):
            self.game.use_reward_model(address, run.reward.reward_model.model_path)
        per_role = config.adapters == "per_role"
        self.adapters = adapter_names(self.game.roles) if per_role else {}
        self.opponent: ServedModel | None = None
        if config.opponent.frozen:
            special = tokenizer.all_special_tokens
            client = config.opponent.client()
            self.opponent = ServedModel(client, special_tokens=special, temperature=1.0)


_workers: WeakKeyDictionary[Any, _Worker] = WeakKeyDictionary()  # by verl's server client


class SelfPlayAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is untyped
    """Plays one game as one trajectory."""

    @ends_the_run
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> SelfPlayOutput:
        """Play the game of one row, whose ``extra_info`` holds the facts.

        Returns the trajectory with the game's record, not yet scored. A turn that does not fit,
        fails, is aborted, takes too long, or lacks requested ``logprobs`` makes the game void; it
        never raises.
        """
        server = self.server_manager
        if (worker := _workers.get(server)) is None:
            worker = _Worker(self.config, self.data_config, self.tokenizer, server)
            _workers[server] = worker
        game = worker.game.new_game(row["extra_info"])
        record = game.record
        record.uid, record.session = str(row.get("uid", "")), int(row.get("session_id", 0))
        # With verl's random uid, a repeated run would draw differently.
        name = f"{row.get('global_steps', 0)}-{row.get('index', record.uid)}-{record.session}"
        policy = _Policy(worker, sampling_params, name)
        opponent = _Opponent(worker, record)
        plays, roles = worker.config.plays, worker.game.roles
        players = {role: policy if plays(role) else opponent for role in roles}
        await play_game(worker.game, game, players)

        record.context = worker.config.context
        versions = [turn.weights for turn in policy.trajectory.turns if turn.weights is not None]
        record.policy_version = min(versions, default=None)
        # verl's metrics cast both to int; where the policy took no turn, they are the weights that
        # the step began with.
        version = min(versions, default=int(row.get("global_steps", 1)) - 1)
        extra = {"min_global_steps": version, "max_global_steps": version}
        metrics = AgentLoopMetrics(generate_sequences=policy.timing.get("generate_sequences", 0.0))
        return policy.trajectory.to_output(record, self.tokenizer.pad_token_id, metrics, extra)


class _Policy:
    """The live policy in one game. Its turns join the trajectory even if the game becomes void."""

    name = ""

    def __init__(self, worker: _Worker, sampling_params: dict[str, Any], game: str) -> None:
        self._worker, self._sampling_params = worker, sampling_params
        self._game = game if worker.rollout.full_determinism else uuid4().hex
        isolated = worker.config.context == "isolated"
        has_log_probs = bool(sampling_params.get("logprobs"))
        self.trajectory = Trajectory(worker.game.roles, isolated, has_log_probs)
        self.timing: dict[str, Any] = {}
        self._reserved = 0  # tokens of turns that are being generated

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        trajectory, encoder = self.trajectory, self._worker.encoder
        before = trajectory.before(turn.role, turn.conversation)
        prompt = (
            encoder.continuation(turn, before[-1].response_ids[-1])
            if before
            else encoder.opening(turn)
        )
        budget = self._room(turn, len(prompt.ids))
        said = [token for of in before for token in (*of.prompt_ids, *of.response_ids)]
        taken = TrajectoryTurn(turn.role, prompt.ids, [], None, turn.conversation, turn.number)
        # Reserve its place and its tokens before other turns begin.
        trajectory.turns.append(taken)
        self._reserved += budget
        try:
            output = await self._generate(turn, said + prompt.ids, budget)
        except NoReplyError:
            trajectory.turns.remove(taken)
            raise
        finally:
            self._reserved -= budget
        ids, log_probs = list(output.token_ids), list(output.log_probs or [])
        finite = sum(map(math.isfinite, log_probs))
        complete = finite == len(log_probs) == len(ids)
        taken.response_ids, taken.log_probs = ids, log_probs if complete else None
        taken.weights = output.extra_fields.get("global_steps")
        if output.stop_reason in ABORTED or not ids:
            raise NoReplyError(f"{turn.role}: generation aborted")
        if trajectory.has_log_probs and not complete:
            raise NoReplyError(f"{turn.role}: {finite} finite log-probs for {len(ids)} tokens")
        cut = encoder.was_cut(ids, budget, output.stop_reason)
        return Reply(encoder.decode(ids, turn.stop), len(ids), cut, prompt.prefill)

    def _room(self, turn: Turn, prompt_tokens: int) -> int:
        """Return a turn's token budget, so that it does not overrun ``response_length``."""
        rollout, first = self._worker.rollout, not self.trajectory.turns
        used = self.trajectory.response_tokens + self._reserved + (0 if first else prompt_tokens)
        budget: int = min(turn.max_tokens, rollout.response_length - used)
        if budget < 1 or (first and prompt_tokens > rollout.prompt_length):
            raise NoReplyError(f"no room for the {turn.role}'s turn")
        return budget

    async def _generate(self, turn: Turn, prompt_ids: list[int], budget: int) -> TokenOutput:
        worker, limit = self._worker, self._worker.config.turn_timeout_s
        stop = worker.encoder.stop(turn.stop)
        sampling_params = {**self._sampling_params, **stop, "max_tokens": budget}
        if turn.role in worker.adapters:
            sampling_params["adapter"] = worker.adapters[turn.role]
        generation = worker.server.generate(
            request_id=f"{self._game}-{turn.number}",
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
        )
        try:
            with simple_timer("generate_sequences", self.timing):
                return await asyncio.wait_for(generation, limit)
        except TimeoutError:
            reason = f"timed out after {limit} s"
        except Exception as error:  # the server's own; verl would drop the game and its record
            logger.exception("the rollout server gave no turn")
            reason = f"failed: {type(error).__name__}: {str(error)[:500]}"
        raise NoReplyError(f"{turn.role}: generation {reason}")


class _Opponent:
    """The frozen model in the untrained roles; only its text enters the game."""

    name = ""

    def __init__(self, worker: _Worker, record: GameRecord) -> None:
        self._model, self._config, self._record = worker.opponent, worker.config.opponent, record

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        assert self._model is not None
        opponent = OpponentRecord(role=turn.role, kind="endpoint", version=None)
        try:
            reply = await self._model.reply(turn, messages)
        except NoReplyError as error:
            self._record.opponent = opponent
            # An outage costs its games, not the run; no other player replaces the opponent.
            raise NoReplyError(f"opponent failed: {error}") from None
        if self._record.opponent is None:  # or a concurrent turn has failed
            opponent.version = reply.model or str(self._config.model)
            self._record.opponent = opponent
        return reply


class PerTurnRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl is untyped
    """Rewards per role (``reward.reward_manager.source=importlib``); the game scores, not
    ``compute_score``.
    """

    def __init__(
        self, config: Any, tokenizer: Any, compute_score: Any = None, **of_verl: Any
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        selfplay = SelfPlayConfig.from_run(config)
        self._game = game_class(selfplay.game)(selfplay)

    @ends_the_run
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one game: the sum of its rewards (0.0 if void), its record, and numbers for
        validation. ValueError for rewards of a role or a turn that the game lacks.
        """
        fields = data[len(data) - 1].non_tensor_batch["tool_extra_fields"]
        record: Any = fields[RECORD_KEY].model_copy(deep=True)
        turns = [turn.role for turn in record.turns]
        await self._game.score(record)
        # A user's code may have put anything into it; the rewards paid must be the ones recorded.
        record = self._game.Record.model_validate(record.model_dump())
        record.check_rewards(self._game.roles, turns)
        numbers = self._game.view.validation_numbers(record)
        return {
            "reward_score": sum(sum(components.values()) for components in record.rewards.values()),
            "reward_extra_info": {**numbers, RECORD_KEY: record},
        }
