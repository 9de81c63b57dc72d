"""Does verl play, batch and save the games as self-play needs it?"""

from __future__ import annotations

from collections.abc import Iterator

from medserl_agentloop.core.run_check.run import ACTOR, FSDP, ROLLOUT, Run

REFUSED_IF_ON = {
    "algorithm.filter_groups.enable": (
        "DAPO's filter reads one score per row, the sum of both roles' rewards. In a zero-sum game the sum is "
        "constant, so groups would be kept by the noise of format terms, or replaced without end"
    ),
    "distillation.enabled": "self-play sets the actor's loss, so the teacher's would never be used",
    f"{ROLLOUT}.enable_rollout_routing_replay": "games keep no routes of experts, so none would be replayed",
}


def unsupported(run: Run) -> Iterator[str]:
    """Nothing is on that needs one score per row, or a column that games do not have."""
    for key, why in REFUSED_IF_ON.items():
        if run[key]:
            yield f"{key}=True: {why}. Set it to False."
    for engine in ("fsdp_config", "megatron", "veomni"):
        key = f"{ACTOR}.{engine}.router_replay.mode"
        if run[key] == "R3":
            yield f"{key}=R3 replays the rollout's routes of experts, and games keep none. Set it to disabled."


def rollout(run: Run) -> Iterator[str]:
    """The rollout engine can be built, and its samples can be learned from."""
    if run[f"{ROLLOUT}.name"] is None:
        yield f"{ROLLOUT}.name is not set. Set it to sglang, or add the recipe cpu for a run without a GPU."
    if run[f"{ROLLOUT}.temperature"] <= 0:
        yield (
            f"{ROLLOUT}.temperature={run[f'{ROLLOUT}.temperature']}: all games of a prompt would be the same, and the "
            "loss divides by it. Set it above 0, e.g. 1.0."
        )
    tensor, data = run[f"{ROLLOUT}.tensor_model_parallel_size"], run[f"{ROLLOUT}.data_parallel_size"]
    if run.gpus % (tensor * data):
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={tensor} times data_parallel_size={data} does not divide the "
            f"{run.gpus} GPUs of the run (trainer.nnodes times trainer.n_gpus_per_node). Set it to 1, or to a divisor."
        )


def mini_batches(run: Run) -> Iterator[str]:
    """Every mini-batch holds games of all kinds, and workers can share it."""
    batch, n = run["data.train_batch_size"], run[f"{ROLLOUT}.n"]
    for engine in run.trained:
        size, shuffle = run[f"{engine}.ppo_mini_batch_size"], run[f"{engine}.shuffle"]
        if batch > size and not shuffle:
            yield (
                f"{engine}.shuffle={shuffle} with several mini-batches in a step (data.train_batch_size={batch}, "
                f"{engine}.ppo_mini_batch_size={size}): verl keeps the order in which games finish, so the first "
                f"updates would see mostly invalid and one-turn games. Set {engine}.shuffle=True."
            )
        workers = run.gpus // run.ulysses(engine)
        if run[f"{engine}.strategy"] in FSDP and workers and size * n % workers:
            # verl/workers/engine_workers.py (train_mini_batch) asserts it, in the first update.
            yield (
                f"{engine}.ppo_mini_batch_size={size} with {ROLLOUT}.n={n} makes mini-batches of {size * n} games, "
                f"which {workers} data-parallel workers cannot share evenly. Set it to a multiple of {workers}."
            )


def replay_buffer(run: Run) -> Iterator[str]:
    """The run notices that a process that plays its games died."""
    sampler = "trainer.v1.sampler"
    if not (run[f"{sampler}.custom_sampler.path"] and run[f"{sampler}.custom_sampler.name"]):
        yield (
            f"{sampler}.custom_sampler is empty, and verl's own replay buffer waits for ever for the games of a "
            f"process that died. Set {sampler}.custom_sampler.path=pkg://medserl_agentloop.core.replay_buffer and "
            ".name=SelfPlayReplayBuffer (or a subclass of yours)."
        )
    if run[f"{sampler}.sync_refill_failed_groups"]:
        yield (
            f"{sampler}.sync_refill_failed_groups=True does nothing: verl does not pass it to custom samplers. "
            "Set it to False."
        )


def checkpoints(run: Run) -> Iterator[str]:
    """A killed run can be resumed."""
    path, mode = run["trainer.resume_from_path"], run["trainer.resume_mode"]
    if mode == "resume_path" and "global_step_" not in str(path):
        yield (
            f"trainer.resume_mode=resume_path with trainer.resume_from_path={path}: verl reads the step from the "
            "path. Set it to the folder global_step_N of a checkpoint."
        )
    if run["trainer.save_freq"] <= 0:
        return
    for engine in run.trained:
        checkpoint = f"{engine}.checkpoint"
        if run[f"{engine}.strategy"] not in FSDP:
            continue
        if run[f"{checkpoint}.async_save"]:
            # verl/trainer/ppo/v1/trainer_base.py (_save_checkpoint) leaves latest_checkpointed_iteration.txt to
            # the engine then, and FSDP's does not write it.
            yield (
                f"{checkpoint}.async_save=True is for Megatron: with FSDP no checkpoint would count as complete, and a "
                f"killed run would start anew. Set {checkpoint}.async_save=False."
            )
        contents = run.names(f"{checkpoint}.load_contents")
        if "model" not in contents and mode != "disable":
            yield (
                f"{checkpoint}.load_contents=[{','.join(contents)}] has no model: a killed run would resume with the "
                f"weights that it began with. Set {checkpoint}.save_contents=[model,optimizer,extra], or "
                "trainer.resume_mode=disable."
            )
