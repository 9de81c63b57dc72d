"""Whether a model's layers read a restart of position ids as a new sequence, from its configuration alone.

Attention does: Transformers masks it at every restart. Layers that carry state along the sequence (linear attention,
Mamba, convolutions) do not, and a role would be trained on a state that holds the other's turns. Called before
anything is loaded; the certificate measures the same on the loaded model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from medserl_agentloop.core.config import ConfigError

_ISOLATED_LAYERS = {"full_attention", "sliding_attention", "attention", "dense", "sparse", "moe", "mlp"}
"""Layer types of Transformers' configurations that attend within a packed sequence, or mix no tokens at all."""


def check_models(run: DictConfig) -> None:
    """Refuse a run in isolated contexts whose model would let them leak.

    A configuration that cannot be read here, e.g. on a remote file system, is left to the certificate.

    Raises:
        ConfigError: Names the model and the layers, and says what to use instead.
    """
    from transformers import AutoConfig  # here, because only a run needs it

    nodes = [run.actor_rollout_ref.model, *([run.critic.model] if run.critic.enable else [])]
    for path, trust in {(node.path, bool(node.get("trust_remote_code", False))) for node in nodes}:
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        except (OSError, ValueError):
            continue  # verl says what is wrong with it
        if problem := leak_of(config):
            raise ConfigError(
                f"selfplay.context=isolated cannot run with model.path={path} ({config.model_type}): {problem}, so the "
                "roles would be trained on contexts that hold each other's turns. Use a model with full or "
                "sliding-window attention and one position per token (Qwen3, Llama, Mistral, Gemma 3), or set "
                "selfplay.context=shared."
            )


def leak_of(config: Any) -> str | None:
    """Why contexts that are packed into one row would leak in a model; None if nothing speaks for it.

    Args:
        config: A configuration of Transformers.
    """
    text = config.get_text_config()
    layers = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    if carrying := sorted(set(layers) - _ISOLATED_LAYERS):
        return f"its layers of type {', '.join(carrying)} do not start anew where position ids restart"
    models = list(_model_classes(config, text))
    if any(getattr(model, "_is_stateful", False) for model in models):
        return "its layers carry a state along the sequence that does not start anew where position ids restart"
    rope = repr(getattr(text, "rope_parameters", None))
    if "mrope_section" in rope or any(hasattr(model, "get_rope_index") for model in models):
        return "its rotary positions have several dimensions (MRoPE), and restarts are written for one"
    return None


def _model_classes(*configs: Any) -> Iterator[type]:
    from transformers import AutoModel, AutoModelForCausalLM

    for auto in (AutoModel, AutoModelForCausalLM):
        for config in configs:
            if type(config) in auto._model_mapping:
                found = auto._model_mapping[type(config)]
                yield from found if isinstance(found, tuple) else (found,)
