"""What a run needs of the machine it starts on: GPUs, packages, keys, files.

verl finds these missing when the model is loaded, the first step is logged or the first checkpoint is written.
The recipes' Hydra callback asks :func:`check_machine`; tests compose configs for machines that they are not on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from omegaconf import DictConfig
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK
from transformers.utils import is_kernels_available
from verl.utils.import_utils import resolve_config_path

from medserl_agentloop.backends import sglang_cpu
from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, refuse
from medserl_agentloop.core.run_check.inputs import (
    another_run,
    changed_credit,
    data_files,
    lost_checkpoint,
    missing_models,
)
from medserl_agentloop.core.run_check.run import ACTOR, CRITIC, FSDP, MODEL, ROLLOUT, Run

ATTENTION = f"{MODEL}.override_config.attn_implementation"

PACKAGES = {
    f"{ROLLOUT}.name": {"sglang": "sglang", "vllm": "vllm", "trtllm": "tensorrt_llm"},
    "trainer.logger": {
        **{name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio", "rl_insight")},
        **{"tracking": "wandb", "vemlp_wandb": "volcengine_ml_platform"},
    },
}
"""What verl imports for a name of the config, once it gets there."""

WANDB_HOSTS = ("wandb", "coreweave")
"""Parts of the names of W&B's servers, as ``wandb login`` writes them to netrc."""

WANDB_FILES = ("wandb/settings", "~/.config/wandb/settings")


def check_gpus(config: DictConfig) -> None:
    """Refuse a run on the GPUs of this machine if it has none, or fewer; a cluster of Ray's may have them elsewhere.

    Raises:
        ConfigError: Says what was found and what to write instead.
    """
    elsewhere = joins_a_cluster(config.ray_kwargs.ray_init.get("address")) or config.trainer.nnodes > 1
    if config.trainer.device != "cuda" or elsewhere:
        return
    found, needed = torch.cuda.device_count(), config.trainer.n_gpus_per_node
    if not found:
        build = "" if torch.version.cuda or torch.version.hip else f"; torch {torch.__version__} is built without CUDA"
        raise ConfigError(
            "this run needs a GPU (trainer.device=cuda), and torch finds none on this machine"
            f"{build}. Start it where `nvidia-smi` shows one (docs/install_gpu.md), or try a recipe for the CPU: "
            "+recipes=quickstart."
        )
    if found < needed:
        raise ConfigError(
            f"trainer.n_gpus_per_node={needed}, and torch finds {found} on this machine "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}). Set it to {found} or less."
        )


def joins_a_cluster(address: str | None = None) -> bool:
    """Whether ``ray.init`` joins a cluster: by its address, or because `ray start` made this machine a part of one."""
    if address := address or os.environ.get("RAY_ADDRESS"):
        return address != "local"  # which starts one of its own
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").exists()


def check_machine(run: Run) -> list[str]:
    """Warnings of a run that has passed ``check_run``; one that lacks something on this machine is refused.

    Raises:
        ConfigError: Says what is missing and how to get it, or how to do without: one line for each.
    """
    if str(run["ray_kwargs.ray_init.address"]).startswith("ray://"):  # it will run on another machine
        return []
    checks = (
        missing_packages,
        wandb_key,
        flash_attention,
        missing_models,
        data_files,
        lost_checkpoint,
        another_run,
        folders,
    )
    refuse(problem for check in checks for problem in check(run))
    return [*downloads(run), *changed_credit(run)]


def missing_packages(run: Run) -> Iterator[str]:
    """One sentence for each package that a name of the config needs and that is not installed."""
    for key, packages in PACKAGES.items():
        for name in run.names(key):
            if name in packages and find_spec(packages[name]) is None:
                yield f"{key}={name}: the package {packages[name]} is not installed. Install it, or take another."


def wandb_key(run: Run) -> Iterator[str]:
    """A sentence if W&B is asked for and has no key."""
    if not {"wandb", "tracking"} & set(run.names("trainer.logger")):
        return
    offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
    key = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    # W&B's own files may say anything; the benefit of the doubt is theirs.
    settings = any(Path(file).expanduser().exists() for file in WANDB_FILES)
    if not (offline or key or settings or _netrc_knows_wandb()):
        yield (
            "trainer.logger has wandb, and there is no key for it. Run `wandb login` or export WANDB_API_KEY, export "
            "WANDB_MODE=offline to log to a folder, or take wandb out: trainer.logger=[console]."
        )


