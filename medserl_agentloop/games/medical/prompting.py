"""Prompt profiles: Jinja templates that turn a note into a role's prompt, and their parser.

docs/prompts.md describes their folders. A note is a value, never read as a template.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.encoding import Message, place
from medserl_agentloop.core.interaction import Prompt, Turn
from medserl_agentloop.games.medical.case import Category, Role, checked_types, in_words
from medserl_agentloop.games.medical.edit import number_sentences, numbered_text
from medserl_agentloop.games.medical.parsing import load_parser
from medserl_agentloop.paths import resource

logger = logging.getLogger(__name__)


class _ProfileSettings(BaseModel):
    """The contents of ``profile.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="its keys")

    parser: str = Field(
        default="medserl", description="Name of the parser, or your own package.module:NAME."
    )
    assistant_prefix: str = Field(
        default="", description="How the prompt begins the player's turn, after the chat template."
    )
    stop: dict[Role, list[str]] = Field(
        default={}, description="By role, strings that also end its turn."
    )


class PromptProfile:
    """The templates and the parser of one profile; a ValueError names file and key."""

    def __init__(self, folder: Path, error_types: str | tuple[str, ...] | None = None) -> None:
        self.folder, self.error_types = folder, checked_types(error_types)
        file = folder / "profile.yaml"
        try:
            values = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
            self.settings = _ProfileSettings.model_validate(values)
            parser = self.settings.parser
            if ":" in parser:
                logger.warning("%s: %r imports a module, which may do anything", file, parser)
            self.parser = load_parser(parser, self.error_types)
        except Exception as error:  # a user's file and module may raise anything
            raise ValueError(f"prompt profile {file}: {error}") from error
        self._jinja = ImmutableSandboxedEnvironment(  # a profile may come from somebody else
            loader=FileSystemLoader(folder),
            undefined=StrictUndefined,
            autoescape=False,  # prompts are text, and escaping would change the note
        )
        self._jinja.filters |= {"one_of": _one_of, "in_words": in_words}

    def messages(self, role: Role, category: Category, note: str) -> list[Message]:
        """The messages that open ``role``'s context; a ValueError names a wrong template's line."""
        name = template_name(role, category)
        messages = [
            {"role": "user", "content": self._render(f"{role.value}/{name}.jinja", note=note)}
        ]
        systems = (f"{role.value}/{name}.system.jinja", f"{role.value}/system.jinja")
        for system in [file for file in systems if (self.folder / file).exists()][:1]:
            messages.insert(0, {"role": "system", "content": self._render(system)})
        return messages

    def templates(self) -> list[dict[str, Any]]:
        """Every template with a place for the note: ``role``, ``template`` and ``messages``."""
        categories = {(role, template_name(role, c)): c for role in Role for c in Category}
        templates = []
        for (role, name), category in categories.items():
            with suppress(ValueError):  # a profile may lack those that no row needs
                messages = self.messages(role, category, place("note"))
                templates.append({"role": role.value, "template": name, "messages": messages})
        return templates

    def shown(self, note: str, listed: Mapping[int, str]) -> str:
        """``note`` as players read it; ``listed`` are the source's own sentences."""
        return numbered_text(number_sentences(note, listed)) if self.parser.numbered else note

    def turn(self, role: Role, category: Category, note: str, max_tokens: int = 0) -> Turn:
        """Return the turn that the prompts open, with the note kept apart as untrusted text."""
        prompt = Prompt(tuple(self.messages(role, category, place("note"))), {"note": note})
        stop = tuple(self.settings.stop.get(role, ()))
        return Turn(
            role.value, prompt, max_tokens, prefix=self.settings.assistant_prefix, stop=stop
        )

    def _render(self, name: str, **values: str) -> str:
        try:
            return self._jinja.get_template(name).render(error_types=self.error_types, **values)
        except Exception as error:  # a user's template may raise anything
            where = str(self.folder / name)
            for frame in traceback.extract_tb(error.__traceback__):  # a template may include others
                if frame.filename.endswith(".jinja"):
                    where = f"{frame.filename}, line {frame.lineno}"
            allowed = "{{ note }} and {{ error_types }}" if values else "{{ error_types }}"
            raise ValueError(
                f"prompt template {where}: {error}. It may use {allowed}, and nothing else."
            ) from error


def _one_of(names: Iterable[str], before: str = "") -> str:
    """``the a, the b or the c``, with ``before`` in front of each."""
    *others, last = [f"{before}{name}" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def template_name(role: Role, category: Category) -> str:
    return "assess" if role is Role.ASSESSOR else category.value


@cache
def load_profile(
    name: str = "medserl", error_types: str | tuple[str, ...] | None = None
) -> PromptProfile:
    """A profile by name (a folder of ``prompts/``) or by a path, ``./mine``; else a ValueError."""
    # A bare name is never a folder of the working directory: it may have a profile's name.
    folder = Path(name) if "/" in name or name in (".", "..") else resource("prompts") / name
    if not name or not all((folder / role.value).is_dir() for role in Role):
        known = sorted(p.name for p in resource("prompts").iterdir() if p.is_dir())
        raise ValueError(
            f"no prompt profile {name!r}: expected one of {', '.join(known)} "
            "or the path of a folder with attacker/ and assessor/ templates"
        )
    return PromptProfile(folder, error_types)
