"""The facts of a parquet row, as the game reads them."""

from dataclasses import asdict
from typing import Any

import pytest

from medserl_agentloop.games.medical.types import Category, ErrorType, GameSpec, Label

ROW = {"category": "vanilla_benign", "target_label": "safe", "seed_note": "A note.", "index": 41, "text_id": "ms-7"}


def test_a_row_is_read_with_absent_facts_as_nothing() -> None:
    facts = GameSpec.from_extra_info({**ROW, "error_note": None, "error_type": "", "error_sentence": ""})
    assert facts == GameSpec(Category.VANILLA_BENIGN, Label.SAFE, "A note.", text_id="ms-7", index=41)


def test_a_full_row_is_read() -> None:
    facts = {
        **ROW, "category": "adversarial_harmful", "target_label": "harmful", "error_note": "E", "clean_note": "C",
        "error_type": "causalOrganism", "error_sentence": "es", "corrected_sentence": "cs", "vignette_id": "v",
    }  # fmt: skip
    spec = GameSpec.from_extra_info(facts)
    assert asdict(spec) == facts
    assert (spec.category, spec.error_type) == (Category.ADVERSARIAL_HARMFUL, ErrorType.CAUSAL_ORGANISM)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("category", "adversarial", [c.value for c in Category]),
        ("category", None, [c.value for c in Category]),
        ("target_label", "benign", ["safe", "harmful"]),
        ("error_type", "typo", [t.value for t in ErrorType]),
        ("seed_note", "", ["valid string"]),
        ("seed_note", None, ["valid string"]),
        ("seed_note", 5, ["valid string"]),
        ("clean_note", ["C"], ["valid string"]),
        ("error_sentence", 1.5, ["valid string"]),
        ("index", "x", ["valid integer"]),
    ],
)
def test_a_bad_row_is_refused_with_row_key_value_and_what_is_allowed(key: str, value: Any, allowed: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        GameSpec.from_extra_info({**ROW, key: value})
    row = f"row {value if key == 'index' else 41}"
    parts = (row, "ms-7", repr(key), repr(value), "medec_to_parquet.py", *allowed)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("key", ["category", "target_label", "seed_note"])
def test_a_missing_required_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"row 41.*{key}"):
        GameSpec.from_extra_info({k: v for k, v in ROW.items() if k != key})
