"""The report of ``medserl judge calibrate`` on a judge, and a run's checks of its judge."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from medserl_agentloop.core.chat import BASE, TEMPLATE_KWARGS
from medserl_agentloop.core.client import blocking
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.step_file import LATEST
from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.judges import JUDGES, build_judge, judge_class
from medserl_agentloop.games.medical.judges.llm import judge_template
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import LABELS_JUDGE
from medserl_agentloop.paths import regular_file, replacing
from medserl_agentloop.scoring.metrics import wilson_interval

_NODE = JudgeServer.node
_CHANGES_ANSWERS = {"model", "extra_body", "max_tokens", "json_schema"}
# Half of what a correct catch should earn is left (2 * 0.75 - 1); one at 0.73 spoiled earlier runs.
_LEAST_SENSITIVITY = 0.75
# Least sensitivity + specificity - 1: 1 if a judge is always right, 0 if it ignores the note.
_LEAST_INFORMATION = 0.2
_BEFORE, _AFTER = (f"He weighs 80 kg. He gets aspirin 100 {unit} a day." for unit in ("mg", "g"))


class CountedShare(BaseModel):
    """``hits`` of ``items``."""

    hits: int = Field(ge=0)
    items: int = Field(ge=0)

    @classmethod
    def of(cls, facts: Iterable[bool | None]) -> CountedShare:
        """Count the true ones of the facts that are not None."""
        known = [fact for fact in facts if fact is not None]
        return cls(hits=sum(known), items=len(known))

    @property
    def rate(self) -> float | None:
        return round(self.hits / self.items, 4) if self.items else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share."""
        low, high = wilson_interval(self.hits, self.items)
        return round(low, 4), round(high, 4)

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return "none" if self.rate is None else f"{100 * self.rate:.1f} % ({low:.1f} to {high:.1f})"


class JudgedGroup(BaseModel):
    """The answers about edits or notes of one kind, or of one rule or error type (``subgroup``)."""

    kind: str
    subgroup: str | None
    right: CountedShare  # of those with an answer; of injections, those that moved no verdict
    reaches: CountedShare | None = None  # those about which a run would ask
    abstained: CountedShare
    failed: CountedShare


class Measured(BaseModel):
    """Shares of right answers by a judge or a blind reader."""

    sensitivity: CountedShare  # of the answers about notes with an error, those that say so
    # Of the answers about safe notes that the rules let reach a judge, those that call them safe.
    specificity: CountedShare
    groups: tuple[JudgedGroup, ...]
    void: dict[str, int] = Field(default={}, exclude=True)  # why no answer, how often


class JudgeReport(Measured):
    """One calibration of a judge, and of the blind reader."""

    judge: dict[str, Any]  # as in judge_identity
    sources: dict[str, str]  # SHA-256 of the files that the notes are from, by name
    limit: int | None  # most edits of each kind; None for all
    reader: Measured | None = None


def write_report(report: JudgeReport, path: Path) -> None:
    with replacing(path) as file:
        file.write(report.model_dump_json(indent=1).encode() + b"\n")


def read_report(path: str | Path) -> JudgeReport:
    """Read a report of :func:`write_report`; ValueError for anything else."""
    try:
        return JudgeReport.model_validate_json(regular_file(Path(path)).read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"{path}: not a report of medserl judge calibrate ({error})") from None


def why_refused(report: JudgeReport) -> str | None:
    """Say why a run refuses a judge with this report; None if it accepts it."""
    right, safe = report.sensitivity, report.specificity
    if not right.items or right.hits < _LEAST_SENSITIVITY * right.items:
        least = f"{_LEAST_SENSITIVITY:.0%}"
        return f"the judge's sensitivity is {right}, but a run needs {least}. Use another judge"
    if not safe.items:
        return (
            "the judge's specificity is unknown, because no safe edit reached it. Measure it on "
            "more notes, or on pairs of notes"
        )
    if right.hits / right.items + safe.hits / safe.items - 1 < _LEAST_INFORMATION:
        return (
            f"the judge's sensitivity is {right} and its specificity {safe}: it says nearly the "
            "same about right and wrong notes. Use another judge"
        )
    return None


def judge_identity(config: MedicalConfig, served: str | None = None) -> dict[str, Any]:
    """The identity of a run's judge: its name, model, wording and options; ``served`` is verl's."""
    identity: dict[str, Any] = {"judge": config.judge}
    if config.judge in ("labels", "http"):  # http: all that matters is on its server
        return identity
    server = config.judge_server
    identity |= server.model_dump(mode="json", include=_CHANGES_ANSWERS)
    identity["model"] = server.model or served
    identity["json_schema"] &= server.url != BASE
    if config.judge == "llm":
        identity["wording"] = sha256(judge_template(config.profile).encode()).hexdigest()[:12]
    return identity


# -- a run's judge ---------------------------------------------------------------------------------


