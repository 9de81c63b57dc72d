"""What must hold for the rows of a parquet file: types, prompt, labels, facts of the game, no leak of the label.

Called by ``verify.py`` with the rows as verl's ``RLHFDataset`` hands them out. Rows may be damaged in
any way, so nothing here trusts a type.

The leak test asks whether anything but its medical content tells a row's label, without a classifier. For each
feature of a row (white space of its note, its id's number, its place in the file, the length of its note) every
rule "harmful on this side of a cut, safe on the other" is tried. How many harmful rows lie on one side is a
hypergeometric count if feature and label are independent, so Fisher's exact test gives the chance of a count
that far off. It is multiplied by the cuts of the feature and by the number of features (Bonferroni); below
``ALPHA`` the feature is a leak. Copies of a row are not independent, so each note counts once per label, except
for its place. The bound is wide in small files: MEDEC's own leak, trailing blanks on 60 % of the error notes and
47 % of the clean ones, shows from about 1,000 rows on, a perfect rule from about 20.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from medserl_agentloop.data.rows import AGENT_NAME
from medserl_agentloop.data.writing import SCHEMA
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import GameSpec, Label, VanillaAttacker

REMAKE = "write the file again with data_prep/medec_to_parquet.py"
ALPHA = 1e-3  # chance of one false alarm in a file without leaks
_MAX_CUTS = 32


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
    if message := _wrong_label(row, facts, spec):
        yield Check.LABELS, f"{message}: {REMAKE}"
    prompt = messages_of(row)
    if prompt is None:
        yield Check.PROMPT, f"{_why_not_native(row.get('prompt'))}; {REMAKE}"
        return
    text = "\n".join(message["content"] for message in prompt)
    if message := _unrendered(prompt, text, facts, spec, profile, vanilla_attacker):
        yield Check.RENDERED, message
    for key in ("text_id", "vignette_id"):
        value = facts.get(key)
        # An id that is only a number cannot be told from the numbers of a note.
        if not isinstance(value, str) or not re.search(r"[^\W\d_]", value) or not re.search(r"[\d_-]", value):
            continue
        if re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text):
            yield Check.IDS, f"the prompt contains the row's {key} {_shown(value)}, which goes with the label; {REMAKE}"
            return


def facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row's ``extra_info``; empty if it is not a struct."""
    facts = row.get("extra_info")
    return facts if isinstance(facts, dict) else {}


