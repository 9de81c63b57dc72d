"""Composes a run's config and checks it before self-play; a refusal says what to write instead.

Each rule prevents a run that would be silently wrong or would fail after hours. Errors that verl,
Hydra or torch report within minutes are left to them, and the separation of the roles to the
certificate. :func:`check_run` runs before Ray is up, in the recipe's Hydra callback, and again in
the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.utils import need_reference_policy

from medserl_agentloop.core.config import NORMALIZATIONS, SelfPlayConfig, game_class, refuse
from medserl_agentloop.paths import did_you_mean, resource

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CORRECTION, SAMPLER = "algorithm.rollout_correction", "trainer.v1.sampler"
FSDP = ("fsdp2",)
OWN_MODULES = "pkg://medserl_agentloop."

# How the keys for the size of micro-batches begin: in an update, and in a pass for log-probs.
UPDATES = {ACTOR: f"{ACTOR}.ppo_", CRITIC: f"{CRITIC}.ppo_infer_"}
LOG_PROBS = {ACTOR: f"{ROLLOUT}.log_prob_", REF: f"{REF}.log_prob_"}

MUST_BE: dict[str, tuple[Any, str]] = {
    "trainer.use_v1": (True, "verl's older trainer does not know roles"),
    "trainer.v1.trainer_mode": ("selfplay_sync", "it does not know roles or measure a certificate"),
    "algorithm.filter_groups.enable": (False, "it reads one score per row, the roles' sum"),
    f"{SAMPLER}.sync_refill_failed_groups": (
        False,
        "verl does not tell a custom sampler (selfplay/lost_games counts what is lost)",
    ),
    "algorithm.use_pf_ppo": (False, "verl's V1 trainer does not read it"),
    "distillation.enabled": (False, "self-play sets the actor's loss, so no teacher is used"),
    "hydra.job.chdir": (False, "relative paths would be resolved in another folder"),
}
"""The required value of a key, and why."""


@dataclass(frozen=True)
class RunConfig:
    """A run's whole config, read by dotted key, and its ``selfplay`` node."""

    config: DictConfig
    selfplay: SelfPlayConfig

    def __getitem__(self, key: str) -> Any:
        """None if the key is absent, null or still ``???``."""
        return OmegaConf.select(self.config, key)

    def names(self, key: str) -> list[str]:
        """A key's value as a list of names."""
        value = self[key]
        values = value if isinstance(value, ListConfig) else [value]
        return [str(name) for name in values if name is not None]

    @property
    def trained(self) -> dict[str, str]:
        """The engines that are trained, each with the key of its model."""
        return {ACTOR: MODEL} | ({CRITIC: f"{CRITIC}.model"} if self[f"{CRITIC}.enable"] else {})

    @property
    def engines(self) -> dict[str, str]:
        """All engines that read games, each with the key of its model."""
        return self.trained | ({REF: MODEL} if REF in self.log_probs.values() else {})

    @property
    def log_probs(self) -> dict[str, str]:
        """The log-prob passes before an update, with their engines."""
        reused = self.selfplay.reuse_log_probs or self[f"{CORRECTION}.bypass_mode"]
        passes = {} if reused else {"actor": ACTOR}
        if need_reference_policy(self.config):
            # With LoRA, verl's reference policy is the actor without its adapter (trainer_base.py,
            # ref_in_actor).
            in_actor = self.lora_rank or self[f"{MODEL}.lora_adapter_path"] is not None
            passes |= {"reference in actor": ACTOR} if in_actor else {"reference": REF}
        return passes

    @property
    def lora_rank(self) -> int:
        """Rank of the actor's adapter; 0 without one."""
        return int(self[f"{MODEL}.lora.rank"] or self[f"{MODEL}.lora_rank"] or 0)

    @property
    def gpus(self) -> int:
        """Training workers."""
        return int(self["trainer.nnodes"] * self["trainer.n_gpus_per_node"])

    def ulysses(self, engine: str) -> int:
        """Workers of an FSDP engine that share a row; 1 without sequence parallelism."""
        # verl/workers/config: actor.py takes either key, critic.py reads only that of its engine.
        nodes = [f"{CRITIC}.fsdp"] if engine == CRITIC else [engine, f"{engine}.fsdp_config"]
        return max(self[f"{node}.ulysses_sequence_parallel_size"] or 1 for node in nodes)

    def packs(self, engine: str) -> bool:
        """Return whether an engine's micro-batches are limited by tokens."""
        # verl passes no key to the critic's engine, whose own default is True (trainer_base.py,
        # EngineConfig).
        keys = f"{engine}.{'log_prob_' * (engine == REF)}"
        return engine == CRITIC or bool(self[f"{keys}use_dynamic_bsz"])

    def refusal(self, key: str, reason: str, remedy: str) -> str:
        return f"{key}={self[key]}: {reason}. Set it to {remedy}."