def judge_problems(run: Any) -> Iterator[str]:
    """Yield the reasons why the judge of a ``run_check.RunConfig`` cannot be asked or trusted."""
    selfplay, reward_model = run.selfplay, run.config.reward.reward_model
    served = reward_model.model_path if reward_model.enable else None
    try:
        load_profile(selfplay.profile)
        judge_class(selfplay.judge)
        if selfplay.asks_base:
            served = run.config.actor_rollout_ref.model.path
            yield from _base_problems(selfplay, served)
        else:
            yield from _server_problems(selfplay, served)
        if selfplay.judge_report is not None:
            yield from _report_problems(selfplay, served)
    except ValueError as error:
        yield str(error)


def _base_problems(selfplay: MedicalConfig, model: str) -> Iterator[str]:
    folder = Path(model).expanduser().absolute()
    if any((each / LATEST).exists() for each in (folder, *folder.parents[:3])):
        yield (
            f"{_NODE}.url={BASE}: {model} was trained, e.g. in a warm start, and would judge by "
            f"what it was taught. Serve the model before it, and set {_NODE}.url and .model"
        )
    if selfplay.adapters != "per_role":
        yield (
            f"{_NODE}.url={BASE} asks the base model, which the engine has only with adapters: "
            "set selfplay.adapters=per_role and actor_rollout_ref.model.lora_rank, or name a server"
        )
    for key in selfplay.judge_server.extra_body.keys() - {TEMPLATE_KWARGS}:
        yield f"{_NODE}.extra_body.{key}: the base model accepts only {TEMPLATE_KWARGS}. Remove it."


def _server_problems(selfplay: MedicalConfig, served: str | None) -> Iterator[str]:
    """``served`` is the model that verl serves, if any. Raises ValueError for other problems."""
    server, reads = selfplay.judge_server, selfplay.blind.readings > 0
    server.api_key()
    if server.url not in (None, BASE):
        server.check_address()
    if selfplay.judge == "http" and reads:
        yield "selfplay.judge=http offers no chat: set selfplay.blind.readings=0, or judge=llm."
    elif (selfplay.judge == "llm" or reads) and server.url is None and not served:
        yield (
            f"selfplay.{'judge=llm' if selfplay.judge == 'llm' else 'blind.readings'} needs a "
            f"model that reads the notes. Append {_NODE}.url=http://localhost:30000/v1 "
            f"{_NODE}.model=MODEL, with the address and the name of one that is served, or add the "
            "recipe judge_by_verl, which has verl serve one on an extra GPU (docs/judges.md)."
        )
    else:
        own = {} if selfplay.judge in JUDGES else {"judge": LABELS_JUDGE}  # a user's is not built
        build_judge(selfplay.model_copy(update=own), "localhost:1" if served else None, served)


def _report_problems(selfplay: MedicalConfig, served: str | None) -> Iterator[str]:
    try:
        report = read_report(str(selfplay.judge_report))
    except ValueError as error:
        yield f"selfplay.judge_report={error}"
        return
    others = [
        f"{name} is {json.dumps(report.judge.get(name))} there, but {json.dumps(value)} in this run"
        for name, value in judge_identity(selfplay, served).items()
        if report.judge.get(name) != value
    ]
    problem = f"it is of another judge: {'; '.join(others)}. Measure this run's" if others else None
    if problem := problem or why_refused(report):
        yield (
            f"selfplay.judge_report={selfplay.judge_report}: {problem}, or leave judge_report out "
            "to continue anyway."
        )


def unanswered(config: MedicalConfig) -> str:
    """Ask a first question; return why there is no answer, empty if there is one or no server."""
    if config.judge_server.url in (None, BASE):
        return ""
    server = config.judge_server.model_copy(update={"retries": 0, "cache": None})
    spec = GameSpec(Category.ADVERSARIAL_BENIGN, Label.HARMFUL, _BEFORE)
    try:
        judge = build_judge(config.model_copy(update={"judge_server": server}))
        if config.judge in ("http", "llm"):
            blocking(judge.judge(_AFTER, _BEFORE, spec))
        elif judge.reader is not None:
            return blocking(judge.reader.read(_AFTER, [_AFTER]))[0].failed or ""
    except Exception as error:  # as in a game, which it would make void
        return f"{type(error).__name__}: {error}"
    return ""


def judge_lines(selfplay: MedicalConfig) -> Iterator[str]:
    """Yield a run's lines about its judge: whether it answers, and how good it is."""
    reason = unanswered(selfplay)
    if "ConnectError" in reason or "ConnectTimeout" in reason:
        url = f"{_NODE}.url={selfplay.judge_server.url}"
        raise ConfigError(f"{url} cannot be connected to. Start the judge first ({reason})")
    if reason:
        yield f"warning: the judge does not answer, and games without its answer are void: {reason}"
    if selfplay.judge_report is not None:
        report = read_report(selfplay.judge_report)
        yield f"judge: sensitivity {report.sensitivity}, specificity {report.specificity}"
    elif not getattr(judge_class(selfplay.judge), "never_errs", False):
        yield (
            f"judge: selfplay.judge={selfplay.judge} was never measured, and rewards are only as "
            "good as it is. Name a report of 'medserl judge calibrate' in selfplay.judge_report"
        )
