"""Reads a model folder (Hugging Face, LoRA adapter, verl run or checkpoint) as a player in fp32 on
the CPU, and exports it as a Hugging Face folder.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import verl  # noqa: F401  (its plugin makes peft's torchvision importable next to SGLang)
from omegaconf import OmegaConf
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger, merge_non_dtensor_shards

from medserl_agentloop.backends.cpu_sampling import Sampler, SamplingRequest, SamplingSettings
from medserl_agentloop.core.client import without_credentials
from medserl_agentloop.core.config import ADAPTERS_FOLDER
from medserl_agentloop.core.encoding import ChatEncoder, Message, as_untrusted, end_ids
from medserl_agentloop.core.interaction import Reply, Turn
from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, METRICS_FILE, Checkpoint, StepFile
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.paths import hash_of_model, hash_of_values

logger = logging.getLogger(__name__)

_SHARDS = "model_world_size_*_rank_*.pt"
_ADAPTER = "adapter_config.json"
_WEIGHTS = (_SHARDS, "*.safetensors", "*.bin")
_WORTH_THREADS = 20_000_000  # parameters; in smaller models threads wait for each other
_LARGE = 1_000_000_000


def find_weights(folder: Path) -> Path:
    """The folder with the weights; of a run, its last checkpoint; ValueError if none."""
    weights = folder
    if (folder / LATEST).is_file():
        weights = folder / f"global_step_{(folder / LATEST).read_text().strip()}"
    if (weights / "actor").is_dir():
        weights = weights / "actor"
    if not _files(weights, _WEIGHTS):
        weights = weights / "huggingface"  # a checkpoint of checkpoint.save_contents=[hf_model]
    if not _files(weights, _WEIGHTS):
        raise ValueError(
            f"{folder} holds no model: expected a Hugging Face folder, a LoRA adapter, the folder "
            "of a run, or a checkpoint of verl's FSDP engines (global_step_N). Megatron's "
            "are merged with verl.model_merger first"
        )
    return weights


def base_of(weights: Path) -> str | None:
    """The base model, a folder or hub name, of a folder with only a LoRA adapter; else None."""
    if any(weights.glob(_SHARDS)) or not (weights / _ADAPTER).exists():
        return None
    return str(json.loads((weights / _ADAPTER).read_text())["base_model_name_or_path"])


def facts_of(folder: Path) -> dict[str, Any]:
    """Return facts about a folder's model for a results file; ``sha256`` covers its files and an
    adapter's base.
    """
    weights = find_weights(folder)
    facts = {"name": str(folder), "checkpoint": str(weights.relative_to(folder))}
    if base := base_of(weights):
        both = hash_of_values(hash_of_model(weights), hash_of_model(base))
        return facts | {"sha256": both, "base": base}
    return facts | {"sha256": hash_of_model(weights)}


def load_model(weights: Path) -> tuple[Any, Any]:
    """The model and its tokenizer; a ``PeftModel`` if each role has an adapter.

    ValueError if weights are missing.
    """
    first, *others = (weights / ADAPTERS_FOLDER / role.value for role in Role)
    if all(folder.is_dir() for folder in (first, *others)):
        base, tokenizer = load_model(Path(str(base_of(first))))
        model = PeftModel.from_pretrained(base, first, adapter_name=first.name)
        for folder in others:
            model.load_adapter(folder, adapter_name=folder.name)
        return model.eval(), tokenizer
    with TemporaryDirectory() as temporary:
        folder = _merged(weights, Path(temporary)) if any(weights.glob(_SHARDS)) else weights
        places = (folder, folder / "lora_adapter")
        adapters = [place for place in places if (place / _ADAPTER).exists()]
        start = base_of(folder) or folder
        own = (folder / "tokenizer_config.json").exists()
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                start, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder if own else start)
        except (OSError, ValueError) as error:
            raise ValueError(f"{weights} cannot be loaded as a model: {error}") from None
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"{weights} lacks {len(missing)} of the model's weights ({missing[0]}, ...); verl "
                "writes such a folder for LoRA with hf_model in checkpoint.save_contents: take the "
                "checkpoint above it"
            )
        for adapter in adapters[:1]:
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval(), tokenizer


def _merged(weights: Path, target: Path) -> Path:
    places = {"local_dir": str(weights), "hf_model_config_path": str(weights / "huggingface")}
    config = ModelMergerConfig(operation="merge", backend="fsdp", target_dir=str(target), **places)
    # It warns about torch.compile, which is not used.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            _ExactMerger(config).merge_and_save()
    except Exception as error:  # unpickling a damaged file may raise anything
        raise ValueError(f"{weights} cannot be merged: {type(error).__name__}: {error}") from None
    return target


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


class _ExactMerger(FSDPModelMerger):  # type: ignore[misc]  # verl is untyped
    """verl's merger without its cast to bf16, which would change greedy answers."""

    def _load_and_merge_state_dicts(
        self,
        world_size: int,
        total_shards: int,
        mesh_shape: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
    ) -> dict[str, torch.Tensor]:
        file = f"{self.config.local_dir}/model_world_size_{world_size}_rank_{{}}.pt"
        shards = [
            torch.load(file.format(rank), map_location="cpu", weights_only=False)
            for rank in range(total_shards)
        ]
        if all("lora_" in name for name in shards[0]):
            raise ValueError("a LoRA adapter without its model: save with save_lora_only=False")
        merged: dict[str, torch.Tensor] = {}
        for name, first in shards[0].items():
            parts = [shard[name] for shard in shards]
            if isinstance(first, DTensor):
                tensors = [part._local_tensor for part in parts]
                # The last placement is FSDP's; one before it belongs to replicas.
                merged[name] = self._merge_by_placement(tensors, first.placements[-1])
            else:
                merged[name] = merge_non_dtensor_shards(name, parts)
        return merged