def check_run(config: DictConfig) -> SelfPlayConfig:
    """Validate the ``selfplay`` node and the verl keys it depends on; a ConfigError has a line for
    each problem.
    """
    run = RunConfig(config, SelfPlayConfig.from_run(config))
    of_game = game_class(run.selfplay.game).View.check_run(run)
    checks = (_roles, _adapters, _of_verl, _batches, _checkpoints)
    refuse([*of_game, *(problem for check in checks for problem in check(run))])
    return run.selfplay


def check_warm_start(config: DictConfig) -> Iterator[str]:
    """Yield a sentence for what makes the checkpoints of a warm start useless."""
    saved = OmegaConf.select(config, "checkpoint.save_contents") or ()
    if OmegaConf.select(config, "model.lora_rank") and "hf_model" in saved:
        yield (
            "checkpoint.save_contents has hf_model: with LoRA, verl's folder holds names that no "
            "model reads. Set it to [model,optimizer,extra] and merge (docs/warm_start.md)."
        )


def warnings(config: DictConfig, schema: DictConfig) -> Iterator[str]:
    """Yield what is likely a mistake in a run; ``schema`` is verl's own config."""
    for key in unknown_keys(config, schema):
        yield f"{key} is not a key of verl's config; nothing in verl reads it"
    top_p, top_k = (OmegaConf.select(config, f"{ROLLOUT}.{key}") for key in ("top_p", "top_k"))
    if "selfplay" in config and (top_p < 1 or top_k > 0):
        yield (
            f"{ROLLOUT}.top_p={top_p} and top_k={top_k} cut the distribution that games are drawn "
            "from, but the loss only knows the temperature; train with top_p=1.0 and top_k=-1"
        )


def _roles(run: RunConfig) -> Iterator[str]:
    """Trainer, estimator, loss and opponent support roles."""
    for key, (value, reason) in MUST_BE.items():
        if (run[key] or False) != value:
            yield run.refusal(key, reason, str(value))
    key = f"{SAMPLER}.custom_sampler"
    if not (run[f"{key}.path"] and run[f"{key}.name"]):
        remedy = f"{OWN_MODULES}core.trainer, and {key}.name to SelfPlayReplayBuffer"
        reason = "verl's own replay buffer waits forever for the games of a process that died"
        yield run.refusal(f"{key}.path", reason, remedy)
    key = f"{ROLLOUT}.n"
    if run["algorithm.adv_estimator"] in ("role_grpo", "role_rloo") and run[key] == 1:
        yield run.refusal(key, "it compares a prompt's games: no advantages", "2 or more")
    key = f"{ACTOR}.strategy"
    if run.selfplay.credit.loss == "per_role" and run[key] not in FSDP:
        yield run.refusal(key, "it does not count each role's tokens", "fsdp2")
    key = f"{ACTOR}.use_kl_loss"
    if run.selfplay.anchors() and not need_reference_policy(run.config):
        remedy = f"True, with {ACTOR}.kl_loss_coef=0.0 if the anchor should be the only KL term"
        yield run.refusal(key, "selfplay.anchor needs the reference policy", remedy)
    if run.selfplay.opponent.frozen:
        if run.selfplay.context == "shared":
            yield run.refusal("selfplay.context", "a frozen opponent plays separately", "isolated")
        if run.selfplay.train == "both":
            yield run.refusal("selfplay.train", "a frozen opponent plays one role", "the other one")
        try:
            run.selfplay.opponent.check_address()
            run.selfplay.opponent.api_key()
        except ValueError as error:
            yield str(error)


