"""Text for a terminal: untrusted text made harmless, a run's lines, a command's errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unicodedata import category

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def shown(value: str) -> str:
    """A value for a message; a long one is described, because it may be a patient's note."""
    if not value.strip():
        return "an empty cell"
    return ascii(value) if len(value) <= 40 else f"a text of {len(value)} characters"


def visible(text: str) -> str:
    """Untrusted text for a terminal: what it would obey, or not show, is spelled out, e.g. as
    ``\\x1b`` or ``\\u202e``. Newlines stay, tabs become spaces; for rich use :func:`plain`.
    """
    if text.isprintable():
        return text
    # Categories C: control, format, private and unassigned characters, and lone surrogates.
    hidden = {c for c in text if c != "\n" and (category(c)[0] == "C" or c in "\u2028\u2029")}
    return "".join(ascii(c)[1:-1] if c in hidden else c for c in text.expandtabs(4))


# environment variable that tells a run's lines from text of a model or a server
MARK = "MEDSERL_MARK"


def announce(line: str) -> None:
    """Print a line that goes to the terminal of a run, whichever of its processes prints it."""
    print(f"[medserl{os.environ.get(MARK, '')}] {line}", flush=True)


def plain(text: str, style: str = "") -> Text:
    """Untrusted text for a ``rich`` console, by :func:`visible` and with its markup as text."""
    from rich.text import Text

    return Text(visible(text), style)


def say(console: Console, line: str) -> None:
    """Print a line of untrusted text, unwrapped, so that it can be searched for."""
    console.print(plain(line), soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], **style: Any) -> Table:
    """Numbers and untrusted text as a table of ``rich``; whole numbers are right-aligned."""
    from rich.table import Table

    made = Table(title=plain(title), title_justify="left", **style)
    for at, column in enumerate(columns):
        numbers = any(isinstance(row[at], int) for row in rows)
        made.add_column(plain(column), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(plain(str(cell)) for cell in row))
    return made


@contextmanager
def errors_in_one_line(who: str = "medserl", stopped: str = "") -> Iterator[None]:
    """Exit with code 2 and print a user's error and its notes, one line each, after ``who``.

    With ``stopped``, a command reports after Ctrl-C what is left, and ends with 130.
    """
    import typer  # slow to import, and a run does not need it

    try:
        yield
    except (KeyboardInterrupt, EOFError):  # a person who plays may end the input instead
        if not stopped:
            raise
        typer.echo(f"{who}: stopped; {stopped}", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        for line in (f"{who}: {reason}", *getattr(error, "__notes__", ())):
            # A newline in a file name must not make it look like something else.
            typer.echo(visible(" ".join(line.split())), err=True)
        raise typer.Exit(2) from None
