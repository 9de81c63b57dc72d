"""Check a run's config before self-play; every refusal says what to write instead.

A rule stands here only if without it the run would be wrong in silence, or would end after hours.
What verl, Hydra or torch say themselves within minutes is left to them. Whether the roles are apart
is left to the certificate, which measures it. :func:`check_run` runs in the recipe's Hydra
callback, before Ray is up, and in the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import need_reference_policy

from medserl_agentloop.core.config import (
    NORMALIZATIONS,
    ConfigError,
    SelfPlayConfig,
    game_class,
    refuse,
)
from medserl_agentloop.core.run_check.composition import PPO, leaves
from medserl_agentloop.paths import did_you_mean

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
LORA_BACKEND = f"{ROLLOUT}.engine_kwargs.sglang.lora_backend"
CORRECTION, SAMPLER = "algorithm.rollout_correction", "trainer.v1.sampler"
FSDP = ("fsdp", "fsdp2")
OWN_MODULES = "pkg://medserl_agentloop."

_OPEN_NODES = (
    *("selfplay", "hydra", "ray_kwargs.ray_init"),
    # Fields of FSDPEngineConfig and of CriticConfig that verl's YAML leaves out.
    *(
        f"{node}.mixed_precision"
        for node in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp", "engine")
    ),
    f"{CRITIC}.ppo_infer_max_token_len_per_gpu",
)

UPDATES = {ACTOR: f"{ACTOR}.ppo_", CRITIC: f"{CRITIC}.ppo_infer_"}
LOG_PROBS = {ACTOR: f"{ROLLOUT}.log_prob_", REF: f"{REF}.log_prob_"}
"""Beginnings of the keys for the size of micro-batches: in an engine's update, and in its pass for
log-probs.
"""


@dataclass(frozen=True)
class RunConfig:
    """A run's whole config, read by dotted key, and its ``selfplay`` node."""

    config: DictConfig
    selfplay: SelfPlayConfig

    def __getitem__(self, key: str) -> Any:
        """None where the key is absent, null or still ``???``."""
        return OmegaConf.select(self.config, key)

    def names(self, key: str) -> list[str]:
        """The names in the value of a key: none, one, or a list."""
        value = self[key]
        return [
            str(name)
            for name in (value if isinstance(value, ListConfig) else [value])
            if name is not None
        ]

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
        """The passes for log-probs before an update, each with its engine."""
        passes = (
            {}
            if self.selfplay.reuse_log_probs or self[f"{CORRECTION}.bypass_mode"]
            else {"actor": ACTOR}
        )
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

    def tokenizer(self, **options: Any) -> Any:
        """The tokenizer that the run's ``model`` node asks for; raises as
        ``AutoTokenizer.from_pretrained``.
        """
        model = self.config.actor_rollout_ref.model
        trusted = bool(model.get("trust_remote_code", False))
        path = model.get("tokenizer_path") or model.path
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted, **options)
        tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
        return tokenizer

    def ulysses(self, engine: str) -> int:
        """Workers of an FSDP engine that share a row; 1 without sequence parallelism."""
        # verl/workers/config: actor.py takes either key, critic.py reads only that of its engine.
        nodes = [f"{CRITIC}.fsdp"] if engine == CRITIC else [engine, f"{engine}.fsdp_config"]
        return max(self[f"{node}.ulysses_sequence_parallel_size"] or 1 for node in nodes)

    def packs(self, engine: str) -> bool:
        """Return whether the micro-batches of an engine are made by tokens."""
        # verl hands no key to the critic's engine, whose own default is True (trainer_base.py,
        # EngineConfig).
        return engine == CRITIC or bool(
            self[f"{engine}.{'log_prob_' if engine == REF else ''}use_dynamic_bsz"]
        )

    def too_few(self, key: str, longest: int, sharing: int, row: str = "game") -> Iterator[str]:
        """Yield that a micro-batch of so many tokens has no room for the longest row."""
        # verl/utils/seqlen_balancing.py (rearrange_micro_batches) asserts it when such a row comes,
        # maybe after hours.
        if (self[key] or 0) * sharing < longest:
            yield (
                f"{key}={self[key]} holds no {row} of {longest} tokens, which data.max_* allows, "
                "and verl ends the "
                f"run at the first one. Set it to {-(-longest // sharing)} or more."
            )


