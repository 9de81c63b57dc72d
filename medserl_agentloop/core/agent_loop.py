"""The agent loop: has a game played, and makes the live policy's turns one trajectory.

verl builds one instance per trajectory and calls :meth:`SelfPlayAgentLoop.run` with the row's
columns. Named in ``tool_configs/agent_loop.yaml``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar
from uuid import uuid4

from hydra.utils import instantiate
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.core.chat import ABORTED, BaseModelChat, ServedModel
from medserl_agentloop.core.config import SelfPlayConfig, adapter_names, game_class
from medserl_agentloop.core.encoding import ChatEncoder, end_ids
from medserl_agentloop.core.interaction import (
    Interaction,
    Message,
    NoReplyError,
    Reply,
    Turn,
    play_game,
)
from medserl_agentloop.core.liveness import ends_the_run
from medserl_agentloop.core.records import GameRecord, OpponentRecord
from medserl_agentloop.core.trajectory import SelfPlayOutput, Trajectory, TrajectoryTurn

logger = logging.getLogger(__name__)


class _Shared:
    """Objects that all games of one worker share; reading them from the config would cost more than
    the game.
    """

    def __init__(self, run: Any, data: Any, tokenizer: Any, server: Any) -> None:
        self.config = config = SelfPlayConfig.from_run(run)
        # With the tokenizer, verl would put its end of sequence over that of the model's config.
        model = instantiate(run.actor_rollout_ref.model, load_tokenizer=False, _convert_="partial")
        self.encoder = ChatEncoder.of_run(
            tokenizer, data, end_ids(model.hf_config, model.generation_config)
        )
        self.interaction: Interaction[Any, Any] = game_class(config.game)(config, self.encoder)
        self.adapters = (
            adapter_names(self.interaction.roles) if config.adapters == "per_role" else {}
        )
        path = run.actor_rollout_ref.model.path
        self.interaction.use_base_model(
            BaseModelChat(path, server, self.encoder, config.turn_timeout_s)
        )
        if run.reward.reward_model.enable:
            self.interaction.use_reward_model(None, run.reward.reward_model.model_path)
        self.rollout = run.actor_rollout_ref.rollout
        self.opponent: ServedModel | None = None
        if config.opponent.frozen:
            special = tokenizer.all_special_tokens
            self.opponent = ServedModel(
                config.opponent.client(), special_tokens=special, temperature=1.0
            )


class SelfPlayAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is untyped
    """Plays one game as one trajectory."""

    _last: ClassVar[tuple[tuple[Any, ...], _Shared] | None] = None
    """The config of the process's last game, and the objects that it shares with the next game of
    the same run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        made_from = (self.config, self.data_config, self.tokenizer, self.server_manager)
        last = SelfPlayAgentLoop._last
        if last is None or any(old is not new for old, new in zip(last[0], made_from, strict=True)):
            last = SelfPlayAgentLoop._last = (made_from, _Shared(*made_from))
        self._shared = last[1]

    @ends_the_run
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> SelfPlayOutput:
        """Play the game of one row; its ``extra_info`` holds the facts, ``sampling_params`` are
        verl's.

        Returns the trajectory with the game's record, not yet scored. A turn that does not fit,
        that the engine aborts or fails at, that takes too long or that lacks its log-probs (if
        ``logprobs`` asks for them) makes the game void; it never raises.
        """
        interaction = self._shared.interaction
        game = interaction.new_game(row["extra_info"])
        record = game.record
        record.uid, record.session = str(row.get("uid", "")), int(row.get("session_id", 0))
        # verl's random uid would give a run other draws than its repetition.
        name = f"{row.get('global_steps', 0)}-{row.get('index', record.uid)}-{record.session}"
        seats = _Seats(self._shared, self.server_manager, record, sampling_params, name)
        await play_game(interaction, game, dict.fromkeys(interaction.roles, seats))

        record.context = self._shared.config.context
        versions = [turn.weights for turn in seats.trajectory.turns if turn.weights is not None]
        record.policy_version = min(versions, default=None)
        # verl's metrics cast both to int; where the policy took no turn, they are the weights that
        # the step began with.
        version = min(versions, default=int(row.get("global_steps", 1)) - 1)
        extra = {"min_global_steps": version, "max_global_steps": version}
        metrics = AgentLoopMetrics(generate_sequences=seats.timing.get("generate_sequences", 0.0))
        return seats.trajectory.to_output(record, metrics, extra, self.tokenizer.pad_token_id)