def truth_of(row: dict[str, Any]) -> Any:
    """The row's ``reward_model.ground_truth``; None if it has none."""
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def messages_of(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """The row's prompt; None if it is not a native list of messages that ends with the user's."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        return None
    return prompt if prompt[-1]["role"] == "user" else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        return False
    return value["role"] in _ROLES and isinstance(value["content"], str)


def _why_not_native(prompt: Any) -> str:
    if isinstance(prompt, str):
        kind = "a JSON string" if prompt.lstrip()[:1] in "[{" else "a string"
        return f"the prompt is {kind}, which verl would cut into letters instead of messages"
    if not isinstance(prompt, list) or not prompt:
        return f"the prompt is {_shown(prompt)}, not a list of messages"
    return (
        "the prompt must be messages of {role, content}, each with a role of "
        f"{', '.join(_ROLES)} and text, the last one the user's"
    )


def _unrendered(
    prompt: list[dict[str, str]],
    text: str,
    facts: dict[str, Any],
    spec: GameSpec | None,
    profile: PromptProfile,
    vanilla_attacker: VanillaAttacker,
) -> str:
    seed_note = facts.get("seed_note")
    note = seed_note if isinstance(seed_note, str) else ""
    # Notes may hold braces of their own, so the note is taken out before looking for a template's.
    if mark := _TEMPLATE_MARK.search(text.replace(note, "") if note else text):
        return f"the prompt still holds {_shown(mark[0])}: its template was never rendered; {REMAKE}"
    if not note or note not in text:
        return (
            "the prompt does not contain its seed note, so the player would judge a placeholder or another "
            f"row's note; {REMAKE}"
        )
    name = profile.folder.name
    if spec and prompt != profile.messages(
        spec.category.first_role(vanilla_attacker.on(facts)), spec.task, spec.seed_note
    ):
        return (
            f"the prompt is not what profile {name!r} renders for a {spec.category.value} game; {REMAKE} "
            f"--profile {name}, or verify it with the --profile and --vanilla-attacker it was written with"
        )
    return ""


def _wrong_label(row: dict[str, Any], facts: dict[str, Any], spec: GameSpec | None) -> str:
    truth, target = truth_of(row), facts.get("target_label")
    if truth not in [label.value for label in Label]:
        what = "a note's id" if truth in (facts.get("text_id"), facts.get("vignette_id")) and truth else "no label"
        return f"reward_model.ground_truth is {_shown(truth)}, {what}; it must be the text 'harmful' or 'safe'"
    if truth != target:
        return (
            f"reward_model.ground_truth is {truth!r} and extra_info.target_label {_shown(target)}; the two must agree"
        )
    if spec and not spec.category.has_attack and spec.target_label is not spec.category.seed_label:
        return (
            f"a {spec.category.value} row presents its seed note as it is, so its label must be "
            f"{spec.category.seed_label.value!r}, not {truth!r}"
        )
    return ""


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


class LabelledRow(NamedTuple):
    """What the leak test looks at."""

    text_id: str
    seed_note: str
    target_label: Label
    seed_label: Label


class Leak(NamedTuple):
    """A feature that tells labels apart."""

    feature: str
    remedy: str
    label: str  # ``target_label`` or ``seed label``
    accuracy: float  # share of right answers of the best rule, both labels weighing the same; 0.5 is chance
    chance: float  # of a rule this good in any feature, if none of them depended on the label


_PLACE = "the row's place in the file"
_STRIP = "strip the notes of both labels alike"
_REMEDIES = {
    "white space before the note": _STRIP,
    "white space after the note": _STRIP,
    "a line break at the note's end": _STRIP,
    "double blanks in the note": "give the notes of both labels the same white space",
    "the parity of the text id": "take both notes of a case from its error row, so that they share its id",
    "the number in the text id": "choose the vignettes of each label with a seed, not by their ids",
    _PLACE: "shuffle the rows with a seed",
    "the note's length": "take the notes of both labels from the same vignettes",
}


def _features(place: int, row: LabelledRow) -> list[int]:
    """One value for each of ``_REMEDIES``."""
    note = row.seed_note
    digits = re.search(r"([0-9]{1,18})\D*$", row.text_id)
    number = int(digits[1]) if digits else -1
    before, tail = len(note) - len(note.lstrip()), note[len(note.rstrip()) :]
    broken = int("\n" in tail or "\r" in tail)
    blanks = note.strip().count("  ")
    return [before, len(tail), broken, blanks, number % 2 if digits else -1, number, place, len(note.split())]


def find_leaks(rows: Sequence[LabelledRow]) -> Iterator[Leak]:
    """Every feature of a file's rows, in their order, that tells a label better than chance, with its best label."""
    features = [_features(place, row) for place, row in enumerate(rows)]
    first_place: dict[LabelledRow, int] = {}
    for place, row in enumerate(rows):
        first_place.setdefault(row, place)
    labels = {"target_label": [row.target_label is Label.HARMFUL for row in rows]}
    seed_labels = [row.seed_label is Label.HARMFUL for row in rows]
    if seed_labels != labels["target_label"]:
        labels["seed label"] = seed_labels
    for at, (feature, remedy) in enumerate(_REMEDIES.items()):
        places = range(len(rows)) if feature == _PLACE else first_place.values()
        column = [features[place][at] for place in places]
        cuts = _cuts(column)
        tests = max(1, len(cuts)) * len(labels) * len(_REMEDIES)
        found = []
        for label, harmful in labels.items():
            accuracy, chance = _best_rule(column, [harmful[place] for place in places], cuts)
            found.append(Leak(feature, remedy, label, accuracy, min(1.0, chance * tests)))
        strongest = min(found, key=lambda leak: leak.chance)
        if strongest.chance < ALPHA:
            yield strongest


def _cuts(column: list[int]) -> list[int]:
    """Values to cut at: every distinct one but the last, or evenly spaced quantiles of them."""
    ordered = sorted(column)
    distinct = sorted(set(ordered))[:-1]
    if len(distinct) <= _MAX_CUTS:
        return distinct
    quantiles = {ordered[len(ordered) * i // (_MAX_CUTS + 1)] for i in range(1, _MAX_CUTS + 1)}
    return sorted(quantiles - {ordered[-1]})


def _best_rule(column: list[int], harmful: list[bool], cuts: list[int]) -> tuple[float, float]:
    """Accuracy and chance of the least likely rule."""
    rows, of_harmful = len(harmful), sum(harmful)
    best = (0.5, 1.0)
    if of_harmful in (0, rows):
        return best
    for cut in cuts:
        below = sum(value <= cut for value in column)
        hits = sum(is_harmful for value, is_harmful in zip(column, harmful, strict=True) if value <= cut)
        gap = abs(hits / of_harmful - (below - hits) / (rows - of_harmful))
        # Two sides: both "more harmful rows below the cut" and "fewer" would count as a leak.
        chance = min(1.0, 2 * _tail(hits, below, of_harmful, rows))
        if chance < best[1]:
            best = (0.5 + gap / 2, chance)
    return best


def _tail(hits: int, drawn: int, marked: int, rows: int) -> float:
    """Probability of a hypergeometric count at least as far from its mean, on the same side, as ``hits``."""
    if hits * rows < drawn * marked:  # below the mean: count the unmarked rows instead
        hits, marked = drawn - hits, rows - marked
    total = 0.0
    for k in range(hits, min(drawn, marked) + 1):
        term = math.exp(_log_choose(marked, k) + _log_choose(rows - marked, drawn - k) - _log_choose(rows, drawn))
        total += term
        if term < total * 1e-12:
            break
    return min(1.0, total)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