class LocalModel:
    """A model on this machine's CPU, in evaluation mode."""

    def __init__(self, name: str, model: Any, tokenizer: Any, encoder: ChatEncoder) -> None:
        self.name, self.model, self.tokenizer, self.encoder = name, model, tokenizer, encoder
        self.sampler = Sampler(model, tokenizer, encoder.ends)

    async def check(self) -> None:
        """Nothing to check: the model is already loaded."""

    def count(self, text: str) -> int:
        return self.encoder.count(text)

    async def sample(
        self,
        turn: Turn,
        messages: Sequence[Message],
        *,
        number: int,
        budget: int,
        temperature: float,
        seed: int,
    ) -> Reply:
        """Take a turn, batched with other games' turns; empty and truncated if its prompt leaves no
        room.
        """
        if len(messages) > len(turn.prompt.messages):  # a later turn reads the full conversation
            turn = replace(turn, prompt=as_untrusted(messages))
        prompt = self.encoder.opening(turn)
        room = min(budget, self.model.config.max_position_embeddings - len(prompt.ids))
        if room <= 0:
            return Reply("", truncated=True, prefill=prompt.prefill)
        draws = torch.Generator().manual_seed(_turn_seed(seed, number, turn))
        of_role = turn.role if turn.role in getattr(self.model, "peft_config", ()) else None
        params = {"temperature": temperature, "adapter": of_role, **self.encoder.stop(turn.stop)}
        settings = SamplingSettings.from_params(params)
        drawn = await self.sampler.sample(SamplingRequest(prompt.ids, room, draws), settings)
        text, cut = self.encoder.decode(drawn.token_ids, turn.stop), drawn.stop_reason == "length"
        return Reply(text, len(drawn.token_ids), cut, prompt.prefill)


def _turn_seed(seed: int, number: int, turn: Turn) -> int:
    """Seed of a turn in game ``number``; each role and conversation has its own."""
    role, which = turn.role, turn.conversation or "0"
    of_role = {each.value: each.id for each in Role}.get(role) or zlib.crc32(role.encode())
    of_conversation = int(which) if which.isdecimal() else zlib.crc32(which.encode())
    return (seed * 1_000_003 + 2 * number + of_role + (of_conversation << 48)) % 2**63


