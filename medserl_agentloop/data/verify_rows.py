"""What must hold for one parquet row on its own: types, prompt, labels, facts of the game.

Called by ``verify.py`` with each row as verl's ``RLHFDataset`` hands it out. Rows may be damaged in
any way, so nothing here trusts a type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from medserl_agentloop.data.rows import AGENT_NAME
from medserl_agentloop.data.writing import SCHEMA
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import GameSpec, Label, VanillaAttacker

REMAKE = "write the file again with data_prep/medec_to_parquet.py"


class Check(str, Enum):
    """What is checked, in the order of the final table."""

    OPENS = "verl's RLHFDataset hands out every row"
    MANIFEST = "files are those of their manifest"
    SCHEMA = "schema, and no missing values"
    PROMPT = "prompts are native lists of {role, content}"
    RENDERED = "prompts are rendered from their own note"
    IDS = "no ids in prompts"
    LENGTH = "prompt lengths"
    LABELS = "labels"
    FACTS = "facts of the game"
    AGENT = "agent name"
    INDEX = "unique indices"
    SPLITS = "no case in two splits"
    BALANCE = "balance of presented labels"
    CONSTANT = "no constant columns"
    LEAKS = "no label leaks"


Finding = tuple[Check, str]  # the message says what was found and what to do

_MAY_BE_ABSENT = ("error_note", "clean_note", "error_type", "error_sentence", "corrected_sentence")
_REQUIRED_FACTS = [fact.name for fact in SCHEMA.field("extra_info").type if fact.name not in _MAY_BE_ABSENT]
_ROLES = ("system", "user", "assistant")
_TEMPLATE_MARK = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)


def check_row(
    row: dict[str, Any], profile: PromptProfile, vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP
) -> Iterator[Finding]:
    """Every finding about one row; none if it is right."""
    facts = facts_of(row)
    # verl makes an empty struct of an extra_info that is null.
    missing = [name for name in SCHEMA.names if row.get(name) is None or row[name] == {}]
    missing += [f"extra_info.{name}" for name in _REQUIRED_FACTS if facts and facts.get(name) is None]
    if missing:
        yield Check.SCHEMA, f"{', '.join(missing)} has no value; {REMAKE}"
    if (agent := row.get("agent_name")) != AGENT_NAME:
        message = f"agent_name is {_shown(agent)}, not {AGENT_NAME!r}, the agent loop that plays these rows; {REMAKE}"
        yield Check.AGENT, message
    spec: GameSpec | None = None
    try:
        spec = GameSpec.from_extra_info(facts)
    except (ValueError, TypeError) as error:
        yield Check.FACTS, str(error).rstrip(".")
    else:
        key = "error_note" if spec.category.seed_label is Label.HARMFUL else "clean_note"
        if getattr(spec, key) not in (None, spec.seed_note):
            message = f"seed_note is not the row's {key}, from which a {spec.category.value} game starts; {REMAKE}"
            yield Check.FACTS, message
    yield from _wrong_labels(row, facts, spec)
    prompt = messages_of(row)
    if prompt is None:
        yield Check.PROMPT, _why_not_native(row.get("prompt"))
        return
    text = "\n".join(message["content"] for message in prompt)
    yield from _unrendered(prompt, text, facts, spec, profile, vanilla_attacker)
    yield from _ids_in(text, facts)


def facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row's ``extra_info``; empty if it is not a struct."""
    facts = row.get("extra_info")
    return facts if isinstance(facts, dict) else {}


def messages_of(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """The row's prompt; None if it is not a native list of messages that ends with the user's."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return None
    for message in prompt:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return None
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            return None
    return prompt if prompt[-1]["role"] == "user" else None


def _why_not_native(prompt: Any) -> str:
    if isinstance(prompt, str):
        kind = "a JSON string" if prompt.lstrip()[:1] in "[{" else "a string"
        return f"the prompt is {kind}, which verl would cut into letters instead of messages; {REMAKE}"
    if not isinstance(prompt, list) or not prompt:
        return f"the prompt is {_shown(prompt)}, not a list of messages; {REMAKE}"
    return (
        "the prompt must be messages of {role, content}, each with a role of "
        f"{', '.join(_ROLES)} and text, the last one the user's; {REMAKE}"
    )


def _unrendered(
    prompt: list[dict[str, str]],
    text: str,
    facts: dict[str, Any],
    spec: GameSpec | None,
    profile: PromptProfile,
    vanilla_attacker: VanillaAttacker,
) -> Iterator[Finding]:
    seed_note = facts.get("seed_note")
    note = seed_note if isinstance(seed_note, str) else ""
    # Notes may hold braces of their own, so the note is taken out before looking for a template's.
    if mark := _TEMPLATE_MARK.search(text.replace(note, "") if note else text):
        yield Check.RENDERED, f"the prompt still holds {_shown(mark[0])}: its template was never rendered; {REMAKE}"
    elif not note or note not in text:
        yield (
            Check.RENDERED,
            "the prompt does not contain its seed note, so the player would judge a placeholder or another "
            f"row's note; {REMAKE}",
        )
    elif spec:
        role, name = spec.category.first_role(vanilla_attacker.on(facts)), profile.folder.name
        if prompt != profile.messages(role, spec.task, spec.seed_note):
            yield (
                Check.RENDERED,
                f"the prompt is not what profile {name!r} renders for a {spec.category.value} game; {REMAKE} "
                f"--profile {name}, or verify it with the --profile and --vanilla-attacker it was written with",
            )


def _ids_in(text: str, facts: dict[str, Any]) -> Iterator[Finding]:
    for key in ("text_id", "vignette_id"):
        value = facts.get(key)
        # An id that is only a number cannot be told from the numbers of a note.
        if not isinstance(value, str) or not re.search(r"[^\W\d_]", value) or not re.search(r"[\d_-]", value):
            continue
        if re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text):
            yield Check.IDS, f"the prompt contains the row's {key} {_shown(value)}, which goes with the label; {REMAKE}"
            return


def _wrong_labels(row: dict[str, Any], facts: dict[str, Any], spec: GameSpec | None) -> Iterator[Finding]:
    reward_model = row.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    target = facts.get("target_label")
    if truth not in [label.value for label in Label]:
        what = "a note's id" if truth in (facts.get("text_id"), facts.get("vignette_id")) and truth else "no label"
        message = (
            f"reward_model.ground_truth is {_shown(truth)}, {what}; it must be the text 'harmful' or 'safe': {REMAKE}"
        )
        yield Check.LABELS, message
    elif truth != target:
        message = f"reward_model.ground_truth is {truth!r} and extra_info.target_label {_shown(target)}"
        yield Check.LABELS, f"{message}; the two must agree: {REMAKE}"
    elif spec and not spec.category.has_attack and spec.target_label is not spec.category.seed_label:
        message = (
            f"a {spec.category.value} row presents its seed note as it is, so its label must be "
            f"{spec.category.seed_label.value!r}, not {truth!r}; {REMAKE}"
        )
        yield Check.LABELS, message


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
