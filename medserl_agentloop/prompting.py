"""Prompt profiles: Jinja templates that turn a note into a role's chat messages, and their parser.

A profile is a folder ``<profile>/<role>/<template>.jinja``; a ``profile.yaml`` in it names the
parser of the turns its templates ask for, where that is not the default one. Rendering is a single pass with
``StrictUndefined``: a note is a value, it is never itself read as a template.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medserl_agentloop.game.parsing import load_parser
from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.paths import resource

Message = dict[str, str]


class ProfileSettings(BaseModel):
    """What ``profile.yaml`` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parser: str = Field(default="medserl", description="Name of the parser, or package.module:NAME of a user's own.")


class PromptProfile:
    """The templates and the parser of one profile. Use :func:`load_profile`.

    Raises:
        ValueError: ``profile.yaml`` is wrong; names file and key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "profile.yaml"
        try:
            values = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
            self.settings = ProfileSettings.model_validate(values)
            self.parser = load_parser(self.settings.parser)
        except (OSError, ValidationError, ValueError) as error:
            raise ValueError(f"prompt profile {file}: {error}") from error
        self._jinja = Environment(
            loader=FileSystemLoader(folder),
            undefined=StrictUndefined,
            autoescape=False,  # prompts are text, and escaping would change the note
            keep_trailing_newline=False,
        )

    def messages(self, role: Role, category: Category, note: str) -> list[Message]:
        """The chat messages that open ``role``'s own context.

        The assessor's do not depend on the category: it must not learn it.

        Raises:
            ValueError: A template is missing or cannot be rendered; names the file and the reason.
        """
        name = f"attacker/{category.value}" if role is Role.ATTACKER else "assessor/assess"
        try:
            content = self._jinja.get_template(f"{name}.jinja").render(note=note)
        except Exception as error:  # a user's template may raise anything
            where = f"{self.folder / name}.jinja"
            line = getattr(error, "lineno", None)
            raise ValueError(
                f"prompt template {where}{f', line {line}' if line else ''}: {error}. "
                "A template may use {{ note }} and nothing else."
            ) from error
        return [{"role": "user", "content": content}]


@cache
def load_profile(name: str = "medserl") -> PromptProfile:
    """Load a profile by name (a folder of ``prompts/``) or by the path of a folder, e.g. ``./mine``.

    Raises:
        ValueError: There is no such folder; lists the profiles that exist.
    """
    # A bare name is never a folder of the working directory: one may be called like a profile.
    folder = Path(name) if "/" in name or name in (".", "..") else resource("prompts") / name
    if not name or not all((folder / role.value).is_dir() for role in Role):
        known = sorted(p.name for p in resource("prompts").iterdir() if p.is_dir())
        raise ValueError(
            f"no prompt profile {name!r}: expected one of {', '.join(known)} "
            "or the path of a folder with attacker/ and assessor/ templates"
        )
    return PromptProfile(folder)
