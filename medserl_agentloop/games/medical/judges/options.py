"""The ``selfplay.judge_server`` node: how judges that ask a server reach it."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.client import CircuitBreaker, HttpClient

_NODE = "selfplay.judge_server"
Agreement = Literal["majority", "unanimous", "abstain"]


class PanelModel(BaseModel):
    """One more model that is asked; what is left out is as in ``judge_server``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(default=None, description="Base of its OpenAI-compatible API.")
    model: str | None = Field(default=None, description="Its name.")
    api_key_env: str | None = Field(default=None, description="Environment variable that holds its API key.")


class JudgeServer(BaseModel):
    """Where a judge's server is and how it is asked. All counts and limits hold per reward-loop worker.

    A game waits at most ``(retries + 1) * timeout_s`` and the pauses between the tries.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        default=None,
        description="http: the server that offers /judge. llm: the base of an OpenAI-compatible API, with its /v1; "
        "null is verl's own reward model.",
    )
    model: str | None = Field(default=None, description="llm: name of the model; null is verl's own reward model.")
    api_key_env: str | None = Field(
        default=None, description="Name of the environment variable that holds the API key; never the key itself."
    )
    timeout_s: float = Field(default=30.0, gt=0, description="Seconds that one request may take, answer included.")
    retries: int = Field(default=3, ge=0, description="Further tries after a lost connection, a time-out, 429 or 5xx.")
    backoff_s: float = Field(default=0.5, ge=0, description="First pause between tries; it doubles, with jitter.")
    backoff_max_s: float = Field(default=8.0, ge=0, description="Longest pause between two tries, in seconds.")
    concurrency: int = Field(default=16, ge=1, description="Requests in flight at once.")
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
    panel: list[PanelModel] = Field(
        default=[], description="llm: further models that vote, e.g. [{model: b, url: ...}]."
    )
    temperature: float = Field(default=0.0, ge=0, description="llm: sampling temperature; 0 is greedy.")
    max_tokens: int = Field(default=2048, ge=1, description="llm: tokens of an answer, reasoning included.")
    json_schema: bool = Field(default=True, description="llm: bind answers to the JSON schema, where the server can.")
    extra_body: dict[str, Any] = Field(
        default={}, description="llm: more fields of the request, e.g. chat_template_kwargs; null takes a field out."
    )

    def api_key(self) -> str | None:
        """The API key, from the environment.

        Raises:
            ValueError: The variable is not set. Its name is not repeated: it may be a key by mistake.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ValueError(
                "selfplay.judge_server.api_key_env names an environment variable that is not set. It wants the name "
                "of a variable, such as JUDGE_API_KEY, not the key; set that variable where the run starts."
            )
        return key

    def check_votes(self) -> None:
        """Refuse votes that all say the same.

        Raises:
            ValueError: Says what to set.
        """
        if self.votes > 2 and not (self.temperature or "temperature" in self.extra_body):
            raise ValueError(
                f"{_NODE}.votes={self.votes} asks one question more than once, and at temperature 0 the answer is the "
                f"same: set {_NODE}.temperature, e.g. to 0.7, or at most two votes, one for each order of the notes."
            )

    def members(self) -> list[JudgeServer]:
        """The options of each model that votes: this one, and those of the panel."""
        return [self, *(self.model_copy(update=member.model_dump(exclude_none=True)) for member in self.panel)]

    def client(self, path: str) -> HttpClient:
        """A client of the server.

        Args:
            path: Path of the requests, which ``url`` may end with.

        Raises:
            ValueError: The server has no usable address, or its API key is not in the environment.
        """
        if self.url is None:
            raise ValueError("selfplay.judge_server.url is not set")
        return HttpClient(
            self.url.rstrip("/").removesuffix(path),
            key=self.api_key(),
            timeout_s=self.timeout_s,
            tries=self.retries + 1,
            concurrency=self.concurrency,
            backoff_s=self.backoff_s,
            backoff_max_s=self.backoff_max_s,
            breaker=CircuitBreaker(self.breaker_failures, self.breaker_seconds),
        )
