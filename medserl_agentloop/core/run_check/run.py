"""A run's config as the start-up checks read it, and the names and keys in it that verl does not know.

verl looks a name up when it needs it: in a registry, in an if-chain, as a module or class, often after the
engines are up and the first games are played. A key that it does not have is never looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.import_utils import load_module
from verl.utils.tracking import Tracking
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from medserl_agentloop.backends import PLATFORM_NAME, ROLLOUT_NAME
from medserl_agentloop.core.config import NORMALIZATIONS, SelfPlayConfig
from medserl_agentloop.paths import did_you_mean

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"

FSDP = ("fsdp", "fsdp2")
"""Strategies whose forward pass reads a restart of ``position_ids`` as a new sequence."""


@dataclass(frozen=True)
class Run:
    """A run's whole config, read by dotted key, and its ``selfplay`` node."""

    config: DictConfig
    selfplay: SelfPlayConfig

    def __getitem__(self, key: str) -> Any:
        """The value of a key; None where it is absent, null or still ``???``."""
        return OmegaConf.select(self.config, key)

    def names(self, key: str) -> list[str]:
        """The names in the value of a key: none, one, or a list; ``rollout_rs`` has commas between them."""
        value = self[key]
        if value is None:
            return []
        if key.endswith(".rollout_rs"):
            return [name.strip() for name in str(value).split(",") if name.strip()]
        return [str(name) for name in value] if isinstance(value, ListConfig) else [str(value)]

    @property
    def trained(self) -> dict[str, str]:
        """The engines that are trained, each with the key of its model."""
        return {ACTOR: MODEL} | ({CRITIC: f"{CRITIC}.model"} if self[f"{CRITIC}.enable"] else {})

    @property
    def engines(self) -> dict[str, str]:
        """All engines that read games, each with the key of its model."""
        # With LoRA, verl's reference policy is the actor without its adapter (trainer_base.py, ref_in_actor).
        in_actor = self.lora_rank or self[f"{MODEL}.lora_adapter_path"] is not None
        return self.trained | ({REF: MODEL} if self.has_reference and not in_actor else {})

    @property
    def lora_rank(self) -> int:
        """Rank of the actor's adapter; 0 without one."""
        return int(self[f"{MODEL}.lora.rank"] or self[f"{MODEL}.lora_rank"] or 0)

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference policy."""
        return bool(need_reference_policy(self.config))

    @property
    def gpus(self) -> int:
        """Training workers of the run."""
        return int(self["trainer.nnodes"] * self["trainer.n_gpus_per_node"])

    def ulysses(self, engine: str) -> int:
        """Workers of an FSDP engine that share a row; 1 without sequence parallelism."""
        # verl/workers/config: actor.py takes either key, critic.py reads only that of its engine.
        keys = [f"{engine}.fsdp_config.ulysses_sequence_parallel_size", f"{engine}.ulysses_sequence_parallel_size"]
        if engine == CRITIC:
            keys = [f"{engine}.fsdp.ulysses_sequence_parallel_size"]
        return max(self[key] or 1 for key in keys)


# Where verl has an if-chain instead of a registry, the names stand here; tests compare them with verl's.
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = [base + plus for base in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")]
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
STRATEGIES = (*FSDP, "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel")

REGISTRIES = ("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode", f"{ROLLOUT}.name")
"""Keys that take a name that a user registered; the registries are read as they stand at start-up."""

LOADED = (
    ("reward.reward_manager.module.path", "reward.reward_manager.name"),
    ("reward.custom_reward_function.path", "reward.custom_reward_function.name"),
    ("data.custom_cls.path", "data.custom_cls.name"),
    ("trainer.v1.sampler.custom_sampler.path", "trainer.v1.sampler.custom_sampler.name"),
    (f"{ACTOR}.optim.optimizer_impl", f"{ACTOR}.optim.optimizer"),
    (f"{CRITIC}.optim.optimizer_impl", f"{CRITIC}.optim.optimizer"),
)
"""Keys of a file, or of a module as ``pkg://module``, and of what verl takes from it; an optimizer's module is bare."""

CLASSES = ("trainer.checkpoint_callback_class", f"{ROLLOUT}.agent.agent_loop_manager_class")
"""Keys of a class as ``module.Class``."""

_OPEN_NODES = (
    "selfplay",
    "hydra",
    "ray_kwargs.ray_init",  # arguments of ray.init
    # A field of FSDPEngineConfig that verl's YAML leaves out.
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "critic.fsdp.mixed_precision",
    "engine.mixed_precision",
)


