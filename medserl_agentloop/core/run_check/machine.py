"""Check the machine and the files that a run starts with, for the common mistakes of a first hour.

:data:`CHECKS` is asked by the recipes' Hydra callback, before Ray is up, and by ``medserl doctor``.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from heapq import nlargest
from importlib.metadata import distributions
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import torch
from datasets import Dataset
from huggingface_hub import HfApi, try_to_load_from_cache
from ray._common.utils import get_default_ray_temp_dir
from ray._private.utils import (
    get_num_cpus,
    get_ray_address_file,
    read_ray_address,
    validate_socket_filepath,
)

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking, without_credentials
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import AGENT_NAME, LIMITS, Interaction, overlong
from medserl_agentloop.core.run_check import ACTOR, FSDP, MODEL, ROLLOUT, RunConfig
from medserl_agentloop.core.run_check.resume import Finding, checkpoints
from medserl_agentloop.paths import DIFFERS, differs_from_manifest, read_parquet, regular_file

OWN_DATASET = "pkg://medserl_agentloop.core.trainer"  # data.custom_cls.path in recipes/core.yaml
ROWS_AT_START = 500  # of a data file, looked at before Ray starts: about a second
# positions of the context that SGLang never fills (max_req_len in sglang/srt/managers/tp_worker.py)
RESERVED = 2
GPU_SET = "pip install --no-deps --requirement constraints-gpu.txt"
PACKAGES = {"sglang": GPU_SET} | {
    logger: f"pip install {logger}" for logger in ("wandb", "mlflow", "swanlab", "tensorboard")
}
"""Engines and loggers of that name, with the command that installs them."""
NOT_CONVERTED = (".csv", ".tsv", ".xlsx", ".xls", ".jsonl", ".json")
CONVERT = "Write it with medserl data convert --input FILE.csv --output FOLDER"


def gpus(run: RunConfig) -> Iterator[str]:
    """The GPUs are on this machine, unless the run has a cluster of Ray's."""
    present, needed = torch.cuda.device_count(), run["trainer.n_gpus_per_node"]
    if run["trainer.device"] == "cuda" and stays_here(run) and present < needed:
        install = f"; torch {torch.__version__} is built without CUDA. Run {GPU_SET}" * (
            torch.version.cuda is None
        )
        yield (
            f"this run needs {needed} GPU{'s' * (needed > 1)} (trainer.device=cuda, "
            f"trainer.n_gpus_per_node={needed}), "
            f"and torch sees {present} on this machine "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
            f"{install}. Start it where `nvidia-smi` shows them, set fewer, or try a recipe for "
            "the CPU: "
            "+recipes=own_notes."
        )


def cpus(run: RunConfig) -> Iterator[str]:
    """Ray has the CPUs that processes of the run hold: with fewer, verl waits for ever, without a
    word.
    """
    units = run["transfer_queue.backend.SimpleStorage.num_data_storage_units"]
    served, own_gpus = "reward.reward_model", run["reward.reward_model.enable_resource_pool"]
    cards = run.gpus + (
        run[f"{served}.n_gpus_per_node"] * run[f"{served}.nnodes"] if own_gpus else 0
    )
    # A unit and the controller of TransferQueue hold one each, a GPU's bundle three
    # (max_colocate_count in verl/single_controller/ray/base.py). Every other process needs one free
    # while it starts.
    needed = units + 1 + 3 * cards + 1
    present = run["ray_kwargs.ray_init.num_cpus"] or get_num_cpus(override_docker_cpu_warning=True)
    if stays_here(run) and present < needed:
        yield (
            f"this run needs {needed} CPUs of Ray's (3 for each GPU of {cards}, {units} and 1 for "
            "verl's queue of "
            f"batches, 1 to start others), and Ray counts {present:g}: verl would wait for ever. "
            "Take a machine with "
            f"16, or let Ray count more than there are: ray_kwargs.ray_init.num_cpus={needed}."
        )


def folders(run: RunConfig) -> Iterator[str]:
    """Home, Ray's folder and the run's can be written to; Ray says it after half a minute."""
    checkpoints, records = "trainer.default_local_dir", "selfplay.records"
    places = {
        "run: export HOME=FOLDER": Path.home(),
        "run: export RAY_TMPDIR=FOLDER": Path(get_default_ray_temp_dir()),
        f"set {checkpoints}": Path(run[checkpoints]),
        f"set {records}": Path(run.selfplay.records),
    }
    for remedy, folder in places.items():
        whole = folder.expanduser().absolute()
        there = next(parent for parent in (whole, *whole.parents) if parent.exists())
        try:
            with TemporaryFile(dir=there):
                pass
        except OSError as error:
            yield f"{folder} cannot be written to ({error.strerror}). For another one, {remedy}."


