"""``medserl plan``: a recipe's memory by phase, time and disk on a GPU that need not be there.

First arithmetic alone: ``tests/planning`` compares its counts with torch's own, and its sums with the peaks of real
steps on a CPU. Then what it is fed with from a run's config.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from medserl_agentloop.paths import errors_in_one_line

if TYPE_CHECKING:
    from medserl_agentloop.core.run_check import RunConfig

GIB = 2**30
CONTEXTS, GRAPHS, PREFILL_GRAPHS = 1.0 * GIB, 2.5 * GIB, 1.5 * GIB
"""CUDA contexts of trainer and server with their libraries; the server's CUDA graphs for decoding and its workspace;
SGLang's graphs for prefill of up to 8,192 tokens, which it does without where it serves adapters: assumed."""
PROCESS = 0.75 * GIB
"""Memory of the host for a process that has imported torch and verl: assumed. 0.3 to 0.5 were measured without CUDA."""
TRAINING, DECODING, HOST_GB_S = 0.35, 0.5, 25.0
"""Shares of a card's peak rates that are reached, and GB/s between host and GPU: assumed."""

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
        self.q, self.kv = self.heads * self.head_dim, self.kv_heads * self.head_dim  # numbers of a token
        self.kv_bytes = 2 * self.layers * 2 * self.kv  # of the KV cache for one token, in 16 bits
        attention = 2 * self.hidden * (self.q + self.kv) + self.qk_norm * 2 * self.head_dim
        self.layer_parameters = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    def saved_in_layer(self, dtype: int) -> int:
        """Bytes that one layer saves for the backward pass for each token, with flash attention; ``dtype`` in bytes."""
        normed = 2 * self.hidden + self.qk_norm * (self.q + self.kv)  # in fp32, and in the dtype
        others = 2 * self.hidden + 2 * (self.q + self.kv) + 4 * self.intermediate
        scalars = 2 + self.heads + self.qk_norm * (self.heads + self.kv_heads)
        return normed * (4 + dtype) + others * dtype + 4 * scalars

    def saved_outside(self, dtype: int) -> int:
        """The same for what is beside the layers, logits excepted."""
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
    foreach: bool = True  # Adam takes the square roots of all states at once: torch's default on a GPU, unless fused
    fused_loss: bool = True  # flash-attn's cross entropy, which works in place
    chunk: int = 0  # tokens of which verl's fused kernels have the logits at once, in fp32; 0 for all of a micro-batch
    scaled: bool = False  # a temperature other than 1 makes a copy of the logits
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
        self.outer = (shape.vocab + (not self.tied) * self.head + 1) * shape.hidden  # parameters beside the layers
        sides = 4 * shape.hidden + 2 * shape.q + 2 * shape.kv + 3 * (shape.hidden + shape.intermediate)
        adapter = shape.layers * self.lora_rank * sides
        self.parameters = shape.layers * shape.layer_parameters + self.outer + adapter
        self.trained = adapter or self.parameters
        self.checkpoint = self.weight_bytes * (self.parameters + 2 * self.trained)  # weights and Adam's states, on disk
        # What FSDP gathers: all outside the layers, and two layers, one of them ahead.
        gathered = self.gathers * (self.outer + 2 * shape.layer_parameters) * self.compute_bytes
        self.working: Parts = {"FSDP copies": gathered}

    @property
    def pinned(self) -> float:
        """Pinned memory for each byte in it: PyTorch rounds every tensor there up to a power of two."""
        shape = self.shape
        sides = [shape.q] * 2 + [shape.kv] * 2 + [shape.intermediate] * 3
        sizes = [shape.hidden * side / self.workers for side in [shape.vocab, *sides * shape.layers]]
        return sum(2.0 ** ceil(log2(size)) for size in sizes) / sum(sizes)

    def share(self, parameters: int) -> float:
        """Bytes that one worker's part of so many numbers takes on its GPU."""
        return 0.0 if self.on_cpu else parameters * self.weight_bytes / self.workers

    def resident(self, *, weights: bool = False, adam: bool = False) -> Parts:
        """What lies on the GPU, offloaded parts only where they are asked for."""
        return {
            "weights": self.share(self.parameters) * (weights or not self.param_offload),
            "Adam": self.share(2 * self.trained) * (adam or not self.optimizer_offload),
        }

    def update(self) -> Parts:
        """Parts of the backward pass at its peak: at the logits, in the last layer, or at the embedding."""
        shape, dtype, tokens = self.shape, self.compute_bytes, self.update_tokens
        # Without flash-attn, verl's logprobs_from_logits_v2 saves log-probs in fp32; gradients by row, then as a whole.
        logits = tokens * self.head * (dtype * (1 + self.scaled) + (not self.fused_loss) * (4 + 2 * dtype))
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
        return self.working | {"gradients": self.share(self.trained)} | peak

    def inference(self) -> Parts:
        """Parts of a pass without gradients."""
        widest = max((not self.chunk) * self.head * (1 + self.scaled), 3 * self.shape.intermediate)
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


