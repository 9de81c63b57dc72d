"""Checks that the machine, the data files and the servers of a run are what it needs.

The recipes' Hydra callback, before Ray starts, and ``medserl doctor`` run :data:`CHECKS`. The
trainer checks every row once verl has read them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from datasets import Dataset
from huggingface_hub import HfApi, try_to_load_from_cache
from ray._common.utils import get_default_ray_temp_dir
from ray._private.utils import get_num_cpus, read_ray_address
from transformers import AutoTokenizer

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking, without_credentials
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import AGENT_NAME, LIMITS, Interaction, overlong
from medserl_agentloop.core.run_check import ROLLOUT, RunConfig
from medserl_agentloop.core.run_check.resume import Finding, checkpoints
from medserl_agentloop.paths import DIFFERS, differs_from_manifest, read_parquet

OWN_DATASET = "pkg://medserl_agentloop.core.trainer"  # data.custom_cls.path in recipes/core.yaml
ROWS_AT_START = 500  # of a data file, the longest: about a second


def stays_here(run: RunConfig) -> bool:
    """Return whether all processes of a run are on this machine."""
    return _starts_ray(run) and run["trainer.nnodes"] == 1


def _starts_ray(run: RunConfig) -> bool:
    """Return whether ``ray.init`` starts a Ray of the run's own and joins no cluster."""
    given = run["ray_kwargs.ray_init.address"]
    address = (None if given == "auto" else given) or os.environ.get("RAY_ADDRESS")
    found = address or read_ray_address()  # of `ray start`
    return found in (None, "", "local")


def folders(run: RunConfig) -> Iterator[str]:
    """Home, Ray's folder and the run's are writable; Ray would report it after half a minute."""
    for folder, remedy in (
        ("~", "run: export HOME=FOLDER"),
        (get_default_ray_temp_dir(), "run: export RAY_TMPDIR=FOLDER"),
        (run["trainer.default_local_dir"], "set trainer.default_local_dir"),
        (run.selfplay.records, "set selfplay.records"),
    ):
        whole = Path(folder).expanduser().absolute()
        there = next(parent for parent in (whole, *whole.parents) if parent.exists())
        try:
            with TemporaryFile(dir=there):
                pass
        except OSError as error:
            yield f"{whole} cannot be written to ({error.strerror}). For another one, {remedy}."


def gpus(run: RunConfig) -> Iterator[str]:
    """The GPUs are here, or in a Ray cluster."""
    if _starts_ray(run) and (nodes := run["trainer.nnodes"]) > 1:
        yield (
            f"trainer.nnodes={nodes} needs a Ray cluster, but none is running here. Start one with "
            "`ray start` (docs/clusters), or set trainer.nnodes=1."
        )
    if run["trainer.device"] == "cuda" and stays_here(run) and not torch.cuda.device_count():
        yield (
            "this run needs a GPU (trainer.device=cuda), but torch sees none. Start it where "
            "`nvidia-smi` shows one, or try a recipe for the CPU: +recipes=own_notes."
        )


def cpus(run: RunConfig) -> Iterator[str]:
    """Ray has enough CPUs for the run's processes: with fewer, verl hangs silently."""
    units = run["transfer_queue.backend.SimpleStorage.num_data_storage_units"]
    served, cards = "reward.reward_model", run.gpus
    if run[f"{served}.enable_resource_pool"]:
        cards += run[f"{served}.n_gpus_per_node"] * run[f"{served}.nnodes"]
    # A unit and the controller of TransferQueue hold one each, a GPU's bundle three
    # (max_colocate_count in verl/single_controller/ray/base.py). Every other process needs one free
    # while it starts.
    needed = units + 1 + 3 * cards + 1
    present = run["ray_kwargs.ray_init.num_cpus"] or get_num_cpus(override_docker_cpu_warning=True)
    if stays_here(run) and present < needed:
        yield (
            f"this run needs {needed} Ray CPUs, 3 for each GPU, but Ray counts {present:g}: verl "
            "would wait forever. Use a machine with 16, or let Ray count more than there are: "
            f"ray_kwargs.ray_init.num_cpus={needed}."
        )


