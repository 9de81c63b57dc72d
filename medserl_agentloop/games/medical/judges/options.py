"""The ``selfplay.judge_server`` node: how judges that ask a server reach it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from medserl_agentloop.core.client import CircuitBreaker, ServerAddress, ServerOptions

Agreement = Literal["majority", "unanimous", "abstain"]


class JudgeServer(ServerOptions):
    """Where a judge's server is and how it is asked. All counts and limits hold per reward-loop worker.

    A game waits at most ``(retries + 1) * timeout_s`` and the pauses between the tries.
    """

    node: ClassVar[str] = "selfplay.judge_server"

    url: str | None = Field(
        default=None,
        description="http: the server that offers /judge. llm: the base of an OpenAI-compatible API, with its /v1; "
        "null is verl's own reward model.",
    )
    model: str | None = Field(default=None, description="llm: name of the model; null is verl's own reward model.")
    timeout_s: float = Field(default=30.0, gt=0, description="Seconds that one request may take, answer included.")
    backoff_max_s: float = Field(default=8.0, ge=0, description="Longest pause between two tries, in seconds.")
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

    def check_votes(self) -> None:
        """Refuse votes that all say the same.

        Raises:
            ValueError: Says what to set.
        """
        if self.votes > 2 and not (self.temperature or "temperature" in self.extra_body):
            raise ValueError(
                f"{self.node}.votes={self.votes} asks one question more than once, and at temperature 0 the answer is "
                f"the same: set {self.node}.temperature, e.g. to 0.7, or at most two votes, one for each order of the "
                "notes."
            )

    def members(self) -> list[JudgeServer]:
        """The options of each model that votes: this one, and those of the panel."""
        return [self, *(self.model_copy(update=member.model_dump(exclude_none=True)) for member in self.panel)]
