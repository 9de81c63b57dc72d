"""A model behind an OpenAI-compatible chat server (SGLang, vLLM, ...) as a player."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from medserl_agentloop.core.chat import ChatClient
from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, Refused
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.play.driver import NoReplyError, Reply


@dataclass(frozen=True)
class EndpointOptions:
    """How a server is asked.

    Attributes:
        url: Base of the API; ``/v1`` is added where it has no path. May hold a user name and a password.
        model: Name of the served model.
        api_key: Sent as a bearer token; None sends none.
        max_tokens: Most tokens of one turn.
        temperature: Sampling temperature.
        seed: Makes every turn's sampling seed, together with role and note.
        timeout_s: Seconds that one request may take.
        tries: Requests for one turn before the game is void.
        concurrency: Most requests in flight.
        backoff_s: First pause between two tries; it doubles up to 20 seconds.
        template_kwargs: Arguments of the server's chat template, e.g. ``{"enable_thinking": False}``.
    """

    url: str = field(repr=False)
    model: str
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 4096
    temperature: float = 1.0
    seed: int = 0
    timeout_s: float = 300.0
    tries: int = 4
    concurrency: int = 16
    backoff_s: float = 0.5
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The API's base without a slash at its end."""
        url = self.url.rstrip("/")
        return url if urlsplit(url).path.strip("/") else f"{url}/v1"


def api_key_in(variable: str | None) -> str | None:
    """The API key that an environment variable holds; None where no variable is named.

    Raises:
        ValueError: It is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        # The name is not repeated: it may be a key by mistake.
        raise ValueError("--api-key-env names an environment variable that is not set; it wants the name, not the key")
    return key


class EndpointPlayer:
    """Asks a served model for its turns.

    Args:
        options: The server and the sampling.
        profile: Prompt profile of the turns.
    """

    def __init__(self, options: EndpointOptions, profile: PromptProfile) -> None:
        self.name, self.template_kwargs = options.model, options.template_kwargs
        self.parser = profile.parser
        self._options = options
        self.profile = profile
        self._http = HttpClient(
            options.base,
            key=options.api_key,
            timeout_s=options.timeout_s,
            tries=options.tries,
            concurrency=options.concurrency,
            backoff_s=options.backoff_s,
        )
        self._chat = ChatClient(self._http, options.model)
        self.url = self._http.url
        """The API's base, without credentials."""

    async def check(self) -> None:
        """Ask the server for its models, so that a wrong address or name shows before the first game.

        Raises:
            ValueError: The server does not answer, or serves other models.
        """
        url = f"{self._http.url}/models"
        try:
            served = [str(model["id"]) for model in (await self._http.get("/models"))["data"]]
        except Refused as refusal:
            if refusal.status not in (401, 403):
                return  # not every server lists its models
            raise ValueError(
                f"{url} answers {refusal.status}; name the environment variable of the API key with --api-key-env"
            ) from None
        except (BadAnswer, KeyError, TypeError):
            return
        except NoAnswer as error:
            raise ValueError(
                f"no server answers at {url} ({error}); give the base of an OpenAI-compatible API"
            ) from None
        if served and self.name not in served:
            raise ValueError(f"{url} does not list the model {self.name!r}; --model is one of {', '.join(served)}")

    async def reply(self, role: Role, category: Category, note: str, sample: int = 0) -> Reply:
        """Take a turn; see :class:`play.driver.Player`. Other samples of the same turn have seeds of their own."""
        options, prefix = self._options, self.profile.settings.assistant_prefix
        of = f"{options.seed}/{role.value}/{note}" + (f"/{sample}" if sample else "")
        fields = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            # Of role and note and not of the order of the requests, which differs from run to run.
            "seed": zlib.crc32(of.encode(errors="replace")) >> 1,
            "chat_template_kwargs": options.template_kwargs or None,
        }
        try:
            answer = await self._chat.complete(self.profile.messages(role, category, note), fields, prefix)
        except NoAnswer as error:
            raise NoReplyError(str(error)) from None
        return Reply(answer.text, tokens=answer.tokens, truncated=answer.truncated, prefill=prefix)

    async def aclose(self) -> None:
        """Close the connections; of use to ``contextlib.aclosing``."""
        await self._http.aclose()
