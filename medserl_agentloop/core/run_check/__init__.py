"""Check a run's config before self-play; every refusal says what to write instead.

A rule stands here only if without it the run would be wrong in silence, or would end after hours.
What verl, Hydra or torch say themselves within minutes is left to them. Whether the roles are apart
is left to the certificate, which measures it. :func:`check_run` runs in the recipe's Hydra
callback, before Ray is up, and in the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, NamedTuple

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


class StartRule(NamedTuple):
    """A key whose value a run cannot be trusted with, if ``wrong``."""

    key: str
    wrong: object
    reason: str
    remedy: str
    """The value to set instead, after "Set it to"."""


def check_run(config: DictConfig) -> SelfPlayConfig:
    """Validate the ``selfplay`` node and the keys of verl's that it depends on; a ConfigError has a
    line for each.
    """
    run = RunConfig(config, SelfPlayConfig.from_run(config))
    rules = (*_roles(run), *_adapters(run), *_of_verl(run), *_batches(run), *_checkpoints(run))
    refuse(
        [
            *game_class(run.selfplay.game).View.check_run(run),
            *_address(run),
            *(
                f"{rule.key}={run[rule.key]}: {rule.reason}. Set it to {rule.remedy}."
                for rule in rules
                if rule.wrong
            ),
        ]
    )
    return run.selfplay


def problems(config: DictConfig, schema: DictConfig) -> tuple[list[str], list[str]]:
    """Return refusals and warnings for the start of a run; ``schema`` is verl's own config."""
    warned = [
        f"{key} is not a key of verl's config; nothing in verl reads it"
        for key in unknown_keys(config, schema)
    ]
    if "selfplay" not in config:  # a warm start
        contents = config.checkpoint.save_contents if "checkpoint" in config else ()
        if OmegaConf.select(config, "model.lora_rank") and "hf_model" in contents:
            return [
                "checkpoint.save_contents has hf_model: with LoRA, verl's folder holds names that "
                "no model reads, and would load as random weights. Set it to "
                "[model,optimizer,extra] and merge (docs/warm_start.md)."
            ], warned
        return [], warned
    try:
        check_run(config)
    except ConfigError as error:
        return str(error).splitlines(), warned
    top_p, top_k = (OmegaConf.select(config, f"{ROLLOUT}.{key}") for key in ("top_p", "top_k"))
    if top_p < 1 or top_k > 0:
        warned.append(
            f"{ROLLOUT}.top_p={top_p} and top_k={top_k} cut the distribution that games are drawn "
            "from, and the loss knows of the temperature only; train with top_p=1.0 and top_k=-1"
        )
    return [], warned


