"""``medserl plan``: GiB of each phase of a run on one GPU and on its host, from only the config.

``tests/planning/test_plan.py`` compares the counts with torch's own, and the sums with the peaks of
real steps on a CPU.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from medserl_agentloop.terminal import errors_in_one_line, table, visible

if TYPE_CHECKING:
    from medserl_agentloop.core.run_check import RunConfig

Parts = dict[str, float]
"""Bytes by name."""

GIB = 2**30
USABLE, FULL = 0.985, 0.95  # assumed shares: of a card that programs get, and that a plan may fill
# Assumed: CUDA contexts of trainer and server, SGLang's graphs and workspace, a process on the host
# with torch and verl (0.3 to 0.5 were measured without CUDA).
CONTEXTS, GRAPHS, PREFILL_GRAPHS, PROCESS = 1.0 * GIB, 2.5 * GIB, 1.5 * GIB, 0.75 * GIB

QWEN3 = {  # hidden, intermediate, layers, heads, tied: quoted from the config.json of each
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-32b": (5120, 25600, 64, 64, False),
}
"""Models that can be planned without their files, by how their names begin."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
SFT = "engine"  # the node of the one engine in the config of verl's SFT trainer
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_FSDP = {ACTOR: f"{ACTOR}.fsdp_config", REF: f"{REF}.fsdp_config", CRITIC: "critic.fsdp", SFT: SFT}
_BYTES = {"fp32": 4, "float32": 4}  # every other dtype of verl's has 2


