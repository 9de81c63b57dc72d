"""Small real things for tests: tokenizers of two chat families, a random model, a composed run.

Built in memory, no network. Users' tests of their own games may import them.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from medserl_agentloop.core.run_check.composition import compose_run as compose_run

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] "
    "}}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama3": (
        LLAMA3,
        [
            "<|endoftext|>",
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ],
    ),
}
"""Chat template and special tokens, of which the last ends a turn."""


def tiny_tokenizer(family: str = "chatml") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a family, ``chatml`` or ``llama3``, with ``<think>`` as an added
    token, as Qwen3's.
    """
    template, special = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    backend.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[-1], pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(vocab_size: int, *, seed: int = 0, attention: str = "sdpa") -> Qwen3ForCausalLM:
    """A random Qwen3 of about 100,000 parameters in fp32, in evaluation mode."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8192,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    weights = {"initializer_range": 0.2}  # large enough that a wrong context shows in the log-probs
    config = Qwen3Config(
        vocab_size=vocab_size, attn_implementation=attention, **sizes, **heads, **weights
    )
    return Qwen3ForCausalLM(config).float().eval()


def build_agent_loop(engine: Any, tokenizer: Any, config: DictConfig) -> Any:
    """The self-play agent loop as verl's worker builds it, on ``engine`` as its server client."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop

    configs = {"trainer_config": DictConfigWrap(config), "data_config": DictConfigWrap(config.data)}
    parts = {
        "server_manager": engine,
        "tokenizer": tokenizer,
        "processor": None,
        "dataset_cls": RLHFDataset,
    }
    return SelfPlayAgentLoop(**configs, **parts)
