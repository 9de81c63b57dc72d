"""The reference tables, made from the code that defines what they list. None of them is stored.

A page asks for a table with a line ``<!-- reference: NAME -->``; ``docs/site_hook.py`` puts it
there when the site is built. ``python docs/make_reference.py NAME`` prints one.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import GAMES

MORE = {
    "profile": "prompts.md",
    "context": "how_it_works.md#contexts",
    "reward": "rewards.md",
    "assessments": "rewards.md#several-assessments-of-one-attack",
    "judge": "judges.md",
    "judge_server": "judges.md",
    "judge_report": "judges.md#how-good-is-a-judge",
    "opponent": "advanced.md#opponents",
    "certify": "how_it_works.md#the-certificate",
    "alarms": "metrics.md",
}
"""The page that says more of a key."""


def is_node(field: FieldInfo) -> bool:
    """Return whether a field is a node with keys of its own."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def choices(annotation: Any) -> list[str]:
    """The words that a field takes, where these are all it takes."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    if get_origin(annotation) in (Union, UnionType):
        parts = [
            choices(part) if part is not type(None) else ["null"] for part in get_args(annotation)
        ]
        return (
            [word for part in parts for word in part] if all(parts) and parts != [["null"]] else []
        )
    return []


def default_of(field: FieldInfo) -> str:
    """A field's default as YAML has it on one line; ``???`` where the key must be set, nothing for
    a node.
    """
    if field.is_required() or is_node(field):
        return "???" if field.is_required() else ""
    value = field.default.value if isinstance(field.default, Enum) else field.default
    if isinstance(value, str) and value:
        return value
    text = json.dumps(value)
    return text.replace('"', "") if isinstance(value, dict) else text


def entries(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field under a model with its dotted key, nodes before their own fields."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        if is_node(field):
            yield from entries(field.annotation, f"{path}{name}.")


def medical_entries() -> list[tuple[str, FieldInfo]]:
    """Fields that the medical game adds to those of any game, or has another default for, with
    their nodes.
    """
    common = {key: default_of(field) for key, field in entries(SelfPlayConfig)}
    every = list(entries(MedicalConfig))
    own = [
        key for key, field in every if not is_node(field) and common.get(key) != default_of(field)
    ]
    return [
        (key, field)
        for key, field in every
        if key in own or any(k.startswith(f"{key}.") for k in own)
    ]


def keys() -> str:
    """All keys of the ``selfplay`` node."""
    lines = []
    for title, fields in (
        ("Every game", list(entries(SelfPlayConfig))),
        ("The medical game", medical_entries()),
    ):
        lines += [f"## {title}\n", "| key | default | meaning |", "|---|---|---|"]
        for key, field in fields:
            description = (field.description or "").replace("|", "\\|")
            words = choices(field.annotation)
            takes = (
                f"`{'`, `'.join(words)}`. "
                if words and not all(word in description for word in words)
                else ""
            )
            more = f" More: [{MORE[key].partition('#')[0]}]({MORE[key]})." if key in MORE else ""
            default = "" if is_node(field) else f"`{default_of(field)}`"
            lines.append(f"| `{key}` | {default} | {takes}{description}{more} |")
        lines.append("")
    return "\n".join(lines)


def columns() -> str:
    """The columns of the table of games."""
    lines = ["| column | dtype | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {column.dtype} | {column.meaning} |" for name, column in GAMES.items()]
    return "\n".join(
        [*lines, "| `reward/<role>/<component>` | Float64 | one component of the reward |"]
    )


METRICS = Path(__file__).with_name("metrics.csv")


def metrics() -> str:
    """Every metric of a run with its unit and its meaning."""
    lines = ["| name | unit | meaning |", "|---|---|---|"]
    with METRICS.open(encoding="utf-8", newline="") as file:
        lines += [
            f"| `{row['name']}` | {row['unit']} | {row['meaning']} |"
            for row in csv.DictReader(file)
        ]
    return "\n".join(lines)


def alarms() -> str:
    """The alarms of the medical game: their limits, numbers and advice."""
    lines = ["| alarm | fires | its number | look at first |", "|---|---|---|---|"]
    for rule in MedicalGameInteraction.View.rules(MedicalGameInteraction.roles):
        limit = f"{'above' if rule.above else 'below'} {rule.limit:g}"
        limit += " of its first value" * rule.of_first
        lines.append(f"| `{rule.name}` | {limit} | `{rule.metric}` | {rule.advice} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "keys": keys,
    "columns": columns,
    "metrics": metrics,
    "alarms": alarms,
}
"""The tables that a page may ask for, by name."""

REFERENCE = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)


def with_reference(markdown: str) -> str:
    """A page with the tables that it asks for."""
    return REFERENCE.sub(lambda request: TABLES[request[1]](), markdown)


if __name__ == "__main__":
    print(TABLES[sys.argv[1]]())
