"""What ``medserl judge calibrate`` found out about a judge, and which judge it was.

Written by ``evaluation.judge_calibration``; read by ``judges.startup`` and, to correct rewards, by the reward manager.
"""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from medserl_agentloop.games.medical.rewards import ErrorRates
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.intervals import wilson_interval
from medserl_agentloop.paths import replacing

if TYPE_CHECKING:
    from medserl_agentloop.games.medical.config import MedicalConfig

_HOW_IT_IS_REACHED = {
    "url", "api_key_env", "timeout_s", "retries", "backoff_s", "backoff_max_s", "concurrency", "batch_size",
    "batch_wait_ms", "cache", "breaker_failures", "breaker_seconds",
}  # fmt: skip
"""Options of ``judge_server`` that change no answer; any other makes another judge."""

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
    """A counted share with Wilson's 95 % interval. Rate and interval are written for readers, and read from the counts.

    Attributes:
        hits: For how many items it holds.
        items: How many there were.
    """

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
        """Its 95 % interval."""
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
    """What a judge said of edits of one kind, or of one sort among them.

    Attributes:
        kind: The kind.
        sort: The rule that made the edits, or the type of the error; None for all edits of the kind.
        right: Of the edits that it answered about, those it told the truth about.
        abstained: Of all edits, those it would not decide.
        failed: Of all edits, those it gave no answer about.
    """

    kind: Kind
    sort: str | None
    right: Share
    abstained: Share
    failed: Share


class Seconds(_Part):
    """How long an answer took, answers from a cache left out.

    Attributes:
        mean: Mean seconds per game; None if nothing was asked.
        interval: Its 95 % interval, by the normal distribution.
        total: Seconds of the whole calibration.
        at_once: Games that were asked about at the same time.
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
        seed: Of the choice of edits.
        sensitivity: Of the answers about notes with an error, ``harmful``.
        specificity: Of the answers about notes without one, ``safe``.
        abstained: Of all edits.
        failed: Of all edits.
        position_bias: Of the games that a model of the judge's was asked about in both orders of the two notes, those
            in which it said something else; None if there were none.
        groups: By kind, and within a kind by error type or rule.
        asked: Questions that it took, those of several votes each for itself, answers from a cache left out.
        cached: Games whose answer came from the judge's cache.
        seconds: How long the answers took.
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

    @property
    def rates(self) -> ErrorRates | None:
        """Sensitivity and specificity as they were measured; None if one of them was not."""
        right, safe = self.sensitivity, self.specificity
        if not right.items or not safe.items:
            return None
        return ErrorRates(right.hits / right.items, safe.hits / safe.items)


def write_report(report: JudgeReport, path: Path) -> None:
    """Write a report as JSON; whole or not at all.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(report.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def read_report(path: str | Path) -> JudgeReport:
    """A report that :func:`write_report` wrote.

    Raises:
        ValueError: There is no such file, or it holds something else.
    """
    try:
        return JudgeReport.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}: not a report of medserl judge calibrate ({where or 'file'}: {first['msg']})"
        ) from None


def judge_identity(config: MedicalConfig, reward_model: str | None = None) -> dict[str, Any]:
    """What of a run's configuration makes its judge the judge that it is: its name, model, wording and options.

    Args:
        config: The run's ``selfplay`` node.
        reward_model: The model that verl serves; used as in ``build_judge``.
    """
    identity: dict[str, Any] = {"judge": config.judge}
    if config.judge in _WITHOUT_OPTIONS:
        return identity
    server = config.judge_server
    identity |= _without_addresses(server.model_dump(mode="json"))
    if server.url is None and server.model is None:
        identity["model"] = reward_model
    if config.judge == "llm":
        from medserl_agentloop.games.medical.judges.llm import (
            judge_template,  # imports the config, which imports this module
        )

        identity["wording"] = hashlib.sha256(judge_template(config.profile).encode()).hexdigest()[:12]
    return identity


def _without_addresses(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a server, and of those in lists among them, that can change an answer."""
    return {
        name: [_without_addresses(v) if isinstance(v, dict) else v for v in value] if isinstance(value, list) else value
        for name, value in options.items()
        if name not in _HOW_IT_IS_REACHED
    }


def differences(measured: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Where two identities differ, in words."""
    return [
        f"{name} is {json.dumps(measured.get(name))} there and {json.dumps(run.get(name))} in this run"
        for name in {**measured, **run}
        if measured.get(name) != run.get(name)
    ]
