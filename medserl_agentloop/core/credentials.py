"""What the HTTP client shows a server to be let in, and hides from everybody else."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

_SHORTEST_SECRET = 6  # Of shorter ones only whole credentials are looked for in answers: "none" is also a word.


class Credentials:
    """The address of a server, and the user name and password or the API key that it wants.

    Args:
        url: The server's address. A user name and a password in it are sent as basic authentication.
        key: API key, sent as a bearer token; with its scheme in front (``Basic ...``) it is sent as it is. It
            wins over what the address holds.

    Raises:
        ValueError: The address or the key cannot be used. The message repeats neither.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url.strip())
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            usable = usable and not parts.query and not parts.fragment
            httpx.URL(url.strip())
        except (ValueError, httpx.InvalidURL):
            usable = False
        if not usable:
            raise ValueError(
                "the address of the server cannot be used: expected http://host:port or https://host (signs of a "
                "password other than letters and digits are written in percent code)"
            )
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        value, user, password = (key or "").strip(), unquote(parts.username or ""), unquote(parts.password or "")
        if not value and (user or password):
            value = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"
        if value and not (value.isascii() and value.isprintable()):
            raise ValueError("the API key holds a character that no HTTP header can hold")
        value = value if not value or " " in value else f"Bearer {value}"
        self.headers = {"authorization": value} if value else {}
        # As they stand in the address, decoded, and as they travel: a server may repeat any of them.
        whole = {value, parts.netloc.rpartition("@")[0], f"{user}:{password}" if user else "", _decoded(value)}
        parted = {value.rpartition(" ")[2], password or user, parts.password or "", _decoded(value).partition(":")[2]}
        self._in_messages = _any_of(whole | parted)
        self._in_answers = _any_of(whole | {part for part in parted if len(part) >= _SHORTEST_SECRET})

    def taken_out_of(self, text: str) -> str:
        """A message without them."""
        return self._in_messages.sub("***", text)

    def taken_out_of_answer(self, answer: Any) -> Any:
        """An answer's JSON without them, and without the lone surrogates that no file or tokenizer takes."""
        if isinstance(answer, str):
            return self._in_answers.sub("***", answer).encode(errors="replace").decode()
        if isinstance(answer, list):
            return [self.taken_out_of_answer(item) for item in answer]
        if isinstance(answer, dict):
            clean = self.taken_out_of_answer
            return {clean(name): clean(value) for name, value in answer.items()}
        return answer


def _decoded(authorization: str) -> str:
    """``user:password`` of a header of basic authentication; nothing of another one."""
    scheme, _, value = authorization.partition(" ")
    try:
        return b64decode(value).decode() if scheme.lower() == "basic" else ""
    except ValueError:
        return ""


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Matches each of ``texts`` in any case, the longest first; nothing where there is none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)", re.IGNORECASE)
