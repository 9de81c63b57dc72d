"""The plan's counts against torch's own on meta tensors, and its sums against the peaks of real steps."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import AttentionInterface

from benchmarks import plan_memory
from medserl_agentloop.planning import PUBLISHED
from medserl_agentloop.planning.arithmetic import Engine, Shape


def model_of(shape: Shape, dtype: torch.dtype = torch.float32) -> Any:
    """The model on the meta device, with an attention that saves what flash attention does."""
    family, config = (Qwen3ForCausalLM, Qwen3Config) if shape.qk_norm else (LlamaForCausalLM, LlamaConfig)
    sizes = config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device("meta"):
        return family(sizes).to(dtype)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_torch_counts(name: str) -> None:
    assert Engine(PUBLISHED[name]).parameters == sum(p.numel() for p in model_of(PUBLISHED[name]).parameters())


def test_parameters_of_a_critic_and_of_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    shape = Shape(64, 96, 2, 4, 2, 16, 500, tied=True, qk_norm=True, max_tokens=512)
    plain = sum(p.numel() for p in model_of(shape).parameters())
    assert Engine(shape, outputs=1).parameters == plain + shape.hidden
    adapted = get_peft_model(model_of(shape), LoraConfig(r=8, target_modules="all-linear"))
    assert Engine(shape, lora_rank=8).trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return output.transpose(1, 2), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_saved_activations_are_those_that_torch_saves(qk_norm: bool, dtype: torch.dtype) -> None:
    AttentionInterface.register("saved_by_fa", flash)
    shape = Shape(256, 768, 3, 8, 2, 64, 1000, tied=True, qk_norm=qk_norm, max_tokens=512)
    model, tokens = model_of(shape, dtype), 128
    model.config._attn_implementation = "saved_by_fa"
    weights, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    inputs = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask: Any = {"full_attention": None} if qk_norm else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        last = model.model(inputs, attention_mask=mask, position_ids=inputs, use_cache=False).last_hidden_state
    counted = sum(s.nbytes() for key, s in saved.items() if key not in weights) + last.nbytes
    computed = shape.layers * shape.saved_in_layer(dtype.itemsize) + shape.saved_outside(dtype.itemsize)
    assert computed * tokens == pytest.approx(counted, rel=0.001)


@pytest.mark.slow
def test_peaks_of_real_steps_at_two_sizes_are_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_memory, "SIZES", plan_memory.SIZES[:2])
    rows = list(plan_memory.rows())
    assert len(rows) == 8
    for *which, real, computed in rows:
        assert computed == pytest.approx(real, rel=0.1), which
