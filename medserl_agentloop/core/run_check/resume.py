"""Checks of a run that goes on: its checkpoint can be read, and its config is that of the steps
before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf

from medserl_agentloop.core.config import ROLE_ADAPTERS, game_class
from medserl_agentloop.core.run_check import ACTOR, MODEL, RunConfig
from medserl_agentloop.core.run_check.composition import leaves
from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, RunFiles
from medserl_agentloop.paths import sha256_of

SAME_RUN = (
    *("selfplay.game", "selfplay.context", f"{MODEL}.path", "algorithm.adv_estimator"),
    "reward.reward_model.model_path",
)
"""Keys that decide what a run learns, besides its game's (``Interaction.same_run``).

Which role trains may change.
"""
OF_OPTIMIZER = tuple(
    f"{of}.optim.{name}" for of in (ACTOR, "critic") for name in ("lr.", "betas.", "weight_decay.")
)
"""Keys, each with a dot, whose values a checkpoint's optimizer brings along: verl loads it over
this run's.
"""
OF_ADAPTERS = ("selfplay.train.", "selfplay.credit.role_weights.")
"""The same where each role has an adapter: they decide which parameters the optimizer has."""
SAME_LOADER = (
    "data.dataloader_num_workers",
    "data.shuffle",
    "data.sampler.class_path",
    "data.sampler.class_name",
)
"""Keys with another value of which a checkpoint's place in the rows cannot be read, or is another
place.
"""
SAME_ANYWAY = (
    *(
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.resume",
        "selfplay.allow_changes",
    ),
    *("transfer_queue.enable", f"{MODEL}.lora.{ROLE_ADAPTERS}"),
)
"""Beginnings of keys that a run which goes on has to change, and of those that are set after its
start is checked.
"""
ITS_NAME = ("trainer.default_local_dir", "trainer.experiment_name", "selfplay.records")
TRAIN_HASHES, TOKENIZER_HASH = (
    "medserl_train_files_sha256",
    "medserl_tokenizer_sha256",
)  # in ``run_config.yaml``
Finding = str | tuple[Literal["warn"], str]


def checkpoints(run: RunConfig) -> Iterator[Finding]:
    """Check that the run to resume, if any, is the same one, can be read, and has steps left to
    train.
    """
    mode = run["trainer.resume_mode"]
    try:
        if mode == "resume_path":
            yield from _chosen(run)
        elif mode == "auto" and run.selfplay.certify != "only":
            yield from _newest(run)
    except ValueError as error:  # a file of the run that cannot be read
        yield str(error)


def _chosen(run: RunConfig) -> Iterator[Finding]:
    """Check the checkpoint that the run names itself."""
    if "global_step_" not in str(path := run["trainer.resume_from_path"]):
        yield (
            f"trainer.resume_mode=resume_path, and trainer.resume_from_path={path or 'null'} is no "
            "checkpoint. Set "
            "it to a folder global_step_N, or trainer.resume_mode=auto to go on from the newest "
            "one."
        )
        return
    checkpoint = Path(path)
    yield from _written_by_others(run, checkpoint)
    refused, reported = changed_settings(run, checkpoint.parent)
    if refused:
        yield f"trainer.resume_from_path={checkpoint} cannot be resumed: {'; '.join(refused)}."
    elif reported:
        yield "warn", f"from this checkpoint on {'; '.join(reported)}"


def _newest(run: RunConfig) -> Iterator[Finding]:
    """Check the last checkpoint in the run's folder, if there is one."""
    folder, another = (
        Path(run["trainer.default_local_dir"]),
        "set trainer.experiment_name to a new name",
    )
    latest = folder / LATEST
    # data.pt is the last that verl writes.
    whole = [
        path.parent.name.removeprefix("global_step_")
        for path in folder.glob("global_step_*/data.pt")
    ]
    newest = max((name for name in whole if name.isdecimal()), key=int, default=None)
    resume = (
        f"Write {newest} into it to resume from the newest checkpoint there"
        if newest
        else "It has no whole one"
    )
    if not latest.is_file():
        if newest:
            yield (
                f"{latest} is missing beside checkpoints, which a new run would overwrite. "
                f"{resume}, or {another}."
            )
        return
    # A full disk, or a kill at the wrong moment, leaves the file empty (trainer_base.py,
    # _save_checkpoint): verl fails on that once the models are loaded. Where it names a folder that
    # is gone, verl starts from nothing without a word.
    step = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not (step.isdecimal() and (folder / f"global_step_{step}").is_dir()):
        yield f"{latest} says {step!r}, which is no checkpoint. {resume}, or {another}."
        return
    yield from _written_by_others(run, folder / f"global_step_{step}")
    records = Path(run.selfplay.records)
    refused, reported = changed_settings(run)
    list(
        RunFiles(records).missing(int(step)) if records.is_dir() else ()
    )  # the resume reports what is missing
    if refused:
        yield (
            f"trainer.default_local_dir={folder} has checkpoints of another run "
            f"({'; '.join(refused)}), and this one "
            f"would resume from them. For a run of its own {another}; to go on from them on "
            "purpose add "
            "selfplay.allow_changes=true."
        )
    elif reported:
        kept = records / f"run_config.until_step_{step}.yaml"
        yield "warn", f"from here on {'; '.join(reported)}. {kept} keeps the config until then"
    total = run["trainer.total_training_steps"]
    if total is not None and int(step) >= total and not run["trainer.val_only"]:
        yield (
            f"the run in {folder} has trained {step} steps, and "
            f"trainer.total_training_steps={total}: nothing is left "
            f"to train. Set it to more to go on; for a new run {another}."
        )