@dataclass
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
    reuses_log_probs: bool = False  # the actor's log-probs have no pass of their own
    helpers: int = 0  # processes on the host that play, reward and load

    def __post_init__(self) -> None:
        self.plays = self.generated_tokens > 0  # a warm start trains on conversations that are there
        self.trained = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    @property
    def host(self) -> float:
        """Bytes on the host for each GPU, without those of the helpers."""
        # SGLang keeps its weights there while it sleeps, and verl loads the actor there before it is moved.
        copies = 2 * self.pool_of_free * bool(self.pool) / self.tensor_parallel
        total = self.actor.parameters * (copies + self.actor.weight_bytes) + 4 * PROCESS
        for engine in filter(None, (self.actor, self.critic, self.reference)):
            held = engine.param_offload * engine.parameters + engine.optimizer_offload * 2 * engine.trained
            if engine.on_cpu:
                held = engine.parameters + (engine is not self.reference) * 3 * engine.trained
            total += held * engine.weight_bytes / engine.workers * engine.pinned
        return total


def phases(setup: Setup, card: Card) -> dict[str, Parts]:
    """What lies on one GPU in each phase of a step, from the second step on."""
    # SGLang takes a share of what is free when it starts (model_runner_kv_cache_mixin.py): weights that are not
    # offloaded are there by then. Adam's states come with the first step.
    there = sum(engine.resident()["weights"] for engine in setup.trained.values())
    pool = setup.pool * (card.memory - setup.pool_of_free * (CONTEXTS + there))
    weights = 2 * setup.actor.parameters / setup.tensor_parallel
    graphs = GRAPHS + PREFILL_GRAPHS * (setup.pool_of_free and not setup.base_stays)
    generating = {"server's weights": weights, "KV cache": pool - weights, "server's graphs": graphs} if pool else {}
    kept = {"server's graphs"} | ({"server's weights"} if setup.base_stays else set())
    beside = {part: size for part, size in generating.items() if part in kept or not setup.pool_freed}
    by_phase = {"generation": generating} if setup.plays else {}
    if setup.plays and not setup.reuses_log_probs:
        by_phase["log-probs, actor"] = beside | setup.actor.inference()
    if setup.reference:
        by_phase["log-probs, reference"] = beside | setup.reference.inference()
    for who, engine in setup.trained.items():
        by_phase[f"update, {who}"] = beside | engine.update()
        by_phase[f"optimizer step, {who}"] = beside | engine.optimizer_step()
    by_phase["checkpoint, actor"] = beside
    for name, parts in by_phase.items():
        for who, engine in setup.trained.items():
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
        if engine and setup.plays and not (engine is setup.actor and setup.reuses_log_probs):
            times[f"log-probs, {who}"] = forward(engine, 1, engine.infer_tokens)
    for who, engine in setup.trained.items():
        passes = setup.epochs * (4 if engine.checkpointing else 3) + (who == "critic")  # and one for the values
        moved = 2 * (engine.param_offload * engine.parameters + engine.optimizer_offload * 2 * engine.trained)
        times[f"update, {who}"] = forward(engine, passes, engine.update_tokens)
        times[f"update, {who}"] += moved * engine.weight_bytes / engine.workers / host
    return times