def check_run(config: DictConfig) -> SelfPlayConfig:
    """Validate the ``selfplay`` node and the keys of verl's that it depends on; a ConfigError has a
    line for each.
    """
    run = RunConfig(config, SelfPlayConfig.from_run(config))
    rules = (
        _trainer,
        _estimator,
        _opponent,
        _adapters,
        _without_effect,
        _batches,
        _checkpoints,
    )
    refuse(
        [
            *game_class(run.selfplay.game).View.check_run(run),
            *(sentence for rule in rules for sentence in rule(run)),
        ]
    )
    return run.selfplay


def problems(config: DictConfig, schema: DictConfig) -> tuple[list[str], list[str]]:
    """Return refusals and warnings for the start of a run; ``schema`` is verl's own config."""
    warned = [
        f"{key} is not a key of verl's config; nothing in verl reads it"
        for key in unknown_keys(config, schema)
    ]
    wrong = list(no_numbers(config, schema)) or list(_warm_start(config))
    if wrong or "selfplay" not in config:
        return wrong, warned
    try:
        check_run(config)
    except ConfigError as error:
        return str(error).splitlines(), warned
    top_p, top_k = (OmegaConf.select(config, f"{ROLLOUT}.{key}") for key in ("top_p", "top_k"))
    if top_p < 1 or top_k > 0:
        warned.append(
            f"{ROLLOUT}.top_p={top_p} and top_k={top_k} cut the distribution that games are drawn "
            "from, and the loss "
            "knows of the temperature only; train with top_p=1.0 and top_k=-1"
        )
    return [], warned


def no_numbers(config: DictConfig, schema: DictConfig) -> Iterator[str]:
    """Keys that are numbers in verl's config and hold something else, which verl reports without
    the key; and NaN, which trains nothing without a word.
    """
    for key, default in leaves(schema):
        value = OmegaConf.select(config, key)
        # Two numbers as text, and a word of the SFT trainer's.
        text = key.endswith("_threshold") or value == "after_each_epoch"
        number = isinstance(value, (int, float))
        if isinstance(default, (int, float)) and not (number or text):
            said = "null" if value is None else value
            yield f"{key}={said} is no number, and verl's own value is {default}."
        elif number and math.isnan(value):
            yield f"{key}=nan is no number. Set a finite one."
    for key in ("trainer.total_training_steps", "trainer.total_epochs"):
        value = OmegaConf.select(config, key)
        if value is not None and not (isinstance(value, int) and value > 0):
            yield f"{key}={value} trains nothing. Set a number from 1."


def _warm_start(config: DictConfig) -> Iterator[str]:
    """verl's SFT trainer runs a warm start, and saves weights that a model can read."""
    if "selfplay" in config:
        return
    if OmegaConf.select(config, "hydra.job.config_name") == PPO:
        yield "this recipe is a warm start: run python -m verl.trainer.sft_trainer_ray"
    elif (
        OmegaConf.select(config, "model.lora_rank")
        and "hf_model" in config.checkpoint.save_contents
    ):
        yield (
            "with LoRA, verl's hf_model folder holds names that no model reads, and would load as "
            "random weights; set "
            "'checkpoint.save_contents=[model,optimizer,extra]' and merge (docs/warm_start.md)"
        )


def _trainer(run: RunConfig) -> Iterator[str]:
    """verl's own trainers and reward managers know no roles, and measure no certificate."""
    mode, v1 = run["trainer.v1.trainer_mode"], run["trainer.use_v1"]
    if not v1 or mode != "selfplay_sync":
        yield (
            f"trainer.v1.trainer_mode={mode} (trainer.use_v1={v1}) does not know the game's roles. "
            "Set trainer.use_v1=True and trainer.v1.trainer_mode=selfplay_sync."
        )
    sampler = f"{SAMPLER}.custom_sampler"
    if not (run[f"{sampler}.path"] and run[f"{sampler}.name"]):
        yield (
            f"{sampler} is empty, and verl's own replay buffer waits for ever for the games of a "
            "process that died. "
            f"Set {sampler}.path=pkg://medserl_agentloop.core.trainer and "
            ".name=SelfPlayReplayBuffer."
        )


