"""Checks that a resumed run is the same run and that its files can be read.

:data:`MAY_CHANGE` lists the keys that a resume may change. Every other difference is refused, so
new keys are safe by default.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from medserl_agentloop.core.config import ROLE_ADAPTERS, game_class
from medserl_agentloop.core.run_check import ACTOR, MODEL, RunConfig, leaves
from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, RunFiles, lock_folder
from medserl_agentloop.paths import hash_of_file, hash_of_folder, hash_of_model, hash_of_values

Finding = str | tuple[Literal["warn"], str]

MAY_CHANGE = (
    # steps, and when to save, test and log
    *("trainer.total_epochs", "trainer.total_training_steps", "*.optim.total_training_steps"),
    *("trainer.save_freq", "trainer.test_freq", "trainer.val_before_train", "trainer.val_only"),
    *("trainer.logger", "*.project_name", "*.experiment_name", "trainer.log_val_generations"),
    *("trainer.max_*_ckpt_to_keep", "trainer.*_data_dir", "trainer.resume_*", "*profiler*"),
    *("selfplay.alarms.*", "selfplay.on_alarm", "selfplay.certify"),
    *("selfplay.best_by", "selfplay.stop_after_evaluations"),
    # folders of the run
    *("trainer.default_local_dir", "trainer.default_hdfs_dir", "selfplay.records"),
    *("*.checkpoint.load_contents", "*.checkpoint.save_contents"),
    # machines, memory and micro-batches
    *("*.nnodes", "*.n_gpus_per_node", "*.fsdp_size", "*num_workers"),
    *("*micro_batch_size*", "*max_token_len_per_gpu", "*use_dynamic_bsz", "data.val_batch_size"),
    *("*_offload", "*.offload_policy", "*.reshard_after_forward", "*.forward_prefetch"),
    *("*gradient_checkpointing*", "*.entropy_checkpointing", "*.ulysses_sequence_parallel_size"),
    *("*.gpu_memory_utilization", "*.free_cache_engine", "*.enforce_eager", "*.max_num_seqs"),
    *("*.max_num_batched_tokens", "*.enable_chunked_prefill", "*.tensor_model_parallel_size"),
    # how long to wait for servers, and how many requests they get at once
    *("selfplay.turn_timeout_s", "selfplay.*.timeout_s", "selfplay.*.retries"),
    *("selfplay.*.concurrency", "selfplay.*.api_key_env"),
    # set by verl and the trainer once the start is checked, and what no self-play run reads
    *("transfer_queue.*", f"{MODEL}.lora.{ROLE_ADAPTERS}.*", "distillation.*"),
)
"""Patterns of the keys that a resume may change."""
SAME_LOADER = ("data.dataloader_num_workers",)
"""Exceptions to :data:`MAY_CHANGE`: each worker has a position in the rows."""
IDENTITY = "medserl_identity"
"""Node of ``run_config.yaml`` with the identities of models, data and folders."""


class Change(NamedTuple):
    """A key with its old value and its new one."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        if self.was == self.now:
            return f"what {self.key}={self.now} names has changed"
        return f"{self.key} was {self.was} and is now {self.now}"

    def matches(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(self.key, pattern) for pattern in patterns)


def checkpoints(run: RunConfig) -> Iterator[Finding]:
    """Check that no other process uses the run's folder, and that a run to resume is the same one,
    readable, and not finished.
    """
    if run.selfplay.certify == "only":
        return
    mode, folder = run["trainer.resume_mode"], Path(run["trainer.default_local_dir"])
    chosen = Path(str(run["trainer.resume_from_path"]))
    try:
        for taken in {folder, Path(run.selfplay.records)}:
            if taken.is_dir():
                with lock_folder(taken, wait_s=5.0):
                    pass
        if mode == "auto":
            yield from _newest(run, folder)
        elif mode == "resume_path" and "global_step_" not in chosen.name:
            yield (
                f"trainer.resume_mode=resume_path, and trainer.resume_from_path={chosen} is no "
                "checkpoint. Set it to a folder global_step_N."
            )
        elif mode == "resume_path" and chosen.resolve().parent == folder.resolve():
            yield from _same(run, chosen)
        elif (folder / LATEST).is_file() and not run["trainer.val_only"]:
            yield (
                f"trainer.resume_mode={mode} would overwrite the run in {folder}. Set "
                "trainer.experiment_name to a new name, or drop trainer.resume_mode to continue."
            )
        elif mode == "resume_path":
            yield from _of_another_run(run, chosen)
    except ValueError as error:  # a file of the run that cannot be read
        yield str(error)


