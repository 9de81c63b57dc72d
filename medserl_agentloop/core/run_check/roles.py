"""Does the run know the roles, and does each see its own context only?"""

from __future__ import annotations

from collections.abc import Iterator

from medserl_agentloop.backends.cpu import PLATFORM_NAME
from medserl_agentloop.core.config import game_class
from medserl_agentloop.core.credit import NORMALIZATIONS
from medserl_agentloop.core.run_check.run import ACTOR, CRITIC, FSDP, MODEL, ROLLOUT, Run
from medserl_agentloop.paths import did_you_mean

TRAINER_MODES = ("selfplay_sync",)
ROLE_ESTIMATOR_NAMES = tuple(NORMALIZATIONS)
GROUP_ESTIMATORS = ("role_grpo", "role_rloo")


def trainer(run: Run) -> Iterator[str]:
    """Only this package's trainer separates the roles."""
    mode, v1 = run["trainer.v1.trainer_mode"], run["trainer.use_v1"]
    if not v1 or mode not in TRAINER_MODES:
        yield (
            f"trainer.v1.trainer_mode={mode} (trainer.use_v1={v1}) does not know the game's roles. Set "
            f"trainer.use_v1=True and trainer.v1.trainer_mode to one of {', '.join(TRAINER_MODES)}."
        )


def reward_manager(run: Run) -> Iterator[str]:
    """Only a reward manager of this package rewards turns."""
    source = run["reward.reward_manager.source"]
    if source != "importlib" or run["reward.reward_manager.module.path"] is None:
        yield (
            f"reward.reward_manager.source={source} gives one score for the whole trajectory. Set "
            "reward.reward_manager.source=importlib, .name=PerTurnRewardManager and "
            ".module.path=pkg://medserl_agentloop.core.reward_manager (or a subclass of yours)."
        )


def estimator(run: Run) -> Iterator[str]:
    """The estimator knows roles and has what it needs; verl's own are for comparison."""
    name, train = run["algorithm.adv_estimator"], run.selfplay.train
    if name not in ROLE_ESTIMATOR_NAMES:
        if train != "both":
            yield (
                f"selfplay.train={train} needs an estimator that knows roles, and algorithm.adv_estimator={name} does "
                f"not{did_you_mean(name, ROLE_ESTIMATOR_NAMES)}. Set it to one of {', '.join(ROLE_ESTIMATOR_NAMES)}."
            )
        return
    for role in game_class(run.selfplay.game).roles:
        try:
            run.selfplay.credit.normalization(name, role)
        except ValueError as error:
            yield str(error)
    # verl enables a critic by itself for its own "gae" only.
    if name == "role_gae" and not run["critic.enable"]:
        yield (
            f"algorithm.adv_estimator=role_gae needs a critic, and critic.enable={run['critic.enable']}. Set "
            "critic.enable=True, or choose an estimator without a critic: role_reinforce_pp, role_grpo, "
            "role_rloo or role_rae."
        )
    if name in GROUP_ESTIMATORS and run[f"{ROLLOUT}.n"] == 1:
        yield (
            f"algorithm.adv_estimator={name} compares the games of one prompt, and with {ROLLOUT}.n=1 there is only "
            f"one, so all advantages would be 0. Set {ROLLOUT}.n to 2 or more."
        )


def anchor(run: Run) -> Iterator[str]:
    """The anchor has a reference policy to hold on to."""
    if run.selfplay.anchors and not run.has_reference:
        yield (
            f"selfplay.anchor needs the reference policy. Set {ACTOR}.use_kl_loss=True, with {ACTOR}.kl_loss_coef=0.0 "
            "if the anchor shall be the only KL term."
        )


def contexts(run: Run) -> Iterator[str]:
    """With isolated contexts, every engine reads a position restart as a new sequence."""
    if run.selfplay.context != "isolated":
        return
    for engine, model in run.engines.items():
        strategy, padding = f"{engine}.strategy", f"{model}.use_remove_padding"
        ways_out = (
            f"Either run with {strategy}=fsdp2 (or fsdp) and {padding}=True, or set selfplay.context=shared and accept "
            "that each role is trained on a context that holds the other's turns."
        )
        if run[strategy] not in FSDP:
            yield (
                f"selfplay.context=isolated cannot run with {strategy}={run[strategy]}: that engine ignores position "
                f"restarts, so each role would see the other's turns. {ways_out}"
            )
        elif not run[padding]:
            yield (
                f"selfplay.context=isolated cannot run with {padding}={run[padding]}: padded batches ignore position "
                f"restarts, so each role would see the other's turns. {ways_out}"
            )


def sequence_parallelism(run: Run) -> Iterator[str]:
    """Workers that share a row also share its attention."""
    # verl/models/transformers/monkey_patch.py patches the function behind every flash attention, and no other.
    chosen = run[f"{MODEL}.override_config.attn_implementation"] or "flash_attention_2"
    # verl/utils/model.py (load_valuehead_model) takes no other for a critic; backends/cpu_engine.py has SDPA.
    of_critic = "sdpa" if run["trainer.device"] == PLATFORM_NAME else "flash_attention_2"
    for engine in run.engines:
        attention, size = of_critic if engine == CRITIC else chosen, run.ulysses(engine)
        if run[f"{engine}.strategy"] in FSDP and size > 1 and "flash" not in attention:
            yield (
                f"{engine}: ulysses_sequence_parallel_size={size} needs flash attention; with "
                f"attn_implementation={attention} each worker would attend to its own part of a row alone. Set "
                f"ulysses_sequence_parallel_size=1, or {MODEL}.override_config.attn_implementation=flash_attention_2."
            )