def _estimator(run: RunConfig) -> Iterator[str]:
    """The estimator knows the roles if one is not trained, and has something to compare."""
    name, train = run["algorithm.adv_estimator"], run.selfplay.train
    if name not in NORMALIZATIONS and train != "both":
        yield (
            f"selfplay.train={train} needs an estimator that knows roles, and "
            f"algorithm.adv_estimator={name} does not{did_you_mean(name, NORMALIZATIONS)}. Set it "
            f"to one of {', '.join(NORMALIZATIONS)}."
        )
    if name in ("role_grpo", "role_rloo") and run[f"{ROLLOUT}.n"] == 1:
        yield (
            f"algorithm.adv_estimator={name} compares the games of one prompt, and with "
            f"{ROLLOUT}.n=1 there is only "
            f"one, so all advantages would be 0. Set {ROLLOUT}.n to 2 or more."
        )
    if run.selfplay.credit.loss == "per_role" and run[f"{ACTOR}.strategy"] not in FSDP:
        yield (
            f"{ACTOR}.strategy={run[f'{ACTOR}.strategy']} does not count each role's tokens. Set "
            "it to fsdp2, or "
            "selfplay.credit.loss=verl with selfplay.certify=warn, for comparison."
        )
    if run.selfplay.anchors() and not need_reference_policy(run.config):
        yield (
            f"selfplay.anchor needs the reference policy. Set {ACTOR}.use_kl_loss=True, with "
            f"{ACTOR}.kl_loss_coef=0.0 "
            "if the anchor shall be the only KL term."
        )


def _opponent(run: RunConfig) -> Iterator[str]:
    """The frozen model that the policy plays against can be asked, and takes a role that is not
    trained.
    """
    opponent = run.selfplay.opponent
    if opponent.kind == "live":
        return
    kind = f"selfplay.opponent.kind={opponent.kind}"
    if run.selfplay.context == "shared":
        yield (
            f"{kind} keeps its turns out of the trajectory, which is one conversation of all. Set "
            "selfplay.context=isolated."
        )
    if run.selfplay.train == "both":
        yield (
            f"{kind} plays the role that is not trained, but selfplay.train=both trains both. Set "
            "selfplay.train to "
            "the name of one role, or selfplay.opponent.kind=live."
        )
    try:
        opponent.check_address()
        opponent.api_key()
    except ValueError as error:
        yield str(error)


def _adapters(run: RunConfig) -> Iterator[str]:
    """Check that adapters are loaded, saved in a readable form, and used for the tokens of their
    own role.
    """
    rank, path, merge = run.lora_rank, f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.merge"
    if not rank and run[path] is not None:
        yield (
            f"{path}={run[path]} is not loaded with {MODEL}.lora_rank=0. Set lora_rank to the "
            "adapter's own."
        )
    contents = run.names(f"{ACTOR}.checkpoint.save_contents")
    if rank and "hf_model" in contents:
        yield (
            f"{ACTOR}.checkpoint.save_contents=[{','.join(contents)}]: with LoRA, verl's hf_model "
            "folder holds names "
            "that no model reads. Set it to [model,optimizer,extra]; `medserl evaluate` reads such "
            "a checkpoint."
        )
    if run.selfplay.adapters == "shared":
        return
    sharing, strategy, engine = run.ulysses(ACTOR), run[f"{ACTOR}.strategy"], run[f"{ROLLOUT}.name"]
    for wrong, needed, reason in (
        (not rank, f"{MODEL}.lora_rank above 0, e.g. 32", "it trains LoRA adapters"),
        (run[merge], f"{merge}=False", "one set of merged weights cannot serve two adapters"),
        (
            engine not in ("sglang", "cpu_hf"),
            f"{ROLLOUT}.name=sglang",
            f"{engine} takes no adapter from a request",
        ),
        (
            strategy != "fsdp2",
            f"{ACTOR}.strategy=fsdp2",
            "an adapter's gradients are clipped as FSDP2 holds them",
        ),
        (
            sharing > 1,
            f"{ACTOR}.ulysses_sequence_parallel_size=1",
            "a rank must see the roles of a whole row",
        ),
        (
            run.selfplay.context != "isolated",
            "selfplay.context=isolated",
            "the shared context is one of both roles",
        ),
        (
            _drops_adapters(run),
            f"{LORA_BACKEND}=triton",
            "in CUDA graphs csgmv gives some requests no adapter",
        ),
    ):
        if wrong:
            yield f"selfplay.adapters=per_role needs {needed}: {reason}."


