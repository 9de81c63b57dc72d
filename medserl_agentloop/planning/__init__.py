"""Memory of a training step by phase, in bytes on one GPU, and its time: arithmetic alone, no framework.

``medserl_agentloop.planning.plan`` reads the numbers from a run's config. ``tests/planning`` compares the counts with
torch's own, and the sums with the peaks of real steps on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

GIB = 2**30
CONTEXTS, GRAPHS = 1.0 * GIB, 2.5 * GIB
"""CUDA contexts of trainer and server with their libraries; the server's CUDA graphs and workspace: assumed."""
TRAINING, DECODING, HOST_GB_S = 0.35, 0.5, 25.0
"""Shares of a card's peak rates that are reached, and GB/s between host and GPU: assumed."""

Parts: TypeAlias = dict[str, float]
"""Bytes by name."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder of the Llama family, by the numbers of its ``config.json``."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    max_tokens: int

    @property
    def q(self) -> int:
        """Numbers in a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Numbers in a token's keys, and in its values."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * (self.q + self.kv) + self.qk_norm * 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache for one token, in 16 bits."""
        return 2 * self.layers * 2 * self.kv

    def saved_in_layer(self, dtype: int) -> int:
        """Bytes that one layer saves for the backward pass for each token, with flash attention; ``dtype`` in bytes."""
        normed = 2 * self.hidden + self.qk_norm * (self.q + self.kv)  # in fp32, and in the dtype
        others = 2 * self.hidden + 2 * (self.q + self.kv) + 4 * self.intermediate
        scalars = 2 + self.heads + self.qk_norm * (self.heads + self.kv_heads)
        return normed * (4 + dtype) + others * dtype + 4 * scalars

    def saved_outside(self, dtype: int) -> int:
        """The same for what is beside the layers, logits excepted."""
        return 12 + 2 * self.head_dim * dtype + self.hidden * (4 + 2 * dtype)