PUBLISHED = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, tied=True, qk_norm=True, max_tokens=40960),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936, tied=True, qk_norm=True, max_tokens=40960),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, tied=True, qk_norm=True, max_tokens=40960),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, tied=False, qk_norm=True, max_tokens=40960),
}
"""By the beginning of a model's name; quoted from the config.json that Qwen publishes with it."""

CARDS = {24: ("RTX 4090", 165, 1008), 48: ("L40S", 362, 864), 80: ("H100 SXM", 989, 3350),
         96: ("RTX PRO 6000 Blackwell", 504, 1792), 141: ("H200", 989, 4800)}  # fmt: skip
"""By GB: TFLOP/s in bf16 without sparsity, and GB/s of its memory; quoted from NVIDIA's data sheets."""

USABLE, FULL, TIGHT = 0.985, 0.95, 0.9
"""Shares, assumed: of a card's memory that programs get; of that, how much a plan may fill, and what is tight."""

NOTE, INSTRUCTIONS, FILLED, ATTACKED = 190, 500, 0.5, 0.5
"""Assumed: tokens of a note (124 words in MEDEC) and of a prompt without it; share of its budget that a turn uses;
share of games with an attack."""

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_ACTOR, _REF, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
_FSDP = {_ACTOR: f"{_ACTOR}.fsdp_config", _REF: f"{_REF}.fsdp_config", _CRITIC: "critic.fsdp"}
_PASSES = {_ACTOR: "actor_rollout_ref.rollout.log_prob", _REF: f"{_REF}.log_prob", _CRITIC: "critic.forward"}
_MODEL, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_DYNAMIC, _LIMIT, _SIZE = "use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"
_HELPERS = (f"{_ROLLOUT}.agent.num_workers", "reward.num_workers", "data.dataloader_num_workers")
_WARM_START = "engine"
"""Node of the one engine in the config of verl's SFT trainer, whose rows are conversations."""
_GAME = ("game", "conversation")


@dataclass
class Plan:
    """What was computed; sizes are bytes of one GPU."""

    card: Card
    setup: Setup
    phases: dict[str, Parts]
    seconds: dict[str, float]

    def __post_init__(self) -> None:
        sums = {phase: sum(parts.values()) for phase, parts in self.phases.items()}
        self.worst = max(sums, key=lambda phase: sums[phase])
        self.peak = sums[self.worst]
        self.cache = self.phases.get("generation", {}).get("KV cache", 0.0)
        self.longest_game = self.setup.longest_game * self.setup.actor.shape.kv_bytes if self.setup.pool else 0
        self.fits = self.cache >= self.longest_game and self.peak <= FULL * self.card.memory


