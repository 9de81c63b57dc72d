"""The ``selfplay.judge_server`` node: how judges that ask a server reach it."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


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
    timeout_s: float = Field(default=30.0, gt=0, description="Seconds that one request may take.")
    retries: int = Field(default=3, ge=0, description="Further tries after a lost connection, a time-out, 429 or 5xx.")
    backoff_s: float = Field(default=0.5, ge=0, description="First pause between tries; it doubles, with jitter.")
    backoff_max_s: float = Field(default=8.0, ge=0, description="Longest pause between two tries, in seconds.")
    concurrency: int = Field(default=16, ge=1, description="Requests in flight at once.")
    batch_size: int = Field(default=16, ge=1, description="http: most games in one request.")
    batch_wait_ms: float = Field(default=20.0, ge=0, description="http: how long a game waits for others to join it.")
    cache: str | None = Field(default=None, description="Folder of answers to ask for once; null keeps none.")
    breaker_failures: int = Field(
        default=5, ge=1, description="Requests lost in a row before the judge counts as down."
    )
    breaker_seconds: float = Field(
        default=30.0, ge=0, description="How long no request is made then; one trial follows."
    )
    max_tokens: int = Field(default=2048, ge=1, description="llm: tokens of an answer, reasoning included.")
    json_schema: bool = Field(default=True, description="llm: ask for answers bound to the JSON schema.")
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