def _adapters(run: RunConfig) -> Iterator[str]:
    """Adapters are loaded, saved in a readable form, and used only for their role's tokens."""
    path, contents = f"{MODEL}.lora_adapter_path", f"{ACTOR}.checkpoint.save_contents"
    if run.lora_rank and "hf_model" in run.names(contents):
        reason = "with LoRA, verl's hf_model folder holds names that no model reads"
        yield run.refusal(contents, reason, "[model,optimizer,extra]")
    if not run.lora_rank and run[path] is not None:
        yield run.refusal(path, f"it is not loaded with {MODEL}.lora_rank=0", "null")
    if run.selfplay.adapters == "shared":
        return
    rank, merge, engine = f"{MODEL}.lora_rank", f"{MODEL}.lora.merge", f"{ROLLOUT}.name"
    strategy, sharing = f"{ACTOR}.strategy", f"{ACTOR}.ulysses_sequence_parallel_size"
    backend, context = f"{ROLLOUT}.engine_kwargs.sglang.lora_backend", run.selfplay.context
    # In CUDA graphs; SGLang's pull request 28371 will change it.
    drops = run[engine] == "sglang" and run[backend] in (None, "csgmv")
    drops &= run["trainer.device"] == "cuda" and not run[f"{ROLLOUT}.enforce_eager"]
    for key, right, reason, remedy in (
        (rank, run.lora_rank, "there are no adapters to train", "32, e.g."),
        (merge, not run[merge], "merged weights cannot serve two adapters", "False"),
        (engine, run[engine] in ("sglang", "cpu_hf"), "requests name no adapter", "sglang"),
        (strategy, run[strategy] == "fsdp2", "FSDP2's gradients are clipped by role", "fsdp2"),
        (sharing, run.ulysses(ACTOR) == 1, "a rank must see the roles of a full row", "1"),
        ("selfplay.context", context == "isolated", "both roles share a context", "isolated"),
        (backend, not drops, "csgmv gives some requests no adapter", "triton"),
    ):
        if not right:
            yield run.refusal(key, f"selfplay.adapters=per_role: {reason}", remedy)


def _of_verl(run: RunConfig) -> Iterator[str]:
    """verl silently ignores these, or they do something else in a game with several roles."""
    key = "reward.custom_reward_function.path"
    if not str(run[key] or OWN_MODULES).startswith(OWN_MODULES):
        remedy = "null, and name your own reward in selfplay (docs/rewards.md)"
        yield run.refusal(key, "rewards come from the game; this one is never called", remedy)
    key = "algorithm.norm_adv_by_std_in_grpo"
    if run["algorithm.adv_estimator"] == "role_grpo" and not run[key]:
        reason = "role_grpo reads selfplay.credit.normalize: mean for each role is Dr. GRPO"
        yield run.refusal(key, reason, "True")
    key = "trainer.critic_warmup"
    if run[key] and not run[f"{CRITIC}.enable"]:
        yield run.refusal(key, "without a critic no role would be trained until then", "0")
    # verl/trainer/ppo/v1/trainer_base.py: only the legacy trainer passes these keys to the loss.
    corrects = run[f"{CORRECTION}.rollout_is"] or run[f"{CORRECTION}.rollout_rs"]
    bypassed = corrects or run[f"{CORRECTION}.loss_type"] not in (None, "ppo_clip")
    key = f"{CORRECTION}.bypass_mode"
    if run[key] and bypassed:
        reason = "verl's V1 trainer then ignores rollout_is, rollout_rs and loss_type"
        yield run.refusal(key, reason, "False, or the others to null, null and ppo_clip")
    key = f"{ROLLOUT}.calculate_log_probs"
    if corrects and not run[key]:
        yield run.refusal(key, f"{CORRECTION} reads the rollout's log-probs", "True")
    for key, remedy in ((f"{ROLLOUT}.temperature", "1.0"), (f"{ROLLOUT}.do_sample", "True")):
        if not (run[key] or run["trainer.val_only"]):
            yield run.refusal(key, "log-probs of greedy tokens train nothing", remedy)
    key, factor = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    if run[key] == "seq-mean-token-sum-norm" and run[factor] is None:
        reason = "it divides by the padded width, so one role's length shrinks the other's update"
        remedy = f"token-mean, or set {factor}, e.g. to data.max_response_length"
        yield run.refusal(key, reason, remedy)
    key, cuda = f"{MODEL}.use_fused_kernels", run["trainer.device"] == "cuda"
    if cuda and not run[key] and not any(distributions(name="flash-attn")):
        yield run.refusal(key, "without flash-attn, verl takes log-probs in bf16", "True")


