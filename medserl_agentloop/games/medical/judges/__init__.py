"""Judges: they decide whether the presented note contains an error. A user's own is named by its import path."""

from __future__ import annotations

import logging
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from medserl_agentloop.core.chat import BASE
from medserl_agentloop.core.client import (
    Answer,
    AnswerCache,
    BadAnswer,
    CircuitBreaker,
    ServerAddress,
    ServerOptions,
)
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.metrics import UNREAD_RATE
from medserl_agentloop.games.medical.records import (
    BELIEVES_THE_ROW,
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    UNKNOWABLE,
    Judgement,
    MedicalRecord,
    Reading,
)
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import find_object

if TYPE_CHECKING:
    from medserl_agentloop.core.base_model import BaseModelChat
    from medserl_agentloop.games.medical.config import MedicalConfig

logger = logging.getLogger(__name__)

JUDGES = {
    "labels": "medserl_agentloop.games.medical.judges:LabelJudge",
    "http": "medserl_agentloop.games.medical.judges.protocol:HttpJudge",
    "llm": "medserl_agentloop.games.medical.judges.llm:LlmJudge",
}
WHAT_IT_CANNOT_SEE = (  # said once by whoever plays games with it
    "judge labels: nobody reads the rewritten notes. A valid attack counts as having done what its row asks for, so "
    f"a harmless edit is paid as an error, and the assessor that sees through it is punished ({UNREAD_RATE} in "
    "metrics.jsonl is the share of such notes). docs/judges.md has judges that read."
)
Agreement = Literal["majority", "unanimous", "abstain"]


class JudgeServer(ServerOptions):
    """Where a judge's server is and how it is asked. All counts and limits hold per reward-loop worker.

    A game waits at most ``(retries + 1) * timeout_s`` and the pauses between the tries.
    """

    node: ClassVar[str] = "selfplay.judge_server"

    url: str | None = Field(
        default=None,
        description="http: the server that offers /judge. llm: the base of an OpenAI-compatible API, with its /v1; "
        "null is verl's own reward model; base is the policy's base model, on the rollout's engine "
        "(selfplay.adapters=per_role).",
    )
    model: str | None = Field(
        default=None, description="llm: name of the model; null is verl's own reward model, or the base model."
    )
    timeout_s: float = Field(default=30.0, gt=0, description="Seconds that one request may take, answer included.")
    batch_size: int = Field(default=16, ge=1, description="http: most games in one request.")
    batch_wait_ms: float = Field(default=20.0, ge=0, description="http: how long a game waits for others to join it.")
    cache: str | None = Field(
        default=None, description="Folder of answers given before, on a local disk; null keeps none."
    )
    breaker_failures: int = Field(
        default=5, ge=1, description="Requests lost in a row before the judge counts as down."
    )
    breaker_seconds: float = Field(
        default=30.0, ge=0, description="How long no request is made then; one trial follows."
    )
    votes: int = Field(
        default=1, ge=1, description="llm: times each model is asked; every second time the edited note comes first."
    )
    agreement: Agreement = Field(
        default="majority",
        description="llm: whose word counts where votes differ. majority: more than half of all. unanimous: all. "
        "abstain: those that decide, if they agree. The judge abstains otherwise.",
    )
    panel: list[ServerAddress] = Field(
        default=[],
        description="llm: further models that vote, e.g. [{model: b, url: ...}]; what one leaves out is as here.",
    )
    temperature: float = Field(default=0.0, ge=0, description="llm: sampling temperature; 0 is greedy.")
    max_tokens: int = Field(default=2048, ge=1, description="llm: tokens of an answer, reasoning included.")
    json_schema: bool = Field(default=True, description="llm: bind answers to the JSON schema, where the server can.")

    def breaker(self) -> CircuitBreaker:
        """Stops asking a judge that is down."""
        return CircuitBreaker(self.breaker_failures, self.breaker_seconds)

    def answers(self, kind: type[Answer]) -> AnswerCache[Answer]:
        """What was answered before, by kind."""
        return AnswerCache(self.cache, kind)

    def check_votes(self) -> None:
        """Refuse votes that all say the same; a ValueError says what to set."""
        if self.votes > 2 and not (self.temperature or "temperature" in self.extra_body):
            raise ValueError(
                f"{self.node}.votes={self.votes} asks one question more than once, and at temperature 0 the answer is "
                f"the same: set {self.node}.temperature, e.g. to 0.7, or at most two votes, one for each order of the "
                "notes."
            )

    def members(self) -> list[JudgeServer]:
        """The options of each model that votes: this one, and those of the panel."""
        return [self, *(self.model_copy(update=member.model_dump(exclude_none=True)) for member in self.panel)]