def _netrc_knows_wandb() -> bool:
    own_server = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    files = [Path(name).expanduser() for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc") if name]
    text = " ".join(file.read_text(errors="replace") for file in files if file.is_file())
    return any(server in text for server in (*WANDB_HOSTS, own_server) if server)


def flash_attention(run: Run) -> Iterator[str]:
    """One sentence for each thing that would be loaded with a flash attention that is not installed."""
    if is_kernels_available():  # Transformers falls back to it (modeling_utils.py)
        return
    for what, way_out in _without_flash_attention(run):
        yield (
            f"verl loads {what} with attn_implementation=flash_attention_2, which needs the package flash-attn, and it "
            "is not installed. Either run pip install flash-attn==2.8.3 --no-build-isolation, or pip install "
            "'kernels>=0.12,<0.13', with which Transformers downloads the same; or " + way_out
        )


def downloads(run: Run) -> Iterator[str]:
    """What Transformers will fetch from the hub while the run starts."""
    if any(_without_flash_attention(run)):
        yield (
            "flash-attn is not installed; when the model is loaded, Transformers fetches "
            f"{FLASH_ATTN_KERNEL_FALLBACK['flash_attention_2']} from the Hugging Face hub in its place"
        )


def _without_flash_attention(run: Run) -> Iterator[tuple[str, str]]:
    """What is loaded with a flash attention 2 that is not installed, and how to do without it."""
    if run["trainer.device"] != "cuda" or _installed("flash-attn"):
        return
    if run[f"{ACTOR}.strategy"] in FSDP and run[ATTENTION] in (None, "flash_attention_2"):
        yield (
            "a model",
            f"set +{ATTENTION}=sdpa, with which each context attends to itself: slower, and not run on a GPU.",
        )
    # verl/utils/model.py (load_valuehead_model) asks for it, whatever attn_implementation says.
    if CRITIC in run.trained and run[f"{CRITIC}.strategy"] in FSDP:
        yield "every critic", "choose an estimator without one, e.g. role_reinforce_pp, and critic.enable=False."


def _installed(distribution: str) -> bool:
    # By distribution: SGLang brings flash-attn-4, whose module is flash_attn, too.
    return any(distributions(name=distribution))


def folders(run: Run) -> Iterator[str]:
    """One sentence for each folder or file that cannot be used."""
    keys = {run.selfplay.records: "selfplay.records", run["trainer.default_local_dir"]: "trainer.default_local_dir"}
    for name, key in keys.items():
        folder = Path(name).resolve()
        exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not (exists.is_dir() and os.access(exists, os.W_OK)):
            yield f"{key}={name}: {exists} is no folder that can be written to. Set it to another."
    loops, resume = f"{ROLLOUT}.agent.agent_loop_config_path", "trainer.resume_from_path"
    if run[loops] is not None:
        try:
            Path(resolve_config_path(run[loops])).open().close()
        except OSError as error:
            yield f"{loops}={run[loops]} cannot be read ({error}). Set it to null, or to tool_configs/agent_loop.yaml."
    if run["trainer.resume_mode"] == "resume_path" and not Path(run[resume]).is_dir():
        yield f"{resume}={run[resume]}: there is no such folder. Set it to the folder global_step_N of a checkpoint."


RESERVED = 2
"""Positions of the context that SGLang never fills (max_req_len in sglang/srt/managers/tp_worker.py)."""


def check_sglang_on_cpu(config: DictConfig) -> None:
    """Refuse a run of a CPU recipe whose SGLang could not start, or would cut turns short in silence."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "sglang":
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "this recipe runs SGLang on the CPU, and there is a GPU, for which verl has an SGLang rollout of its "
            "own. Take a recipe without trainer.device=cpu, such as qwen3_4b, or hide the GPU with "
            "CUDA_VISIBLE_DEVICES=-1 in front of the command."
        )
    if not sglang_cpu.is_installed():
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang, and SGLang is not installed here. Run `make sglang-env` and use "
            ".venv-sglang/bin/python, or: pip install --no-deps --requirement constraints-sglang.txt"
        )
    needed = longest_context(config) + RESERVED
    for key, limit in (
        ("max_model_len", rollout.max_model_len),
        ("engine_kwargs.sglang.max_total_tokens", rollout.engine_kwargs.sglang.get("max_total_tokens")),
    ):
        # The engine lowers a request's budget to what is left of either, and reports an ordinary "length".
        if limit is not None and limit < needed:
            raise ConfigError(
                f"a turn may need {needed} tokens with its prompt, and actor_rollout_ref.rollout.{key}={limit}: "
                f"SGLang would cut it without a word. Set it to at least {needed}, or lower "
                "data.max_prompt_length, data.max_response_length or the game's token budget (selfplay.budget)."
            )


def longest_context(config: DictConfig) -> int:
    """Most tokens that a prompt and its turn may have together, whatever the rows are."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    selfplay = SelfPlayConfig.from_run(config)
    if selfplay.context == "shared":
        return int(prompt + response)
    # verl counts all prompts but the first as response.
    return int(max(prompt + min(selfplay.longest_turn(prompt) or response, response), response))


def check_stop_strings(strings: Sequence[str], rollout: Any) -> None:
    """Refuse stop strings, of more than one token each, that the engine of verl's rollout node could not look for."""
    if strings and rollout.name == "sglang" and rollout.get("skip_tokenizer_init", False):
        raise ConfigError(
            f"the profile's stop strings {', '.join(map(repr, strings))} are more than one token each, and SGLang "
            "looks for such strings only with actor_rollout_ref.rollout.skip_tokenizer_init=False. Set that, or "
            "take them out of profile.yaml."
        )
