"""``medserl plan``: a recipe's memory by phase, time and disk on a GPU that need not be there.

What the arithmetic is fed with from a run's config, and what the command prints.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from medserl_agentloop.planning.arithmetic import (
    DECODING,
    TRAINING,
    Card,
    Engine,
    Setup,
    Shape,
    phases,
    seconds,
)
from medserl_agentloop.planning.arithmetic import GIB as GIB
from medserl_agentloop.planning.arithmetic import PROCESS as PROCESS
from medserl_agentloop.terminal import errors_in_one_line

if TYPE_CHECKING:
    from medserl_agentloop.core.run_check import RunConfig

PUBLISHED = {
    "qwen3-0.6b": Shape(
        1024, 3072, 28, 16, 8, 128, 151936, tied=True, qk_norm=True, max_tokens=40960
    ),
    "qwen3-1.7b": Shape(
        2048, 6144, 28, 16, 8, 128, 151936, tied=True, qk_norm=True, max_tokens=40960
    ),
    "qwen3-4b": Shape(
        2560, 9728, 36, 32, 8, 128, 151936, tied=True, qk_norm=True, max_tokens=40960
    ),
    "qwen3-8b": Shape(
        4096, 12288, 36, 32, 8, 128, 151936, tied=False, qk_norm=True, max_tokens=40960
    ),
    "qwen3-32b": Shape(
        5120, 25600, 64, 64, 8, 128, 151936, tied=False, qk_norm=True, max_tokens=40960
    ),
}
"""By the beginning of a model's name; quoted from the config.json that Qwen publishes with it."""

CARDS = {24: ("RTX 4090", 165, 1008), 48: ("L40S", 362, 864), 80: ("H100 SXM", 989, 3350),
         96: ("RTX PRO 6000 Blackwell", 504, 1792), 141: ("H200", 989, 4800)}  # fmt: skip
"""By GB: TFLOP/s in bf16 without sparsity, and GB/s of its memory; quoted from NVIDIA's data
sheets.
"""

USABLE, FULL, TIGHT = 0.985, 0.95, 0.9
"""Shares, assumed: of a card's memory that programs get; of that, how much a plan may fill, and
what is tight.
"""

NOTE, EDIT, INSTRUCTIONS, FILLED, ATTACKED, RESERVED = 190, 40, 500, 0.5, 0.5, 0.7
"""Assumed: tokens of a note (124 words in MEDEC), of an edit of one, and of a prompt without it;
share of its budget
that a turn uses; share of games with an attack; share of a turn's budget for which SGLang keeps
room at its start."""
ANSWER, THOUGHT, JUDGE = 150, 450, "qwen3-32b"
"""Assumed: tokens of a judge's answer, and of its reasoning before it; its model, where nothing
here knows it.
"""

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_ACTOR, _REF, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
_FSDP = {_ACTOR: f"{_ACTOR}.fsdp_config", _REF: f"{_REF}.fsdp_config", _CRITIC: "critic.fsdp"}
_MODEL, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_HELPERS = (f"{_ROLLOUT}.agent.num_workers", "reward.num_workers", "data.dataloader_num_workers")
_WARM_START = "engine"
"""Node of the one engine in the config of verl's SFT trainer, whose rows are conversations."""
_GAME = ("game", "conversation")


@dataclass
class Plan:
    """The computed plan; sizes are bytes of one GPU."""

    card: Card
    setup: Setup
    phases: dict[str, dict[str, float]]
    seconds: dict[str, float]

    def __post_init__(self) -> None:
        sums = {phase: sum(parts.values()) for phase, parts in self.phases.items()}
        self.worst = max(sums, key=lambda phase: sums[phase])
        self.peak = sums[self.worst]
        self.cache = self.phases.get("generation", {}).get("KV cache", 0.0)
        self.longest_game = (
            self.setup.longest_game * self.setup.actor.shape.kv_bytes if self.setup.pool else 0
        )
        self.fits = self.cache >= self.longest_game and self.peak <= FULL * self.card.memory


