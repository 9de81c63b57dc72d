"""Write what is said of fields in other places, from the fields that define them.

``python docs/make_reference.py`` writes ``docs/configuration.md``, the ``selfplay`` node of ``recipes/core.yaml`` and
``recipes/medical.yaml``, and the columns of the frames in ``docs/report.md``. Tests compare them with the fields.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.report.frames import GAMES, SCORES, TURNS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
CORE, MEDICAL = ROOT / "recipes" / "core.yaml", ROOT / "recipes" / "medical.yaml"
BEGIN, END = "# selfplay: written by docs/make_reference.py\n", "# selfplay: end\n"
WIDTH = 120
RECORDS = "${trainer.default_local_dir}"  # the recipes put a run's files beside its checkpoints
MORE = {
    "profile": "prompts.md",
    "context": "how_it_works.md#contexts",
    "reward": "rewards.md",
    "assessments": "rewards.md#several-assessments-of-one-attack",
    "judge": "judges.md",
    "judge_server": "judges.md",
    "judge_report": "judges.md#how-good-is-a-judge",
    "opponent": "opponents.md",
    "certify": "how_it_works.md#the-certificate",
    "alarms": "metrics.md",
}
"""The page that says more of a key."""

INTRODUCTION = """# The `selfplay` node

All keys that this package adds to verl's config, with their defaults. Override them like any key of verl's:
`selfplay.edits.max_changed_words=12`. A wrong key or value stops the run at its start, with the right one in the
message. Everything else is verl's own configuration.

The first part is for every game, the second for the medical game. This page is written from the fields of
`SelfPlayConfig` and `MedicalConfig` by `python docs/make_reference.py`.
"""


def is_node(field: FieldInfo) -> bool:
    """Whether a field is a node with keys of its own."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def choices(annotation: Any) -> list[str]:
    """The words that a field takes, where these are all it takes."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    if get_origin(annotation) in (Union, UnionType):
        parts = [choices(part) if part is not type(None) else ["null"] for part in get_args(annotation)]
        return [word for part in parts for word in part] if all(parts) and parts != [["null"]] else []
    return []


def shown(value: Any) -> str:
    """A default as YAML has it on one line."""
    if isinstance(value, Enum):
        return str(value.value)
    return (
        value
        if isinstance(value, str) and value
        else json.dumps(value).replace('"', "")
        if isinstance(value, dict)
        else json.dumps(value)
    )


def entries(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field under a model with its dotted key, nodes before their own fields."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        if is_node(field):
            yield from entries(field.annotation, f"{path}{name}.")


def defaults(key: str, field: FieldInfo) -> str:
    """A field's default as YAML has it; none where it must be given."""
    if key == "records" or is_node(field):
        return RECORDS if key == "records" else ""
    return "???" if field.is_required() else shown(field.default)


def of_medical() -> list[tuple[str, FieldInfo]]:
    """Fields that the medical game adds to those of any game, or has another default for, with their nodes."""
    common = {key: (defaults(key, field), is_node(field)) for key, field in entries(SelfPlayConfig)}
    every = list(entries(MedicalConfig))
    own = [key for key, field in every if not is_node(field) and common.get(key, [""])[0] != defaults(key, field)]
    return [(key, field) for key, field in every if key in own or any(k.startswith(f"{key}.") for k in own)]


def page() -> str:
    """The text of ``docs/configuration.md``."""
    lines = [INTRODUCTION]
    for title, fields in (("Every game", list(entries(SelfPlayConfig))), ("The medical game", of_medical())):
        lines += [f"## {title}\n", "| key | default | meaning |", "|---|---|---|"]
        for key, field in fields:
            said = (field.description or "").replace("|", "\\|")
            words = choices(field.annotation)
            takes = f"`{'`, `'.join(words)}`. " if words and not all(word in said for word in words) else ""
            more = f" More: [{MORE[key].partition('#')[0]}]({MORE[key]})." if key in MORE else ""
            default = "" if is_node(field) else f"`{defaults(key, field)}`"
            lines.append(f"| `{key}` | {default} | {takes}{said}{more} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def node(fields: list[tuple[str, FieldInfo]]) -> str:
    """A ``selfplay`` node with these fields."""
    lines = ["selfplay:"]
    for key, field in fields:
        indent = "  " * (key.count(".") + 1)
        line = f"{indent}{key.rpartition('.')[2]}:"
        if not is_node(field):
            line += f" {defaults(key, field)}"
        first = re.split(r"(?<!e\.g)\. ", field.description or "")[0].rstrip(".")
        words = choices(field.annotation)
        comment = " | ".join(words) if words else first
        if len(line) + 3 + len(comment) <= WIDTH:
            lines.append(f"{line}  # {comment}")
        else:
            lines += textwrap.wrap(comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            lines.append(line)
    return "\n".join(lines) + "\n"


NODES = {CORE: lambda: list(entries(SelfPlayConfig)), MEDICAL: of_medical}
"""The recipes that hold a written node, each with its fields."""


def with_node(recipe: Path) -> str:
    """A recipe with its node made anew."""
    before, _, rest = recipe.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{node(NODES[recipe]())}{END}{after}"


REPORT = ROOT / "docs" / "report.md"
FRAMES = "### The columns\n"


def with_columns() -> str:
    """The page of the report with the columns of the frames made anew."""
    before, _, _ = REPORT.read_text(encoding="utf-8").partition(FRAMES)
    lines = [FRAMES]
    for name, schema in (("games", GAMES), ("turns", TURNS), ("scores", SCORES)):
        lines += [f"`{name}`\n", "| column | dtype | meaning |", "|---|---|---|"]
        lines += [f"| `{column}` | {c.dtype} | {c.meaning} |" for column, c in schema.items()]
        if name == "games":
            lines.append("| `reward/<role>/<component>` | Float64 | one component of the reward |")
        lines.append("")
    return before + "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write all files."""
    REPORT.write_text(with_columns(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    for recipe in NODES:
        recipe.write_text(with_node(recipe), encoding="utf-8")


if __name__ == "__main__":
    main()