def _drops_adapters(run: RunConfig) -> bool:
    """Return whether SGLang would decode several adapters by csgmv in CUDA graphs, before its pull
    request 28371.
    """
    on_gpu = run[f"{ROLLOUT}.name"] == "sglang" and run["trainer.device"] == "cuda"
    return on_gpu and run[LORA_BACKEND] in (None, "csgmv") and not run[f"{ROLLOUT}.enforce_eager"]


def _without_effect(run: RunConfig) -> Iterator[str]:
    """verl ignores these without a word, or they do something else in a game of several roles."""
    corrects = run[f"{CORRECTION}.rollout_is"] or run[f"{CORRECTION}.rollout_rs"]
    # verl/trainer/ppo/v1/trainer_base.py: only the legacy trainer hands these keys on to the loss.
    bypassed = corrects or run[f"{CORRECTION}.loss_type"] not in (None, "ppo_clip")
    scheme = f"{ACTOR}.loss_agg_mode"
    for key, wrong, reason, remedy in (
        (
            "algorithm.filter_groups.enable",
            run["algorithm.filter_groups.enable"],
            "DAPO's filter reads one score per row, the sum of both roles' rewards. In a zero-sum "
            "game the sum is constant, so groups would be kept by the noise of format terms",
            "False",
        ),
        (
            "algorithm.use_pf_ppo",
            run["algorithm.use_pf_ppo"],
            "verl weighs rows by one score, and its V1 trainer does not read this key",
            "False",
        ),
        (
            "distillation.enabled",
            run["distillation.enabled"],
            "self-play sets the actor's loss, so the teacher's would never be used",
            "False",
        ),
        (
            "reward.custom_reward_function.path",
            not str(run["reward.custom_reward_function.path"] or OWN_MODULES).startswith(
                OWN_MODULES
            ),
            "rewards come from the game, so this function would never be called",
            "null, and name a reward of yours in selfplay (docs/rewards.md)",
        ),
        (
            "trainer.critic_warmup",
            run["trainer.critic_warmup"] and not run[f"{CRITIC}.enable"],
            "there is no critic, and the actor would not be updated until then",
            "0",
        ),
        (
            "algorithm.norm_adv_by_std_in_grpo",
            run["algorithm.adv_estimator"] == "role_grpo"
            and not run["algorithm.norm_adv_by_std_in_grpo"],
            "role_grpo does not read it; for Dr. GRPO set selfplay.credit.normalize to mean for "
            "each role",
            "True",
        ),
        (
            f"{SAMPLER}.sync_refill_failed_groups",
            run[f"{SAMPLER}.sync_refill_failed_groups"],
            "verl does not tell a custom sampler, and no game that was lost would be played again "
            "(selfplay/lost_games counts them)",
            "False",
        ),
        (
            f"{CORRECTION}.bypass_mode",
            run[f"{CORRECTION}.bypass_mode"] and bypassed,
            "verl's V1 trainer then ignores rollout_is, rollout_rs and loss_type, and nothing "
            "would be corrected",
            "False, or the others to null, null and ppo_clip",
        ),
        (
            f"{ROLLOUT}.calculate_log_probs",
            corrects and not run[f"{ROLLOUT}.calculate_log_probs"],
            f"{CORRECTION} reads the rollout's log-probs, and nothing would be corrected",
            "True",
        ),
        (
            f"{ROLLOUT}.temperature",
            run[f"{ROLLOUT}.temperature"] <= 0 and not run["trainer.val_only"],
            "all games of a row would be the same, and log-probs of greedy tokens train nothing",
            "1.0",
        ),
        (
            f"{ROLLOUT}.do_sample",
            not run[f"{ROLLOUT}.do_sample"] and not run["trainer.val_only"],
            "all games of a row would be the same, and log-probs of greedy tokens train nothing",
            "True",
        ),
        (
            scheme,
            run[scheme] == "seq-mean-token-sum-norm" and run[f"{ACTOR}.loss_scale_factor"] is None,
            "it divides by the padded width of a batch, so a longer turn of one role shrinks the "
            "other's update",
            f"token-mean, or set {ACTOR}.loss_scale_factor, e.g. to data.max_response_length",
        ),
        (
            "hydra.job.chdir",
            run["hydra.job.chdir"],
            "relative folders of data and checkpoints would be looked for in another place",
            "False",
        ),
    ):
        if wrong:
            yield f"{key}={run[key]}: {reason}. Set it to {remedy}."