def _published(path: str) -> Shape | None:
    return next(
        (shape for name, shape in PUBLISHED.items() if Path(path).name.lower().startswith(name)),
        None,
    )


def read_shape(path: str, folder: Path | None = None) -> Shape:
    """Shape of the model at ``path``, from the config.json of ``folder`` or of ``path``, or as
    published.

    Raises ValueError where nothing here knows the model, or it is no dense decoder of the Llama
    family.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    local = folder or Path(path).expanduser()
    if not (local / "config.json").is_file():
        if folder is None and (known := _published(path)):
            return known
        raise ValueError(
            f"the model {path}: there is no {local / 'config.json'}, and it is none of "
            f"{', '.join(PUBLISHED)}. "
            "Name the folder of its config.json: --model-config FOLDER."
        )
    config: Any = AutoConfig.from_pretrained(local).get_text_config()
    kv_heads, head_dim = (
        getattr(config, "num_key_value_heads", None),
        getattr(config, "head_dim", None),
    )
    shape = Shape(
        config.hidden_size, config.intermediate_size, config.num_hidden_layers,
        config.num_attention_heads,
        kv_heads or config.num_attention_heads,
        head_dim or config.hidden_size // config.num_attention_heads,
        config.vocab_size, tied=config.tie_word_embeddings, qk_norm=config.model_type == "qwen3",
        max_tokens=config.max_position_embeddings,
    )  # fmt: skip
    with torch.device("meta"):
        counted = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if abs(Engine(shape).parameters / counted - 1) > 0.01:
        raise ValueError(
            f"{local} ({config.model_type}): medserl plan knows dense decoders of the Llama family "
            "only."
        )
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
    keys = (
        ("max_length",)
        if _WARM_START in run.config
        else ("max_prompt_length", "max_response_length")
    )
    return sum(_whole(run, f"data.{key}") for key in keys)


def _tokens(run: RunConfig, packs: bool, keys: str, sharing: int) -> int:
    """Tokens of the largest micro-batch on one GPU; ``keys`` is how its keys begin."""
    from medserl_agentloop.core.config import refuse

    longest, most = _longest(run), f"{keys}max_token_len_per_gpu"
    if not packs:
        return _whole(run, f"{keys}micro_batch_size_per_gpu") * longest // sharing
    tokens = _whole(run, most)
    refuse(run.too_few(most, longest, sharing, _GAME[_WARM_START in run.config]))
    return tokens


def _fsdp_engine(
    run: RunConfig, strategy: str, fsdp: str, model: str, optim: str, shape: Shape
) -> Engine:
    """An engine with what any of verl's FSDP engines reads below these nodes."""
    if run[strategy] not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"{strategy}={run[strategy]}: medserl plan knows fsdp2 and fsdp. Set it to fsdp2."
        )
    size_of_group = _whole(run, f"{fsdp}.fsdp_size")
    adam, cuda = run[f"{optim}.override_optimizer_config"] or {}, run["trainer.device"] == "cuda"
    attention = run[f"{model}.override_config.attn_implementation"]
    return Engine(
        shape,
        workers=size_of_group if size_of_group > 0 else run.gpus,
        weight_bytes=_bytes(
            run, f"{fsdp}.model_dtype", "bf16" if strategy.startswith(_REF) else "fp32"
        ),
        compute_bytes=_bytes(run, f"{fsdp}.mixed_precision.param_dtype", "bf16"),
        checkpointing=bool(run[f"{model}.enable_gradient_checkpointing"]),
        foreach=cuda and not adam.get("fused") and adam.get("foreach") is not False,
        chunk=512 * bool(run[f"{model}.use_fused_kernels"]),
        fused_loss=cuda
        and attention in (None, "flash_attention_2"),  # a run with another one has no flash-attn
        param_offload=bool(run[f"{fsdp}.param_offload"]),
        optimizer_offload=bool(run[f"{fsdp}.optimizer_offload"]),
        on_cpu=bool(run[f"{fsdp}.offload_policy"]),
        hf_copy="hf_model" in run.names(f"{optim.removesuffix('optim')}checkpoint.save_contents"),
    )


