"""The plan's arithmetic: the memory of one GPU and the seconds of each phase of a step.

``tests/planning`` compares its counts with torch's own, and its sums with the peaks of real steps
on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2
from typing import TypeAlias

GIB = 2**30
CONTEXTS, GRAPHS, PREFILL_GRAPHS = 1.0 * GIB, 2.5 * GIB, 1.5 * GIB
"""CUDA contexts of trainer and server with their libraries; the server's CUDA graphs for decoding
and its workspace;
SGLang's graphs for prefill of up to 8,192 tokens, which it does without where it serves adapters:
assumed."""
PROCESS = 0.75 * GIB
"""Memory of the host for a process that has imported torch and verl: assumed. 0.3 to 0.5 were
measured without CUDA.
"""
TRAINING, DECODING, HOST_GB_S, PUSH_GB_S = 0.35, 0.5, 25.0, 2.0
"""Shares of a card's peak rates that are reached; GB/s between host and GPU, and of fp32 weights in
sleep, wake and
push: assumed."""

Parts: TypeAlias = dict[str, float]
"""Bytes by name."""


@dataclass
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

    def __post_init__(self) -> None:
        self.q, self.kv = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )  # numbers of a token
        self.kv_bytes = 2 * self.layers * 2 * self.kv  # of the KV cache for one token, in 16 bits
        attention = 2 * self.hidden * (self.q + self.kv) + self.qk_norm * 2 * self.head_dim
        self.layer_parameters = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    def saved_in_layer(self, dtype: int) -> int:
        """Bytes that one layer saves for the backward pass for each token, with flash attention;
        ``dtype`` in bytes.
        """
        normed = 2 * self.hidden + self.qk_norm * (self.q + self.kv)  # in fp32, and in the dtype
        others = 2 * self.hidden + 2 * (self.q + self.kv) + 4 * self.intermediate
        scalars = 2 + self.heads + self.qk_norm * (self.heads + self.kv_heads)
        return normed * (4 + dtype) + others * dtype + 4 * scalars

    def saved_outside(self, dtype: int) -> int:
        """The same for the parts outside the layers, except logits."""
        return 12 + 2 * self.head_dim * dtype + self.hidden * (4 + 2 * dtype)


@dataclass
class Engine:
    """A model that FSDP trains or, as the reference, only reads."""

    shape: Shape
    workers: int = 1  # GPUs that share its weights
    weight_bytes: int = 4  # of a weight, its gradient and each of Adam's states
    compute_bytes: int = 2
    lora_rank: int = 0  # of an adapter on all linear layers
    outputs: int = 0  # of the head: 1 for a critic, 0 for the vocabulary
    checkpointing: bool = True
    # Adam takes the square roots of all states at once: torch's default on a GPU, unless fused
    foreach: bool = True
    fused_loss: bool = True  # flash-attn's cross entropy, which works in place
    # tokens of which verl's fused kernels have the logits at once, in fp32; 0 for all of a
    # micro-batch
    chunk: int = 0
    scaled: bool = False  # a temperature other than 1 makes a copy of the logits
    entropy: bool = (
        False  # the update takes it, too: gradients of the logits twice, and not in place
    )
    hf_copy: bool = False  # of the weights in a checkpoint
    param_offload: bool = False
    optimizer_offload: bool = False
    on_cpu: bool = False  # FSDP2's CPU offload policy, which verl sets for every reference
    gathers: bool = True  # FSDP's copies, in the dtype that computes
    update_tokens: int = 0  # of the largest micro-batch on one GPU
    infer_tokens: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self.head = self.outputs or shape.vocab
        self.tied = shape.tied and not self.outputs  # the head is the embedding, too
        self.outer = (
            shape.vocab + (not self.tied) * self.head + 1
        ) * shape.hidden  # parameters beside the layers
        sides = (
            4 * shape.hidden + 2 * shape.q + 2 * shape.kv + 3 * (shape.hidden + shape.intermediate)
        )
        adapter = shape.layers * self.lora_rank * sides
        self.parameters = shape.layers * shape.layer_parameters + self.outer + adapter
        self.trained = adapter or self.parameters
        # Weights and Adam's states, on disk.
        self.checkpoint = self.weight_bytes * (
            (1 + self.hf_copy) * self.parameters + 2 * self.trained
        )
        # What FSDP gathers: all outside the layers, and two layers, one of them ahead. FSDP2 copies
        # it out of a buffer, and gradients into one in fp32.
        buffer = self.gathers * (self.outer + shape.layer_parameters)
        gathered = self.gathers * shape.layer_parameters + 2 * buffer
        self.working: Parts = {"FSDP copies": gathered * self.compute_bytes}
        self.reduced = 4.0 * buffer * (not adapter)

    @property
    def pinned(self) -> float:
        """Pinned memory for each byte in it:

        PyTorch rounds every tensor there up to a power of two.
        """
        shape = self.shape
        sides = [shape.q] * 2 + [shape.kv] * 2 + [shape.intermediate] * 3
        sizes = [
            shape.hidden * side / self.workers for side in [shape.vocab, *sides * shape.layers]
        ]
        return sum(2.0 ** ceil(log2(size)) for size in sizes) / sum(sizes)

    def share(self, parameters: int) -> float:
        """Bytes that one worker's part of so many numbers takes on its GPU."""
        return 0.0 if self.on_cpu else parameters * self.weight_bytes / self.workers

    def resident(self, *, weights: bool = False, adam: bool = False) -> Parts:
        """Return the memory in use on the GPU, offloaded parts only where they are asked for."""
        return {
            "weights": self.share(self.parameters) * (weights or not self.param_offload),
            "Adam": self.share(2 * self.trained) * (adam or not self.optimizer_offload),
        }

    def update(self) -> Parts:
        """Parts of the backward pass at its peak: at the logits, in the last layer, or at the
        embedding.
        """
        shape, dtype, tokens = self.shape, self.compute_bytes, self.update_tokens
        # Without flash-attn, verl's logprobs_from_logits_v2 saves log-probs in fp32; gradients by
        # row, then as a whole.
        copies = 1 + self.scaled + 2 * self.entropy
        logits = tokens * self.head * (dtype * copies + (not self.fused_loss) * (4 + 2 * dtype))
        if self.chunk:  # _fused_linear_for_ppo_bwd in verl/utils/experimental/torch_functional.py
            logits = self.chunk * self.head * (2 * dtype + 4 * 4)
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
        return self.working | {"gradients": self.share(self.trained) + self.reduced} | peak

    def inference(self) -> Parts:
        """Parts of a pass without gradients."""
        widest = max((not self.chunk) * self.head * (1 + self.scaled), 3 * self.shape.intermediate)
        return self.working | {
            "logits or layer": float(self.infer_tokens * self.compute_bytes * widest)
        }

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