def read_shape(path: str, folder: Path | None = None) -> Shape:
    """Shape of the model at ``path``, from the config.json of ``folder`` or of ``path``, or as published.

    Raises ValueError where nothing here knows the model, or it is no dense decoder of the Llama family.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    local = folder or Path(path).expanduser()
    if not (local / "config.json").is_file():
        known = [name for name in PUBLISHED if Path(path).name.lower().startswith(name)]
        if known and folder is None:
            return PUBLISHED[known[0]]
        raise ValueError(
            f"the model {path}: there is no {local / 'config.json'}, and it is none of {', '.join(PUBLISHED)}. "
            "Name the folder of its config.json: --model-config FOLDER."
        )
    config: Any = AutoConfig.from_pretrained(local).get_text_config()
    kv_heads, head_dim = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    shape = Shape(
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        kv_heads or config.num_attention_heads, head_dim or config.hidden_size // config.num_attention_heads,
        config.vocab_size, tied=config.tie_word_embeddings, qk_norm=config.model_type == "qwen3",
        max_tokens=config.max_position_embeddings,
    )  # fmt: skip
    with torch.device("meta"):
        counted = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if abs(Engine(shape).parameters / counted - 1) > 0.01:
        raise ValueError(f"{local} ({config.model_type}): medserl plan knows dense decoders of the Llama family only.")
    return shape


def _whole(run: RunConfig, key: str) -> int:
    value = run[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value} is no whole number. Write one, e.g. {key}=1.")
    return value


def _bytes(run: RunConfig, key: str, default: str) -> int:
    dtype = run[key] or default
    if dtype not in _BYTES:
        raise ValueError(f"{key}={dtype} is no dtype of verl's. Write one of {', '.join(_BYTES)}.")
    return _BYTES[dtype]


def _longest(run: RunConfig) -> int:
    """Most tokens of a game, or of a conversation of a warm start."""
    keys = ("max_length",) if _WARM_START in run.config else ("max_prompt_length", "max_response_length")
    return sum(_whole(run, f"data.{key}") for key in keys)


def _tokens(run: RunConfig, dynamic: str, most: str, size: str, sharing: int) -> int:
    """Tokens of the largest micro-batch on one GPU."""
    longest = _longest(run)
    if not run[dynamic]:
        return _whole(run, size) * longest // sharing
    if _whole(run, most) * sharing < longest:
        raise ValueError(
            f"{most}={run[most]} holds no {_GAME[_WARM_START in run.config]} of {longest} tokens, which data.max_* "
            f"allows, and verl ends the run at the first one. Set it to {-(-longest // sharing)} or more."
        )
    return _whole(run, most)


def _fsdp_engine(run: RunConfig, strategy: str, fsdp: str, model: str, optim: str, shape: Shape) -> Engine:
    """An engine with what any of verl's FSDP engines reads below these nodes."""
    if run[strategy] not in ("fsdp", "fsdp2"):
        raise ValueError(f"{strategy}={run[strategy]}: medserl plan knows fsdp2 and fsdp. Set it to fsdp2.")
    size_of_group = _whole(run, f"{fsdp}.fsdp_size")
    adam, cuda = run[f"{optim}.override_optimizer_config"] or {}, run["trainer.device"] == "cuda"
    attention = run[f"{model}.override_config.attn_implementation"]
    return Engine(
        shape,
        workers=size_of_group if size_of_group > 0 else run.gpus,
        weight_bytes=_bytes(run, f"{fsdp}.model_dtype", "bf16" if strategy.startswith(_REF) else "fp32"),
        compute_bytes=_bytes(run, f"{fsdp}.mixed_precision.param_dtype", "bf16"),
        checkpointing=bool(run[f"{model}.enable_gradient_checkpointing"]),
        foreach=cuda and not adam.get("fused") and adam.get("foreach") is not False,
        chunk=512 * bool(run[f"{model}.use_fused_kernels"]),
        fused_loss=cuda and attention in (None, "flash_attention_2"),  # a run with another one has no flash-attn
        param_offload=bool(run[f"{fsdp}.param_offload"]),
        optimizer_offload=bool(run[f"{fsdp}.optimizer_offload"]),
        on_cpu=bool(run[f"{fsdp}.offload_policy"]),
    )


def _engine(run: RunConfig, name: str, shape: Shape) -> Engine:
    passes, sharing, reads = _PASSES[name], run.ulysses(name), name == _REF
    own = f"{_CRITIC}.{_DYNAMIC}" if name == _CRITIC else f"{passes}_{_DYNAMIC}"
    ppo = () if reads else (f"{name}.{_DYNAMIC}", f"{name}.ppo_{_LIMIT}", f"{name}.ppo_{_SIZE}")
    model = f"{_CRITIC}.model" if name == _CRITIC else _MODEL
    engine = _fsdp_engine(run, f"{name}.strategy", _FSDP[name], model, f"{name}.optim", shape)
    return replace(
        engine,
        lora_rank=run.lora_rank * (name == _ACTOR) * (2 if run.selfplay.adapters == "per_role" else 1),
        outputs=int(name == _CRITIC),
        scaled=run[f"{_ROLLOUT}.temperature"] != 1 and name != _CRITIC,
        on_cpu=reads or engine.on_cpu,
        update_tokens=_tokens(run, *ppo, sharing) if ppo else 0,
        infer_tokens=_tokens(run, own, f"{passes}_{_LIMIT}", f"{passes}_{_SIZE}", sharing),
    )


