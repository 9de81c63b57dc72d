"""Prompt profiles: Jinja templates that turn a note into a role's chat messages.

A profile is a folder ``<profile>/<role>/<template>.jinja``. Rendering is a single pass with
``StrictUndefined``: a note is a value, it is never itself read as a template.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.paths import resource

Message = dict[str, str]


class PromptProfile:
    """The templates of one profile. Use :func:`load_profile`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
