"""The tables of the pages:

``python -m experiments.pages`` writes all of them anew from the CSV files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def with_table(page: str, name: str, table: str) -> str:
    """A page with another table between ``<!-- table: name -->`` and ``<!-- end -->``."""
    marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page)


def tables() -> Iterator[tuple[Path, str, str]]:
    """Yield page, name and text of every table."""
    import pandas as pd

    from experiments.incentives import simulate
    from experiments.kuhn_poker import run as kuhn_poker
    from experiments.learning import results
    from experiments.opponent import results as opponent
    from experiments.shortcuts import run as shortcuts

    for file in sorted(simulate.FIGURES.glob("*.csv")):
        yield (
            simulate.PAGE,
            file.stem,
            simulate.as_markdown(
                pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
            ),
        )
    yield kuhn_poker.PAGE, "nash_conv", kuhn_poker.table(kuhn_poker.read())
    for name, make in results.TABLES.items():
        yield (
            results.PAGES.get(name, results.PAGE),
            name,
            results.markdown(make(folder=results.FIGURES)),
        )
    for name, text in opponent.tables().items():
        yield opponent.PAGE, name, text
    for name, make in shortcuts.TABLES.items():
        yield shortcuts.PAGE, name, results.markdown(make())


def main() -> None:
    """Write them into their pages."""
    for page, name, table in tables():
        page.write_text(with_table(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")


if __name__ == "__main__":
    main()