def _batches(run: RunConfig) -> Iterator[str]:
    """Mini-batches mix all games, micro-batches hold the longest one, and old log-probs exist when
    needed.
    """
    batch = run["data.train_batch_size"]
    several, logged = f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.calculate_log_probs"
    epochs, estimator = f"{ACTOR}.ppo_epochs", "algorithm.adv_estimator"
    readers = {several: run[several] < batch, epochs: run[epochs] > 1, logged: not run[logged]}
    readers[estimator] = run[estimator] not in NORMALIZATIONS
    corrections = (f"{CORRECTION}.{of}" for of in ("bypass_mode", "rollout_is", "rollout_rs"))
    readers |= {key: run[key] for key in ("algorithm.use_kl_in_reward", *corrections)}
    wrong = ", ".join(f"{key}={run[key]}" for key, reads in readers.items() if reads)
    if run.selfplay.reuse_log_probs and wrong:
        reason = f"old log-probs are read with {wrong}"
        yield run.refusal("selfplay.reuse_log_probs", reason, "false")
    for engine in run.engines:
        size = run[f"{engine}.ppo_mini_batch_size"] or batch
        if batch > size and not run[f"{engine}.shuffle"]:
            reason = "games come in the order in which they end: the first updates see the shortest"
            yield run.refusal(f"{engine}.shuffle", reason, "True")
    longest = run["data.max_prompt_length"] + run["data.max_response_length"]
    passes = {UPDATES[engine]: engine for engine in run.trained}
    passes |= {LOG_PROBS[engine]: engine for engine in run.log_probs.values()}
    for keys, engine in passes.items():
        # verl/utils/seqlen_balancing.py (rearrange_micro_batches) asserts it on such a row, perhaps
        # after hours.
        key, sharing = f"{keys}max_token_len_per_gpu", run.ulysses(engine)
        if run.packs(engine) and (run[key] or 0) * sharing < longest:
            reason = f"it cannot hold a game of {longest} tokens, which data.max_* allows"
            yield run.refusal(key, reason, f"{-(-longest // sharing)} or more")


def _checkpoints(run: RunConfig) -> Iterator[str]:
    """A killed run can be resumed."""
    for engine in run.trained:
        if run["trainer.save_freq"] <= 0 or run[f"{engine}.strategy"] not in FSDP:
            continue
        # verl/trainer/ppo/v1/trainer_base.py (_save_checkpoint) leaves
        # latest_checkpointed_iteration.txt to the engine then, and FSDP's does not write it.
        key, contents = f"{engine}.checkpoint.async_save", f"{engine}.checkpoint.load_contents"
        if run[key]:
            yield run.refusal(key, "with FSDP no checkpoint would count as complete", "False")
        if "model" not in run.names(contents) and run["trainer.resume_mode"] != "disable":
            reason = "a killed run would resume with the weights that it began with"
            yield run.refusal(contents, reason, "[model,optimizer,extra], as save_contents")