class BlindGate(ServerAddress):
    """Who has to find an injected error in the presented note alone, before the game counts.

    What is left out of the address is that of the judge's server.
    """

    node: ClassVar[str] = "selfplay.blind"

    readings: int = Field(default=0, ge=0, description="Times the presented note is read alone; 0 is no gate.")
    needed: int = Field(default=1, ge=1, description="Readings that must find the error where it is.")
    temperature: float = Field(default=0.7, ge=0, description="Sampling temperature of a reading.")

    @model_validator(mode="after")
    def _can_be_passed(self) -> BlindGate:
        if self.readings and self.needed > self.readings:
            raise ValueError(f"needed={self.needed} of readings={self.readings} can never be reached: lower it")
        if self.readings > 1 and self.temperature == 0:
            raise ValueError(f"readings={self.readings} at temperature=0 are all the same: raise it, e.g. to 0.7")
        return self

    def server(self, judge: JudgeServer) -> JudgeServer:
        """The reader's options: the judge's, with what differs."""
        own = self.model_dump(include={"url", "model", "api_key_env", "temperature"}, exclude_none=True)
        return judge.model_copy(update={**own, "votes": 1, "panel": []})


class Judge(Protocol):
    """Says whether the presented note of a game is harmful.

    A class with a class method ``from_config(config: MedicalConfig)`` is built by it, any other without arguments. An
    instance serves one process and must not bind to an event loop before it is asked.
    """

    name: str

    async def judge(self, record: MedicalRecord) -> Judgement:
        """Judge ``record.presented_note``. An exception voids the game, it never ends the run."""
        ...


class LabelJudge:
    """Trusts the row: every presented note has its target label, so a harmless edit passes as an error."""

    name = BELIEVES_THE_ROW

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=record.spec.target_label)


class Reader(Protocol):
    """Reads the presented note of a game alone and says whether it finds the error."""

    async def read(self, record: MedicalRecord) -> list[Reading]:
        """The readings of ``record.presented_note``."""
        ...


class GatedJudge:
    """A judge that is asked about rewritten notes only: the labels of untouched notes come from the data.

    With a ``reader``, its word on an injected error counts only if the reader of the note alone finds it too, in
    ``needed`` readings.
    """

    def __init__(self, judge: Judge, reader: Reader | None = None, needed: int = 1) -> None:
        self.name = judge.name
        self._judge, self._reader, self._needed = judge, reader, needed

    async def judge(self, record: MedicalRecord) -> Judgement:
        if not record.category.has_attack:
            return await LabelJudge().judge(record)
        said = await self._judge.judge(record)
        injected = record.spec.target_label is said.label is Label.HARMFUL
        if self._reader is None or not injected:
            return said
        readings = await self._reader.read(record)
        found, lost = (sum(r.found is True for r in readings), [r.failed for r in readings if r.failed is not None])
        if found < self._needed <= found + len(lost):
            raise BadAnswer(f"{len(lost)} of {len(readings)} readings were lost: {lost[0]}")
        return said.model_copy(update={"readings": readings, "knowable": found >= self._needed})


def judge_class(name: str) -> Any:
    """The class of the judge called ``name``; a ValueError says why there is none."""
    expected = "package.module:Class of a class with a method 'async def judge(self, record) -> Judgement'"
    return find_object(
        "judge", name, JUDGES, expected, lambda found: iscoroutinefunction(getattr(found, "judge", None))
    )


def build_judge(
    config: MedicalConfig,
    reward_router_address: str | None = None,
    reward_model: str | None = None,
    base: BaseModelChat | None = None,
) -> Judge:
    """The judge of a ``selfplay`` node, behind its gate; a ValueError says what it lacks.

    Where ``judge_server`` names no ``url``, the reward model is asked that verl serves at ``host:port``, by its name.
    Only a run has a ``base`` model to ask.
    """
    if config.asks_base and base is None:
        raise ValueError(
            f"selfplay.judge_server.url={BASE}: the base model answers in a run only, on its own engine. Serve the "
            "model that the run starts from, and give the server's address."
        )
    server = config.judge_server
    if server.url is None and reward_router_address is not None:
        at_router = {"url": f"http://{reward_router_address}/v1", "model": server.model or reward_model}
        config = config.model_copy(update={"judge_server": server.model_copy(update=at_router)})
    found = judge_class(config.judge)
    asked = {"base": base} if config.asks_base and config.judge == "llm" else {}
    judge = found.from_config(config, **asked) if hasattr(found, "from_config") else found()
    if not config.blind.readings:
        return GatedJudge(judge)
    from medserl_agentloop.games.medical.judges.llm import BlindReader

    return GatedJudge(judge, BlindReader.from_config(config, base), config.blind.needed)


async def judge_game(judge: Judge, record: MedicalRecord) -> None:
    """Put the judge's word into ``record``; a failure or an abstention makes the game void.

    A game that has nothing to judge (void, or an invalid attack) is left alone.
    """
    if record.void is not None or record.assessment is None:
        return
    try:
        record.judgement = await judge.judge(record)
    except Exception as error:
        # An outage of the judge must cost its games, not the run, and must not invent a result.
        reason = one_line(f"{type(error).__name__}: {error}")[:300]
        record.void = f"{JUDGE_FAILED}: {reason}"
        logger.warning("judge %s gave no answer, the game is void: %s", judge.name, reason)
        return
    if record.judgement.label is None:
        record.void = JUDGE_ABSTAINED
    elif record.judgement.knowable is False:
        found = sum(reading.found is True for reading in record.judgement.readings)
        record.void = f"{UNKNOWABLE}: found in {found} of {len(record.judgement.readings)} readings of the note alone"
