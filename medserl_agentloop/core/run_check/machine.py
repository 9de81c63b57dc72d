"""Check the machine and the files that a run starts with, for the common mistakes of a first hour.

:data:`CHECKS` is asked by the recipes' Hydra callback, before Ray is up, and by ``medserl doctor``.
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

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking, without_credentials
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import AGENT_NAME, LIMITS, Interaction, overlong
from medserl_agentloop.core.run_check import ROLLOUT, RunConfig
from medserl_agentloop.core.run_check.resume import Finding, checkpoints
from medserl_agentloop.paths import DIFFERS, differs_from_manifest, read_parquet

OWN_DATASET = "pkg://medserl_agentloop.core.trainer"  # data.custom_cls.path in recipes/core.yaml
ROWS_AT_START = 500  # of a data file, looked at before Ray starts: about a second
# positions of the context that SGLang never fills (max_req_len in sglang/srt/managers/tp_worker.py)
RESERVED = 2
NOT_CONVERTED = (".csv", ".tsv", ".xlsx", ".xls", ".jsonl", ".json")
CONVERT = "Write it with medserl data convert --input FILE.csv --output FOLDER"


def gpus(run: RunConfig) -> Iterator[str]:
    """There is a GPU on this machine, unless the run has a cluster of Ray's."""
    if run["trainer.device"] == "cuda" and stays_here(run) and not torch.cuda.device_count():
        yield (
            "this run needs a GPU (trainer.device=cuda), and torch sees none. Start it where "
            "`nvidia-smi` shows one, or try a recipe for the CPU: +recipes=own_notes."
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
    """Return whether all processes of a run are on this machine: ``ray.init`` joins no cluster."""
    given = run["ray_kwargs.ray_init.address"]
    address = (None if given == "auto" else given) or os.environ.get("RAY_ADDRESS")
    found = address or read_ray_address()  # of `ray start`
    return found in (None, "", "local") and run["trainer.nnodes"] == 1


def sglang_on_cpu(run: RunConfig) -> Iterator[str]:
    """A CPU recipe's SGLang has no GPU in sight, and room for the longest turn."""
    if run["trainer.device"] != "cpu" or run[f"{ROLLOUT}.name"] != "sglang":
        return
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
    """The models are here, or on a hub that answers."""
    found = {str(run[key]): key for key in (f"{of}.path" for of in run.trained.values())}
    for path, key in found.items():  # the critic's is mostly the actor's
        if "://" in path or (Path(path).expanduser() / "config.json").is_file():
            continue
        try:
            if Path(path).expanduser().is_dir():
                raise FileNotFoundError("there is no config.json in it")
            if not isinstance(try_to_load_from_cache(path, "config.json"), str):
                HfApi().model_info(path, timeout=3.0)
        except (OSError, ValueError, httpx.HTTPError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            yield (
                f"{key}={path} is no folder of a model (seen from {Path.cwd()}), nor one on the "
                f"hub: {reason}. Name another, or fetch it: `hf download {path} --local-dir FOLDER`"
            )


def data(run: RunConfig) -> Iterator[str]:
    """The data files are here and converted, and their longest rows can be played with this config.

    The trainer checks all rows once Ray is up. What only verl can read is left to it: remote files,
    other formats, a data set class of the user's, a tokenizer that is not here yet.
    """
    node = run.config.data
    if node.custom_cls.path not in (None, OWN_DATASET):
        return
    try:
        tokenizer = run.tokenizer(local_files_only=True)
        game = game_class(run.selfplay.game)(run.selfplay, ChatEncoder.of_run(tokenizer, node))
    except (OSError, ValueError):
        game = None
    for key in ("data.train_files", "data.val_files"):
        for file in [Path(name).expanduser() for name in run.names(key) if "://" not in name]:
            folder = quote(str(file.parent))
            if not file.exists():
                yield (
                    f"{key}: {file} does not exist (seen from {Path.cwd()}). Name another, or "
                    f"write it: medserl data convert --input FILE.csv --output {folder}"
                )
            elif file.suffix in NOT_CONVERTED:
                yield (
                    f"{key}={file} is not converted, and a run reads converted rows. "
                    f"Write them: medserl data convert --input {quote(str(file))} "
                    f"--output {folder}"
                )
            elif file.suffix == ".parquet" and game is not None:
                try:
                    table = read_parquet(file)
                    if absent := {"prompt", "extra_info"} - {*table.column_names}:
                        raise ValueError(
                            f"{key}={file} has no column {', '.join(sorted(absent))}. {CONVERT}."
                        )
                    dataset = SimpleNamespace(dataframe=Dataset(table))
                    check_dataset(dataset, f"{key}={file}", game, node, ROWS_AT_START)
                except ValueError as error:
                    yield str(error)


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
    "engine": sglang_on_cpu,
    "model": models,
    "data": data,
    "checkpoints": checkpoints,
    "opponent": opponent,
}
"""All checks by name: each yields a sentence for a problem, with its remedy, or ``warn`` and what
should be known.
"""
