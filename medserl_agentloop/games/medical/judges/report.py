"""What a run must know of its judge before it starts: what ``medserl judge calibrate`` measured, and whether it can be
asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from medserl_agentloop.core.chat import BASE, PATH, TEMPLATE_KWARGS
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused, blocking
from medserl_agentloop.core.metrics import wilson_interval
from medserl_agentloop.games.medical.judges import JudgeServer
from medserl_agentloop.games.medical.judges.llm import judge_template
from medserl_agentloop.games.medical.rewards import LEAST_INFORMATION, ErrorRates, corrected, load_scheme
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import replacing

if TYPE_CHECKING:
    from medserl_agentloop.core.run_check.run import Run
    from medserl_agentloop.games.medical.config import MedicalConfig

_NODE = JudgeServer.node
_CHANGES_ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("model", "extra_body", "votes", "agreement", "temperature", "max_tokens", "json_schema"), True),
    "panel": {"__all__": {"model"}},
}
_WITHOUT_OPTIONS = ("labels", "http")  # of an http judge, all that matters is on its server
_PROBES = {"http": ("/judge", "/health"), "llm": (PATH, "/models")}  # the path that is asked, one that answers at once
_SERVED_BY = ("sglang", "vllm", "trtllm")  # rollouts of verl's whose servers speak the OpenAI protocol


class Kind(str, Enum):
    """Kinds of edits whose truth is known."""

    HARMFUL = "harmful"
    REPAIRED = "repaired"
    HARMLESS = "harmless"
    DRESSED = "dressed"

    @property
    def truth(self) -> Label:
        """What a note is after such an edit."""
        return Label.HARMFUL if self is Kind.HARMFUL else Label.SAFE


class Share(BaseModel):
    """A counted share: for ``hits`` of ``items`` it holds. Rate and interval are written for readers, and not read."""

    model_config = ConfigDict(frozen=True)

    hits: int = Field(ge=0)
    items: int = Field(ge=0)

    @computed_field
    def rate(self) -> float | None:
        """The share, 0 to 1; None without items."""
        return round(self.hits / self.items, 4) if self.items else None

    @computed_field
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of it."""
        low, high = wilson_interval(self.hits, self.items)
        return round(low, 4), round(high, 4)

    def __str__(self) -> str:
        if not self.items:
            return "none"
        low, high = wilson_interval(self.hits, self.items)
        return f"{100 * self.hits / self.items:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Group(_Part):
    """What a judge said of edits of one kind, or of one sort among them: the rule, or the type of the error.

    ``right`` is a share of the edits that it answered about, the others are shares of all edits.
    """

    kind: Kind
    sort: str | None
    right: Share
    abstained: Share
    failed: Share


class NoteKind(str, Enum):
    """Kinds of notes that a blind reader is shown: a real error, no error, or a change that nobody can see."""

    ERROR = "error"
    CLEAN = "clean"
    UNKNOWABLE = "unknowable"


class BlindGroup(_Part):
    """What a reader of the note alone said of notes of one kind, or of one sort among them.

    ``found`` is a share of the readings: where there is something to find, and anywhere in a clean note. ``passed`` is
    the share of the notes in which enough readings found it.
    """

    kind: NoteKind
    sort: str | None
    found: Share
    passed: Share
    abstained: Share
    failed: Share


class Seconds(_Part):
    """Seconds per game, answers from a cache left out: the mean and its 95 % interval by the normal distribution.

    The ``total`` is that of the whole calibration, which asked about so many games ``at_once``.
    """

    mean: float | None
    interval: tuple[float, float] | None
    total: float
    at_once: int


