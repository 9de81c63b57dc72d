"""What all commands of ``medserl`` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_in_one_line(who: str = "medserl") -> Iterator[None]:
    """End the program with exit code 2 and one line for an error that the user can mend; ``who`` begins the line."""
    try:
        yield
    except (ValueError, OSError) as error:
        file = isinstance(error, OSError) and error.filename
        reason = f"{error.filename}: {error.strerror}" if file else str(error)  # type: ignore[union-attr]
        # A newline in a file name must not make it look like something else.
        typer.echo(f"{who}: {' '.join(reason.split())}", err=True)
        raise typer.Exit(2) from None
