"""A model's weights as verl's FSDP engines save them, in as many shards as one likes."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


def save_shards(model: Any, tokenizer: Any, folder: Path, ranks: int) -> Path:
    """Write ``folder`` as ``FSDPCheckpointManager`` does: a file per rank, and config and tokenizer
    beside.
    """
    (folder / "huggingface").mkdir(parents=True)
    model.config.architectures = [
        "Qwen3ForCausalLM"
    ]  # a model that was read from a folder has them
    model.config.save_pretrained(folder / "huggingface")
    model.generation_config.save_pretrained(folder / "huggingface")
    tokenizer.save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for rank in range(ranks):
            shards = {}
            for name, weight in model.state_dict().items():
                chunks = weight.chunk(ranks)
                part = chunks[rank] if rank < len(chunks) else weight[:0]
                shards[name] = DTensor.from_local(
                    part.clone(),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
            torch.save(shards, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    finally:
        dist.destroy_process_group()
    return folder