def _newest(run: RunConfig, folder: Path) -> Iterator[Finding]:
    """Check the last checkpoint in the run's folder, if there is one."""
    latest, another = folder / LATEST, "set trainer.experiment_name to a new name"
    # data.pt is the last that verl writes.
    whole = [int(path.parent.name[12:]) for path in folder.glob("global_step_[0-9]*/data.pt")]
    if not latest.is_file() and not whole:
        return
    # A full disk, or a kill at the wrong moment, leaves the file empty. Without it, or for a folder
    # that is gone, verl starts from nothing.
    step = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if not (step.isdecimal() and (folder / f"global_step_{step}").is_dir()):
        newest = f"write {max(whole)} into it, the newest checkpoint there, or " * bool(whole)
        yield f"{latest} says {step!r}, which is not a checkpoint: {newest}{another}."
        return
    yield from _same(run, folder / f"global_step_{step}")
    files, total = RunFiles(run.selfplay.records), run["trainer.total_training_steps"]
    done = total is not None and int(step) >= total and not run["trainer.val_only"]
    if done and not validation_is_missing(run, files, int(step)):
        yield (
            f"the run in {folder} has trained {step} steps, and trainer.total_training_steps="
            f"{total}: nothing is left to train. Raise it to continue; for a new run {another}."
        )


def validation_is_missing(
    run: RunConfig, files: RunFiles, step: int, last: int | None = None
) -> bool:
    """Return whether a run was killed between the checkpoint of ``step`` and its validation."""
    every, last = run["trainer.test_freq"], last or run["trainer.total_training_steps"]
    due = every > 0 and (step % every == 0 or step == last)
    # A step's validation has its own line.
    trained = [row for of, _, row in files.metrics.steps() if of == step]
    return due and bool(trained) and all("selfplay/games" in row for row in trained)


def _same(run: RunConfig, checkpoint: Path) -> Iterator[Finding]:
    """Check that the run of a checkpoint in this run's folder is this one."""
    yield from _written_by_others(run, checkpoint)
    if not (found := changes(run, Path(run.selfplay.records))):
        return
    new = {
        "trainer.experiment_name": f"{run['trainer.experiment_name']}_from_{checkpoint.name[12:]}",
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(checkpoint.resolve()),
        f"{ACTOR}.checkpoint.load_contents": "[model]",
    }
    yield (
        f"{checkpoint.parent} holds a run with other settings: {'; '.join(map(str, found))}. Set "
        "them back, or begin a new run at its last checkpoint (with other "
        "trainer.default_local_dir and selfplay.records, if you set them): "
        f"{shlex.join(f'{key}={value}' for key, value in new.items())}"
    )


def _of_another_run(run: RunConfig, checkpoint: Path) -> Iterator[Finding]:
    """Check the other run's checkpoint from which this run starts."""
    yield from _written_by_others(run, checkpoint)
    found = changes(run, checkpoint.parent)
    differs = "; ".join(map(str, found))
    # verl takes the learning rate and more from an optimizer's state.
    if found and "optimizer" in run.names(f"{ACTOR}.checkpoint.load_contents"):
        yield (
            f"the checkpoint has other settings: {differs}. Set them back, or begin with its "
            f"weights alone: {ACTOR}.checkpoint.load_contents=[model]"
        )
    elif found:
        yield "warn", f"from this checkpoint on {differs}"