def _address(run: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the address and the API key of an opponent's server."""
    try:
        if run.selfplay.opponent.frozen:
            run.selfplay.opponent.check_address()
            run.selfplay.opponent.api_key()
    except ValueError as error:
        yield str(error)


def _roles(run: RunConfig) -> Iterator[StartRule]:
    """Trainer, estimator and loss know the roles, and a frozen opponent has one that is not
    trained.
    """
    name, train = run["algorithm.adv_estimator"], run.selfplay.train
    frozen = run.selfplay.opponent.frozen
    yield StartRule("trainer.use_v1", not run["trainer.use_v1"], "it knows no roles", "True")
    yield StartRule(
        "trainer.v1.trainer_mode",
        run["trainer.v1.trainer_mode"] != "selfplay_sync",
        "it knows no roles, and measures no certificate",
        "selfplay_sync",
    )
    sampler = f"{SAMPLER}.custom_sampler"
    yield StartRule(
        f"{sampler}.path",
        not (run[f"{sampler}.path"] and run[f"{sampler}.name"]),
        "verl's own replay buffer waits for ever for the games of a process that died",
        f"pkg://medserl_agentloop.core.trainer, and {sampler}.name to SelfPlayReplayBuffer",
    )
    yield StartRule(
        "algorithm.adv_estimator",
        name not in NORMALIZATIONS and train != "both",
        f"it does not know the roles, and selfplay.train={train}",
        f"one of {', '.join(NORMALIZATIONS)}",
    )
    yield StartRule(
        f"{ROLLOUT}.n",
        name in ("role_grpo", "role_rloo") and run[f"{ROLLOUT}.n"] == 1,
        f"{name} compares the games of one prompt, so all advantages would be 0",
        "2 or more",
    )
    yield StartRule(
        f"{ACTOR}.strategy",
        run.selfplay.credit.loss == "per_role" and run[f"{ACTOR}.strategy"] not in FSDP,
        "it does not count each role's tokens",
        "fsdp2, or, for comparison, selfplay.credit.loss to verl and selfplay.certify to warn",
    )
    yield StartRule(
        f"{ACTOR}.use_kl_loss",
        run.selfplay.anchors() and not need_reference_policy(run.config),
        "selfplay.anchor needs the reference policy",
        f"True, with {ACTOR}.kl_loss_coef=0.0 if the anchor shall be the only KL term",
    )
    yield StartRule(
        "selfplay.context",
        frozen and run.selfplay.context == "shared",
        "a frozen opponent's turns are in no trajectory, and this is one conversation of all",
        "isolated",
    )
    yield StartRule(
        "selfplay.train",
        frozen and train == "both",
        "a frozen opponent plays a role that is not trained",
        "the name of one role, or selfplay.opponent.url to null",
    )


def _adapters(run: RunConfig) -> Iterator[StartRule]:
    """Adapters are loaded, saved in a readable form, and used for the tokens of their own role."""
    rank, path, contents = (
        run.lora_rank,
        f"{MODEL}.lora_adapter_path",
        f"{ACTOR}.checkpoint.save_contents",
    )
    yield StartRule(
        path,
        not rank and run[path] is not None,
        f"it is not loaded with {MODEL}.lora_rank=0",
        f"null, or {MODEL}.lora_rank to the adapter's own",
    )
    yield StartRule(
        contents,
        rank and "hf_model" in run.names(contents),
        "with LoRA, verl's hf_model folder holds names that no model reads",
        "[model,optimizer,extra]; `medserl evaluate` reads such a checkpoint",
    )
    if run.selfplay.adapters == "shared":
        return
    strategy, engine = run[f"{ACTOR}.strategy"], run[f"{ROLLOUT}.name"]
    for key, wrong, reason, remedy in (
        (f"{MODEL}.lora_rank", not rank, "there are no adapters to train", "32, e.g."),
        (
            f"{MODEL}.lora.merge",
            run[f"{MODEL}.lora.merge"],
            "one set of merged weights cannot serve two adapters",
            "False",
        ),
        (
            f"{ROLLOUT}.name",
            engine not in ("sglang", "cpu_hf"),
            "it takes no adapter from a request",
            "sglang",
        ),
        (
            f"{ACTOR}.strategy",
            strategy != "fsdp2",
            "an adapter's gradients are clipped as FSDP2 holds them",
            "fsdp2",
        ),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size",
            run.ulysses(ACTOR) > 1,
            "a rank must see the roles of a whole row",
            "1",
        ),
        (
            "selfplay.context",
            run.selfplay.context != "isolated",
            "the shared context is one of both roles",
            "isolated",
        ),
        # SGLang's pull request 28371 will change it.
        (
            LORA_BACKEND,
            (engine, run["trainer.device"]) == ("sglang", "cuda")
            and run[LORA_BACKEND] in (None, "csgmv")
            and not run[f"{ROLLOUT}.enforce_eager"],
            "in CUDA graphs csgmv, the default, gives some requests no adapter",
            "triton",
        ),
    ):
        yield StartRule(key, wrong, f"selfplay.adapters=per_role: {reason}", remedy)


