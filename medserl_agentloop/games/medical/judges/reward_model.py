"""Can the model that verl serves for a judge be asked? verl says so once the policy is loaded, or never."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports verl, which `medserl play` does without
    from medserl_agentloop.core.run_check.run import Run

NODE = "reward.reward_model"
SERVED_BY = ("sglang", "vllm", "trtllm")
"""Rollouts of verl's whose servers speak the OpenAI protocol."""


def reward_model(run: Run) -> Iterator[str]:
    """A reward model that is on serves the judge, and leaves scoring to the reward manager."""
    if not run[f"{NODE}.enable"]:
        return
    if not run[f"{NODE}.enable_resource_pool"]:
        # verl/experimental/reward_loop/reward_loop.py, reward_loop_worker_handles
        yield (
            f"{NODE}.enable=True on the trainer's GPUs: verl wakes such a model when all games of a step are over, so "
            "no game could be judged. Give it GPUs of its own (enable_resource_pool=True, n_gpus_per_node and nnodes "
            f"of {NODE}), or serve it outside of the run, with selfplay.judge_server.url and {NODE}.enable=False."
        )
    if run["reward.custom_reward_function.path"] is None:
        # verl/experimental/reward_loop/reward_loop.py, compute_score
        yield (
            f"{NODE}.enable=True: verl would score with that model's own head and never ask the judge. Set "
            "reward.custom_reward_function.path=pkg://medserl_agentloop.core.reward_manager and "
            "reward.custom_reward_function.name=PerTurnRewardManager; verl then leaves scoring to the reward manager."
        )
    if run[f"{NODE}.model_path"] is None:
        yield f"{NODE}.enable=True needs {NODE}.model_path: the folder or Hugging Face name of the model."
    yield from _server(run)


def _server(run: Run) -> Iterator[str]:
    rollout = f"{NODE}.rollout"
    selfplay: Any = run.selfplay
    name, own_gpus = run[f"{rollout}.name"], run[f"{NODE}.enable_resource_pool"]
    if name not in SERVED_BY:
        yield (
            f"{rollout}.name={name or '???'}: set it to the engine that serves the judge's model, "
            f"one of {', '.join(SERVED_BY)}."
        )
    gpus = run[f"{NODE}.n_gpus_per_node"] * run[f"{NODE}.nnodes"]
    needed = 1
    for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        needed *= run[f"{rollout}.{size}"]
    if own_gpus and gpus < needed:
        yield (
            f"{NODE}.n_gpus_per_node={run[f'{NODE}.n_gpus_per_node']} and nnodes={run[f'{NODE}.nnodes']} are {gpus} "
            f"GPUs, and one server takes {needed} ({rollout}.tensor_model_parallel_size="
            f"{run[f'{rollout}.tensor_model_parallel_size']}). Give it more GPUs or a smaller size."
        )
    if own_gpus and run[f"{rollout}.free_cache_engine"]:
        # verl/experimental/reward_loop/reward_model.py puts it to sleep; only compute_rm_score wakes it, and that is
        # called for a colocated model alone (trainer/ppo/v1/trainer_base.py, _compute_reward_colocate).
        yield (
            f"{rollout}.free_cache_engine=True, verl's default: verl takes the memory of a reward model with GPUs of "
            f"its own away at the start and never gives it back. Set {rollout}.free_cache_engine=False."
        )
    bound = selfplay.judge == "llm" and selfplay.judge_server.json_schema
    if name == "sglang" and bound and run[f"{rollout}.engine_kwargs.sglang.grammar_backend"] == "none":
        yield (
            f"{rollout}.engine_kwargs.sglang.grammar_backend=none: SGLang refuses answers bound to a JSON schema, and "
            "verl's router hides why. Set selfplay.judge_server.json_schema=False."
        )
