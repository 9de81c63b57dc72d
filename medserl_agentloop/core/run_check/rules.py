"""The rules that a run's config must keep so that self-play is right: what is wrong, and what to write instead.

A row holds the turns of both roles. So the run must know the roles, each role must see its own context only, and a loss
or a correction that takes one number per row or per batch would couple them. ``tests/run_check/test_coupling.py``
measures all that verl has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    _parse_rollout_is_threshold,
    _parse_rollout_rs_thresholds,
)

from medserl_agentloop.backends import PLATFORM_NAME
from medserl_agentloop.core.config import NORMALIZATIONS, game_class
from medserl_agentloop.core.run_check.run import ACTOR, CRITIC, FSDP, MODEL, REF, ROLLOUT, Run
from medserl_agentloop.paths import did_you_mean

Rules = Iterator[tuple[bool, str]]
"""Whether the run breaks a rule, and the sentence to say if it does."""

ROLE_ESTIMATOR_NAMES = tuple(NORMALIZATIONS)
_ESTIMATORS = ", ".join(ROLE_ESTIMATOR_NAMES)

LOSS = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
WEIGHTS, REJECTION = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
NORMALIZED = f"{CORRECTION}.rollout_is_batch_normalize"
SAMPLER = "trainer.v1.sampler"
TRAINER_MODES = ("selfplay_sync", "selfplay_colocate_async")

_PER_ROW = "takes one number from all tokens of a row"
_PER_BATCH = "picks tokens by comparing them with all of a micro-batch"
_ROW_MEAN = {"seq-mean-token-mean": "divides by the number of tokens in a row"}

COUPLED = {
    LOSS: (
        "vanilla",
        {
            "gspo": _PER_ROW,
            "geo_mean": _PER_ROW,
            "sapo": "divides by the number of tokens in a row, whatever loss_agg_mode says",
            "clip_cov": _PER_BATCH,
            "kl_cov": _PER_BATCH,
        },
    ),
    f"{ACTOR}.loss_agg_mode": ("token-mean", _ROW_MEAN),
    f"{CRITIC}.loss_agg_mode": ("token-mean", _ROW_MEAN),
    WEIGHTS: ("token", {"sequence": _PER_ROW}),
    REJECTION: (
        "token_k1",
        dict.fromkeys(SUPPORTED_ROLLOUT_RS_OPTIONS - TOKEN_LEVEL_ROLLOUT_RS_OPTIONS, _PER_ROW),
    ),
    NORMALIZED: ("False", {"True": "divides by the mean over all tokens of a batch"}),
}
"""By key what to set instead, and the values that couple the roles with what each does."""

_REFUSED_IF_ON = {
    "algorithm.filter_groups.enable": (
        "DAPO's filter reads one score per row, the sum of both roles' rewards. In a zero-sum game the sum is "
        "constant, so groups would be kept by the noise of format terms, or replaced without end"
    ),
    "distillation.enabled": "self-play sets the actor's loss, so the teacher's would never be used",
    f"{ROLLOUT}.enable_rollout_routing_replay": "games keep no routes of experts, so none would be replayed",
    f"{SAMPLER}.sync_refill_failed_groups": "verl does not pass it to custom samplers, so it would do nothing",
}


def refusals(run: Run) -> Iterator[str]:
    """One sentence for each rule that the run breaks."""
    first = (_roles, _estimator, _opponents, _contexts, _adapters, _asynchronous)
    for table in (*first, _coupling, _correction, _rollout, _batches, _lengths, _checkpoints):
        yield from (sentence for broken, sentence in table(run) if broken)


def run_warnings(run: Run) -> Iterator[str]:
    """One sentence for each thing that the run may do but hardly wants to."""
    yield from (sentence for unusual, sentence in _advice(run) if unusual)


def _roles(run: Run) -> Rules:
    mode, v1 = run["trainer.v1.trainer_mode"], run["trainer.use_v1"]
    apart = " and keeps its rollouts on GPUs of their own" if mode == "separate_async" else ""
    yield (
        not v1 or mode not in TRAINER_MODES,
        f"trainer.v1.trainer_mode={mode} (trainer.use_v1={v1}) does not know the game's roles{apart}. Set "
        "trainer.use_v1=True and trainer.v1.trainer_mode=selfplay_sync, or add the recipe colocate_async.",
    )
    source = run["reward.reward_manager.source"]
    yield (
        source != "importlib" or run["reward.reward_manager.module.path"] is None,
        f"reward.reward_manager.source={source} gives one score for the whole trajectory. Set "
        "reward.reward_manager.source=importlib, .name=PerTurnRewardManager and "
        ".module.path=pkg://medserl_agentloop.core.reward_manager (or a subclass of yours).",
    )
    yield (
        bool(run.selfplay.anchors) and not run.has_reference,
        f"selfplay.anchor needs the reference policy. Set {ACTOR}.use_kl_loss=True, with {ACTOR}.kl_loss_coef=0.0 "
        "if the anchor shall be the only KL term.",
    )


def _estimator(run: Run) -> Rules:
    name, train = run["algorithm.adv_estimator"], run.selfplay.train
    if name not in ROLE_ESTIMATOR_NAMES:  # verl's own, for comparison
        yield (
            train != "both",
            f"selfplay.train={train} needs an estimator that knows roles, and algorithm.adv_estimator={name} does "
            f"not{did_you_mean(name, ROLE_ESTIMATOR_NAMES)}. Set it to one of {_ESTIMATORS}.",
        )
        return
    for role in game_class(run.selfplay.game).roles:
        try:
            run.selfplay.credit.normalization(name, role)
        except ValueError as error:
            yield True, str(error)
    # verl enables a critic by itself for its own "gae" only.
    yield (
        name == "role_gae" and not run["critic.enable"],
        f"algorithm.adv_estimator=role_gae needs a critic, and critic.enable={run['critic.enable']}. Set "
        "critic.enable=True, or choose an estimator without a critic: role_reinforce_pp, role_grpo, "
        "role_rloo, role_opo or role_rae.",
    )
    yield (
        name in ("role_grpo", "role_rloo", "role_opo") and run[f"{ROLLOUT}.n"] == 1,
        f"algorithm.adv_estimator={name} compares the games of one prompt, and with {ROLLOUT}.n=1 there is only "
        f"one, so all advantages would be 0. Set {ROLLOUT}.n to 2 or more.",
    )


def _opponents(run: Run) -> Rules:
    """The frozen model that the policy plays against can be asked, and a pool has checkpoints to serve."""
    opponent = run.selfplay.opponent
    if opponent.kind == "live":
        return
    kind = f"selfplay.opponent.kind={opponent.kind}"
    yield (
        run.selfplay.context == "shared",
        f"{kind} keeps the other model's turn out of the trajectory, but selfplay.context=shared is one "
        "conversation of all roles. Set selfplay.context=isolated.",
    )
    try:
        opponent.check_address()
        opponent.api_key()
    except ValueError as error:
        yield True, str(error)
    yield (
        run.selfplay.train == "both",
        f"{kind} plays the role that is not trained, but selfplay.train=both trains both. Set selfplay.train to "
        "the name of one role, or selfplay.opponent.kind=live.",
    )
    if opponent.kind != "pool":
        return
    yield (
        run["trainer.save_freq"] <= 0,
        f"{kind} plays against checkpoints, but trainer.save_freq={run['trainer.save_freq']} saves none. "
        "Set it to the number of steps between two opponents.",
    )
    contents = run.names(f"{ACTOR}.checkpoint.save_contents")
    yield (
        "hf_model" not in contents,
        f"{kind} needs checkpoints that a server can load. Set {ACTOR}.checkpoint."
        f"save_contents=[{','.join([*contents, 'hf_model'])}].",
    )
    yield (
        (run[f"{MODEL}.lora_rank"] or 0) > 0,
        f"{kind} needs checkpoints of the whole model, and those of a LoRA run are not. Set {MODEL}.lora_rank=0, "
        "or serve one frozen model with selfplay.opponent.kind=endpoint.",
    )


def _contexts(run: Run) -> Rules:
    """Every engine reads a position restart as a new sequence, and workers that share a row share its attention."""
    isolated = run.selfplay.context == "isolated"
    # verl/models/transformers/monkey_patch.py patches the function behind every flash attention, and no other.
    chosen = run[f"{MODEL}.override_config.attn_implementation"] or "flash_attention_2"
    # verl/utils/model.py (load_valuehead_model) takes no other for a critic; backends/engines.py has SDPA.
    of_critic = "sdpa" if run["trainer.device"] == PLATFORM_NAME else "flash_attention_2"
    for engine, model in run.engines.items():
        strategy, padding = f"{engine}.strategy", f"{model}.use_remove_padding"
        fsdp = run[strategy] in FSDP
        wrong, who = (padding, "padded batches ignore") if fsdp else (strategy, "that engine ignores")
        yield (
            isolated and not (fsdp and run[padding]),
            f"selfplay.context=isolated cannot run with {wrong}={run[wrong]}: {who} position restarts, so each role "
            f"would see the other's turns. Either run with {strategy}=fsdp2 (or fsdp) and {padding}=True, or set "
            "selfplay.context=shared and accept that each role is trained on a context that holds the other's turns.",
        )
        attention, size = of_critic if engine == CRITIC else chosen, run.ulysses(engine)
        yield (
            fsdp and size > 1 and "flash" not in attention,
            f"{engine}: ulysses_sequence_parallel_size={size} needs flash attention; with "
            f"attn_implementation={attention} each worker would attend to its own part of a row alone. Set "
            f"ulysses_sequence_parallel_size=1, or {MODEL}.override_config.attn_implementation=flash_attention_2.",
        )


def _asynchronous(run: Run) -> Rules:
    """Games that are older than the weights are corrected for, and long ones are not left behind."""
    mode = f"trainer.v1.trainer_mode={run['trainer.v1.trainer_mode']}"
    if run["trainer.v1.trainer_mode"] != "selfplay_colocate_async":
        return
    strategy, threshold = f"{SAMPLER}.max_off_policy_strategy", f"{SAMPLER}.max_off_policy_threshold"
    yield (
        run[f"{SAMPLER}.custom_sampler.name"] == "SelfPlayReplayBuffer",
        f"{mode} needs {SAMPLER}.custom_sampler.name=SelfPlayReplayBufferAsync (or a subclass of yours).",
    )
    yield (
        run[strategy] != "wait" or run[threshold] is None,
        f"{mode} with {strategy}={run[strategy]} and max_off_policy_threshold={run[threshold]}: short games finish "
        f"first, and long ones would be dropped or never be trained on. Set {strategy}=wait and {threshold}=2.",
    )
    yield (
        run[WEIGHTS] != "token",
        f"{mode} trains on games of earlier weights, and {WEIGHTS}={run[WEIGHTS]} does not correct for them. Set "
        f"{WEIGHTS}=token.",
    )
    yield (
        run.selfplay.opponent.kind == "pool",
        f"{mode} with selfplay.opponent.kind=pool: a game would go on while its opponent changes. Set "
        "trainer.v1.trainer_mode=selfplay_sync.",
    )


def _adapters(run: Run) -> Rules:
    """The rollout gets what LoRA trains, and with an adapter for each role every token meets that of its own role."""
    rank, engine, merge = run.lora_rank, run[f"{ROLLOUT}.name"], f"{MODEL}.lora.merge"
    path, contents = f"{MODEL}.lora_adapter_path", run.names(f"{ACTOR}.checkpoint.save_contents")
    yield (
        not rank and run[path] is not None,
        f"{path}={run[path]} is not loaded with {MODEL}.lora_rank=0. Set lora_rank to the adapter's own.",
    )
    yield (
        bool(rank) and "hf_model" in contents,
        f"{ACTOR}.checkpoint.save_contents=[{','.join(contents)}]: with LoRA, verl's hf_model folder holds names that "
        "no model reads. Set it to [model,optimizer,extra]; `medserl evaluate` reads such a checkpoint.",
    )
    if run.selfplay.adapters == "shared":
        reasons = {
            "cpu_hf": "rollout cpu_hf loads whole weights",
            "sglang": "verl 0.9.1 pushes an adapter to SGLang under an argument name that SGLang does not have "
            "(serialized_named_tensors)",
        }
        yield (
            bool(rank) and not run[merge] and engine in reasons,
            f"{MODEL}.lora_rank={rank} with {merge}={run[merge]}: {reasons.get(str(engine))}. Set {merge}=True.",
        )
        return
    key = "selfplay.adapters=per_role"
    yield (not rank, f"{key} trains LoRA adapters, and {MODEL}.lora_rank=0. Set it, e.g. to 32.")
    yield (
        bool(run[merge]),
        f"{key} with {merge}={run[merge]}: one set of merged weights cannot serve two adapters. Set it to False.",
    )
    yield (
        engine not in ("cpu_hf", "sglang"),
        f"{key} needs a rollout that takes the adapter from each request, and {ROLLOUT}.name={engine}. Set it to "
        "sglang, or set selfplay.adapters=shared.",
    )
    yield (
        engine == "sglang" and "dummy" in str(run[f"{ROLLOUT}.load_format"]),
        f"{key} with {ROLLOUT}.load_format={run[f'{ROLLOUT}.load_format']}: SGLang reads an adapter's folder only with "
        "another. Set it to auto, or add the recipe adapter_per_role.",
    )
    for name, only, why in (
        (f"{ACTOR}.strategy", "fsdp2", "an adapter's gradients are clipped as FSDP2 holds them"),
        (f"{ROLLOUT}.data_parallel_size", 1, "SGLang loads adapters in an engine of one data-parallel rank only"),
    ):
        yield run[name] != only, f"{key} needs {name}={only}, not {run[name]}: {why}."
    size = run.ulysses(ACTOR)
    yield (
        size > 1,
        f"{key} with {ACTOR}.ulysses_sequence_parallel_size={size}: a rank sees a part of each row and would need the "
        "roles of all its tokens. Set it to 1.",
    )
    yield (
        run.selfplay.context != "isolated",
        f"{key} needs a context for each role, and selfplay.context={run.selfplay.context} is one of both. Set it to "
        "isolated.",
    )


def _coupling(run: Run) -> Rules:
    """No loss or correction takes one number from both roles, and verl can compute it for every micro-batch."""
    # If one role is trained, all trained tokens of a row are its own.
    used = {f"{CRITIC}.loss_agg_mode": CRITIC in run.trained, NORMALIZED: run[WEIGHTS] is not None}
    for key, (instead, coupled) in COUPLED.items() if run.selfplay.train == "both" else ():
        for value in run.names(key):
            yield (
                value in coupled and used.get(key, True),
                f"{key}={value} {coupled.get(value)}. These are of both roles, so what happens to one role would "
                f"change the gradient of the other. Set {key}={instead}, or train one role (selfplay.train).",
            )
    # verl/trainer/ppo/core_algos.py (agg_loss). seq-mean-token-sum passes: it divides by the number of rows
    # of a mini-batch, which no role changes.
    for engine in run.trained:
        scale = f"{engine}.loss_scale_factor"
        yield (
            run[f"{engine}.loss_agg_mode"] == "seq-mean-token-sum-norm" and run[scale] is None,
            f"{engine}.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of a micro-batch, so "
            "a long turn of one role would shrink the gradient of the other. Set "
            f"{scale} to a constant, e.g. {run['data.max_response_length']}.",
        )
    yield (
        run[LOSS] == "bypass_mode",
        f"{LOSS}=bypass_mode ends the run at a micro-batch without a trained token, such as a void game. Set "
        f"{LOSS}=vanilla; {CORRECTION}.bypass_mode=True alone takes the rollout's log-probs as the old ones.",
    )


def _correction(run: Run) -> Rules:
    """verl applies the importance correction that the run asks for, and gets the log-probs for it."""
    rejections, bypass = run.names(REJECTION), f"{CORRECTION}.bypass_mode"
    others = run[WEIGHTS] or rejections or run[f"{CORRECTION}.loss_type"] not in (None, "ppo_clip")
    # verl/trainer/ppo/v1/trainer_base.py: only the legacy trainer hands these keys on to the loss.
    yield (
        bool(run[bypass] and others),
        f"{bypass}=True: verl's V1 trainer then ignores rollout_is, rollout_rs and loss_type, and "
        "nothing would be corrected. Set bypass_mode=False, or leave the others at null, null and ppo_clip.",
    )
    for used, key, parse in (
        (run[WEIGHTS], f"{CORRECTION}.rollout_is_threshold", _parse_rollout_is_threshold),
        (rejections, f"{CORRECTION}.rollout_rs_threshold", partial(_parse_rollout_rs_thresholds, rejections)),
    ):
        try:
            if used:
                parse(run[key])
        except (TypeError, ValueError) as error:
            yield True, f"{key}={run[key]}: {error}"
    asked = f"{ROLLOUT}.calculate_log_probs"
    for key in (WEIGHTS, REJECTION, bypass):
        yield (
            bool(run[key]) and not run[asked],
            f"{key}={run[key]} reads the rollout's log-probs, and {asked}=False asks for none. Set {asked}=True.",
        )


def _rollout(run: Run) -> Rules:
    """Nothing is on that reads one score per row or a column that games lack; the engine can be built."""
    for key, why in _REFUSED_IF_ON.items():
        yield bool(run[key]), f"{key}=True: {why}. Set it to False."
    for engine in ("fsdp_config", "megatron", "veomni"):
        key = f"{ACTOR}.{engine}.router_replay.mode"
        yield (
            run[key] == "R3",
            f"{key}=R3 replays the rollout's routes of experts, and games keep none. Set it to disabled.",
        )
    yield (
        run[f"{ROLLOUT}.name"] is None,
        f"{ROLLOUT}.name is not set. Set it to sglang, or add the recipe cpu for a run without a GPU.",
    )
    yield (
        run[f"{ROLLOUT}.temperature"] <= 0,
        f"{ROLLOUT}.temperature={run[f'{ROLLOUT}.temperature']}: all games of a prompt would be the same, and the "
        "loss divides by it. Set it above 0, e.g. 1.0.",
    )
    tensor, data = run[f"{ROLLOUT}.tensor_model_parallel_size"], run[f"{ROLLOUT}.data_parallel_size"]
    yield (
        bool(run.gpus % (tensor * data)),
        f"{ROLLOUT}.tensor_model_parallel_size={tensor} times data_parallel_size={data} does not divide the "
        f"{run.gpus} GPUs of the run (trainer.nnodes times trainer.n_gpus_per_node). Set it to 1, or to a divisor.",
    )
    custom = f"{SAMPLER}.custom_sampler"
    yield (
        not (run[f"{custom}.path"] and run[f"{custom}.name"]),
        f"{custom} is empty, and verl's own replay buffer waits for ever for the games of a "
        f"process that died. Set {custom}.path=pkg://medserl_agentloop.core.replay_buffer and "
        ".name=SelfPlayReplayBuffer (or a subclass of yours).",
    )


def _batches(run: Run) -> Rules:
    """Every mini-batch holds games of all kinds, and workers can share it."""
    batch, n = run["data.train_batch_size"], run[f"{ROLLOUT}.n"]
    for engine in run.trained:
        size, shuffle = run[f"{engine}.ppo_mini_batch_size"], run[f"{engine}.shuffle"]
        yield (
            batch > size and not shuffle,
            f"{engine}.shuffle={shuffle} with several mini-batches in a step (data.train_batch_size={batch}, "
            f"{engine}.ppo_mini_batch_size={size}): verl keeps the order in which games finish, so the first "
            f"updates would see mostly invalid and one-turn games. Set {engine}.shuffle=True.",
        )
        workers = run.gpus // run.ulysses(engine)
        # verl/workers/engine_workers.py (train_mini_batch) asserts it, in the first update.
        yield (
            run[f"{engine}.strategy"] in FSDP and workers > 0 and bool(size * n % workers),
            f"{engine}.ppo_mini_batch_size={size} with {ROLLOUT}.n={n} makes mini-batches of {size * n} games, "
            f"which {workers} data-parallel workers cannot share evenly. Set it to a multiple of {workers}.",
        )


def _lengths(run: Run) -> Rules:
    """The longest trajectory fits in a micro-batch that is planned by tokens."""
    prompt, response = run["data.max_prompt_length"], run["data.max_response_length"]
    phases = [(engine, "use_dynamic_bsz", "ppo_max_token_len_per_gpu") for engine in run.trained]
    if REF in run.engines:
        phases.append((REF, "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"))
    for engine, dynamic, budget in phases:
        tokens, workers = run[f"{engine}.{budget}"], run.ulysses(engine)
        # verl/utils/seqlen_balancing.py (rearrange_micro_batches) asserts it, when such a trajectory comes.
        yield (
            bool(run[f"{engine}.{dynamic}"]) and tokens * workers < prompt + response,
            f"{engine}.{budget}={tokens} is less than a trajectory may have (data.max_prompt_length={prompt} and "
            f"data.max_response_length={response}), and the run would end at the first longer one. Set it to "
            f"{-(-(prompt + response) // workers)} or more.",
        )


def _checkpoints(run: Run) -> Rules:
    """A killed run can be resumed."""
    path, mode = run["trainer.resume_from_path"], run["trainer.resume_mode"]
    yield (
        mode == "resume_path" and "global_step_" not in str(path),
        f"trainer.resume_mode=resume_path with trainer.resume_from_path={path}: verl reads the step from the "
        "path. Set it to the folder global_step_N of a checkpoint.",
    )
    for engine in run.trained:
        checkpoint = f"{engine}.checkpoint"
        saves = run["trainer.save_freq"] > 0 and run[f"{engine}.strategy"] in FSDP
        contents = run.names(f"{checkpoint}.load_contents")
        # verl/trainer/ppo/v1/trainer_base.py (_save_checkpoint) leaves latest_checkpointed_iteration.txt to
        # the engine then, and FSDP's does not write it.
        yield (
            saves and bool(run[f"{checkpoint}.async_save"]),
            f"{checkpoint}.async_save=True is for Megatron: with FSDP no checkpoint would count as complete, and a "
            f"killed run would start anew. Set {checkpoint}.async_save=False.",
        )
        yield (
            saves and "model" not in contents and mode != "disable",
            f"{checkpoint}.load_contents=[{','.join(contents)}] has no model: a killed run would resume with the "
            f"weights that it began with. Set {checkpoint}.save_contents=[model,optimizer,extra], or "
            "trainer.resume_mode=disable.",
        )


def _advice(run: Run) -> Rules:
    name = run["algorithm.adv_estimator"]
    yield (
        name not in ROLE_ESTIMATOR_NAMES,
        f"algorithm.adv_estimator={name} mixes the rewards of the roles; use one of {_ESTIMATORS} unless that is what "
        "you want to compare with",
    )
    top_p, top_k = run[f"{ROLLOUT}.top_p"], run[f"{ROLLOUT}.top_k"]
    yield (
        top_p < 1 or top_k > 0,
        f"{ROLLOUT}.top_p={top_p} and top_k={top_k} cut the distribution that games are drawn from, and the loss "
        "knows of the temperature only; train with top_p=1.0 and top_k=-1",
    )
    pool = run.selfplay.opponent.kind == "pool"
    opponents = " (and so of opponents, with selfplay.opponent.kind=pool)" if pool else ""
    yield (
        run["trainer.save_freq"] > 0 and not run["trainer.max_actor_ckpt_to_keep"],
        "trainer.max_actor_ckpt_to_keep=null keeps every checkpoint, at 12 bytes per parameter: about 45 GiB each "
        f"for a model of 4 billion; set it to the number to keep{opponents}",
    )
