"""What ``medserl judge calibrate`` found out about a judge, and which judge it was. A run reads it."""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from medserl_agentloop.core.metrics import wilson_interval
from medserl_agentloop.games.medical.judges.question import judge_template
from medserl_agentloop.games.medical.rewards import ErrorRates
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import replacing

if TYPE_CHECKING:
    from medserl_agentloop.games.medical.config import MedicalConfig

_HOW_IT_IS_REACHED = {  # options of judge_server that change no answer; any other makes another judge
    "url", "api_key_env", "timeout_s", "retries", "backoff_s", "backoff_max_s", "concurrency", "batch_size",
    "batch_wait_ms", "cache", "breaker_failures", "breaker_seconds",
}  # fmt: skip
_WITHOUT_OPTIONS = ("labels", "http", "oracle")  # of an http judge, all that matters is on its server


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

    @model_validator(mode="after")
    def _counted(self) -> Share:
        if self.hits > self.items:
            raise ValueError(f"{self.hits} hits of {self.items} items")
        return self

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

    Attributes:
        right: Of the edits that it answered about, those it told the truth about.
        abstained: Of all edits, those it would not decide.
        failed: Of all edits, those it gave no answer about.
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

    Attributes:
        found: Of the readings, those that found something wrong where there is something to find; anywhere in a clean
            note.
        passed: Of the notes, those in which enough readings did.
        abstained: Of the readings, those that could not tell.
        failed: Of all readings, those without an answer.
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
    """Write a report as JSON, whole or not at all; a ValueError says why it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(report.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


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


def judge_identity(config: MedicalConfig, reward_model: str | None = None) -> dict[str, Any]:
    """What makes a run's judge the judge that it is: its name, model, wording and options.

    The model that verl serves is used as in ``build_judge``.
    """
    identity: dict[str, Any] = {"judge": config.judge}
    if config.judge in _WITHOUT_OPTIONS:
        return identity
    server = config.judge_server
    identity |= _without_addresses(server.model_dump(mode="json"))
    if server.url is None and server.model is None:
        identity["model"] = reward_model
    if config.judge == "llm":
        identity["wording"] = hashlib.sha256(judge_template(config.profile).encode()).hexdigest()[:12]
    return identity


def _without_addresses(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a server, and of those of its panel, that can change an answer."""
    kept = {name: value for name, value in options.items() if name not in _HOW_IT_IS_REACHED}
    if "panel" in kept:
        kept["panel"] = [_without_addresses(member) for member in kept["panel"]]
    return kept


def differences(measured: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Where two identities differ, in words."""
    return [
        f"{name} is {json.dumps(measured.get(name))} there and {json.dumps(run.get(name))} in this run"
        for name in {**measured, **run}
        if measured.get(name) != run.get(name)
    ]