_OPEN_NODES = (
    *("selfplay", "hydra", "ray_kwargs.ray_init"),
    # Fields of FSDPEngineConfig and of CriticConfig that verl's YAML leaves out.
    *(f"{node}.fsdp_config.mixed_precision" for node in (ACTOR, REF)),
    *(f"{CRITIC}.fsdp.mixed_precision", "engine.mixed_precision"),
    f"{CRITIC}.ppo_infer_max_token_len_per_gpu",
)


def unknown_keys(run: DictConfig, schema: DictConfig) -> list[str]:
    """Keys of a run that verl's own config, ``schema``, does not have.

    Hydra lets a recipe or a ``+`` add any key, so a misspelled one does nothing. Nodes that verl
    leaves empty may have any keys.
    """

    def below(node: Any, known: Any, path: str) -> Iterator[str]:
        for name, child in node.items():
            here = f"{path}{name}"
            if here in _OPEN_NODES:
                continue
            if name not in known:
                yield here
            elif isinstance(child, dict) and known[name]:
                inner = known[name] if isinstance(known[name], dict) else {}
                yield from below(child, inner, f"{here}.")

    return list(below(OmegaConf.to_container(run), OmegaConf.to_container(schema), ""))


PPO, SFT = "ppo_trainer", "sft_trainer_engine"
"""Names of the configs of verl's PPO trainer and its SFT trainers."""


def compose_run(*overrides: str, config_name: str = PPO) -> DictConfig:
    """Compose a run's config as ``python -m verl.trainer.main_ppo`` does."""
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config: DictConfig = compose(config_name, overrides=list(overrides))
    return config


def compose_recipe(recipe: str, overrides: list[str]) -> tuple[DictConfig, DictConfig]:
    """Compose one or several comma-separated recipes; return them with verl's own config.

    Raises as :func:`compose_explained`.
    """
    names = recipe.strip("[]")
    name = SFT if names.startswith("warm_start") else PPO
    config = compose_explained(name, [f"+recipes=[{names}]", *overrides])
    return config, compose_run(config_name=name)


def compose_explained(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose a config; a ValueError says in one line why Hydra cannot, and what was meant."""
    try:
        return compose_run(*overrides, config_name=config_name)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
    if missing := re.search(r"Could not find 'recipes/(\S+)'", reason):
        known = sorted(path.stem for path in resource("recipes").glob("*.yaml"))
        reason = f"no recipe {missing[1]!r}{did_you_mean(missing[1], known)}: {', '.join(known)}"
    elif unknown := re.search(r"Could not override '([^']+)'", reason):
        keys = dict(leaves(OmegaConf.to_container(compose_run(config_name=config_name))))
        whole = [key for key in keys if key.endswith(f".{unknown[1]}")]
        likest = f" (did you mean {' or '.join(whole)}?)" if whole else ""
        reason = f"verl has no key {unknown[1]}{likest or did_you_mean(unknown[1], keys)}"
    raise ValueError(reason)


def without_a_recipe(overrides: list[str]) -> str | None:
    """Explain a ``main_ppo`` command that meant self-play but names no recipe; None for others."""
    keys = {key.lstrip("+~"): value for key, _, value in (o.partition("=") for o in overrides)}
    if "recipes" in keys:
        return None
    advice = "write +recipes=NAME, e.g. +recipes=quickstart (docs/start.md)"
    if own := next((key for key in keys if key == "recipe" or key.startswith("selfplay.")), None):
        return f"{own} has no effect without a recipe: {advice}"
    # With a data set, this is a verl run without self-play. The other file is its default.
    files = keys.get("data.train_files", "~/data/rlhf/gsm8k/train.parquet")
    several = any(character in files for character in "[:")
    there = several or Path(files).expanduser().exists()
    return None if there else f"no recipe is named, and {files} does not exist: {advice}"


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a list is one value."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