def _of_verl(run: RunConfig) -> Iterator[StartRule]:
    """verl ignores these without a word, or they do something else in a game of several roles."""
    corrects = run[f"{CORRECTION}.rollout_is"] or run[f"{CORRECTION}.rollout_rs"]
    # verl/trainer/ppo/v1/trainer_base.py: only the legacy trainer hands these keys on to the loss.
    bypassed = corrects or run[f"{CORRECTION}.loss_type"] not in (None, "ppo_clip")
    scheme, trains = f"{ACTOR}.loss_agg_mode", not run["trainer.val_only"]
    own_reward = str(run["reward.custom_reward_function.path"] or OWN_MODULES)
    yield StartRule(
        "algorithm.filter_groups.enable",
        run["algorithm.filter_groups.enable"],
        "DAPO's filter reads one score per row, the sum of both roles' rewards. In a zero-sum game "
        "the sum is constant, so groups would be kept by the noise of format terms",
        "False",
    )
    yield StartRule(
        "algorithm.use_pf_ppo",
        run["algorithm.use_pf_ppo"],
        "verl weighs rows by one score, and its V1 trainer does not read this key",
        "False",
    )
    yield StartRule(
        "distillation.enabled",
        run["distillation.enabled"],
        "self-play sets the actor's loss, so the teacher's would never be used",
        "False",
    )
    yield StartRule(
        "reward.custom_reward_function.path",
        not own_reward.startswith(OWN_MODULES),
        "rewards come from the game, so this function would never be called",
        "null, and name a reward of yours in selfplay (docs/rewards.md)",
    )
    yield StartRule(
        "trainer.critic_warmup",
        run["trainer.critic_warmup"] and not run[f"{CRITIC}.enable"],
        "there is no critic, and the actor would not be updated until then",
        "0",
    )
    yield StartRule(
        "algorithm.norm_adv_by_std_in_grpo",
        run["algorithm.adv_estimator"] == "role_grpo"
        and not run["algorithm.norm_adv_by_std_in_grpo"],
        "role_grpo does not read it; for Dr. GRPO set selfplay.credit.normalize to mean for each "
        "role",
        "True",
    )
    yield StartRule(
        f"{SAMPLER}.sync_refill_failed_groups",
        run[f"{SAMPLER}.sync_refill_failed_groups"],
        "verl does not tell a custom sampler, and no game that was lost would be played again "
        "(selfplay/lost_games counts them)",
        "False",
    )
    yield StartRule(
        f"{CORRECTION}.bypass_mode",
        run[f"{CORRECTION}.bypass_mode"] and bypassed,
        "verl's V1 trainer then ignores rollout_is, rollout_rs and loss_type, and nothing would be "
        "corrected",
        "False, or the others to null, null and ppo_clip",
    )
    yield StartRule(
        f"{ROLLOUT}.calculate_log_probs",
        corrects and not run[f"{ROLLOUT}.calculate_log_probs"],
        f"{CORRECTION} reads the rollout's log-probs, and nothing would be corrected",
        "True",
    )
    greedy = "all games of a row would be the same, and log-probs of greedy tokens train nothing"
    yield StartRule(
        f"{ROLLOUT}.temperature", trains and run[f"{ROLLOUT}.temperature"] <= 0, greedy, "1.0"
    )
    yield StartRule(
        f"{ROLLOUT}.do_sample", trains and not run[f"{ROLLOUT}.do_sample"], greedy, "True"
    )
    yield StartRule(
        scheme,
        run[scheme] == "seq-mean-token-sum-norm" and run[f"{ACTOR}.loss_scale_factor"] is None,
        "it divides by the padded width of a batch, so a longer turn of one role shrinks the "
        "other's update",
        f"token-mean, or set {ACTOR}.loss_scale_factor, e.g. to data.max_response_length",
    )
    fused = f"{MODEL}.use_fused_kernels"
    of_cuda = run["trainer.device"] == "cuda" and run[f"{ACTOR}.strategy"] in FSDP
    yield StartRule(
        fused,
        of_cuda and not run[fused] and not any(distributions(name="flash-attn")),
        "without the package flash-attn, verl takes log-probs in bf16",
        "True",
    )
    yield StartRule(
        "hydra.job.chdir",
        run["hydra.job.chdir"],
        "relative folders of data and checkpoints would be looked for in another place",
        "False",
    )