class Shape:
    """Sizes of a dense decoder: from its ``config.json``, and parameters as torch counts them."""

    def __init__(self, config: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            layer = AutoModelForCausalLM.from_config(config).model.layers[0]
        self.matrices = [weight.shape for weight in layer.parameters() if weight.ndim == 2]
        self.in_layer = sum(weight.numel() for weight in layer.parameters())
        self.layers: int = config.num_hidden_layers
        self.vocab: int = config.vocab_size
        self.hidden: int = config.hidden_size
        self.intermediate: int = config.intermediate_size
        self.q: int = layer.self_attn.q_proj.out_features
        self.kv: int = layer.self_attn.k_proj.out_features
        self.head_dim: int = layer.self_attn.head_dim
        self.tied: bool = config.tie_word_embeddings
        self.qk_norm = hasattr(layer.self_attn, "q_norm")
        self.kv_bytes = 2 * self.layers * 2 * self.kv  # of a token in the KV cache, in 16 bits

    def saved_in_layer(self, dtype: int) -> int:
        """Bytes per token that a layer with flash attention saves for its backward pass."""
        normed = 2 * self.hidden + self.qk_norm * (self.q + self.kv)  # in fp32, and in the dtype
        others = 2 * self.hidden + 2 * (self.q + self.kv) + 4 * self.intermediate
        heads = self.q // self.head_dim, self.kv // self.head_dim
        scalars = 2 + heads[0] + self.qk_norm * sum(heads)
        return normed * (4 + dtype) + others * dtype + 4 * scalars

    def saved_outside(self, dtype: int) -> int:
        """The same for the parts outside the layers, except logits."""
        return 12 + 2 * self.head_dim * dtype + self.hidden * (4 + 2 * dtype)


def model_config(path: str) -> Any:
    """Transformers' config of the model at ``path``, from its folder or as published."""
    from transformers import AutoConfig, Qwen3Config

    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        config: Any = AutoConfig.from_pretrained(folder).get_text_config()
        if config.model_type not in FAMILIES:
            raise ValueError(f"{path} is a {config.model_type}, not one of {', '.join(FAMILIES)}.")
        return config
    name = next((name for name in QWEN3 if folder.name.lower().startswith(name)), None)
    if name is None:
        raise ValueError(
            f"the model {path} has no {folder / 'config.json'} and is not one of {', '.join(QWEN3)}"
        )
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    *sizes, tied = QWEN3[name]
    given = dict(zip(names, sizes, strict=True)) | {"num_key_value_heads": 8, "head_dim": 128}
    return Qwen3Config(vocab_size=151936, tie_word_embeddings=tied, **given)


@cache
def read_shape(path: str) -> Shape:
    """Shape of the model at ``path``; ValueError if it is unknown or of another family."""
    return Shape(model_config(path))


@dataclass(eq=False)
class Engine:
    """A model that FSDP trains or, as the reference, only reads."""

    shape: Shape
    workers: int = 1  # GPUs that share its weights
    weight_bytes: int = 4  # of a weight, its gradient and each of Adam's states
    compute_bytes: int = 2
    lora_rank: int = 0  # of an adapter on all linear layers
    critic: bool = False  # its head has one output in place of the vocabulary
    checkpointing: bool = True
    foreach: bool = True  # Adam takes square roots of all states at once: torch's default, unfused
    chunk: int = 0  # tokens whose logits verl's fused kernels have at once, in fp32; 0: all
    scaled: bool = False  # a temperature other than 1 makes a copy of the logits
    entropy: bool = False  # also in the update: gradients of the logits twice
    hf_copy: bool = False  # of the weights in a checkpoint
    param_offload: bool = False
    optimizer_offload: bool = False
    on_cpu: bool = False  # FSDP2's CPU offload policy, which verl sets for every reference
    gathers: bool = True  # FSDP's copies, in the dtype that computes
    update_tokens: int = 0  # of the largest micro-batch on one GPU
    infer_tokens: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self.tied = shape.tied and not self.critic  # the head is also the embedding
        self.head = 1 if self.critic else shape.vocab
        outside = (shape.vocab + (not self.tied) * self.head + 1) * shape.hidden
        adapter = shape.layers * self.lora_rank * sum(sum(sides) for sides in shape.matrices)
        self.parameters = shape.layers * shape.in_layer + outside + adapter
        self.trained = adapter or self.parameters
        # Weights and Adam's states, on disk.
        copies = (1 + self.hf_copy) * self.parameters + 2 * self.trained
        self.checkpoint = self.weight_bytes * copies
        # What FSDP gathers: all outside the layers, and two layers, one of them ahead. FSDP2 copies
        # it out of a buffer, and gradients into one in fp32.
        buffer = self.gathers * (outside + shape.in_layer)
        gathered = (self.gathers * shape.in_layer + 2 * buffer) * self.compute_bytes
        self.working: Parts = {"FSDP copies": gathered}
        self.reduced = 4.0 * buffer * (not adapter)

    def share(self, parameters: int) -> float:
        """Bytes of one worker's share of this many numbers on its GPU."""
        return 0.0 if self.on_cpu else parameters * self.weight_bytes / self.workers

    def resident(self, *, at_work: bool = False, steps: bool = False) -> Parts:
        """Weights and states on the GPU, those of an offloaded engine only while it needs them."""
        return {
            "weights": self.share(self.parameters) * (at_work or not self.param_offload),
            "Adam": self.share(2 * self.trained) * (steps or not self.optimizer_offload),
        }

    def update(self) -> Parts:
        """The backward pass at its peak: at the logits, in the last layer, or at the embedding."""
        shape, dtype, tokens = self.shape, self.compute_bytes, self.update_tokens
        # verl's logprobs_from_logits_v2 saves log-probs in fp32; gradients by row, then as a whole.
        copies = 1 + self.scaled + 2 * self.entropy
        logits = tokens * self.head * (dtype * copies + 4 + 2 * dtype)
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
        """A pass without gradients."""
        widest = max((not self.chunk) * self.head * (1 + self.scaled), 3 * self.shape.intermediate)
        logits = float(self.infer_tokens * self.compute_bytes * widest)
        return self.working | {"logits or layer": logits}

    def optimizer_step(self) -> Parts:
        """Adam's step, without weights and states."""
        gradients = self.share(self.trained)
        return {"gradients": gradients, "Adam's square roots": self.foreach * gradients}

    def on_host(self) -> float:
        """Pinned bytes of one worker; PyTorch rounds each tensor there up to a power of two."""
        held = self.param_offload * self.parameters + self.optimizer_offload * 2 * self.trained
        if self.on_cpu:
            held = self.parameters + (self.update_tokens > 0) * 3 * self.trained
        matrices = [*self.shape.matrices * self.shape.layers, (self.shape.vocab, self.shape.hidden)]
        sizes = [a * b / self.workers for a, b in matrices]
        pinned = sum(2.0 ** ceil(log2(size)) for size in sizes) / sum(sizes)
        return float(held * self.weight_bytes / self.workers * pinned)


@dataclass
class Plan:
    """The memory of a run, in bytes."""

    usable: float  # of one GPU
    phases: dict[str, Parts]  # of one GPU, from the second step on
    host: float  # of one machine
    checkpoint: float
    longest_game: float = 0.0  # of the KV cache

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def cache(self) -> float:
        return self.phases.get("generation", {}).get("KV cache", self.longest_game)

    @property
    def fits(self) -> bool:
        return self.cache >= self.longest_game and self.peak <= FULL * self.usable


def plan_run(run: RunConfig, gpu_gb: float) -> Plan:
    """Plan a composed run on cards of ``gpu_gb`` GB; ValueError for an unknown model."""
    usable = gpu_gb * USABLE * GIB
    if SFT in run.config:
        engine = _engine(run, SFT, "model", run["model.lora_rank"])
        phases = _phases({"actor": engine}, {}, {}, set())
        return Plan(usable, phases, _host(run, [engine], 0), engine.checkpoint)
    rank = run.lora_rank * (2 if run.selfplay.adapters == "per_role" else 1)
    engines = {
        name: _engine(run, name, model, rank * (name == ACTOR))
        for name, model in run.engines.items()
    }
    actor, served = engines[ACTOR], run[f"{ROLLOUT}.name"] != "cpu_hf"
    trained = {name.rpartition(".")[2]: engines[name] for name in run.trained}
    sharing = run[f"{ROLLOUT}.tensor_model_parallel_size"]
    # SGLang takes its share of what is free when it starts: weights that are not offloaded are
    # there by then, and Adam's states come with the first step.
    free = usable - CONTEXTS - sum(engine.resident()["weights"] for engine in trained.values())
    weights = 2 * actor.parameters / sharing
    adapters = run.lora_rank > 0 and not run[f"{MODEL}.lora.merge"]
    no_prefill = adapters or run[f"{ROLLOUT}.engine_kwargs.sglang.disable_piecewise_cuda_graph"]
    server: Parts = {
        "server's weights": weights,
        "KV cache": run[f"{ROLLOUT}.gpu_memory_utilization"] * free - weights,
        "server's graphs": GRAPHS + PREFILL_GRAPHS * (not no_prefill),
    }
    kept = {"server's graphs"} | ({"server's weights"} if adapters else set())
    if not run[f"{ROLLOUT}.free_cache_engine"]:
        kept = set(server)
    reads = {who: engines[name] for who, name in run.log_probs.items()}
    longest = run["data.max_prompt_length"] + run["data.max_response_length"]
    return Plan(
        usable,
        _phases(trained, reads, server if served else {}, kept),
        # SGLang keeps its weights on the host while it sleeps.
        host=_host(run, list(engines.values()), 2 / sharing * served),
        checkpoint=sum(engine.checkpoint for engine in trained.values()),
        longest_game=longest * actor.shape.kv_bytes / sharing * served,
    )


def _engine(run: RunConfig, name: str, model: str, lora_rank: int) -> Engine:
    """The engine of a node, with what any of verl's FSDP engines reads below it."""
    from medserl_agentloop.core.run_check import LOG_PROBS, UPDATES

    fsdp, optim = _FSDP[name], "optim" if name == SFT else f"{name}.optim"
    adam, cuda = run[f"{optim}.override_optimizer_config"] or {}, run["trainer.device"] == "cuda"
    engine = Engine(
        read_shape(run[f"{model}.path"]),
        workers=run[f"{fsdp}.fsdp_size"] if run[f"{fsdp}.fsdp_size"] > 0 else run.gpus,
        weight_bytes=_BYTES.get(run[f"{fsdp}.model_dtype"] or ("" if name == REF else "fp32"), 2),
        compute_bytes=_BYTES.get(run[f"{fsdp}.mixed_precision.param_dtype"] or "bf16", 2),
        lora_rank=lora_rank,
        critic=name == CRITIC,
        checkpointing=bool(run[f"{model}.enable_gradient_checkpointing"]),
        foreach=cuda and not adam.get("fused") and adam.get("foreach") is not False,
        chunk=512 * bool(run[f"{model}.use_fused_kernels"]),
        param_offload=bool(run[f"{fsdp}.param_offload"]),
        optimizer_offload=bool(run[f"{fsdp}.optimizer_offload"]),
        on_cpu=name == REF or bool(run[f"{fsdp}.offload_policy"]),
        hf_copy="hf_model" in run.names(f"{optim.removesuffix('optim')}checkpoint.save_contents"),
    )
    if name == SFT:
        sharing, longest = run[f"{SFT}.ulysses_sequence_parallel_size"], run["data.max_length"]
        packs = run["data.use_dynamic_bsz"]
        return replace(engine, update_tokens=_tokens(run, "data.", packs, longest // sharing))
    longest = run["data.max_prompt_length"] + run["data.max_response_length"]
    packs, most = run.packs(name), longest // run.ulysses(name)
    updates, reads = name in run.trained, name in run.log_probs.values()
    return replace(
        engine,
        scaled=run[f"{ROLLOUT}.temperature"] != 1 and name != CRITIC,
        entropy=name == ACTOR
        and bool(run[f"{name}.calculate_entropy"] or run[f"{name}.entropy_coeff"]),
        update_tokens=_tokens(run, UPDATES[name], packs, most) if updates else 0,
        infer_tokens=_tokens(run, LOG_PROBS[name], packs, most) if reads else 0,
    )


def _tokens(run: RunConfig, keys: str, packs: bool, longest: int) -> int:
    """Tokens of the largest micro-batch on one GPU; ``keys`` is the prefix of its keys."""
    size = "max_token_len_per_gpu" if packs else "micro_batch_size_per_gpu"
    return int(run[f"{keys}{size}"]) * (1 if packs else longest)


def _phases(
    trained: dict[str, Engine], reads: dict[str, Engine], server: Parts, kept: set[str]
) -> dict[str, Parts]:
    """The parts of each phase; ``kept`` is what stays of the server while roles are trained."""
    there = {part: size for part, size in server.items() if part in kept}

    def held(at_work: Engine | None = None, steps: bool = False) -> Parts:
        parts: Parts = {"CUDA contexts": CONTEXTS}
        for who, engine in trained.items():
            working = engine is at_work
            for part, size in engine.resident(at_work=working, steps=steps and working).items():
                parts[part if who == "actor" else f"{part} of the {who}"] = size
        return parts

    phases = {"generation": server | held()} if server else {}
    for who, engine in reads.items():
        phases[f"log-probs, {who}"] = there | engine.inference() | held(engine)
    for who, engine in trained.items():
        phases[f"update, {who}"] = there | engine.update() | held(engine, steps=True)
        phases[f"optimizer step, {who}"] = there | engine.optimizer_step() | held(engine, True)
    return {
        who: {part: size for part, size in parts.items() if size} for who, parts in phases.items()
    }


def _host(run: RunConfig, engines: list[Engine], served: float) -> float:
    """Bytes on one machine; ``served`` is those of a parameter that a sleeping server keeps."""
    keys = (f"{ROLLOUT}.agent.num_workers", "reward.num_workers", "data.dataloader_num_workers")
    helpers = sum(run[key] or 0 for key in keys) + 4
    # verl loads the actor there before it is moved.
    each = engines[0].parameters * (served + engines[0].weight_bytes) + 4 * PROCESS
    each += sum(engine.on_host() for engine in engines)
    return float(each * run["trainer.n_gpus_per_node"] + helpers * PROCESS)


def composed(recipe: str, overrides: list[str]) -> RunConfig:
    """The run of a recipe; ValueError if Hydra cannot compose it or verl lacks one of its keys."""
    from medserl_agentloop.core.config import SelfPlayConfig
    from medserl_agentloop.core.run_check import RunConfig, compose_recipe, unknown_keys

    config, schema = compose_recipe(recipe, overrides)
    if unknown := unknown_keys(config, schema):
        raise ValueError(f"verl has no key {'; '.join(unknown)}. Correct it, or leave it out.")
    selfplay = SelfPlayConfig(game="") if SFT in config else SelfPlayConfig.from_run(config)
    return RunConfig(config, selfplay)


def _that_fit(recipe: str, own: list[str], gpu: float) -> list[str]:
    """A line for each common change that makes a run fit, smallest changes first."""
    names, eight = recipe.strip("[]"), "trainer.n_gpus_per_node=8"
    offload = [f"{ACTOR}.fsdp_config.{what}_offload=true" for what in ("param", "optimizer")]
    changes = [
        (names, offload),
        (f"{names},lora", []),
        (names, [eight, f"{ROLLOUT}.gpu_memory_utilization=0.6"]),
    ]
    if names.startswith("warm_start"):
        lora = ["model.lora_rank=32", "checkpoint.save_contents=[model,optimizer,extra]"]
        fused = "++optim.override_optimizer_config={fused:true}"
        changes = [(names, [fused]), (names, lora), (names, [eight])]
    lines = []
    for name, more in changes:
        with suppress(ValueError):  # it does not work with the user's own overrides
            if (tried := plan_run(composed(name, [*own, *more]), gpu)).fits:
                what = " ".join(f"'{part}'" for part in (f"+recipes=[{name}]", *more))
                lines.append(f"Fits, {tried.peak / GIB:.1f} GiB at the peak: {what}")
    return lines or ["None of the usual changes makes it fit: use a larger card or smaller model."]


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe of the run, or several: qwen3_4b,lora.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides, as for verl's main_ppo.")
    ] = None,
    gpu: Annotated[float, typer.Option(min=1, help="Memory of one GPU, in GB.")] = 96,
) -> None:
    """Compute the memory of a run; exit code 1 if it does not fit."""
    with errors_in_one_line():
        result = plan_run(composed(recipe, overrides or []), gpu)
    rows = []
    for phase, parts in result.phases.items():
        total, largest = sum(parts.values()), sorted(parts.items(), key=lambda part: -part[1])[:5]
        text = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        rows.append((phase, f"{total / GIB:.1f}", f"{total / result.usable:.0%}", text))
    title = f"Memory of one GPU, {result.usable / GIB:.1f} GiB usable, from the second step on"
    Console().print(table(title, ("phase", "GiB", "share", "largest parts"), rows, box=None), "")
    typer.echo(
        f"A checkpoint has {result.checkpoint / GIB:.0f} GiB, and the host needs "
        f"{result.host / GIB:.0f} GiB. Computed; CUDA contexts, graphs and processes are assumed."
    )
    fits = "It fits" if result.fits else f"It does not fit: a plan may fill {FULL:.0%}"
    typer.echo(f"{fits}. The peak is {result.peak / GIB:.1f} GiB.")
    if result.cache < result.longest_game:
        typer.echo(
            f"The KV cache has {result.cache / GIB:.1f} GiB, and the longest game needs "
            f"{result.longest_game / GIB:.1f}: raise {ROLLOUT}.gpu_memory_utilization."
        )
    for line in [] if result.fits else _that_fit(recipe, overrides or [], gpu):
        typer.echo(visible(line))
    raise typer.Exit(0 if result.fits else 1)
