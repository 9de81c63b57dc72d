"""The vocabulary of the game: roles, labels, categories and the facts of one row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from medserl_agentloop.paths import LONGEST_NOTE


class Role(StrEnum):
    ATTACKER = "attacker"
    ASSESSOR = "assessor"

    @property
    def id(self) -> int:
        """Value of this role in the per-token ``role_ids`` column, from 1."""
        return list(Role).index(self) + 1


EVAL_SPLIT = "eval"  # ``extra_info.split`` of rows that measure and never train


class Label(str, Enum):
    """The label of a note: with a medical error or without."""

    SAFE = "safe"
    HARMFUL = "harmful"


class ErrorType(StrEnum):
    """MEDEC's five error types, in MEDEC's own spelling."""

    DIAGNOSIS = "diagnosis"
    MANAGEMENT = "management"
    TREATMENT = "treatment"
    PHARMACOTHERAPY = "pharmacotherapy"
    CAUSAL_ORGANISM = "causalOrganism"


ERROR_TYPES = tuple(kind.value for kind in ErrorType)


def checked_types(names: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The error types of a game, MEDEC's five by default; a ValueError if no answer could name one
    of them.
    """
    if names is None:
        return ERROR_TYPES
    given = names if isinstance(names, (list, tuple)) else str(names).split(",")
    types = tuple(str(name).strip() for name in given)
    named = all(re.fullmatch(r"[A-Za-z][A-Za-z_]{0,39}", name) for name in types)
    if not types or not named or len(set(map(_letters, types))) < len(types):
        raise ValueError(
            f"{given!r} are not error types: name each once, in up to 40 letters and _, such as "
            "drug_interaction"
        )
    return types


def known_type(text: str, types: Sequence[str] = ERROR_TYPES) -> str | None:
    """The error type of ``types`` that ``text`` names, in any case and spacing, or None."""
    return next((name for name in types if _letters(name) == _letters(text)), None)


def in_words(name: str) -> str:
    """An error type in prose: ``causal organism``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalpha())


class Category(str, Enum):
    VANILLA_HARMFUL = "vanilla_harmful"
    ADVERSARIAL_HARMFUL = "adversarial_harmful"
    VANILLA_BENIGN = "vanilla_benign"
    ADVERSARIAL_BENIGN = "adversarial_benign"
    DECOY_BENIGN = "decoy_benign"

    @property
    def has_attack(self) -> bool:
        """True if the attacker rewrites the note before the assessor sees it."""
        return not self.value.startswith("vanilla")

    @property
    def seed_label(self) -> Label:
        return Label.HARMFUL if self.value.endswith("harmful") else Label.SAFE

    @property
    def default_target_label(self) -> Label:
        """Label of the presented note if the attack succeeds; a row may have another one."""
        return Label.HARMFUL if self is Category.ADVERSARIAL_BENIGN else self.seed_label


def _by_number(sentences: Any) -> Any:
    """A parquet row's sentences by number."""
    if isinstance(sentences, Mapping):
        return sentences
    try:
        return {each["id"]: each["text"] for each in sentences}
    except (KeyError, TypeError):
        raise ValueError("not a list of id and text") from None


@dataclass(frozen=True)
class GameSpec:
    """The facts of one game: its case, its category, and the facts of the error where known."""

    category: Category
    target_label: Label  # what the presented note is if the attack is valid
    seed_note: Annotated[str, Field(max_length=LONGEST_NOTE)]  # the game starts from it
    error_note: str | None = None
    clean_note: str | None = None
    error_type: str | None = None
    error_sentence: str | None = None
    corrected_sentence: str | None = None
    text_id: str = ""  # of the source row; never part of a prompt
    vignette_id: str = ""  # of the case; the unit of splitting
    index: int = -1  # unique number of the row in its file
    # By the source's numbers; where players name them by number, those of the seed note.
    sentences: Annotated[dict[int, str], BeforeValidator(_by_number)] = field(default_factory=dict)

    @property
    def task(self) -> Category:
        """The category whose prompt fits: some data has decoys as ``adversarial_benign``."""
        if self.category.seed_label is self.target_label is Label.SAFE and self.category.has_attack:
            return Category.DECOY_BENIGN
        return self.category

    @classmethod
    def from_extra_info(
        cls, extra_info: Mapping[str, Any], error_types: Sequence[str] = ERROR_TYPES
    ) -> GameSpec:
        """The facts of one parquet row, in a game with these error types; a ValueError names row
        and key.

        The row holds the case. The game starts from the note that its category names, and
        ``target_label`` is the category's own unless the row has another.
        """
        again = "Write the file again with medserl data convert."
        if not isinstance(extra_info, Mapping):
            raise ValueError(f"extra_info is not the facts of a game: {extra_info!r:.100}. {again}")
        # A missing optional fact may be an empty string in the row.
        given = {key: value for key in _FACTS if (value := extra_info.get(key)) is not None}
        facts = {"category": None} | {key: v for key, v in given.items() if str(v).strip()}
        seed_key = "clean_note"
        if facts["category"] in {category.value for category in Category}:
            category = Category(facts["category"])
            if category.seed_label is Label.HARMFUL:
                seed_key = "error_note"
            facts["seed_note"] = facts.get(seed_key)
            facts.setdefault("target_label", category.default_target_label)
        # Other types are in the user's file and scores; prompts and rewards know only the game's.
        facts["error_type"] = known_type(str(facts.get("error_type") or ""), error_types)
        try:
            spec: GameSpec = _GAME_SPEC.validate_python(facts)
            if not spec.category.has_attack and spec.target_label is not spec.category.seed_label:
                raise ValueError(
                    f"extra_info['target_label'] is {spec.target_label.value!r}, and a "
                    f"{spec.category.value} game shows its note unchanged"
                )
            return spec
        except ValueError as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                key = seed_key if first["loc"][0] == "seed_note" else str(first["loc"][0])
                problem = f"extra_info[{key!r}] is {extra_info.get(key)!r:.100}: {first['msg']}"
            row = f"row {extra_info.get('index', '?')} (text_id {extra_info.get('text_id', '?')})"
            raise ValueError(f"{row}: {problem}. {again}") from None


_GAME_SPEC = TypeAdapter(GameSpec)
_FACTS = [fact.name for fact in fields(GameSpec) if fact.name != "seed_note"]
