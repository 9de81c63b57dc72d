"""Pages with tables that experiments write."""

from __future__ import annotations

import re


def with_table(page: str, name: str, table: str) -> str:
    """A page with another table between ``<!-- table: name -->`` and ``<!-- end -->``."""
    marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page)
