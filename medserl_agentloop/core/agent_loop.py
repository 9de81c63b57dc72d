"""The agent loop: asks the interaction whose turn it is, generates, hands the text back.

verl builds one instance per trajectory and calls :meth:`SelfPlayAgentLoop.run` with the row's
columns. Named in ``tool_configs/agent_loop.yaml``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.core.client import NoAnswer
from medserl_agentloop.core.config import SelfPlayConfig, game_class
from medserl_agentloop.core.encoding import ChatEncoder, EncodedPrompt
from medserl_agentloop.core.interaction import Interaction, Turn
from medserl_agentloop.core.opponent import HttpOpponent
from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.core.trajectory import SelfPlayOutput, Trajectory, TrajectoryTurn

_ABORTED = ("abort", "aborted")  # SGLang's finish reason, and verl's own word


class _Identity:
    """An object as a key: equal to itself alone, and kept alive, so that no other gets its id."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held


@dataclass(frozen=True)
class _Workbench:
    """What all games of one worker share; reading it from the config would cost more than the game."""

    config: SelfPlayConfig
    interaction: Interaction[Any, Any]
    encoder: ChatEncoder
    opponent: HttpOpponent | None
    prompt_length: int
    response_length: int


@lru_cache(maxsize=8)
def _workbench(run: _Identity, data: _Identity, tokenizer: _Identity) -> _Workbench:
    config = SelfPlayConfig.from_run(run.held)
    rollout = run.held.actor_rollout_ref.rollout
    encoder = ChatEncoder.of_run(tokenizer.held, data.held)
    return _Workbench(
        config,
        game_class(config.game)(config, encoder),
        encoder,
        None
        if config.opponent.kind == "live"
        else HttpOpponent(config.opponent, list(tokenizer.held.all_special_tokens)),
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
    )


class SelfPlayAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is untyped
    """Plays one game as one trajectory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bench = bench = _workbench(_Identity(self.config), _Identity(self.data_config), _Identity(self.tokenizer))
        self._selfplay, self._interaction = bench.config, bench.interaction
        self._encoder, self._opponent = bench.encoder, bench.opponent

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> SelfPlayOutput:
        """Play the game of one row; its ``extra_info`` holds the facts, ``sampling_params`` are verl's.

        Returns the trajectory with the game's record, not yet scored. A turn that does not fit, that the engine aborts,
        that takes too long or that lacks its log-probs (if ``logprobs`` asks for them) makes the game void; it never
        raises.
        """
        interaction = self._interaction
        game = await interaction.start_interaction(extra_info=row["extra_info"])
        record = interaction.record(game)
        asks_log_probs = bool(sampling_params.get("logprobs"))
        trajectory = Trajectory(interaction.roles, self._selfplay.context == "isolated", asks_log_probs)
        versions: list[int] = []
        timing: dict[str, Any] = {}
        played = 0
        try:
            while (turn := interaction.turn(game)) is not None:
                number, played = played, played + 1
                if not self._selfplay.plays(turn.role):
                    await self._opponents_turn(game, turn)
                    continue
                before = trajectory.before(turn.role, turn.conversation)
                prompt = self._prompt(turn, before)
                budget = self._budget(trajectory, turn, prompt)
                if budget < 1:
                    interaction.make_void(game, f"no room for the {turn.role}'s turn")
                    break
                with simple_timer("generate_sequences", timing):
                    output = await self._generate(
                        [token for earlier in before for token in (*earlier.prompt_ids, *earlier.response_ids)]
                        + prompt.ids,
                        {**sampling_params, **self._encoder.stop(turn.stop), "max_tokens": budget},
                    )
                if output is None:
                    seconds = self._selfplay.turn_timeout_s
                    interaction.make_void(game, f"{turn.role}: generation timed out after {seconds} s")
                    break
                ids, log_probs = list(output.token_ids), list(output.log_probs or [])
                complete = len(log_probs) == len(ids)
                trajectory.turns.append(
                    TrajectoryTurn(
                        turn.role, prompt.ids, ids, log_probs if complete else None, turn.conversation, number
                    )
                )
                versions += [v for v in _versions(output) if v is not None]
                if output.stop_reason in _ABORTED or not ids:
                    interaction.make_void(game, f"{turn.role}: generation aborted")
                    break
                if asks_log_probs and not complete:
                    interaction.make_void(game, f"{turn.role}: {len(log_probs)} log-probs for {len(ids)} tokens")
                    break
                await interaction.generate_response(
                    game,
                    [{"role": "assistant", "content": self._decode(ids, turn)}],
                    prefill=prompt.prefill,
                    tokens=len(ids),
                    truncated=self._was_cut(output, budget),
                )
        finally:
            await interaction.finalize_interaction(game)

        record.context = self._selfplay.context
        record.uid, record.session = str(row.get("uid", "")), int(row.get("session_id", 0))
        # verl's metrics cast both versions to int; a server that names none played the row's step.
        fallback = int(row.get("global_steps", 0))
        record.policy_version = min(versions, default=fallback)
        extra = {
            "min_global_steps": record.policy_version,
            "max_global_steps": max(versions, default=fallback),
        }
        metrics = AgentLoopMetrics(generate_sequences=timing.get("generate_sequences", 0.0))
        return trajectory.to_output(record, metrics, extra, self.tokenizer.pad_token_id)

    async def _generate(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput | None:
        """One turn by the live policy; None if it takes longer than ``selfplay.turn_timeout_s``."""
        turn = self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        try:
            return await asyncio.wait_for(turn, self._selfplay.turn_timeout_s)
        except asyncio.TimeoutError:
            return None

    async def _opponents_turn(self, game: str, turn: Turn) -> None:
        """Have the opponent take a turn, of which nothing but its text enters the game.

        The contexts are separate, so the trained role's tokens are the same as against the live policy.
        """
        assert self._opponent is not None
        interaction = self._interaction
        opponent = OpponentRecord(role=turn.role, kind=self._selfplay.opponent.kind, version=None)
        interaction.record(game).opponent = opponent
        try:
            said, opponent.version = await self._opponent.play(
                turn.prompt.filled(), max_tokens=turn.max_tokens, prefix=turn.prefix
            )
        except NoAnswer as error:
            # An outage costs its games, not the run, and nothing is invented in the opponent's place.
            interaction.make_void(game, f"opponent failed: {error.reason}")
            return
        await interaction.generate_response(
            game,
            [{"role": "assistant", "content": said.text}],
            prefill=turn.prefix,
            tokens=said.tokens,
            truncated=said.truncated,
        )

    def _prompt(self, turn: Turn, before: list[TrajectoryTurn]) -> EncodedPrompt:
        if not before:
            return self._encoder.opening(turn)
        return self._encoder.continuation(turn, before[-1].response_ids[-1])

    def _budget(self, trajectory: Trajectory, turn: Turn, prompt: EncodedPrompt) -> int:
        """Tokens this turn may have, so that the trajectory can never overrun ``response_length``."""
        if not trajectory.turns and len(prompt.ids) > self._bench.prompt_length:
            return 0
        used = trajectory.response_tokens + (len(prompt.ids) if trajectory.turns else 0)
        return min(turn.max_tokens, self._bench.response_length - used)

    def _decode(self, ids: list[int], turn: Turn) -> str:
        """The turn's text without its end-of-turn token; other special tokens stay visible as text."""
        if ids[-1] in (self.tokenizer.eos_token_id, *self._encoder.stop(turn.stop).get("stop_token_ids", ())):
            ids = ids[:-1]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _was_cut(self, output: TokenOutput, budget: int) -> bool:
        # SGLang says "length"; vLLM says "completed" whether a turn ended or was cut.
        if output.stop_reason in ("length", "stop"):
            return bool(output.stop_reason == "length")
        return len(output.token_ids) >= budget and bool(output.token_ids[-1] != self.tokenizer.eos_token_id)


def _versions(output: TokenOutput) -> tuple[int | None, int | None]:
    """Weight versions a turn was generated with, first and last."""
    extra = output.extra_fields
    version = extra.get("global_steps")
    return extra.get("min_global_steps", version), extra.get("max_global_steps", version)
