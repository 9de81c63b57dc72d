"""The ``selfplay:`` node of a run: typed, documented and checked before anything starts.

Here are the keys of any game; a game adds its own in a subclass. ``core.run_check`` checks the rest
of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medserl_agentloop import DEFAULT_GAME, GAMES
from medserl_agentloop.core.client import CHAT_PATH, HttpClient, ServerOptions
from medserl_agentloop.core.metrics import Alarms
from medserl_agentloop.paths import did_you_mean, find_object

C = TypeVar("C", bound="SelfPlayConfig")


class ConfigError(ValueError):
    """The run's config cannot work; the message says what to write instead."""


def refuse(problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


ROLE_ADAPTERS = "role_adapters"
"""Key of ``actor_rollout_ref.model.lora``: the trainer tells its workers the roles and rates."""
ROUTER_ADDRESS = "router_address"
"""Key of ``reward.reward_model``: the trainer tells agent loops the address of verl's server."""
ADAPTERS_FOLDER = "lora_adapters"
"""Checkpoint folder with one peft adapter folder per role."""


def adapter_names(roles: Sequence[str]) -> dict[str, str]:
    """The name of each role's adapter. verl and peft look up the first one as ``default``."""
    return {role: role if number else "default" for number, role in enumerate(roles)}


Share = Annotated[float, Field(ge=0)]  # a share, a weight or a coefficient

Normalization = Literal["batch", "kind", "group", "mean", "none"]
"""The normalization of a role's advantages, after the estimator has subtracted its baseline.

``batch``: whitened (mean 0, variance 1) over the role's trained tokens of the batch. ``kind``: the
same within each kind of game. ``group``: divided by the standard deviation of the role's rewards
within the prompt group. ``mean``: centered over the role's tokens of the batch, not divided.
``none``: unchanged.
"""

NORMALIZATIONS: Mapping[str, tuple[Normalization, ...]] = {
    "role_gae": ("batch", "kind", "mean", "none"),
    # The group is already centered. `mean` stops there (Dr. GRPO); `none` would be
    # role_reinforce_pp with `none`.
    "role_grpo": ("group", "mean", "batch", "kind"),
    # Whitening within a kind would undo what the baseline, one per kind, put in.
    "role_rae": ("none", "mean", "batch"),
    "role_reinforce_pp": ("batch", "kind", "mean", "none"),
    "role_rloo": ("none", "batch", "kind"),  # already centered within the group
}
"""The role-separated estimators, each with the normalizations that make sense for it, its own form
first.
"""


class CreditSettings(BaseModel):
    """Settings of the role-separated estimators."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    role_weights: dict[str, Share] = Field(
        default={},
        description="Factor of each role's advantages after normalization, 1 by default; 0 "
        "silences a role. With adapters=per_role, factor of the learning rate of a role's adapter: "
        "AdamW would cancel a factor of its gradients.",
    )
    normalize: dict[str, Normalization | None] = Field(
        default={}, description="Normalization per role; null is the estimator's own."
    )
    loss: Literal["per_role", "verl"] = Field(
        default="per_role",
        description="per_role: verl's loss of each role's tokens alone, so that weights say what "
        "share a role has, whatever it writes. verl: one token-mean over all roles, in which a "
        "longer role shrinks the other's share; the certificate does not hold, so it is for "
        "comparison, with certify=warn.",
    )

    def normalization(self, estimator: str, role: str) -> Normalization:
        """Return how ``estimator`` normalizes ``role``'s advantages; ValueError if it cannot."""
        allowed = NORMALIZATIONS[estimator]
        chosen = self.normalize.get(role) or allowed[0]
        if chosen not in allowed:
            raise ValueError(
                f"selfplay.credit.normalize.{role}={chosen} makes no sense with {estimator}: "
                f"choose one of {', '.join(allowed)}, or null for {allowed[0]}"
            )
        return chosen


class OpponentConfig(ServerOptions):
    """The player of the role that is not trained. Its tokens are never part of a trajectory."""

    node: ClassVar[str] = "selfplay.opponent"

    url: str | None = Field(
        default=None,
        description="OpenAI-compatible server of a frozen model, e.g. http://host:30000; null: the "
        "policy itself plays.",
    )
    model: str | None = Field(
        default="default", description="Model name in the requests; SGLang takes any."
    )
    concurrency: int = Field(
        default=64, ge=1, description="Requests in flight from one agent-loop worker."
    )

    @property
    def frozen(self) -> bool:
        """True if a model behind a server plays, not the policy itself."""
        return self.url is not None

    def client(self, path: str = CHAT_PATH) -> HttpClient:
        return super().client(path)


class SelfPlayConfig(BaseModel):
    """Self-play settings that verl has no key for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    game: str = Field(
        description="Name of one of medserl_agentloop/games, or your own package.module:Class."
    )
    context: Literal["isolated", "shared"] = Field(
        default="isolated",
        description="isolated: each role has its own context. shared: one conversation, which "
        "lets each role read the turns of the other; for comparison only.",
    )
    train: str = Field(
        default="both",
        description="Whose tokens the loss sees: both, or one role. The other role still plays.",
    )
    adapters: Literal["shared", "per_role"] = Field(
        default="shared",
        description="shared: all roles train the same weights. per_role: each role has its own "
        "LoRA adapter on one base model. More: [gpu.md](gpu.md#lora).",
    )
    anchor: dict[str, Share] = Field(
        default={},
        description="Coefficient of the KL to the reference policy on each role's tokens, "
        "including an untrained role's; needs the actor's use_kl_loss. Both roles share weights: "
        "an untrained role's parse rate fell from 1.00 to 0.88 within 80 steps without an anchor.",
    )
    anchor_end: Share = Field(
        default=1.0,
        description="Factor of the anchors in the last step; they fall, or rise, evenly over the "
        "run.",
    )
    turn_timeout_s: float | None = Field(
        default=3600.0,
        gt=0,
        description="Seconds a generated turn may take, queueing included, before its game is "
        "void; null: no limit.",
    )
    credit: CreditSettings = Field(default=CreditSettings(), description="Advantages of the roles.")
    reuse_log_probs: bool = Field(
        default=False,
        description="true: the update's own forward pass gives the old log-probs, which saves a "
        "pass over the batch. For one mini-batch and one epoch. Entropy is then measured with "
        "actor.calculate_entropy only.",
    )
    opponent: OpponentConfig = Field(
        default=OpponentConfig(), description="Who plays the role that is not trained."
    )
    certify: Literal["stop", "warn", "only"] = Field(
        default="stop",
        description="What to do if isolation, credit or loss fail the measurement at the start. "
        "stop: the run ends. warn: it continues, for comparisons. only: nothing is trained in any "
        "case.",
    )
    records: str = Field(
        default="runs/selfplay", description="Folder that gets games.jsonl and metrics.jsonl."
    )
    alarms: Alarms = Field(
        default=Alarms(), description="When a number of a step becomes a health alarm."
    )
    on_alarm: Literal["warn", "stop"] = Field(
        default="warn",
        description="warn: print and log alarms. stop: also end the run, after the step is saved.",
    )
    best_by: str | None = Field(
        default=None,
        description="Validation measure of the best checkpoint, which is kept with the newest ones "
        "(val-core/DATA_SET/MEASURE, the mean of several data sets); null: none.",
    )
    stop_after_evaluations: int | None = Field(
        default=None,
        ge=1,
        description="End the run when the best validation is this many validations old; null: "
        "never.",
    )

    def trains(self, role: str) -> bool:
        """Return whether the loss sees the tokens of ``role``."""
        return self.train in ("both", role)

    def who_trains(self, roles: Sequence[str]) -> str | None:
        """Say who trains against whom; None if both roles train."""
        if self.train == "both":
            return None
        others = " and ".join(role for role in roles if role != self.train)
        by = "the policy that is trained"
        if self.opponent.frozen:
            by = f"the frozen {self.opponent.model} at {self.opponent.url}"
        return f"only the {self.train} is trained; the {others} is played by {by}"

    def plays(self, role: str) -> bool:
        """Return whether the policy plays ``role``; otherwise an opponent does."""
        return not self.opponent.frozen or self.trains(role)

    def anchors(self, done: float = 0.0) -> dict[str, float]:
        """Coefficients by role when this share of the run is ``done``."""
        factor = 1 + (self.anchor_end - 1) * done
        return {role: value * factor for role, value in self.anchor.items() if value}

    def problems(self) -> Iterator[str]:
        """Yield problems that involve several keys; each begins with the key."""
        return iter(())

    @classmethod
    def from_run(cls: type[C], config: DictConfig) -> C:
        """Read the ``selfplay`` node of a run's config; a ConfigError names each wrong key."""
        node = OmegaConf.select(config, "selfplay")
        if node is None:
            raise ConfigError("no 'selfplay' node: start from a recipe, e.g. +recipes=quickstart")
        values: Any = OmegaConf.to_container(node, resolve=True)
        name = values.get("game")
        if name == "???":
            raise ConfigError("selfplay.game is not set: name it, or take a recipe that does")
        game = game_class(name or DEFAULT_GAME)
        if not issubclass(game.Config, cls):
            raise ConfigError(f"selfplay.game={name} is not the game that this command is for")
        try:
            parsed: C = game.Config.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(e, game.Config) for e in error.errors())) from None
        refuse([*_against_the_game(parsed, game), *parsed.problems()])
        return parsed