@dataclass(frozen=True)
class Engine:
    """A model that FSDP trains or, as the reference, only reads."""

    shape: Shape
    workers: int = 1  # GPUs that share its weights
    weight_bytes: int = 4  # of a weight, its gradient and each of Adam's states
    compute_bytes: int = 2
    lora_rank: int = 0  # of an adapter on all linear layers
    outputs: int | None = None  # of the head: 1 for a critic, None for the vocabulary
    checkpointing: bool = True
    foreach: bool = True  # Adam takes the square roots of all states at once: torch's default on a GPU, unless fused
    fused_loss: bool = True  # flash-attn's cross entropy, which works in place
    scaled: bool = False  # a temperature other than 1 makes a copy of the logits
    param_offload: bool = False
    optimizer_offload: bool = False
    on_cpu: bool = False  # FSDP2's CPU offload policy, which verl sets for every reference
    gathers: bool = True  # FSDP's copies, in the dtype that computes
    update_tokens: int = 0  # of the largest micro-batch on one GPU
    infer_tokens: int = 0

    @property
    def head(self) -> int:
        """Outputs of the head."""
        return self.shape.vocab if self.outputs is None else self.outputs

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, too."""
        return self.shape.tied and self.head == self.shape.vocab

    @property
    def outer(self) -> int:
        """Parameters beside the layers."""
        return (self.shape.vocab + (not self.tied) * self.head + 1) * self.shape.hidden

    @property
    def adapter(self) -> int:
        """Parameters of the LoRA adapter."""
        shape = self.shape
        sides = 4 * shape.hidden + 2 * shape.q + 2 * shape.kv + 3 * (shape.hidden + shape.intermediate)
        return shape.layers * self.lora_rank * sides

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.shape.layers * self.shape.layer_parameters + self.outer + self.adapter

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.adapter or self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes on disk, of all workers: weights and Adam's states."""
        return self.weight_bytes * (self.parameters + 2 * self.trained)

    def share(self, parameters: int) -> float:
        """Bytes that one worker's part of so many numbers takes on its GPU."""
        return 0.0 if self.on_cpu else parameters * self.weight_bytes / self.workers

    def resident(self, *, weights: bool = False, adam: bool = False) -> Parts:
        """What lies on the GPU, offloaded parts only where they are asked for."""
        return {
            "weights": self.share(self.parameters) * (weights or not self.param_offload),
            "Adam": self.share(2 * self.trained) * (adam or not self.optimizer_offload),
        }

    @property
    def working(self) -> Parts:
        """What FSDP gathers: all outside the layers, and two layers, one of them ahead."""
        return {"FSDP copies": self.gathers * (self.outer + 2 * self.shape.layer_parameters) * self.compute_bytes}

    def update(self) -> Parts:
        """Parts of the backward pass at its peak: at the logits, in the last layer, or at the embedding."""
        shape, dtype, tokens = self.shape, self.compute_bytes, self.update_tokens
        # Without flash-attn, verl's logprobs_from_logits_v2 saves log-probs in fp32; gradients by row, then as a whole.
        logits = tokens * self.head * (dtype * (1 + self.scaled) + (not self.fused_loss) * (4 + 2 * dtype))
        layer = tokens * shape.saved_in_layer(dtype)
        each = tokens * shape.hidden * dtype if self.checkpointing else layer
        saved = {"activations": float(shape.layers * each + tokens * shape.saved_outside(dtype))}
        # Its gradients in the wide MLP, and what checkpointing computes again.
        work = 2.0 * tokens * shape.intermediate * dtype + self.checkpointing * layer
        # Autograd adds up both gradients of a tied embedding when it has them.
        embedding = float(shape.vocab * shape.hidden * dtype * (not self.lora_rank))
        peak = max(
            saved | {"logits": float(logits)},
            saved | {"layer at work": work, "embedding's gradients": self.tied * embedding},
            {"embedding's gradients": (3 if self.tied else 1) * embedding},
            key=lambda parts: sum(parts.values()),
        )
        return self.working | {"gradients": self.share(self.trained)} | peak

    def inference(self) -> Parts:
        """Parts of a pass without gradients."""
        widest = max(self.head * (1 + self.scaled), 3 * self.shape.intermediate)
        return self.working | {"logits or layer": float(self.infer_tokens * self.compute_bytes * widest)}

    def optimizer_step(self) -> Parts:
        """Parts of Adam's step beside weights and states."""
        gradients = self.share(self.trained)
        return {"gradients": gradients, "Adam's square roots": self.foreach * gradients}


@dataclass(frozen=True)
class Card:
    """A GPU: bytes that programs can take, TFLOP/s in bf16, GB/s of its memory."""

    name: str
    memory: float
    tflops: float
    bandwidth: float


@dataclass(frozen=True)
class Setup:
    """All that the plan reads from a run's config."""

    actor: Engine
    reference: Engine | None = None
    critic: Engine | None = None
    pool: float = 0.0  # gpu_memory_utilization; 0 for the embedded CPU server, and where nothing is generated
    pool_of_free: bool = True  # of what is free when the server starts (SGLang), or of the card (vLLM)
    pool_freed: bool = True  # free_cache_engine
    base_stays: bool = False  # on the server, beside adapters, when its pool is freed
    tensor_parallel: int = 1
    concurrent: int = 1  # most games at once on one server
    games: int = 1  # in a step
    longest_game: int = 0
    game_tokens: float = 0.0  # on average, and how many of them are generated
    generated_tokens: float = 0.0
    epochs: int = 1  # passes of the update over a batch

    @property
    def plays(self) -> bool:
        """Whether there are games; a warm start trains on conversations that are there."""
        return self.generated_tokens > 0

    def trained(self) -> Iterator[tuple[str, Engine]]:
        """Engines with an optimizer."""
        yield "actor", self.actor
        if self.critic:
            yield "critic", self.critic

    @property
    def host(self) -> float:
        """Bytes on the host for each GPU."""
        total = 0.0
        for engine in filter(None, (self.actor, self.critic, self.reference)):
            held = engine.param_offload * engine.parameters + engine.optimizer_offload * 2 * engine.trained
            if engine.on_cpu:
                held = engine.parameters + (engine is not self.reference) * 3 * engine.trained
            total += held * engine.weight_bytes / engine.workers
        return total