def stays_here(run: RunConfig) -> bool:
    """Return whether all processes of a run are on this machine."""
    return cluster_of(run["ray_kwargs.ray_init.address"])[0] is None and run["trainer.nnodes"] == 1


def cluster_of(given: str | None = None) -> tuple[str | None, str]:
    """The address of the cluster that ``ray.init`` joins, or None, and what makes it start one of
    its own instead.
    """
    found = {
        "set ray_kwargs.ray_init.address=null": None if given == "auto" else given,
        "run: unset RAY_ADDRESS": os.environ.get("RAY_ADDRESS"),
        f"run: rm {get_ray_address_file(None)}": read_ray_address(),  # by `ray start`
    }
    remedy, address = next(((remedy, one) for remedy, one in found.items() if one), ("", given))
    return None if address == "local" else address, remedy


def cluster(run: RunConfig | None) -> Iterator[str]:
    """Ray's cluster answers, or can be started; Ray itself would wait for minutes, or name
    something else.
    """
    address, remedy = cluster_of(None if run is None else run["ray_kwargs.ray_init.address"])
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    session = f"{get_default_ray_temp_dir()}/session_YYYY-mm-dd_HH-MM-SS_ffffff_{os.getpid()}"
    try:
        if address is None:
            remedy = "TMPDIR or RAY_TMPDIR is too long; run: export RAY_TMPDIR=/tmp"
            validate_socket_filepath(f"{session}/sockets/plasma_store")
        elif port.isdecimal():
            remedy = f"No cluster of Ray's answers at {address}: start it, or {remedy}"
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        yield f"Ray cannot start ({error}). {remedy}"


def packages(run: RunConfig) -> Iterator[str]:
    """The engine, the loggers and kernels are installed, and W&B has a key."""
    for key in (f"{ROLLOUT}.name", "trainer.logger"):
        for name in set(run.names(key)) & set(PACKAGES):
            if find_spec(name) is None:
                yield f"{key}={name}: the package {name} is not installed. Run: {PACKAGES[name]}"
    attention, fused = f"{MODEL}.override_config.attn_implementation", f"{MODEL}.use_fused_kernels"
    if run["trainer.device"] == "cuda" and run[f"{ACTOR}.strategy"] in FSDP:
        # Without its own kernels verl takes cross entropy and attention of the package flash-attn.
        if not run[fused] and not any(distributions(name="flash-attn")):
            yield (
                f"{fused}=False: without the package flash-attn, verl takes log-probs in bf16, one "
                f"token after another. Set {fused}=True."
            )
        if run[attention] in (None, "flash_attention_2") and not any(
            distributions(name="flash-attn")
        ):
            yield f"{attention} needs the package flash-attn. Set +{attention}=sdpa."
        if run[f"{MODEL}.use_liger"] and find_spec("liger_kernel") is None:
            yield (
                f"{MODEL}.use_liger=True: the package liger-kernel is not installed. Run {GPU_SET}"
            )
    if "wandb" in run.names("trainer.logger") and find_spec("wandb"):
        import wandb  # a second that only its users pay

        logged_in = False
        with suppress(ValueError, wandb.Error):  # a key of another form than W&B's
            logged_in = wandb.setup().settings.mode != "online" or wandb.login(
                prompt=False, verify=False
            )
        if not logged_in:
            yield (
                "trainer.logger has wandb, and there is no key for it, or none that it takes. Run "
                "`wandb login` or "
                "export WANDB_API_KEY, export WANDB_MODE=offline to log to a folder, or set "
                "trainer.logger=[console]."
            )


def sglang_on_cpu(run: RunConfig) -> Iterator[str]:
    """A CPU recipe's SGLang has no GPU in sight, and room for the longest turn."""
    if run["trainer.device"] != "cpu" or run[f"{ROLLOUT}.name"] != "sglang":
        return
    if torch.cuda.is_available():
        yield (
            "this recipe runs SGLang on the CPU, and there is a GPU, which SGLang would use. Take "
            "a recipe without "
            "trainer.device=cpu, such as qwen3_4b, or hide the GPU with CUDA_VISIBLE_DEVICES=-1."
        )
    needed = longest_context(run) + RESERVED
    for key in ("max_model_len", "engine_kwargs.sglang.max_total_tokens"):
        # The engine lowers a request's budget to what is left of either, and reports an ordinary
        # "length".
        if (limit := run[f"{ROLLOUT}.{key}"]) is not None and limit < needed:
            yield (
                f"a turn may need {needed} tokens with its prompt, and {ROLLOUT}.{key}={limit}: "
                "SGLang would cut it "
                f"without a word. Set it to at least {needed}, or lower data.max_prompt_length, "
                "data.max_response_length or the game's token budget (selfplay.budget)."
            )