class _Seats:
    """The players of one game: the live policy, whose turns make the trajectory, and an untrained
    role's opponent.
    """

    name = ""

    def __init__(
        self,
        shared: _Shared,
        server: Any,
        record: GameRecord,
        sampling_params: dict[str, Any],
        game: str,
    ) -> None:
        self._shared, self._server, self._record, self._sampling_params = (
            shared,
            server,
            record,
            sampling_params,
        )
        self._game = game if shared.rollout.full_determinism else uuid4().hex
        isolated, asks_log_probs = (
            shared.config.context == "isolated",
            bool(sampling_params.get("logprobs")),
        )
        self.trajectory = Trajectory(shared.interaction.roles, isolated, asks_log_probs)
        self._begun, self._reserved = 0, 0  # turns, and tokens of those that are being generated
        self.timing: dict[str, Any] = {}

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        number = self._begun  # turns that are taken side by side begin in the order of the game
        self._begun += 1
        if self._shared.config.plays(turn.role):
            return await self._policy_turn(turn, number)
        return await self._opponent_turn(turn, messages)

    async def _policy_turn(self, turn: Turn, number: int) -> Reply:
        """A turn of the live policy; it joins the trajectory whatever becomes of the game."""
        trajectory, encoder = self.trajectory, self._shared.encoder
        before = trajectory.before(turn.role, turn.conversation)
        prompt = (
            encoder.continuation(turn, before[-1].response_ids[-1])
            if before
            else encoder.opening(turn)
        )
        # Never more than there is room for: the trajectory may not overrun ``response_length``.
        used = (
            trajectory.response_tokens
            + self._reserved
            + (len(prompt.ids) if trajectory.turns else 0)
        )
        budget = min(turn.max_tokens, self._shared.rollout.response_length - used)
        if budget < 1 or (
            not trajectory.turns and len(prompt.ids) > self._shared.rollout.prompt_length
        ):
            raise NoReplyError(f"no room for the {turn.role}'s turn")
        said_before = [
            token for earlier in before for token in (*earlier.prompt_ids, *earlier.response_ids)
        ]
        sampling_params = {**self._sampling_params, **encoder.stop(turn.stop), "max_tokens": budget}
        if turn.role in self._shared.adapters:
            sampling_params["adapter"] = self._shared.adapters[turn.role]
        generation = self._server.generate(
            request_id=f"{self._game}-{number}",
            prompt_ids=said_before + prompt.ids,
            sampling_params=sampling_params,
        )
        limit = self._shared.config.turn_timeout_s
        # Its place, and the tokens that it may have, before other turns begin.
        taken = TrajectoryTurn(turn.role, prompt.ids, [], None, turn.conversation, number)
        trajectory.turns.append(taken)
        self._reserved += budget
        try:
            with simple_timer("generate_sequences", self.timing):
                output: TokenOutput = await asyncio.wait_for(generation, limit)
        except TimeoutError:
            trajectory.turns.remove(taken)
            raise NoReplyError(f"{turn.role}: generation timed out after {limit} s") from None
        except Exception as error:  # the server's own; verl would drop the game and its record
            trajectory.turns.remove(taken)
            logger.exception("the rollout server gave no turn")
            raise NoReplyError(
                f"{turn.role}: generation failed: {type(error).__name__}: {str(error)[:500]}"
            ) from None
        finally:
            self._reserved -= budget
        ids, log_probs = list(output.token_ids), list(output.log_probs or [])
        complete = len(log_probs) == len(ids) and all(map(math.isfinite, log_probs))
        taken.response_ids, taken.log_probs = ids, log_probs if complete else None
        taken.weights = output.extra_fields.get("global_steps")
        if output.stop_reason in ABORTED or not ids:
            raise NoReplyError(f"{turn.role}: generation aborted")
        if trajectory.has_log_probs and not complete:
            finite = sum(map(math.isfinite, log_probs))
            raise NoReplyError(f"{turn.role}: {finite} finite log-probs for {len(ids)} tokens")
        cut = encoder.was_cut(ids, budget, output.stop_reason)
        return Reply(encoder.decode(ids, turn.stop), len(ids), cut, prompt.prefill)

    async def _opponent_turn(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """A turn of the opponent's, of which nothing but its text enters the game."""
        model, config = self._shared.opponent, self._shared.config.opponent
        assert model is not None
        opponent = OpponentRecord(role=turn.role, kind="endpoint", version=None)
        try:
            reply = await model.reply(turn, messages)
        except NoReplyError as error:
            self._record.opponent = opponent
            # An outage costs its games, not the run, and nothing is invented in the opponent's
            # place.
            raise NoReplyError(f"opponent failed: {error}") from None
        if self._record.opponent is None:  # or a concurrent turn has failed
            opponent.version = reply.model or str(config.model)
            self._record.opponent = opponent
        return reply