def server(setup: Setup, card: Card) -> Parts:
    """What the inference server takes while it generates.

    SGLang takes a share of what is free when it starts (``model_runner_kv_cache_mixin.py``). Weights that are not
    offloaded are there by then. Adam's states are not: they come with the first step.
    """
    if not setup.pool:
        return {}
    there = sum(engine.resident()["weights"] for _, engine in setup.trained())
    weights = 2 * setup.actor.parameters / setup.tensor_parallel
    size = setup.pool * (card.memory - setup.pool_of_free * (CONTEXTS + there))
    return {"server's weights": weights, "KV cache": size - weights, "server's graphs": GRAPHS}


def phases(setup: Setup, card: Card) -> dict[str, Parts]:
    """What lies on one GPU in each phase of a step, from the second step on."""
    generating = server(setup, card)
    kept = {"server's graphs"} | ({"server's weights"} if setup.base_stays else set())
    beside = {part: size for part, size in generating.items() if part in kept or not setup.pool_freed}
    by_phase = {"generation": generating, "log-probs, actor": beside | setup.actor.inference()} if setup.plays else {}
    if setup.reference:
        by_phase["log-probs, reference"] = beside | setup.reference.inference()
    for who, engine in setup.trained():
        by_phase[f"update, {who}"] = beside | engine.update()
        by_phase[f"optimizer step, {who}"] = beside | engine.optimizer_step()
    by_phase["checkpoint, actor"] = beside
    for name, parts in by_phase.items():
        for who, engine in setup.trained():
            steps = name.endswith(who) and name.startswith(("update", "optimizer"))
            for part, size in engine.resident(weights=name.endswith(who), adam=steps).items():
                parts = parts | {part if who == "actor" else f"{part} of the critic": size}
        by_phase[name] = {part: size for part, size in (parts | {"CUDA contexts": CONTEXTS}).items() if size}
    return by_phase


def seconds(setup: Setup, card: Card, gpus: int) -> dict[str, float]:
    """Seconds of a step by phase."""
    tokens, weights = setup.games * setup.game_tokens, 2 * setup.actor.parameters
    servers = max(1, gpus // setup.tensor_parallel)
    at_once = max(1.0, min(setup.games / servers, setup.concurrent))
    # A decoding step reads the weights once, and the KV cache of all games in flight: half a game each, on average.
    read = weights + at_once * setup.actor.shape.kv_bytes * setup.game_tokens / 2
    decoded = at_once * card.bandwidth * 1e9 * setup.tensor_parallel * DECODING / read
    host = HOST_GB_S * 1e9

    def forward(engine: Engine, passes: int, micro_batch: int) -> float:
        compute = passes * 2 * engine.parameters * tokens / (card.tflops * 1e12 * TRAINING * gpus)
        read = engine.parameters * engine.weight_bytes / engine.workers * tokens / gpus / max(1, micro_batch)
        return compute + engine.on_cpu * min(passes, 2) * read / host

    times = {"generation": setup.games * setup.generated_tokens / servers / decoded} if setup.plays else {}
    for who, engine in (("actor", setup.actor), ("reference", setup.reference)):
        if engine and setup.plays:
            times[f"log-probs, {who}"] = forward(engine, 1, engine.infer_tokens)
    for who, engine in setup.trained():
        passes = setup.epochs * (4 if engine.checkpointing else 3) + (who == "critic")  # and one for the values
        moved = 2 * (engine.param_offload * engine.parameters + engine.optimizer_offload * 2 * engine.trained)
        times[f"update, {who}"] = forward(engine, passes, engine.update_tokens)
        times[f"update, {who}"] += moved * engine.weight_bytes / engine.workers / host
    return times