def game_class(name: str) -> type[Any]:
    """The ``Interaction`` called ``name``, or a user's ``package.module:Class``; ConfigError if
    there is none.
    """
    expected = "package.module:Class, a subclass of medserl_agentloop.core.interaction.Interaction"
    try:
        game: type[Any] = find_object(
            "game", name, GAMES, expected, lambda found: hasattr(found, "next_turn")
        )
    except ValueError as error:
        raise ConfigError(f"selfplay.game: {error}") from None
    return game


def _against_the_game(config: SelfPlayConfig, game: type[Any]) -> Iterator[str]:
    """Yield entries for roles or alarms that the game lacks, and a choice that trains no role."""
    weights = config.credit.role_weights
    if config.train not in ("both", *game.roles):
        yield f"selfplay.train={config.train!r}: expected both, or one of {', '.join(game.roles)}"
    elif not any(weights.get(role, 1.0) for role in game.roles if config.trains(role)):
        yield (
            "selfplay.credit.role_weights: every role that is trained has weight 0, so nothing "
            "would be learned. Set one of them above 0, or selfplay.train to the other role."
        )
    if config.stop_after_evaluations and not config.best_by:
        yield "selfplay.stop_after_evaluations needs a measure: set selfplay.best_by."
    credit, roles = config.credit, game.roles
    alarms = [rule.name for rule in game.View.rules(roles)]
    for key, named, known in (
        ("anchor", config.anchor, roles),
        ("credit.role_weights", weights, roles),
        ("credit.normalize", credit.normalize, roles),
        ("alarms.limits", config.alarms.limits, alarms),
    ):
        for name in set(named) - set(known):
            yield _no_key(f"{key}.{name}", known)