def _batches(run: RunConfig) -> Iterator[str]:
    """Mini-batches have all kinds of games, micro-batches the longest; old log-probs are there when
    they are read.
    """
    batch, longest = (
        run["data.train_batch_size"],
        run["data.max_prompt_length"] + run["data.max_response_length"],
    )
    readers = {
        f"{ACTOR}.ppo_mini_batch_size": run[f"{ACTOR}.ppo_mini_batch_size"] < batch,
        f"{ACTOR}.ppo_epochs": run[f"{ACTOR}.ppo_epochs"] > 1,
        "algorithm.adv_estimator": run["algorithm.adv_estimator"] not in NORMALIZATIONS,
        "algorithm.use_kl_in_reward": run["algorithm.use_kl_in_reward"],
        **{
            f"{CORRECTION}.{of}": run[f"{CORRECTION}.{of}"]
            for of in ("bypass_mode", "rollout_is", "rollout_rs")
        },
        f"{ROLLOUT}.calculate_log_probs": not run[f"{ROLLOUT}.calculate_log_probs"],
    }
    if run.selfplay.reuse_log_probs and (wrong := [key for key, reads in readers.items() if reads]):
        yield (
            "selfplay.reuse_log_probs=true is for one mini-batch, one epoch and an estimator of "
            "roles, without a "
            "correction or KL in the reward. It does not go with "
            f"{', '.join(f'{key}={run[key]}' for key in wrong)}. "
            "Set it to false."
        )
    for engine in run.engines:
        size = run[f"{engine}.ppo_mini_batch_size"] or batch
        if batch > size and not run[f"{engine}.shuffle"]:
            yield (
                f"{engine}.shuffle=False with several mini-batches in a step "
                f"(data.train_batch_size={batch}, "
                f"{engine}.ppo_mini_batch_size={size}): verl keeps the order in which games "
                "finish, so the first "
                f"updates would see mostly invalid and one-turn games. Set {engine}.shuffle=True."
            )
    passes = {UPDATES[engine]: engine for engine in run.trained}
    passes |= {LOG_PROBS[engine]: engine for engine in run.log_probs.values()}
    for keys, engine in passes.items():
        if run.packs(engine):
            yield from run.too_few(f"{keys}max_token_len_per_gpu", longest, run.ulysses(engine))


def _checkpoints(run: RunConfig) -> Iterator[str]:
    """A killed run can be resumed."""
    for engine in run.trained:
        checkpoint = f"{engine}.checkpoint"
        if run["trainer.save_freq"] <= 0 or run[f"{engine}.strategy"] not in FSDP:
            continue
        # verl/trainer/ppo/v1/trainer_base.py (_save_checkpoint) leaves
        # latest_checkpointed_iteration.txt to the engine then, and FSDP's does not write it.
        if run[f"{checkpoint}.async_save"]:
            yield (
                f"{checkpoint}.async_save=True is for Megatron: with FSDP no checkpoint would "
                "count as complete, and a "
                f"killed run would start anew. Set {checkpoint}.async_save=False."
            )
        contents = run.names(f"{checkpoint}.load_contents")
        if "model" not in contents and run["trainer.resume_mode"] != "disable":
            yield (
                f"{checkpoint}.load_contents=[{','.join(contents)}] has no model: a killed run "
                "would resume with the "
                "weights that it began with. Set "
                f"{checkpoint}.save_contents=[model,optimizer,extra], or "
                "trainer.resume_mode=disable."
            )


def unknown_keys(run: DictConfig, schema: DictConfig) -> list[str]:
    """Keys of a run that verl's own config, ``schema``, does not have, each with the nearest one it
    has.

    Hydra lets a recipe, or a ``+`` on the command line, add any key; a misspelt one composes and
    does nothing. Nodes that verl leaves empty belong to somebody else and may hold anything.
    """

    def below(node: Any, known: Any, path: str) -> Iterator[str]:
        for name, child in node.items():
            here = f"{path}{name}"
            if name not in known and here not in _OPEN_NODES:
                yield f"{here}{did_you_mean(str(name), known)}"
            elif isinstance(child, dict) and here not in _OPEN_NODES and known[name]:
                yield from below(
                    child, known[name] if isinstance(known[name], dict) else {}, f"{here}."
                )

    return list(below(OmegaConf.to_container(run), OmegaConf.to_container(schema), ""))