def _known_names(run: Run) -> Mapping[str, Collection[str]]:
    """All names that verl, or this package, knows for a key of the config."""
    rollouts = [name for name, _ in _ROLLOUT_REGISTRY]
    if run["trainer.device"] == PLATFORM_NAME:  # registered only in processes that run on this platform
        rollouts.append(ROLLOUT_NAME)
    names: dict[str, Collection[str]] = {
        "algorithm.adv_estimator": sorted({*NORMALIZATIONS, *ADV_ESTIMATOR_REGISTRY}),
        "algorithm.kl_penalty": KL_ESTIMATORS,
        "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
        "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
        "algorithm.rollout_correction.rollout_rs": sorted(SUPPORTED_ROLLOUT_RS_OPTIONS),
        "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
        f"{ACTOR}.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        f"{ACTOR}.kl_loss_type": KL_ESTIMATORS,
        f"{ROLLOUT}.name": sorted(set(rollouts)),
        "trainer.logger": [*Tracking.supported_backend, "tracking"],
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
    }
    for engine in (ACTOR, CRITIC):
        names[f"{engine}.strategy"] = STRATEGIES
        names[f"{engine}.loss_agg_mode"] = AGGREGATIONS
        names[f"{engine}.checkpoint.save_contents"] = CHECKPOINT_CONTENTS
        names[f"{engine}.checkpoint.load_contents"] = CHECKPOINT_CONTENTS
        if run[f"{engine}.strategy"] in FSDP:  # other engines have schedules of their own
            names[f"{engine}.optim.lr_scheduler_type"] = ("constant", "cosine")
    names[f"{REF}.strategy"] = STRATEGIES
    return names


def unknown_names(run: Run) -> Iterator[str]:
    """One sentence for each name that verl would not find, with the nearest right one."""
    for library in run.names("actor_rollout_ref.model.external_lib"):
        # verl imports it in its workers, where it may register names.
        yield from _cannot_load("actor_rollout_ref.model.external_lib", library)
    told: set[str] = set()  # one key may take its value from another
    for key, known in _known_names(run).items():
        for name in run.names(key):
            if name not in known and name not in told:
                told.add(name)
                own = ", or register yours with VERL_USE_EXTERNAL_MODULES=your.module" if key in REGISTRIES else ""
                yield (
                    f"{key}={name}: verl knows no such name{did_you_mean(name, known)}. "
                    f"Choose one of {', '.join(known)}{own}."
                )
    for path_key, name_key in LOADED:
        if (path := run[path_key]) is not None:
            yield from _cannot_load(path_key, path, name_key, run[name_key])
    for key in CLASSES:
        if (path := run[key]) is not None:
            module, _, name = path.rpartition(".")
            yield from _cannot_load(key, module, key, name)


def _cannot_load(path_key: str, path: str, name_key: str = "", name: str | None = None) -> Iterator[str]:
    try:
        module = load_module(path if path_key.endswith(".path") else f"pkg://{path}")
    except Exception as error:  # a user's module may raise anything
        yield f"{path_key}: verl cannot load {path} ({type(error).__name__}: {error})."
        return
    if name_key and not hasattr(module, str(name)):
        yield f"{name_key}={name}: there is no such name in {path}{did_you_mean(str(name), dir(module))}."


def unknown_keys(run: DictConfig, schema: DictConfig) -> list[str]:
    """Keys of a run that verl's own config does not have, each with the nearest one it has.

    Hydra lets a recipe, or a ``+`` on the command line, add any key; a misspelt one composes and does
    nothing. Nodes that verl leaves empty belong to somebody else and may hold anything.
    """
    return list(_unknown_below(OmegaConf.to_container(run), OmegaConf.to_container(schema), ""))


def _unknown_below(node: Any, known: Any, path: str) -> Iterator[str]:
    for name, child in node.items():
        here = f"{path}{name}"
        if here in _OPEN_NODES:
            continue
        if name not in known:
            yield f"{here}{did_you_mean(str(name), known)}"
        elif isinstance(child, dict) and known[name]:
            yield from _unknown_below(child, known[name] if isinstance(known[name], dict) else {}, f"{here}.")


def wrong_types(run: DictConfig, schema: DictConfig, path: str = "") -> Iterator[str]:
    """One sentence for each value whose type verl cannot use where its own config has another.

    A node with ``_target_`` is one of verl's dataclasses, whose annotations say the type; any other is compared with
    verl's default. An annotation that verl's own default contradicts says nothing. ``path`` is where both nodes are.
    """
    types = _annotations(schema.get("_target_"))
    for key in schema:
        here, asked, default = f"{path}{key}", _value(run, key), _value(schema, key)
        if isinstance(default, DictConfig):
            if isinstance(asked, DictConfig):
                yield from wrong_types(asked, default, f"{here}.")
            elif asked is not None:
                yield f"{here}={asked}: this node holds keys ({', '.join(map(str, default))}); set one of them."
            continue
        if asked is None or asked == default or isinstance(asked, DictConfig | ListConfig):
            continue
        if OmegaConf.is_interpolation(run, key):  # told where its value is set
            continue
        expected = types.get(str(key), type(default) if isinstance(default, bool | int | float) else Any)
        if not _fits(asked, expected) and (default is None or _fits(default, expected)):
            name = expected.__name__ if isinstance(expected, type) else str(expected).replace("typing.", "")
            yield f"{here}={asked!r} is not of type {name}, which verl needs here (default: {default}). Set one."


def _value(node: DictConfig, key: Any) -> Any:
    try:
        return node.get(key)
    except OmegaConfBaseException:  # an interpolation of what is not there, or ???
        return None


@cache
def _annotations(target: str | None) -> dict[str, Any]:
    try:
        return get_type_hints(resolve_name(str(target)))
    except (ImportError, AttributeError, ValueError, TypeError, NameError):
        return {}


@cache
def _reader(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(expected, config=ConfigDict(arbitrary_types_allowed=True))


def _fits(value: Any, expected: Any) -> bool:
    try:
        _reader(expected).validate_python(value, strict=True)
    except ValidationError:
        return False
    except PydanticSchemaGenerationError:
        return True
    return True