def key_values(option: str, fields: Sequence[str]) -> dict[str, Any]:
    """Parse the KEY=VALUE of an option; a ValueError names the option and the wrong field."""
    found = OmegaConf.create()
    for field in fields:
        try:
            if field.find("=") < 1:
                raise ValueError("no KEY or no =")
            found.merge_with_dotlist([field])
        except Exception as error:  # YAML and OmegaConf raise their own errors
            raise ValueError(
                f"{option} {field}: expected KEY=VALUE, with the value as in YAML ({error})"
            ) from None
    values: Any = OmegaConf.to_container(found)
    return dict(values)


def selfplay_config(config_class: type[C], named: dict[str, Any], settings: list[str]) -> C:
    """The ``selfplay`` node of a command, from its options and ``--set KEY=VALUE``; ValueError if
    wrong.
    """
    node = OmegaConf.merge(named, key_values("--set", settings))
    return config_class.from_run(OmegaConf.create({"selfplay": node}))


def _explain(error: Any, model: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        about = model.model_fields[key].description
        where = f"Append selfplay.{key}=VALUE to a run, or --{key} VALUE to a command."
        return f"selfplay.{key} is not set. {where} {about}"
    if error["type"] != "extra_forbidden":
        return f"selfplay.{key}={error['input']!r}: {error['msg']}"
    for part in error["loc"][:-1]:
        model = get_args(model)[0] if isinstance(part, int) else model.model_fields[part].annotation
    return _no_key(key, model.model_fields)


def _no_key(key: str, known: Collection[str]) -> str:
    likest = did_you_mean(key.rpartition(".")[2], known)
    return f"selfplay.{key} is not a key of this node{likest}; it has {', '.join(sorted(known))}"