def _written_by_others(run: RunConfig, checkpoint: Path) -> Iterator[str]:
    """verl's FSDP engines read a checkpoint only with as many workers as wrote it, and say so after
    the models.
    """
    names = (file.name.split("_") for file in checkpoint.glob("*/model_world_size_*_rank_*.pt"))
    if (sizes := {name[3] for name in names}) - {str(run.gpus)}:
        yield (
            f"the checkpoint {checkpoint} is of {' and '.join(sorted(sizes))} training workers, "
            "and this run has "
            f"{run.gpus}. Set trainer.nnodes and trainer.n_gpus_per_node as they were, or merge it "
            "(docs/advanced.md) "
            f"and start a run of another name from it with {MODEL}.path."
        )


def changed_settings(run: RunConfig, folder: Path | None = None) -> tuple[list[str], list[str]]:
    """Compare the run with its folder's config: differences that are refused, and those that are
    only reported.

    With ``folder``, that of a checkpoint which the run names itself, only changes are refused that
    make the checkpoint unreadable. A ValueError says that the config cannot be read.
    """
    before, new = (
        (folder or Path(run.selfplay.records)) / CONFIG_FILE,
        OmegaConf.create(config_text(run)),
    )
    try:
        old = OmegaConf.load(before) if before.is_file() else new
        was, now = (
            {key: value for key, value in leaves(c) if value not in (None, {})} for c in (old, new)
        )
    except Exception as error:  # of YAML, of OmegaConf, of the file
        raise ValueError(
            f"{before} says which run the checkpoints are of, and cannot be read "
            f"({str(error).splitlines()[0]}). Mend "
            "it, or move it away to go on without a comparison."
        ) from None
    own = (*SAME_RUN, *(f"selfplay.{name}" for name in game_class(run.selfplay.game).same_run))
    known = [f"{key}." for key, _ in leaves(old)]  # an earlier version may lack a key
    decisive = tuple(f"{key}." for key in own if any(name.startswith(f"{key}.") for name in known))
    loads_optimizer = "optimizer" in run[f"{ACTOR}.checkpoint.load_contents"]
    of_checkpoint = OF_OPTIMIZER + (OF_ADAPTERS if run.selfplay.adapters == "per_role" else ())
    refused, reported = list[str](), list[str]()
    for key in dict.fromkeys([*was, *now]):
        text = f"{key} was {was.get(key)} and is {now.get(key)}"
        node, _, name = key.rpartition(".")
        follows = name in (run[node] or {}) and OmegaConf.is_interpolation(
            run[node], name
        )  # another key
        # A folder of models may have been moved. In a checkpoint of verl's, all folders have the
        # same name.
        moved = name.endswith("path") and _own_names(was.get(key)) == _own_names(now.get(key))
        unknown = key == TRAIN_HASHES and not was.get(key)  # where only verl finds the files
        own_name = folder is not None and key in ITS_NAME
        if (
            was.get(key) == now.get(key)
            or moved
            or unknown
            or own_name
            or key.startswith(SAME_ANYWAY)
        ):
            continue
        if key in SAME_LOADER:
            refused.append(f"{text}, and its place in the rows is lost: set it back")
        elif loads_optimizer and f"{key}.".startswith(of_checkpoint):
            refused.append(
                f"{text}, and verl takes the checkpoint's: set it back, or begin anew from its "
                "weights"
            )
        elif key in (TRAIN_HASHES, TOKENIZER_HASH) or f"{key}.".startswith(decisive):
            if key == TRAIN_HASHES:
                files = (config.get("data.train_files") for config in (was, now))
                text = "data.train_files was {} and is {}, or its rows changed".format(*files)
            elif key == TOKENIZER_HASH:
                if not (
                    was.get(key) and now.get(key)
                ):  # an earlier version's config, or a tokenizer that is not here
                    continue
                text = (
                    "the model's tokenizer or chat template is no longer the one it was trained "
                    "with"
                )
            (reported if run.selfplay.allow_changes or folder else refused).append(text)
        elif not follows:
            reported.append(text)
    return refused, reported


def _own_names(path: object) -> str:
    """The end of a path that names a model: its last folder, or a run's folder and what is below in
    a checkpoint.
    """
    named = re.search(r"[^/]+(/global_step_\d+(/.*)?)?$", str(path).rstrip("/"))
    return named[0] if named else ""


def config_text(run: RunConfig) -> str:
    """The whole config of a run as YAML, with hashes of the files that it reads: what a resumed run
    is held against.
    """
    files = [Path(name) for name in run.names("data.train_files")]
    hashes = {
        TRAIN_HASHES: sorted(sha256_of(file) for file in files if file.is_file()),
        TOKENIZER_HASH: _tokenizer_hash(run),
    }
    own = OmegaConf.masked_copy(
        run.config, [str(key) for key in run.config if key not in ("hydra", "ray_kwargs")]
    )
    own.selfplay = run.selfplay.model_dump(mode="json")  # with the defaults of today
    return f"{OmegaConf.to_yaml(own, resolve=True)}{OmegaConf.to_yaml(OmegaConf.create(hashes))}"


def _tokenizer_hash(run: RunConfig) -> str:
    """Hash of the run's tokenizer and its chat template; empty if only verl finds it."""
    try:
        tokenizer = run.tokenizer()
    except (OSError, ValueError):
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    content = [words, tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