def models(run: RunConfig) -> Iterator[str]:
    """The models are local, or on a reachable hub."""
    found = {str(run[key]): key for key in (f"{of}.path" for of in run.trained.values())}
    for path, key in found.items():  # the critic's is mostly the actor's
        folder = Path(path).expanduser()
        if "://" in path or (folder / "config.json").is_file():
            continue
        try:
            if folder.is_dir() or folder.is_absolute():
                raise FileNotFoundError(f"{folder / 'config.json'} does not exist")
            if not isinstance(try_to_load_from_cache(path, "config.json"), str):
                HfApi().model_info(path, timeout=3.0)
        except (OSError, ValueError, httpx.HTTPError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            yield (
                f"{key}={path} is not a model folder (seen from {Path.cwd()}), nor a model on the "
                f"hub: {reason.rstrip('.')}. Name another, or fetch it: `hf download {path} "
                "--local-dir FOLDER`"
            )


def data(run: RunConfig) -> Iterator[str]:
    """The data files exist, come from one conversion, and their longest rows fit this run."""
    if run["data.custom_cls.path"] not in (None, OWN_DATASET):
        return
    game = _game_of(run)
    files = [
        (key, name) for key in ("train_files", "val_files") for name in run.names(f"data.{key}")
    ]
    for key, file in ((key, Path(name).expanduser()) for key, name in files if "://" not in name):
        source = quote(str(file)) if file.exists() else "FILE.csv"
        write = (
            f"write it: medserl data convert --input {source} --output {quote(str(file.parent))}"
        )
        if not file.exists():
            yield f"data.{key}: {file} does not exist (seen from {Path.cwd()}); {write}"
        elif file.suffix != ".parquet":
            yield f"data.{key}={file} is not converted, but a run reads converted rows: {write}"
        elif differs_from_manifest(file):
            yield f"{file}: {DIFFERS}."
        elif game is not None:
            try:
                rows = SimpleNamespace(dataframe=Dataset(read_parquet(file)))
                check_dataset(rows, f"data.{key}={file}", game, run.config.data, most=ROWS_AT_START)
            except ValueError as error:
                yield str(error)


def _game_of(run: RunConfig) -> Interaction[Any, Any] | None:
    """The run's game; None if its tokenizer is not on this machine yet."""
    model = run.config.actor_rollout_ref.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.get("tokenizer_path") or model.path,
            local_files_only=True,
            trust_remote_code=bool(model.get("trust_remote_code", False)),
        )
        tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
        encoder = ChatEncoder.of_run(tokenizer, run.config.data)
        game: Interaction[Any, Any] = game_class(run.selfplay.game)(run.selfplay, encoder)
        return game
    except (OSError, ValueError):
        return None


def opponent(run: RunConfig) -> Iterator[Finding]:
    """The opponent's server answers; otherwise all its games would be void."""
    options = run.selfplay.opponent
    if not options.frozen:
        return
    try:
        blocking(ServedModel(options.model_copy(update={"retries": 0}).client()).check())
    except ValueError as error:
        yield f"selfplay.opponent.url={without_credentials(str(options.url))}: {error}."


CHECKS: dict[str, Callable[[RunConfig], Iterator[Finding]]] = {
    "folders": folders,
    "GPU": gpus,
    "CPUs": cpus,
    "model": models,
    "data": data,
    "checkpoints": checkpoints,
    "opponent": opponent,
}
"""All checks by name: each yields a sentence for a problem, with its remedy, or ``warn`` and what
should be known.
"""


# --- with verl's tokenizer and data sets ---


def check_stop_strings(strings: Sequence[str], rollout: Any) -> None:
    """Refuse stop strings of more than one token, which SGLang would ignore."""
    if strings and rollout.name == "sglang" and rollout.get("skip_tokenizer_init", False):
        raise ConfigError(
            f"the stop strings {', '.join(map(repr, strings))} are more than one token each. "
            f"SGLang looks for them only with {ROLLOUT}.skip_tokenizer_init=False: set that, or "
            "remove them from profile.yaml."
        )


def check_dataset(
    dataset: Any,
    name: str,
    game: Interaction[Any, Any],
    data: Any,
    *,
    batch: int = 1,
    most: int | None = None,
) -> str:
    """Check the rows of verl's ``RLHFDataset``, called ``name`` in messages, or the ``most``
    longest ones. verl drops rows that do not fill a ``batch``.

    Returns a line that says what will be played and how long the longest row is; a ConfigError
    names a bad row and what to do.
    """
    table = dataset.dataframe
    convert = "Write it with medserl data convert --input FILE.csv --output FOLDER."
    if absent := {"agent_name", "extra_info"} - {*table.column_names}:
        raise ConfigError(f"{name} has no column {', '.join(sorted(absent))}. {convert}")
    kinds, longest, too_long = Counter[str](), [0, 0], dict[str, list[int]]()
    rows = list(enumerate(zip(table["agent_name"], table["extra_info"], strict=True)))
    if most is not None:
        rows = sorted(nlargest(most, rows, key=lambda row: len(str(row[1][1]))), key=itemgetter(0))
    for number, (agent, facts) in rows:
        where = f"{name} row {number}"
        if agent != AGENT_NAME:
            raise ConfigError(f"{where}: agent_name is {agent!r}, not {AGENT_NAME!r}. {convert}")
        try:
            needed = game.plan(facts)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        longest = list(map(max, longest, needed[1:]))
        for limit in overlong(needed, data):
            too_long.setdefault(limit, []).append(number)
        kinds[needed.kind] += 1
    if too_long and not data.filter_overlong_prompts:
        numbers = sorted({number for found in too_long.values() for number in found})
        needs = " and ".join(f"data.{key}={longest[LIMITS.index(key)]}" for key in too_long)
        raise ConfigError(
            f"{name}: row {', '.join(map(str, numbers[:3]))} needs {needs} ({len(numbers)} rows in "
            "all). Set that, plan shorter turns, or leave such rows out with "
            "data.filter_overlong_prompts=true."
        )
    plays = f"all of its {len(table)} rows"
    if left := len(table) % batch:
        plays = f"{len(table) - left} of its {len(table)} rows in each epoch, in batches of {batch}"
    counted = ", ".join(f"{count} {kind}".strip() for kind, count in sorted(kinds.items()))
    return (
        f"{name}: plays {plays} ({counted}); longest prompt {longest[0]} of "
        f"{data.max_prompt_length} tokens, longest planned response {longest[1]} of "
        f"{data.max_response_length}"
    )
