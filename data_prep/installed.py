"""What the scripts of this folder say where the package is not installed.

They import this file from beside them, because the package itself may be what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def or_say_how_to_install() -> Iterator[None]:
    """Ends the script with one sentence and exit code 2 where an import of the block fails."""
    try:
        yield
    except ModuleNotFoundError as missing:
        print(
            f"error: the Python module {missing.name!r} is not installed; "
            f"run `pip install -e .` in {Path(__file__).resolve().parent.parent} and try again.",
            file=sys.stderr,
        )
        sys.exit(2)
