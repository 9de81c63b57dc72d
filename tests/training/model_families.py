"""Tiny random models of the families that isolation is measured on, saved as folders that verl can
load.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from medserl_agentloop.testing import tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough that a wrong context shows
    "tie_word_embeddings": False,
}
LINEAR: dict[str, Any] = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

ISOLATED = {
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON,
        sliding_window=64,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
    ),
}
LEAKING = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **COMMON, **LINEAR, num_experts=0, mlp_only_layers=[0, 1, 2, 3]
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**COMMON, **LINEAR),
    "bamba": lambda: transformers.BambaConfig(
        **{k: v for k, v in COMMON.items() if k != "head_dim"},
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLConfig(
        text_config={**COMMON, "rope_parameters": MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        vocab_size=VOCABULARY,
    ),
}


def save(name: str, folder: Path) -> None:
    """Write the random model of a family with a byte-level tokenizer."""
    torch.manual_seed(0)
    config = (ISOLATED | LEAKING)[name]()
    auto = (
        transformers.AutoModelForImageTextToText
        if name == "qwen2_vl"
        else transformers.AutoModelForCausalLM
    )
    auto.from_config(config).float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