class JudgeReport(_Part):
    """One calibration.

    Attributes:
        judge: Which judge it was, as :func:`judge_identity` has it.
        sources: Names and SHA-256 of the files that the notes are from.
        limit: Most edits of each kind; None for all.
        sensitivity: Of the answers about notes with an error, ``harmful``.
        specificity: Of the answers about notes without one, ``safe``.
        position_bias: Of the games that a model of the judge's was asked about in both orders of the two notes, those
            in which it said something else; None if there were none.
        asked: Questions that it took, those of several votes each for itself, answers from a cache left out.
        cached: Games whose answer came from the judge's cache.
        blind: What its blind reader said, if it has one.
    """

    schema_version: int = Field(default=1, ge=1, le=1)
    judge: dict[str, Any]
    sources: dict[str, str]
    limit: int | None
    seed: int
    sensitivity: Share
    specificity: Share
    abstained: Share
    failed: Share
    position_bias: Share | None
    groups: tuple[Group, ...]
    asked: int
    cached: int
    seconds: Seconds
    blind: tuple[BlindGroup, ...] = ()

    @property
    def rates(self) -> ErrorRates | None:
        """Sensitivity and specificity as they were measured; None if one of them was not."""
        right, safe = self.sensitivity, self.specificity
        if not right.items or not safe.items:
            return None
        return ErrorRates(right.hits / right.items, safe.hits / safe.items)


def write_report(report: JudgeReport, path: Path) -> None:
    """Write a report as JSON, whole or not at all."""
    with replacing(path) as file:
        file.write(report.model_dump_json(indent=1).encode() + b"\n")


def read_report(path: str | Path) -> JudgeReport:
    """A report that :func:`write_report` wrote; a ValueError says that there is none in the file."""
    try:
        return JudgeReport.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"{path}: not a report of medserl judge calibrate ({where}: {first['msg']})") from None


def judge_identity(config: MedicalConfig, served: str | None = None) -> dict[str, Any]:
    """What makes a run's judge the judge that it is: its name, model, wording, options.

    ``served`` is the model that is asked where ``judge_server`` names none: verl's reward model, or the base model.
    """
    identity: dict[str, Any] = {"judge": config.judge}
    if config.judge in _WITHOUT_OPTIONS:
        return identity
    identity |= config.judge_server.model_dump(mode="json", include=_CHANGES_ANSWERS)
    if config.judge_server.url in (None, BASE) and config.judge_server.model is None:
        identity["model"] = served
    if config.judge == "llm":
        identity["wording"] = hashlib.sha256(judge_template(config.profile).encode()).hexdigest()[:12]
    return identity


def judge_problems(run: Run) -> Iterator[str]:
    """What keeps a run's judge from being asked or trusted, a sentence with the key to set for each."""
    selfplay: Any = run.selfplay
    reward_model = run.config.reward.reward_model
    try:
        yield from _server_problems(selfplay, served=reward_model.enable)
        served = reward_model.model_path if reward_model.enable else None
        if selfplay.judge_server.url == BASE:
            served = run.config.actor_rollout_ref.model.path
        yield from _report_problems(selfplay, served)
    except ValueError as error:
        yield str(error)
    if reward_model.enable:
        yield from _reward_model_problems(run, bound=selfplay.judge == "llm" and selfplay.judge_server.json_schema)