def load_player(folder: str | Path, template_kwargs: Mapping[str, Any] | None = None) -> LocalModel:
    """The model in ``folder`` as a player; ValueError if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        place = without_credentials(str(folder))
        raise ValueError(
            f"{place} is neither a folder nor an address that begins with http:// or https://"
        )
    model, tokenizer = load_model(find_weights(folder))
    if (size := model.num_parameters()) > _LARGE:
        logger.warning(
            "%s has %.1f billion parameters and answers in fp32 on this CPU, which may take days. "
            "Serve it, for example with python -m sglang.launch_server, and give the address",
            *(folder, size / 1e9),
        )
    ends = end_ids(model.config, model.generation_config)
    encoder = ChatEncoder(tokenizer, dict(template_kwargs or {}), ends)
    return LocalModel(folder.name, model, tokenizer, encoder)


def load_for_command(folder: str, template_kwargs: Mapping[str, Any]) -> LocalModel:
    """Load a player, and set up the process: no Transformers progress bars or advice, one
    thread for a small model.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    player = load_player(folder, template_kwargs)
    if player.model.num_parameters() < _WORTH_THREADS:
        torch.set_num_threads(1)
    return player


# --- ``medserl export`` ---

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [medserl, self-play, medical-error-detection]
---

# {title}

Step {step} of the self-play run `{run}`, trained from `{base}` with medserl-agentloop to find
errors in clinical notes. For research: not tested in care, and no substitute for a clinician.

| validation | before training | this checkpoint |
|---|---:|---:|
{rows}

Prompts: profile `{profile}` of medserl-agentloop. Weights: {dtype}. To score it on your own notes:

```bash
medserl evaluate {folder} --profile {profile} --notes NOTES.csv
```
"""


def export(run: Path, checkpoint: Checkpoint, target: Path, role: str) -> None:
    """Write a checkpoint as a Hugging Face folder, in its run's number format and with a card; a
    ``role``'s adapter is merged. ValueError if it cannot be loaded, or lacks the adapter.
    """
    model, tokenizer = load_model(find_weights(checkpoint.folder))
    if adapters := getattr(model, "peft_config", None):
        if role not in adapters:
            raise ValueError(f"--role {role}: the run has adapters for {', '.join(adapters)}")
        model.set_adapter(role)
        model = model.merge_and_unload()
    file = run / CONFIG_FILE
    config = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
    dtype = str(OmegaConf.select(config, "actor_rollout_ref.rollout.dtype", default="bfloat16"))
    model.to(getattr(torch, dtype)).save_pretrained(target)
    tokenizer.save_pretrained(target)
    card = _CARD.format(
        title=f"{run.resolve().name}, step {checkpoint.step}",
        step=checkpoint.step,
        run=run.resolve().name,
        base=OmegaConf.select(config, "actor_rollout_ref.model.path", default="an unknown model"),
        rows="\n".join(_score_rows(run, checkpoint.step)) or "| none in this step | | |",
        profile=OmegaConf.select(config, "selfplay.profile", default="medserl"),
        dtype=dtype,
        folder=target.name,
    )
    (target / "README.md").write_text(card, encoding="utf-8")


def _score_rows(run: Path, step: int) -> list[str]:
    """Rows of the card: the validation scores of a step and those before training."""
    file = StepFile(run / METRICS_FILE)
    found: dict[int, dict[str, float]] = {0: {}, step: {}}
    for row in file.read() if file.path.is_file() else ():
        if row["step"] in found:
            found[row["step"]] |= {k: v for k, v in row.items() if k.startswith("val-core/")}
    before = {name: f"{value:.3f}" for name, value in found[0].items()}
    return [
        f"| {name.removeprefix('val-core/')} | {before.get(name, '')} | {value:.3f} |"
        for name, value in sorted(found[step].items())
    ]
