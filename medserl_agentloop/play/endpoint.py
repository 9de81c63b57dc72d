"""A model behind an OpenAI-compatible chat server (SGLang, vLLM, ...) as a player."""

from __future__ import annotations

import zlib
from typing import Any

from pydantic import Field, field_validator

from medserl_agentloop.core.chat import PATH, ChatClient
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused, ServerOptions
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.play.driver import NoReplyError, Reply


class EndpointOptions(ServerOptions):
    """How a server is asked for turns. The address may hold a user name and a password."""

    url: str = Field(repr=False, description="Base of the API; /v1 is added where it has no path.")
    model: str = Field(description="Name of the served model.")
    max_tokens: int = Field(default=4096, description="Most tokens of one turn.")
    temperature: float = Field(default=1.0, description="Sampling temperature.")
    seed: int = Field(default=0, description="Makes every turn's sampling seed, together with role and note.")
    template_kwargs: dict[str, Any] = Field(default={}, description="Arguments of the server's chat template.")

    @field_validator("url")
    @classmethod
    def _with_a_path(cls, url: str) -> str:
        base = url.strip().rstrip("/")
        return base if "/" in base.partition("://")[2] else f"{base}/v1"


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
        self._chat = ChatClient(options.client(PATH))
        self._http = self._chat.http
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
