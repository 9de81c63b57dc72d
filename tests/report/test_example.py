"""The committed example page is one of today's code."""

from pathlib import Path

import pytest
from make_example import EXAMPLE, MOST_BYTES

from medserl_agentloop.report import page


@pytest.mark.parametrize("kind", ["js", "css"])
def test_the_example_has_the_code_of_the_page(kind: str) -> None:
    code = Path(page.__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")
    assert code in EXAMPLE.read_text(encoding="utf-8"), (
        "run `medserl quickstart`, then `python docs/make_example.py runs/quickstart`"
    )


def test_the_example_is_small() -> None:
    assert EXAMPLE.stat().st_size <= MOST_BYTES