def _server_problems(selfplay: MedicalConfig, served: bool) -> Iterator[str]:
    """``served`` is whether verl serves a reward model."""
    server = selfplay.judge_server
    if selfplay.judge == "http" and server.url is None:
        yield (
            "selfplay.judge=http needs a server: set selfplay.judge_server.url, e.g. http://localhost:8001 "
            "('medserl judge serve' starts one)."
        )
    if selfplay.judge == "llm" and server.url is None and not served:
        yield (
            f"selfplay.judge=llm needs a model that reads the notes: set {_NODE}.url to the base of an "
            f"OpenAI-compatible API, e.g. http://localhost:30000/v1, and {_NODE}.model; or let verl serve one on GPUs "
            "of its own with reward.reward_model.enable=True and reward.reward_model.enable_resource_pool=True. "
            "docs/judges.md has the commands."
        )
    if selfplay.asks_base and selfplay.adapters != "per_role":
        yield (
            f"{_NODE}.url={BASE} asks the base model, which the engine has only beside adapters: set "
            "selfplay.adapters=per_role and actor_rollout_ref.model.lora_rank, or give the address of a server."
        )
    if selfplay.asks_base and server.json_schema:
        yield (
            f"{_NODE}.url={BASE} with {_NODE}.json_schema=True: verl starts the engine without a tokenizer, so it "
            "cannot bind answers to a schema. Set it to False."
        )
    if selfplay.asks_base and (unknown := sorted(server.extra_body.keys() - {TEMPLATE_KWARGS})):
        yield f"{_NODE}.extra_body.{unknown[0]}: the base model knows {TEMPLATE_KWARGS} only. Take it out."
    if selfplay.judge == "llm" and any(m.url not in (None, BASE) and not m.model for m in server.members()):
        yield f"selfplay.judge=llm needs {_NODE}.model: the name the server knows its model by."
    # The http judge's server does not answer chat requests.
    reader = selfplay.blind.server(server) if selfplay.judge == "llm" else selfplay.blind
    readable = reader.model or reader.url == BASE if reader.url else served and selfplay.judge == "llm"
    if selfplay.blind.readings and not readable:
        yield (
            "selfplay.blind.readings needs a model that reads the note alone: set selfplay.blind.url and "
            "selfplay.blind.model (with selfplay.judge=llm, those of selfplay.judge_server are used), or "
            "selfplay.blind.readings=0."
        )
    for address in (*server.members(), selfplay.blind):
        if address.url not in (None, BASE):
            address.check_address()
        address.api_key()
    server.check_votes()


def _report_problems(selfplay: MedicalConfig, served: str | None) -> Iterator[str]:
    if selfplay.judge_report is None:
        if selfplay.correct_judge:
            yield (
                "selfplay.correct_judge=True needs the judge's error rates: write them with 'medserl judge calibrate' "
                "and name the file in selfplay.judge_report."
            )
        return
    found, least = f"selfplay.judge_report={selfplay.judge_report}", selfplay.judge_min_sensitivity
    try:
        report = read_report(selfplay.judge_report)
    except ValueError as error:
        yield f"selfplay.judge_report={error}"
        return
    identity = judge_identity(selfplay, served)
    others = [
        f"{name} is {json.dumps(report.judge.get(name))} there and {json.dumps(identity.get(name))} in this run"
        for name in {**report.judge, **identity}
        if report.judge.get(name) != identity.get(name)
    ]
    if selfplay.correct_judge:
        yield from _correction_problems(selfplay, report)
    right, safe = report.sensitivity, report.specificity
    waived = "or set selfplay.judge_min_sensitivity=0 to go on all the same."
    if least == 0:
        return
    if others:
        yield (
            f"{found} is of another judge: {'; '.join(others)}. Measure this run's with 'medserl judge calibrate', "
            f"{waived}"
        )
    elif not right.items or right.hits < least * right.items:
        yield (
            f"{found}: the judge's sensitivity is {right}, and selfplay.judge_min_sensitivity is {least:g}. Each error "
            f"that it misses punishes the player who was right. Use another judge, {waived}"
        )
    elif report.rates is not None and report.rates.information < LEAST_INFORMATION:
        yield (
            f"{found}: the judge's sensitivity is {right} and its specificity {safe}: it says nearly the same of right "
            f"and of wrong notes, so games are won and lost by chance. Use another judge, {waived}"
        )


def _correction_problems(selfplay: MedicalConfig, report: JudgeReport) -> Iterator[str]:
    if report.rates is None:
        yield (
            f"selfplay.correct_judge=True: {selfplay.judge_report} has no sensitivity or no specificity; measure the "
            "judge on a file with pairs."
        )
        return
    try:
        corrected(load_scheme(selfplay.reward), report.rates)
    except ValueError as error:
        yield f"selfplay.correct_judge=True: {error}. Use a better judge, or set it to false."