@dataclass
class Setup:
    """All that the plan reads from a run's config."""

    actor: Engine
    reads: dict[str, Engine] = field(
        default_factory=dict
    )  # engines that have a pass for log-probs, by who it is
    critic: Engine | None = None
    pool: float = (
        0.0  # gpu_memory_utilization; 0 for the embedded CPU server, and where nothing is generated
    )
    pool_of_free: bool = (
        True  # of what is free when the server starts (SGLang), or of the card (vLLM)
    )
    pool_freed: bool = True  # free_cache_engine
    base_stays: bool = False  # on the server, beside adapters, when its pool is freed
    prefill_graphs: bool = True
    tensor_parallel: int = 1
    concurrent: int = 1  # most games at once on one server
    games: int = 1  # in a step
    longest_game: int = 0
    game_tokens: float = 0.0  # on average, and how many of them are generated
    generated_tokens: float = 0.0
    chain: float = 0.0  # most tokens that a game generates one after another
    reserved: float = 0.0  # tokens that a server has room for before it begins a turn
    judge: Shape | None = (
        None  # of a model that answers about games, and GB/s of its card; 0 where they are played
    )
    judge_gb_s: float = 0.0
    judge_at_once: int = 1
    answers: float = 0.0  # in a step, and tokens of one
    answer_tokens: float = 0.0
    epochs: int = 1  # passes of the update over a batch
    helpers: int = 0  # processes on the host that play, reward and load

    def __post_init__(self) -> None:
        self.plays = (
            self.generated_tokens > 0
        )  # a warm start trains on conversations that are there
        self.trained = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    @property
    def host(self) -> float:
        """Bytes on the host for each GPU, without those of the helpers."""
        # SGLang keeps its weights there while it sleeps, and verl loads the actor there before it
        # is moved.
        copies = 2 * self.pool_of_free * bool(self.pool) / self.tensor_parallel
        total = self.actor.parameters * (copies + self.actor.weight_bytes) + 4 * PROCESS
        for engine in (
            *self.trained.values(),
            *(own for who, own in self.reads.items() if who == "reference"),
        ):
            held = (
                engine.param_offload * engine.parameters
                + engine.optimizer_offload * 2 * engine.trained
            )
            if engine.on_cpu:
                held = engine.parameters + (engine in self.trained.values()) * 3 * engine.trained
            total += held * engine.weight_bytes / engine.workers * engine.pinned
        return total