def _batches(run: RunConfig) -> Iterator[StartRule]:
    """Mini-batches have all kinds of games, micro-batches the longest; old log-probs are there when
    they are read.
    """
    batch = run["data.train_batch_size"]
    longest = run["data.max_prompt_length"] + run["data.max_response_length"]
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
    wrong = [f"{key}={run[key]}" for key, reads in readers.items() if reads]
    yield StartRule(
        "selfplay.reuse_log_probs",
        run.selfplay.reuse_log_probs and wrong,
        f"old log-probs are read with {', '.join(wrong)}",
        "false",
    )
    for engine in run.engines:
        size = run[f"{engine}.ppo_mini_batch_size"] or batch
        yield StartRule(
            f"{engine}.shuffle",
            batch > size and not run[f"{engine}.shuffle"],
            f"a step has several mini-batches of {size} games, and verl keeps the order in which "
            "games finish, so the first updates would see mostly invalid and one-turn games",
            "True",
        )
    passes = {UPDATES[engine]: engine for engine in run.trained}
    passes |= {LOG_PROBS[engine]: engine for engine in run.log_probs.values()}
    for keys, engine in passes.items():
        # verl/utils/seqlen_balancing.py (rearrange_micro_batches) asserts it when such a row comes,
        # maybe after hours.
        key, sharing = f"{keys}max_token_len_per_gpu", run.ulysses(engine)
        yield StartRule(
            key,
            run.packs(engine) and (run[key] or 0) * sharing < longest,
            f"it holds no game of {longest} tokens, which data.max_* allows, and verl ends the run "
            "at the first one",
            f"{-(-longest // sharing)} or more",
        )


def _checkpoints(run: RunConfig) -> Iterator[StartRule]:
    """A killed run can be resumed."""
    for engine in run.trained:
        checkpoint = f"{engine}.checkpoint"
        if run["trainer.save_freq"] <= 0 or run[f"{engine}.strategy"] not in FSDP:
            continue
        # verl/trainer/ppo/v1/trainer_base.py (_save_checkpoint) leaves
        # latest_checkpointed_iteration.txt to the engine then, and FSDP's does not write it.
        yield StartRule(
            f"{checkpoint}.async_save",
            run[f"{checkpoint}.async_save"],
            "with FSDP no checkpoint would count as complete, and a killed run would start anew",
            "False",
        )
        contents = f"{checkpoint}.load_contents"
        yield StartRule(
            contents,
            "model" not in run.names(contents) and run["trainer.resume_mode"] != "disable",
            "it has no model, so a killed run would resume with the weights that it began with",
            "[model,optimizer,extra], as save_contents, or trainer.resume_mode to disable",
        )


def unknown_keys(run: DictConfig, schema: DictConfig) -> list[str]:
    """Keys of a run that verl's own config, ``schema``, does not have.

    Hydra lets a recipe, or a ``+`` on the command line, add any key; a misspelt one composes and
    does nothing. Nodes that verl leaves empty may hold anything.
    """

    def below(node: Any, known: Any, path: str) -> Iterator[str]:
        for name, child in node.items():
            here = f"{path}{name}"
            if name not in known and here not in _OPEN_NODES:
                yield here
            elif isinstance(child, dict) and here not in _OPEN_NODES and known[name]:
                yield from below(
                    child, known[name] if isinstance(known[name], dict) else {}, f"{here}."
                )

    return list(below(OmegaConf.to_container(run), OmegaConf.to_container(schema), ""))