def rows_begin_anew(run: RunConfig) -> bool:
    """Return whether another run's checkpoint has a data position in other rows."""
    if run["trainer.resume_mode"] != "resume_path":
        return False
    found = changes(run, Path(str(run["trainer.resume_from_path"])).parent)
    filtered = bool(run["data.filter_overlong_prompts"])  # depends on more keys
    return any(filtered or change.key.startswith("data.") for change in found)


def _written_by_others(run: RunConfig, checkpoint: Path) -> Iterator[str]:
    """verl's FSDP engines read a checkpoint only with as many workers as wrote it."""
    names = (file.name.split("_") for file in checkpoint.glob("*/model_world_size_*_rank_*.pt"))
    if (sizes := {name[3] for name in names}) - {str(run.gpus)}:
        yield (
            f"the checkpoint {checkpoint} is of {' and '.join(sorted(sizes))} training workers, "
            f"and this run has {run.gpus}. Set trainer.nnodes and trainer.n_gpus_per_node as they "
            "were, or export it (docs/gpu.md) and start a new run from it."
        )


def changes(run: RunConfig, folder: Path) -> list[Change]:
    """Return forbidden differences from the ``run_config.yaml`` in ``folder``; ValueError if
    unreadable.
    """
    before = folder / CONFIG_FILE
    if not before.is_file():
        return []
    try:
        configs = (OmegaConf.load(before), OmegaConf.create(config_text(run)))
        old, new = (OmegaConf.to_container(config) for config in configs)
        then, here = (config.pop(IDENTITY, {}) for config in (old, new))
        was, now = ({k: v for k, v in leaves(node) if v not in (None, [])} for node in (old, new))
    except Exception as error:  # from YAML, OmegaConf or the file
        raise ValueError(
            f"{before} cannot be read ({str(error).splitlines()[0]}), and says which run the "
            "checkpoints belong to. Restore it, or move it away to continue without a comparison."
        ) from None
    return different(was, now, then, here)


def different(
    was: dict[str, Any], now: dict[str, Any], then: dict[str, str], here: dict[str, str]
) -> list[Change]:
    """The keys whose values differ but must not; ``then`` and ``here`` are identities by key."""
    found = []
    for key in dict.fromkeys([*was, *now]):
        change = Change(key, was.get(key), now.get(key))
        if change.matches(MAY_CHANGE) and not change.matches(SAME_LOADER):
            continue
        if then.get(key) and here.get(key):  # a folder may have moved; its content may not change
            other = then[key] != here[key]
        else:  # NaN is not equal to itself
            other = change.was != change.now and repr(change.was) != repr(change.now)
        if other:
            found.append(change)
    return found


def config_text(run: RunConfig) -> str:
    """A run's whole config as YAML, with identities of what its keys name; a resumed run is
    compared with it.
    """
    own = OmegaConf.masked_copy(
        run.config, [str(key) for key in run.config if key not in ("hydra", "ray_kwargs")]
    )
    own.selfplay = run.selfplay.model_dump(mode="json")  # with today's defaults
    behind = OmegaConf.create({IDENTITY: dict(_identities(run))})
    return f"{OmegaConf.to_yaml(own, resolve=True)}{OmegaConf.to_yaml(behind)}"


def _identities(run: RunConfig) -> Iterator[tuple[str, str]]:
    models = {f"{MODEL}.path", f"{MODEL}.tokenizer_path", f"{MODEL}.lora_adapter_path"}
    models |= {f"{model}.path" for model in run.trained.values()}
    for key in sorted(models | {"reward.reward_model.model_path"}):
        if run[key] is not None and (known := hash_of_model(str(run[key]))):
            yield key, known
    for key in ("data.train_files", "data.val_files"):
        files = [Path(name).expanduser() for name in run.names(key)]
        if files and all(file.is_file() for file in files):  # otherwise only verl finds them
            yield key, hash_of_values(*sorted(map(hash_of_file, files)))
    for name, folder in game_class(run.selfplay.game).View.folders(run.selfplay).items():
        if folder.is_dir():
            yield f"selfplay.{name}", hash_of_folder(folder)