def served(setup: Setup, card: Card) -> Parts:
    """Return the memory of a rollout server on one GPU while games are played."""
    # SGLang takes a share of what is free when it starts (model_runner_kv_cache_mixin.py): weights
    # that are not offloaded are there by then. Adam's states come with the first step.
    there = sum(engine.resident()["weights"] for engine in setup.trained.values())
    pool = setup.pool * (card.memory - setup.pool_of_free * (CONTEXTS + there))
    weights = 2 * setup.actor.parameters / setup.tensor_parallel
    graphs = GRAPHS + PREFILL_GRAPHS * setup.prefill_graphs
    return (
        {"server's weights": weights, "KV cache": pool - weights, "server's graphs": graphs}
        if pool
        else {}
    )


def phases(setup: Setup, card: Card) -> dict[str, Parts]:
    """Return the memory of one GPU in each phase of a step, from the second step on."""
    generating = served(setup, card)
    kept = {"server's graphs"} | ({"server's weights"} if setup.base_stays else set())
    beside = {
        part: size for part, size in generating.items() if part in kept or not setup.pool_freed
    }
    by_phase = {"generation": generating} if setup.plays else {}
    by_phase |= {
        f"log-probs, {who}": beside | engine.inference() for who, engine in setup.reads.items()
    }
    for who, engine in setup.trained.items():
        by_phase[f"update, {who}"] = beside | engine.update()
        by_phase[f"optimizer step, {who}"] = beside | engine.optimizer_step()
    by_phase["checkpoint, actor"] = beside
    for name, parts in by_phase.items():
        for who, engine in setup.trained.items():
            steps = name.endswith(who) and name.startswith(("update", "optimizer"))
            for part, size in engine.resident(weights=name.endswith(who), adam=steps).items():
                parts = parts | {part if who == "actor" else f"{part} of the critic": size}
        by_phase[name] = {
            part: size for part, size in (parts | {"CUDA contexts": CONTEXTS}).items() if size
        }
    return by_phase


def playing(setup: Setup, card: Card, gpus: int) -> dict[str, float]:
    """Seconds of generation, of the judge after it, and of moving weights to the server."""
    shape, sharing = setup.actor.shape, setup.tensor_parallel
    servers, gb_s = max(1, gpus // sharing), card.bandwidth * sharing
    room = served(setup, card).get("KV cache", 0.0) * sharing / shape.kv_bytes
    at_once = min(setup.concurrent, room / setup.reserved) if room else setup.concurrent

    def decoding(
        model: Shape, gb_s: float, asked: float, tokens: float, at_once: float, chain: float
    ) -> float:
        # A step reads the weights, and half a game in the KV cache for each token, on average.
        # There are as many steps as the tokens that one game waits for (chain), or as all requests
        # take.
        steps = max(chain, asked * tokens / max(1.0, min(asked, at_once)))
        read = (
            steps * 2 * Engine(model).parameters
            + asked * tokens * setup.game_tokens / 2 * model.kv_bytes
        )
        return read / (gb_s * 1e9 * DECODING)

    own = setup.games / servers, setup.generated_tokens, at_once, setup.chain
    times = {"generation": decoding(shape, gb_s, *own)}
    if (
        judge := setup.judge
    ):  # a verdict, then the readings; on a card of its own while games are played
        how = setup.answer_tokens, setup.judge_at_once, 2 * setup.answer_tokens
        if setup.judge_gb_s:
            every, last = (
                decoding(judge, setup.judge_gb_s, asked, *how) for asked in (setup.answers, 2)
            )
            times["judge"] = max(last, every - times["generation"])
        else:
            times["judge"] = decoding(judge, gb_s, setup.answers / servers, *how)
    moved = setup.actor.trained if setup.base_stays else setup.actor.parameters
    return times | {"sleep, wake, push": 4 * moved / (PUSH_GB_S * 1e9) * bool(setup.pool)}


def seconds(setup: Setup, card: Card, gpus: int) -> dict[str, float]:
    """Seconds of a step by phase."""
    tokens, host = setup.games * setup.game_tokens, HOST_GB_S * 1e9

    def forward(engine: Engine, passes: int, micro_batch: int) -> float:
        compute = passes * 2 * engine.parameters * tokens / (card.tflops * 1e12 * TRAINING * gpus)
        read = (
            engine.parameters
            * engine.weight_bytes
            / engine.workers
            * tokens
            / gpus
            / max(1, micro_batch)
        )
        return compute + engine.on_cpu * min(passes, 2) * read / host

    times = playing(setup, card, gpus) if setup.plays else {}
    times |= {
        f"log-probs, {who}": forward(engine, 1, engine.infer_tokens)
        for who, engine in setup.reads.items()
    }
    for who, engine in setup.trained.items():
        passes = setup.epochs * (4 if engine.checkpointing else 3) + (
            who == "critic"
        )  # and one for the values
        moved = 2 * (
            engine.param_offload * engine.parameters + engine.optimizer_offload * 2 * engine.trained
        )
        times[f"update, {who}"] = forward(engine, passes, engine.update_tokens)
        times[f"update, {who}"] += moved * engine.weight_bytes / engine.workers / host
    return times
