"""The reference tables of the site can be made, and every key has a description."""

import re
from pathlib import Path

import pytest
from make_reference import REFERENCE, TABLES, entries, is_node, with_reference

from medserl_agentloop.games.medical.config import MedicalConfig

DOCS = Path(__file__).parents[1] / "docs"
REQUESTS = [(page, name) for page in DOCS.glob("*.md") for name in REFERENCE.findall(page.read_text(encoding="utf-8"))]


def test_every_table_is_asked_for_by_one_page() -> None:
    assert sorted(name for _, name in REQUESTS) == sorted(TABLES)


@pytest.mark.parametrize(("page", "name"), REQUESTS)
def test_the_site_has_the_table_in_the_place_of_the_request(page: Path, name: str) -> None:
    text = with_reference(page.read_text(encoding="utf-8"))
    assert TABLES[name]() in text and "<!-- reference" not in text
    rows = [line for line in TABLES[name]().splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert all(len(re.findall(r"(?<!\\)\|", row)) >= 4 for row in rows)


def test_every_key_has_a_description() -> None:
    assert not [key for key, field in entries(MedicalConfig) if not field.description]
    assert len([key for key, field in entries(MedicalConfig) if not is_node(field)]) > 40
