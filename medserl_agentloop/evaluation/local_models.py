"""A model's folder -> a model in fp32 on this machine's CPU that assesses notes.

It reads Hugging Face folders, LoRA adapters of PEFT's, and what verl leaves: the folder of a run, of one of its steps,
or of a step's actor.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger, merge_non_dtensor_shards

from medserl_agentloop.backends.cpu_sampling import SamplingSettings
from medserl_agentloop.core.encoding import EncodedPrompt
from medserl_agentloop.core.manifest import sha256_of
from medserl_agentloop.evaluation.answering import ANY_CATEGORY, Answers, Question, Sampling, hash_of
from medserl_agentloop.evaluation.tournament import Player
from medserl_agentloop.games.medical.prompting import ProfileEncoder, PromptProfile
from medserl_agentloop.games.medical.types import Role

_LATEST = "latest_checkpointed_iteration.txt"  # verl's name
_SHARDS = "model_world_size_*_rank_*.pt"
_ADAPTER = "adapter_config.json"
_WEIGHTS = (_SHARDS, "*.safetensors", "*.bin")
_WORTH_THREADS = 20_000_000
"""Parameters from which on threads speed a model up. Below, they wait for each other, on a busy machine for long."""
_DECIDING = (*_WEIGHTS, "*.json", "*.jinja", "huggingface/*", "lora_adapter/*")  # files that answers depend on


def find_weights(folder: Path) -> Path:
    """The folder with the weights that ``folder`` means: a run means its last checkpoint.

    Raises:
        ValueError: It holds no model.
    """
    found = folder
    if (folder / _LATEST).is_file():
        found = folder / f"global_step_{(folder / _LATEST).read_text().strip()}"
    if (found / "actor").is_dir():
        found = found / "actor"
    if not _files(found, _WEIGHTS):
        found = found / "huggingface"  # a checkpoint of checkpoint.save_contents=[hf_model]
    if not _files(found, _WEIGHTS):
        raise ValueError(
            f"{folder} holds no model: expected a Hugging Face folder, a LoRA adapter, the folder of a run, or a "
            "checkpoint of verl's FSDP engines (global_step_N). Megatron's are merged with verl.model_merger first"
        )
    return found


def base_of(weights: Path) -> str | None:
    """The model that a folder with nothing but a LoRA adapter names, a folder or a name on the Hub; else None."""
    if any(weights.glob(_SHARDS)) or not (weights / _ADAPTER).exists():
        return None
    base: str = json.loads((weights / _ADAPTER).read_text())["base_model_name_or_path"]
    return base


def fingerprint(weights: Path) -> str:
    """Hash of the weights, the tokenizer and the configs in a folder that :func:`find_weights` found.

    Of an adapter alone it covers the model that it names too, where that is a folder.
    """
    parts = "".join(f"{file.relative_to(weights)} {sha256_of(file)}\n" for file in _files(weights, _DECIDING))
    if (base := base_of(weights)) and Path(base).is_dir():
        parts += fingerprint(Path(base))
    return hashlib.sha256(parts.encode()).hexdigest()


def load_model(weights: Path) -> tuple[Any, Any]:
    """The model, in evaluation mode, and its tokenizer.

    Raises:
        ValueError: The folder does not hold all of a model.
    """
    with TemporaryDirectory() as temporary:
        folder = _merged(weights, Path(temporary)) if any(weights.glob(_SHARDS)) else weights
        adapter = next((place for place in (folder, folder / "lora_adapter") if (place / _ADAPTER).exists()), None)
        base = base_of(folder) or folder
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, output_loading_info=True)
            with_tokenizer = folder if (folder / "tokenizer_config.json").exists() else base
            tokenizer = AutoTokenizer.from_pretrained(with_tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"{weights} cannot be loaded as a model: {error}") from None
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"{weights} lacks {len(missing)} of the model's weights ({', '.join(missing[:3])}, ...); verl writes "
                "such a folder for LoRA with hf_model in checkpoint.save_contents: take the checkpoint above it"
            )
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval(), tokenizer


def load_player(
    folder: Path, prompts: PromptProfile, template_kwargs: dict[str, Any] | None = None, name: str | None = None
) -> Player:
    """The model in ``folder`` as a player, called ``name`` or as its folder.

    Raises:
        ValueError: There is no such folder, or it holds no model.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is neither a folder nor an address that begins with http:// or https://")
    # Bars and advice of no use to who evaluates.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model, tokenizer = load_model(find_weights(folder))
    if model.num_parameters() < _WORTH_THREADS:
        torch.set_num_threads(1)
    return Player(name or str(folder), model, tokenizer, ProfileEncoder(tokenizer, prompts, template_kwargs))


