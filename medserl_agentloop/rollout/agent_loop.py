"""The agent loop: asks the interaction whose turn it is, generates, hands the text back.

verl builds one instance per trajectory and calls :meth:`SelfPlayAgentLoop.run` with the row's
columns. Named in ``tool_configs/agent_loop.yaml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.config import SelfPlayConfig
from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.rollout.encoding import ChatEncoder, EncodedPrompt
from medserl_agentloop.rollout.interaction import MedicalGameInteraction
from medserl_agentloop.rollout.trajectory import SelfPlayOutput, Trajectory, TrajectoryTurn

_ABORTED = ("abort", "aborted")  # SGLang's finish reason, and verl's own word


@dataclass(frozen=True)
class _Workbench:
    """What all games of one worker share; building it per trajectory would cost more than a game."""

    config: SelfPlayConfig
    interaction: MedicalGameInteraction
    encoder: ChatEncoder


@lru_cache(maxsize=8)
def _workbench(tokenizer: Any, selfplay_yaml: str, template_kwargs_yaml: str) -> _Workbench:
    config = SelfPlayConfig.from_run(OmegaConf.create({"selfplay": OmegaConf.create(selfplay_yaml)}))
    template_kwargs: Any = OmegaConf.to_container(OmegaConf.create(template_kwargs_yaml))
    encoder = ChatEncoder(tokenizer, load_profile(config.profile), template_kwargs)
    return _Workbench(config, MedicalGameInteraction(config), encoder)


class SelfPlayAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is untyped
    """Plays one game as one trajectory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bench = _workbench(
            self.tokenizer,
            OmegaConf.to_yaml(self.config.selfplay, resolve=True),
            OmegaConf.to_yaml(OmegaConf.create(dict(self.apply_chat_template_kwargs or {}))),
        )
        self._selfplay, self._interaction, self._encoder = bench.config, bench.interaction, bench.encoder

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> SelfPlayOutput:
        """Play the game of one row.

        Args:
            sampling_params: verl's; the token budget of each turn is added here.
            **row: The row's columns; ``extra_info`` holds the facts of the game.

        Returns:
            The trajectory with the game's record, not yet judged. A turn that the engine aborts or
            that does not fit makes the game void; it never raises.
        """
        interaction = self._interaction
        game = await interaction.start_interaction(
            extra_info=row["extra_info"], special_tokens=self._encoder.special_tokens
        )
        record = interaction.record(game)
        trajectory = Trajectory(isolated=self._selfplay.context == "isolated")
        versions: list[int] = []
        timing: dict[str, Any] = {}
        try:
            while (turn := interaction.turn(game)) is not None:
                role, note = turn
                prompt = self._prompt(trajectory, role, record.spec.task, note)
                budget = self._budget(trajectory, role, prompt)
                if budget < 1:
                    interaction.make_void(game, f"no room for the {role.value}'s turn")
                    break
                with simple_timer("generate_sequences", timing):
                    output = await self.server_manager.generate(
                        request_id=uuid4().hex,
                        prompt_ids=prompt.ids if trajectory.isolated else [*trajectory.ids, *prompt.ids],
                        sampling_params={**sampling_params, **self._encoder.stop(role), "max_tokens": budget},
                    )
                ids = list(output.token_ids)
                log_probs = list(output.log_probs) if output.log_probs else [0.0] * len(ids)
                trajectory.turns.append(TrajectoryTurn(role, prompt.ids, ids, log_probs))
                versions += [v for v in _versions(output) if v is not None]
                if output.stop_reason in _ABORTED or not ids:
                    interaction.make_void(game, f"{role.value}: generation aborted")
                    break
                await interaction.generate_response(
                    game,
                    [{"role": "assistant", "content": self._decode(ids, role)}],
                    prefill=prompt.prefill,
                    tokens=len(ids),
                    truncated=self._was_cut(output, budget),
                )
        finally:
            await interaction.finalize_interaction(game)

        if not trajectory.turns:  # not even the first turn fits: verl still needs a row
            trajectory.turns.append(TrajectoryTurn(role, prompt.ids[-self.rollout_config.prompt_length :], [], []))
        record.profile, record.context = self._selfplay.profile, self._selfplay.context
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

    def _prompt(self, trajectory: Trajectory, role: Role, category: Category, note: str) -> EncodedPrompt:
        if trajectory.isolated or not trajectory.turns:
            return self._encoder.opening(role, category, note)
        return self._encoder.continuation(role, category, note, trajectory.turns[-1].response_ids[-1])

    def _budget(self, trajectory: Trajectory, role: Role, prompt: EncodedPrompt) -> int:
        """Tokens this turn may have, so that the trajectory can never overrun ``response_length``."""
        plan = self._selfplay.budget
        limit: int = self.rollout_config.response_length
        if not trajectory.turns and len(prompt.ids) > self.rollout_config.prompt_length:
            return 0
        used = trajectory.response_tokens + (len(prompt.ids) if trajectory.turns else 0)
        wanted = plan.attacker(prompt.note_tokens) if role is Role.ATTACKER else plan.assessor
        return min(wanted, limit - used)

    def _decode(self, ids: list[int], role: Role) -> str:
        """The turn's text without its end-of-turn token; other special tokens stay visible as text."""
        if ids[-1] in (self.tokenizer.eos_token_id, *self._encoder.stop(role).get("stop_token_ids", ())):
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