def _warm_start_setup(run: RunConfig, shape: Shape) -> Setup:
    """What the arithmetic needs of a run of verl's SFT trainer."""
    sharing = _whole(run, f"{_WARM_START}.ulysses_sequence_parallel_size")
    conversations, workers = _whole(run, "data.train_batch_size"), max(1, run.gpus // sharing)
    if conversations % workers:
        raise ValueError(
            f"data.train_batch_size={conversations} does not divide among {workers} data-parallel workers. Set it to a "
            f"multiple of {workers}."
        )
    engine = _fsdp_engine(run, f"{_WARM_START}.strategy", _WARM_START, "model", "optim", shape)
    tokens = _tokens(run, f"data.{_DYNAMIC}", f"data.{_LIMIT}", f"data.{_SIZE}", sharing)
    return Setup(
        replace(engine, lora_rank=_whole(run, "model.lora_rank"), update_tokens=tokens),
        games=conversations,
        longest_game=_longest(run),
        game_tokens=FILLED * _longest(run),
    )


def _setup(run: RunConfig, shapes: dict[str, Shape]) -> Setup:
    """What the arithmetic needs of a run; a ValueError names the key that does not fit, and what to write."""
    if _WARM_START in run.config:
        return _warm_start_setup(run, shapes[_WARM_START])
    engines = {name: _engine(run, name, shapes[name]) for name in run.engines}
    longest, server = _longest(run), f"{_ROLLOUT}.max_model_len"
    for key, most in ((server, run[server]), (f"{_MODEL}.path={run[f'{_MODEL}.path']}", shapes[_ACTOR].max_tokens)):
        if most is not None and most < longest:
            raise ValueError(
                f"data.max_prompt_length + data.max_response_length = {longest}, and {key} allows {most} tokens. Set "
                f"data.max_response_length={most - run['data.max_prompt_length']} or less."
            )
    selfplay: Any = run.selfplay
    game_tokens, generated = FILLED * longest, FILLED * longest / 2  # of a game, and of them those generated
    if hasattr(selfplay, "budget"):
        generated = ATTACKED * (FILLED * selfplay.budget.attacker_reasoning + NOTE)
        generated += selfplay.assessments * FILLED * selfplay.budget.assessor
        game_tokens = generated + (ATTACKED + selfplay.assessments) * (INSTRUCTIONS + NOTE)
    return Setup(
        engines[_ACTOR],
        engines.get(_REF),
        engines.get(_CRITIC),
        pool=0.0 if run[f"{_ROLLOUT}.name"] == "cpu_hf" else float(run[f"{_ROLLOUT}.gpu_memory_utilization"]),
        pool_of_free=run[f"{_ROLLOUT}.name"] != "vllm",
        pool_freed=bool(run[f"{_ROLLOUT}.free_cache_engine"]),
        base_stays=run.lora_rank > 0 and not run[f"{_MODEL}.lora.merge"],
        tensor_parallel=_whole(run, f"{_ROLLOUT}.tensor_model_parallel_size"),
        concurrent=_whole(run, f"{_ROLLOUT}.max_num_seqs"),
        games=_whole(run, "data.train_batch_size") * _whole(run, f"{_ROLLOUT}.n"),
        longest_game=longest,
        game_tokens=game_tokens,
        generated_tokens=generated,
        epochs=_whole(run, f"{_ACTOR}.ppo_epochs"),
        reuses_log_probs=run.selfplay.reuse_log_probs,
        helpers=sum(_whole(run, key) for key in _HELPERS) + 4,
    )


def plan_run(run: RunConfig, gpu_gb: float, model_config: Path | None = None, beside: float = 0) -> Plan:
    """Plan a composed run on cards of ``gpu_gb`` GB, of which others hold ``beside`` GiB.

    ValueError for a model or a number that it cannot plan with.
    """
    engines = {_WARM_START: "model"} if _WARM_START in run.config else run.engines
    shapes = {name: read_shape(run[f"{key}.path"], model_config) for name, key in engines.items()}
    name, tflops, bandwidth = CARDS[min(CARDS, key=lambda size: abs(size - gpu_gb))]
    card = Card(name, (gpu_gb * USABLE - beside) * GIB, tflops, bandwidth)
    setup = _setup(run, shapes)
    return Plan(card, setup, phases(setup, card), seconds(setup, card, run.gpus))


def composed(recipe: str, overrides: list[str]) -> RunConfig:
    """The run of a recipe; a ValueError if Hydra cannot compose it, or verl has no such key."""
    from medserl_agentloop.core.config import SelfPlayConfig
    from medserl_agentloop.core.run_check import RunConfig, unknown_keys
    from medserl_agentloop.core.run_check.composition import compose_recipe, schema_of

    config = compose_recipe(recipe, overrides)
    if unknown := unknown_keys(config, schema_of(recipe)):
        raise ValueError(f"verl has no key {'; '.join(unknown)}. Correct it, or leave it out.")
    return RunConfig(config, SelfPlayConfig(game="") if _WARM_START in config else SelfPlayConfig.from_run(config))


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe of the run, or several: qwen3_4b,gpu_80g.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, as for verl's main_ppo.")] = None,
    gpu: Annotated[float, typer.Option(help="Memory of one GPU, in GB.")] = 96,
    beside: Annotated[float, typer.Option(help="GiB of each GPU that something else holds, e.g. a judge.")] = 0,
    model_config: Annotated[Path | None, typer.Option(help="Folder with the model's config.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Compute memory, time and disk of a run from its config; exit code 1 if it does not fit."""
    with errors_in_one_line():
        run = composed(recipe, overrides or [])
        result = plan_run(run, gpu, model_config, beside)
    if run["trainer.device"] == "cpu":
        typer.echo(f"{recipe} runs on the CPU; this is the plan of the same run on a GPU of {gpu:g} GB.", err=True)
    if as_json:
        typer.echo(json.dumps({**asdict(result), "fits": result.fits}, indent=2))
    else:
        console = Console()
        console.print(_table(result), "")
        console.print(_sentences(result), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.fits else 1)


def _table(plan: Plan) -> Table:
    title = f"Memory of one GPU, {plan.card.memory / GIB:.1f} GiB usable, from the second step on"
    table = Table("phase", "GiB", "share", "largest parts", box=None, title=title, title_justify="left")
    for phase, parts in plan.phases.items():
        total, largest = sum(parts.values()), sorted(parts.items(), key=lambda part: -part[1])[:5]
        style = "red" if total > FULL * plan.card.memory else "yellow" if total > TIGHT * plan.card.memory else ""
        text = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        table.add_row(phase, f"{total / GIB:.1f}", f"{total / plan.card.memory:.0%}", text, style=style)
    return table


def _sentences(plan: Plan) -> str:
    setup = plan.setup
    spent = ", ".join(f"{phase} {s:.0f}" for phase, s in sorted(plan.seconds.items(), key=lambda item: -item[1]))
    written = " and ".join(f"{engine.checkpoint / GIB:.0f} GiB" for engine in setup.trained.values())
    generated = f", {setup.generated_tokens:,.0f} of them generated" if setup.plays else ""
    helpers = f", and {setup.helpers * PROCESS / GIB:.0f} GiB for {setup.helpers} helper processes" * setup.plays
    fits = f"It fits.{' It is tight.' * (plan.peak > TIGHT * plan.card.memory)}"
    text = f"""\
A step: {sum(plan.seconds.values()):.0f} s ({spent})
in {setup.games} {_GAME[not setup.plays]}s of {setup.game_tokens:,.0f} tokens{generated}
A checkpoint: {written} on disk. The host holds {setup.host / GIB:.0f} GiB for each GPU{helpers}.
Computed by medserl plan. Peak rates: quoted from the data sheet of the {plan.card.name}. Assumed: the shares of them \
that are reached ({TRAINING:.0%} in training, {DECODING:.0%} in decoding), tokens of a game, CUDA contexts and graphs. \
Not counted: traffic between GPUs, the judge.
{fits if plan.fits else f"It does not fit: a plan may fill {FULL:.0%} of the card."} \
The peak is {plan.peak / GIB:.1f} GiB, in {plan.worst}."""
    if plan.cache < plan.longest_game:
        text += (
            f"\nThe server's pool has {plan.cache / GIB:.1f} GiB for the KV cache, and the longest game needs "
            f"{plan.longest_game / GIB:.1f}: raise {_ROLLOUT}.gpu_memory_utilization."
        )
    if not plan.fits:
        text += (
            "\nAdd the recipe gpu_80g, which keeps weights and Adam's states on the host while games are played; train "
            "with LoRA (the recipe lora); use more GPUs, or a smaller model."
        )
    return text