def _merged(weights: Path, target: Path) -> Path:
    """The shards as one model, in ``target``."""
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(weights),
        hf_model_config_path=str(weights / "huggingface"),
        target_dir=str(target),
    )
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # of torch.compile, which nobody uses
    try:
        with redirect_stdout(StringIO()):
            _ExactMerger(config).merge_and_save()
    except (OSError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{weights} cannot be merged: {error}") from None
    return target


class LocalAssessor:
    """A model in this process, ``batch`` notes at a time.

    Raises:
        ValueError: There is no such folder, or it holds no model.
    """

    def __init__(
        self, folder: Path, prompts: PromptProfile, template_kwargs: dict[str, Any], sampling: Sampling, batch: int
    ) -> None:
        self._player = load_player(folder, prompts, template_kwargs)
        weights = find_weights(folder)
        self.identity = fingerprint(weights)
        self.facts = {"name": str(folder), "checkpoint": str(weights.relative_to(folder)), "sha256": self.identity}
        if base := base_of(weights):
            self.facts["base"] = base
        self.stop = prompts.settings.stop.get(Role.ASSESSOR, [])
        self._sampling, self._batch = sampling, batch

    def _encoded(self, note: str) -> EncodedPrompt:
        return self._player.encoder.of(Role.ASSESSOR, ANY_CATEGORY, note)

    def prompt(self, note: str) -> Any:
        """Token ids."""
        return self._encoded(note).ids

    async def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers, batch by batch, the shortest notes first: a batch is padded to its longest prompt."""
        waiting = sorted(questions, key=lambda question: len(question.note))
        for start in range(0, len(waiting), self._batch):
            part = waiting[start : start + self._batch]
            replies = self._player.replies(
                Role.ASSESSOR,
                [self._encoded(question.note) for question in part],
                [int(hash_of([self._sampling.seed, question.note, question.sample])[:15], 16) for question in part],
                SamplingSettings(temperature=self._sampling.temperature),
                budget=self._sampling.max_tokens,
            )
            for question, reply in zip(part, replies, strict=True):
                yield question, reply


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


class _ExactMerger(FSDPModelMerger):  # type: ignore[misc]  # verl is untyped
    """verl's merger, without its cast to bf16: greedy answers would not be those of the run's own validation."""

    def _load_and_merge_state_dicts(
        self, world_size: int, total_shards: int, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        folder = Path(self.config.local_dir)
        files = [folder / f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(total_shards)]
        shards = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
        if all("lora_" in name for name in shards[0]):
            raise ValueError(
                f"{folder} holds a LoRA adapter without its model (checkpoint.save_lora_only); "
                "save checkpoints with save_lora_only=False to evaluate them"
            )
        merged: dict[str, torch.Tensor] = {}
        for name, first in shards[0].items():
            parts = [shard[name] for shard in shards]
            if isinstance(first, DTensor):
                # The last placement is FSDP's; one before it is of replicas.
                merged[name] = self._merge_by_placement([part._local_tensor for part in parts], first.placements[-1])
            else:
                merged[name] = merge_non_dtensor_shards(name, parts)
        return merged