def _reward_model_problems(run: Run, bound: bool) -> Iterator[str]:
    """Settings with which the model that verl serves is never asked; verl says so once the policy is loaded, or never.

    ``bound`` is whether answers are bound to a JSON schema.
    """
    node, rollout = "reward.reward_model", "reward.reward_model.rollout"
    wrong_and_right = (
        # verl/experimental/reward_loop/reward_loop.py, reward_loop_worker_handles: a model on the trainer's GPUs wakes
        # when all games of a step are over, too late to judge one.
        (f"{node}.enable_resource_pool", False, "True"),
        # The same file, compute_score: without a function, verl scores with the model's own head and asks no judge.
        ("reward.custom_reward_function.path", None, "pkg://medserl_agentloop.core.reward_manager (the function that "
         "reward.custom_reward_function.name=PerTurnRewardManager names in it is not called)"),
        (f"{node}.model_path", None, "the folder or the Hugging Face name of the model"),
        # verl/experimental/reward_loop/reward_model.py puts the model to sleep; only compute_rm_score wakes it, and
        # that is called for a colocated model alone (trainer/ppo/v1/trainer_base.py, _compute_reward_colocate).
        (f"{rollout}.free_cache_engine", True, "False"),
    )  # fmt: skip
    for key, wrong, right in wrong_and_right:
        if run[key] == wrong:
            yield f"{node}.enable=True, and {key}={run[key]}: no game could be judged by that model. Set it to {right}."
    name = run[f"{rollout}.name"]
    if name not in _SERVED_BY:
        yield (
            f"{rollout}.name={name or '???'}: set it to the engine that serves the judge's model, "
            f"one of {', '.join(_SERVED_BY)}."
        )
    per_node, nodes = run[f"{node}.n_gpus_per_node"], run[f"{node}.nnodes"]
    tensor_parallel = run[f"{rollout}.tensor_model_parallel_size"]
    needed = tensor_parallel * run[f"{rollout}.data_parallel_size"] * run[f"{rollout}.pipeline_model_parallel_size"]
    if run[f"{node}.enable_resource_pool"] and per_node * nodes < needed:
        yield (
            f"{node}.n_gpus_per_node={per_node} and nnodes={nodes} are {per_node * nodes} GPUs, and one server takes "
            f"{needed} ({rollout}.tensor_model_parallel_size={tensor_parallel}). Give it more GPUs or a smaller size."
        )
    if name == "sglang" and bound and run[f"{rollout}.engine_kwargs.sglang.grammar_backend"] == "none":
        yield (
            f"{rollout}.engine_kwargs.sglang.grammar_backend=none: SGLang refuses answers bound to a JSON schema, and "
            "verl's router hides why. Set selfplay.judge_server.json_schema=False."
        )


def unreachable(judge: str, server: JudgeServer) -> str | None:
    """The first of the judge's servers that cannot be asked now, and why; None if all can, or none is ours to ask."""
    for member in server.members() if judge in _PROBES else ():
        if member.url in (None, BASE):
            continue
        asked, probed = _PROBES[judge]
        client = member.client(asked, timeout_s=3.0)
        try:
            blocking(client.get(probed))
        except NoAnswer as error:
            # Not every server offers the probe, and some answer it in words of their own.
            if isinstance(error, BadAnswer) or (isinstance(error, Refused) and error.status not in (401, 403)):
                continue
            where = f"{client.url}{probed}: {error}"
            return f"the judge's server does not answer ({where}); games that it does not judge are void"
    return None


def judge_lines(selfplay: MedicalConfig) -> Iterator[str]:
    """What a run says once of its judge: that it does not answer yet, and how good it is."""
    if problem := unreachable(selfplay.judge, selfplay.judge_server):
        yield f"warning: {problem}"
    if selfplay.judge_report is not None:
        report = read_report(selfplay.judge_report)
        rewards = "; rewards are corrected for them" if selfplay.correct_judge else ""
        yield f"judge: sensitivity {report.sensitivity}, specificity {report.specificity}{rewards}"
    elif selfplay.judge != "labels":  # it reads no note
        yield (
            f"judge: selfplay.judge={selfplay.judge} was never measured, and rewards are as good as it is. Measure it "
            "with 'medserl judge calibrate' and name the report in selfplay.judge_report (docs/judges.md)"
        )