def _engine(run: RunConfig, name: str, shape: Shape) -> Engine:
    from medserl_agentloop.core.run_check import LOG_PROBS, UPDATES

    packs, sharing = run.packs(name), run.ulysses(name)
    model = f"{_CRITIC}.model" if name == _CRITIC else _MODEL
    engine = _fsdp_engine(run, f"{name}.strategy", _FSDP[name], model, f"{name}.optim", shape)
    return replace(
        engine,
        lora_rank=run.lora_rank
        * (name == _ACTOR)
        * (2 if run.selfplay.adapters == "per_role" else 1),
        outputs=int(name == _CRITIC),
        scaled=run[f"{_ROLLOUT}.temperature"] != 1 and name != _CRITIC,
        entropy=name == _ACTOR
        and bool(run[f"{name}.calculate_entropy"] or run[f"{name}.entropy_coeff"]),
        on_cpu=name == _REF or engine.on_cpu,
        update_tokens=_tokens(run, packs, UPDATES[name], sharing) if name in run.trained else 0,
        infer_tokens=_tokens(run, packs, LOG_PROBS[name], sharing)
        if name in run.log_probs.values()
        else 0,
    )


def _warm_start_setup(run: RunConfig, shape: Shape) -> Setup:
    """Return the arithmetic's input for a run of verl's SFT trainer."""
    sharing = _whole(run, f"{_WARM_START}.ulysses_sequence_parallel_size")
    conversations, workers = _whole(run, "data.train_batch_size"), max(1, run.gpus // sharing)
    if conversations % workers:
        raise ValueError(
            f"data.train_batch_size={conversations} does not divide among {workers} data-parallel "
            "workers. Set it to a "
            f"multiple of {workers}."
        )
    engine = _fsdp_engine(run, f"{_WARM_START}.strategy", _WARM_START, "model", "optim", shape)
    tokens = _tokens(run, bool(run["data.use_dynamic_bsz"]), "data.", sharing)
    return Setup(
        replace(engine, lora_rank=_whole(run, "model.lora_rank"), update_tokens=tokens),
        games=conversations,
        longest_game=_longest(run),
        game_tokens=FILLED * _longest(run),
    )


def _judge(run: RunConfig, games: int, base: Shape) -> dict[str, Any]:
    """The fields of the model that reads rewritten notes, as far as the config says."""
    from medserl_agentloop.core.chat import BASE, TEMPLATE_KWARGS
    from medserl_agentloop.games.medical.config import MedicalConfig

    selfplay = run.selfplay
    if not isinstance(selfplay, MedicalConfig) or selfplay.judge not in ("llm", "http"):
        return {}
    server, apart = selfplay.judge_server, selfplay.judge_server.url != BASE
    shape = (
        _published(server.model or str(run["reward.reward_model.model_path"])) or PUBLISHED[JUDGE]
    )
    # A schema leaves no room for reasoning.
    thinks = not server.json_schema and server.extra_body.get(TEMPLATE_KWARGS, {}).get(
        "enable_thinking", True
    )
    return {
        "judge": shape if apart else base,
        "judge_gb_s": CARDS[80][2] * apart,
        "judge_at_once": server.concurrency * run["reward.num_workers"]
        if apart
        else run[f"{_ROLLOUT}.max_num_seqs"],
        "answers": ATTACKED * games * (1 + selfplay.blind.readings),
        "answer_tokens": ANSWER + THOUGHT * thinks,
    }


def _setup(run: RunConfig, shapes: dict[str, Shape]) -> Setup:
    """Return the arithmetic's input for a run; a ValueError names the key that does not fit, and
    what to write.
    """
    from medserl_agentloop.games.medical.config import MedicalConfig

    if _WARM_START in run.config:
        return _warm_start_setup(run, shapes[_WARM_START])
    engines = {name: _engine(run, name, shapes[name]) for name in run.engines}
    longest, server = _longest(run), f"{_ROLLOUT}.max_model_len"
    for key, most in (
        (server, run[server]),
        (f"{_MODEL}.path={run[f'{_MODEL}.path']}", shapes[_ACTOR].max_tokens),
    ):
        if most is not None and most < longest:
            raise ValueError(
                f"data.max_prompt_length + data.max_response_length = {longest}, and {key} allows "
                f"{most} tokens. Set "
                f"data.max_response_length={most - run['data.max_prompt_length']} or less."
            )
    games = _whole(run, "data.train_batch_size") * _whole(run, f"{_ROLLOUT}.n")
    selfplay = run.selfplay
    game_tokens, generated = (
        FILLED * longest,
        FILLED * longest / 2,
    )  # of a game, and of them those generated
    chain, reserved = generated / FILLED, RESERVED * longest
    if isinstance(selfplay, MedicalConfig):
        from medserl_agentloop.games.medical.prompting import load_profile

        rewritten = (
            EDIT if load_profile(selfplay.profile, selfplay.error_types).parser.numbered else NOTE
        )
        generated = ATTACKED * (FILLED * selfplay.budget.attacker_reasoning + rewritten)
        generated += selfplay.assessments * FILLED * selfplay.budget.assessor
        game_tokens = generated + (ATTACKED + selfplay.assessments) * (INSTRUCTIONS + NOTE)
        turns = selfplay.budget.attacker(rewritten), selfplay.budget.assessor
        chain, reserved = sum(turns), INSTRUCTIONS + NOTE + RESERVED * max(turns)
    sglang, adapters = (
        run[f"{_ROLLOUT}.name"] != "vllm",
        run.lora_rank > 0 and not run[f"{_MODEL}.lora.merge"],
    )
    piecewise_off = bool(run[f"{_ROLLOUT}.engine_kwargs.sglang.disable_piecewise_cuda_graph"])
    return Setup(
        engines[_ACTOR],
        {who: engines[engine] for who, engine in run.log_probs.items()},
        engines.get(_CRITIC),
        pool=0.0
        if run[f"{_ROLLOUT}.name"] == "cpu_hf"
        else float(run[f"{_ROLLOUT}.gpu_memory_utilization"]),
        pool_of_free=sglang,
        pool_freed=bool(run[f"{_ROLLOUT}.free_cache_engine"]),
        base_stays=adapters,
        prefill_graphs=sglang and not adapters and not piecewise_off,
        tensor_parallel=_whole(run, f"{_ROLLOUT}.tensor_model_parallel_size"),
        concurrent=_whole(run, f"{_ROLLOUT}.max_num_seqs"),
        games=games,
        longest_game=longest,
        game_tokens=game_tokens,
        generated_tokens=generated,
        chain=chain,
        reserved=reserved,
        **_judge(run, games, shapes[_ACTOR]),
        epochs=_whole(run, f"{_ACTOR}.ppo_epochs"),
        helpers=sum(_whole(run, key) for key in _HELPERS) + 4,
    )


def plan_run(
    run: RunConfig, gpu_gb: float, model_config: Path | None = None, beside: float = 0
) -> Plan:
    """Plan a composed run on cards of ``gpu_gb`` GB, of which others hold ``beside`` GiB.

    ValueError for a model or a number that it cannot plan with.
    """
    if (memory := gpu_gb * USABLE - beside) <= 0:
        raise ValueError(
            f"of a GPU with {gpu_gb:g} GB nothing is left beside {beside:g} GiB. Name a larger "
            "card, --gpu GB, or less "
            "beside the run, --beside GIB."
        )
    engines = {_WARM_START: "model"} if _WARM_START in run.config else run.engines
    shapes = {name: read_shape(run[f"{key}.path"], model_config) for name, key in engines.items()}
    name, tflops, bandwidth = CARDS[min(CARDS, key=lambda size: abs(size - gpu_gb))]
    card = Card(name, memory * GIB, tflops, bandwidth)
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
    return RunConfig(
        config,
        SelfPlayConfig(game="") if _WARM_START in config else SelfPlayConfig.from_run(config),
    )


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe of the run, or several: qwen3_4b,gpu_80g.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides, as for verl's main_ppo.")
    ] = None,
    gpu: Annotated[float, typer.Option(min=1, help="Memory of one GPU, in GB.")] = 96,
    beside: Annotated[
        float, typer.Option(min=0, help="GiB of each GPU that something else holds, e.g. a judge.")
    ] = 0,
    model_config: Annotated[
        Path | None, typer.Option(help="Folder with the model's config.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Compute memory, time and disk of a run from its config; exit code 1 if it does not fit."""
    with errors_in_one_line():
        run = composed(recipe, overrides or [])
        result = plan_run(run, gpu, model_config, beside)
    if run["trainer.device"] == "cpu":
        typer.echo(
            f"{recipe} runs on the CPU; this is the plan of the same run on a GPU of {gpu:g} GB.",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps({**asdict(result), "fits": result.fits}, indent=2))
    else:
        console = Console()
        console.print(_table(result), "")
        console.print(_sentences(result), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.fits else 1)


def _table(plan: Plan) -> Table:
    title = f"Memory of one GPU, {plan.card.memory / GIB:.1f} GiB usable, from the second step on"
    table = Table(
        "phase", "GiB", "share", "largest parts", box=None, title=title, title_justify="left"
    )
    for phase, parts in plan.phases.items():
        total, largest = sum(parts.values()), sorted(parts.items(), key=lambda part: -part[1])[:5]
        style = (
            "red"
            if total > FULL * plan.card.memory
            else "yellow"
            if total > TIGHT * plan.card.memory
            else ""
        )
        text = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        table.add_row(
            phase, f"{total / GIB:.1f}", f"{total / plan.card.memory:.0%}", text, style=style
        )
    return table


def _sentences(plan: Plan) -> str:
    setup = plan.setup
    spent = ", ".join(
        f"{phase} {s:.0f}" for phase, s in sorted(plan.seconds.items(), key=lambda item: -item[1])
    )
    written = " and ".join(
        f"{engine.checkpoint / GIB:.0f} GiB" for engine in setup.trained.values()
    )
    generated = f", {setup.generated_tokens:,.0f} of them generated" if setup.plays else ""
    helpers = (
        f", and {setup.helpers * PROCESS / GIB:.0f} GiB for {setup.helpers} helper processes"
        * setup.plays
    )
    fits = f"It fits.{' It is tight.' * (plan.peak > TIGHT * plan.card.memory)}"
    text = f"""\
A step: {sum(plan.seconds.values()):.0f} s ({spent})
in {setup.games} {_GAME[not setup.plays]}s of {setup.game_tokens:,.0f} tokens{generated}
A checkpoint: {written} on disk. The host holds {setup.host / GIB:.0f} GiB for each GPU{helpers}.
Computed by medserl plan. Peak rates: quoted from the data sheet of the {plan.card.name}. \
Assumed: the shares of them \
that are reached ({TRAINING:.0%} in training, {DECODING:.0%} in decoding), tokens of games and \
answers, a judge on an \
{CARDS[80][0]} unless it is the base, moving weights, CUDA contexts and graphs. Not counted: \
traffic between GPUs.
{fits if plan.fits else f"It does not fit: a plan may fill {FULL:.0%} of the card."} \
The peak is {plan.peak / GIB:.1f} GiB, in {plan.worst}."""
    if plan.cache < plan.longest_game:
        text += (
            f"\nThe server's pool has {plan.cache / GIB:.1f} GiB for the KV cache, and the longest "
            "game needs "
            f"{plan.longest_game / GIB:.1f}: raise {_ROLLOUT}.gpu_memory_utilization."
        )
    if not plan.fits:
        text += (
            "\nAdd the recipe gpu_80g, which keeps weights and Adam's states on the host while "
            "games are played; train "
            "with LoRA (the recipe lora); use more GPUs, or a smaller model."
        )
    return text