def longest_context(run: RunConfig) -> int:
    """Most tokens that a prompt and its turn may have together, whatever the rows are."""
    prompt, response = run["data.max_prompt_length"], run["data.max_response_length"]
    if run.selfplay.context == "shared":
        return int(prompt + response)
    # verl counts all prompts but the first as response.
    return int(max(prompt + min(run.selfplay.longest_turn(prompt) or response, response), response))


def models(run: RunConfig) -> Iterator[str]:
    """The models are here, or on the hub."""
    keys = [f"{model}.path" for model in run.trained.values()]
    for path, key in {
        str(run[key]): key for key in reversed(keys)
    }.items():  # the critic's is mostly the actor's
        folder = Path(path).expanduser()
        if "://" in path or (folder / "config.json").is_file():
            continue
        try:
            if folder.is_dir():
                raise FileNotFoundError("there is no config.json in it")
            if not isinstance(try_to_load_from_cache(path, "config.json"), str):
                HfApi().model_info(path, timeout=3.0)
        except (OSError, ValueError, httpx.HTTPError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            yield (
                f"{key}={path} is no folder of a model (seen from {Path.cwd()}), nor one on the "
                f"hub: {reason}. "
                f"Name another, or fetch it where there is a network: `hf download {path} "
                "--local-dir FOLDER`."
            )


def data(run: RunConfig) -> Iterator[str]:
    """The data files are here and hold a batch, and their longest rows can be played with this
    config.

    The trainer checks all rows once Ray is up. What only verl can read is left to it: remote files,
    other formats, a data set class of the user's, a tokenizer that is not here yet.
    """
    node = run.config.data
    own_rows = node.custom_cls.path in (None, OWN_DATASET)
    try:
        tokenizer = run.tokenizer(local_files_only=True)
        game = game_class(run.selfplay.game)(run.selfplay, ChatEncoder.of_run(tokenizer, node))
    except (OSError, ValueError):
        game = None
    for key in ("data.train_files", "data.val_files"):
        files = [Path(name).expanduser() for name in run.names(key) if "://" not in name]
        if missing := [str(file) for file in files if not file.exists()]:
            first = Path(missing[0])  # convert writes train.parquet and val.parquet
            own = key == "data.val_files" and first.name != "val.parquet"
            command, written = ("eval", first) if own else ("convert", first.parent)
            yield (
                f"{key}: {', '.join(missing)} does not exist (seen from {Path.cwd()}). Name "
                "another, or write it: "
                f"medserl data {command} --input FILE.csv --output {quote(str(written))}"
            )
            continue
        rows, batch = 0, run["data.train_batch_size"] if key == "data.train_files" else 1
        try:
            for file in map(regular_file, files):
                if own_rows and file.suffix in NOT_CONVERTED:
                    folder = quote(str(file.parent / file.stem))
                    yield (
                        f"{key}={file} is a table of notes, and a run reads the rows that are made "
                        f"of it. Write them: medserl data convert --input {quote(str(file))} "
                        f"--output {folder}, and set data.train_files={folder}/train.parquet."
                    )
                if file.suffix != ".parquet":
                    continue
                table = read_parquet(file)
                table.validate(
                    full=True
                )  # or a damaged text is found where it is used, without the file's name
                rows += table.num_rows
                if absent := {"prompt", "extra_info"} - set(table.column_names):
                    yield f"{key}={file} has no column {', '.join(sorted(absent))}. {CONVERT}."
                elif game is not None and own_rows:
                    dataset = SimpleNamespace(dataframe=Dataset(table))
                    check_dataset(dataset, f"{key}={file}", game, node, ROWS_AT_START)
        except ConfigError as error:
            yield str(error)
        except (OSError, pa.ArrowException, MemoryError, UnicodeDecodeError) as error:  # pyarrow's
            reason = f"{type(error).__name__}: {error}"
            yield (
                f"{key}={file} cannot be read ({reason}): it is damaged, or no parquet file. "
                f"{CONVERT}."
            )
        except ValueError as error:
            yield f"{key}={error}"
        else:
            if files and rows < batch and len(parquet_files(run, key)) == len(run.names(key)):
                yield (
                    f"{key} has {rows} rows, and needs {batch} or more. Name another file or a "
                    "smaller batch."
                )


def parquet_files(run: RunConfig, key: str) -> list[Path]:
    """The files of a data key that are here and are parquet by their name."""
    files = (Path(name).expanduser() for name in run.names(key))
    return [file for file in files if file.suffix == ".parquet" and file.is_file()]


def check_stop_strings(strings: Sequence[str], rollout: Any) -> None:
    """Refuse stop strings, of more than one token each, that the engine of verl's rollout node
    could not look for.
    """
    if strings and rollout.name == "sglang" and rollout.get("skip_tokenizer_init", False):
        raise ConfigError(
            f"the profile's stop strings {', '.join(map(repr, strings))} are more than one token "
            "each, and SGLang "
            "looks for such strings only with actor_rollout_ref.rollout.skip_tokenizer_init=False. "
            "Set that, or "
            "take them out of profile.yaml."
        )


def check_files(files: str | Sequence[str]) -> None:
    """Refuse data files of two different conversions, which a killed one may leave side by side."""
    for file in [files] if isinstance(files, str) else files:
        if differs_from_manifest(Path(file)):
            raise ConfigError(f"{file}: {DIFFERS}.")


def check_dataset(
    dataset: Any,
    name: str,
    game: Interaction[Any, Any],
    data: Any,
    most: int | None = None,
    batch: int = 1,
) -> str:
    """Check every row of verl's ``RLHFDataset``, which messages call ``name``; or ``most`` with the
    longest facts. verl leaves out what does not fill a ``batch``.

    Returns one line that says what will be played and how long the longest row is, by the limits of
    verl's ``data``; a ConfigError names the row, what is wrong with it and what to do.
    """
    rows = dataset.dataframe
    agents = rows["agent_name"] if "agent_name" in rows.column_names else [None] * len(rows)
    kinds: list[str] = []
    longest = [0, 0]
    too_long: dict[str, list[int]] = {}
    everything = list(enumerate(zip(agents, rows["extra_info"], strict=True)))
    if most is not None:
        everything = sorted(
            nlargest(most, everything, key=lambda row: len(str(row[1][1]))), key=itemgetter(0)
        )
    for number, (agent, facts) in everything:
        where = f"{name} row {number}"
        if agent != AGENT_NAME:
            raise ConfigError(
                f"{where}: agent_name is {agent!r}, expected {AGENT_NAME!r}. {CONVERT}."
            )
        try:
            needed = game.plan(facts)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        longest = list(map(max, longest, needed[1:]))
        for limit in overlong(needed, data):
            too_long.setdefault(limit, []).append(number)
        kinds.append(needed.kind)
    if too_long and not data.filter_overlong_prompts:
        numbers = sorted({number for rows in too_long.values() for number in rows})
        shown, more = ", ".join(map(str, numbers[:3])), len(numbers) - 3
        needs = [f"data.{limit}={longest[LIMITS.index(limit)]}" for limit in too_long]
        raise ConfigError(
            f"{name}: row {shown}{f' and {more} more' * (more > 0)} needs {' and '.join(needs)}, "
            f"and the run has {' and '.join(f'{limit}={data[limit]}' for limit in too_long)}. Set "
            "these, plan shorter turns, or leave such rows out with "
            "data.filter_overlong_prompts=true."
        )
    left = len(rows) % batch
    plays = f"all of its {len(rows)} rows"
    if left:
        plays = f"{len(rows) - left} of its {len(rows)} rows in each epoch, in batches of {batch}"
    counted = ", ".join(f"{count} {kind}".strip() for kind, count in sorted(Counter(kinds).items()))
    return (
        f"{name}: plays {plays} ({counted}); longest prompt {longest[0]} of "
        f"{data.max_prompt_length} tokens, longest planned response {longest[1]} of "
        f"{data.max_response_length}"
    )


def opponent(run: RunConfig) -> Iterator[Finding]:
    """A server that plays the untrained role can be reached; without it all its games would be
    void.
    """
    options = run.selfplay.opponent
    if options.kind != "endpoint":
        return
    try:
        blocking(ServedModel(options.model_copy(update={"retries": 0}).client()).check())
    except ValueError as error:
        yield f"selfplay.opponent.url={without_credentials(str(options.url))}: {error}."


CHECKS: dict[str, Callable[[RunConfig], Iterator[Finding]]] = {
    "Ray": cluster,
    "folders": folders,
    "GPU": gpus,
    "CPUs": cpus,
    "packages": packages,
    "engine": sglang_on_cpu,
    "model": models,
    "data": data,
    "checkpoints": checkpoints,
    "opponent": opponent,
}
"""All checks by name: each yields a sentence for a problem, with its remedy, or ``warn`` and what
should be known.
"""
