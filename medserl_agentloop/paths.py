"""Finding files of the package and objects of the user, and writing a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, BinaryIO

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Path of a resource such as ``recipes`` or ``prompts/medserl``; FileNotFoundError if there is none.

    A wheel carries the top-level folders inside the package; a checkout has them beside it.
    """
    candidates = [PACKAGE / name, PACKAGE.parent / name]
    for path in candidates:
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{name!r} is neither in the installed package nor in the checkout: looked at "
        + " and ".join(str(p) for p in candidates)
    )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The one of ``words`` that is likest to ``word``, as a question for the end of a message; empty if none is."""
    close = get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def find_object(
    kind: str, name: str, known: Mapping[str, Any], expected: str, fits: Callable[[Any], bool] = lambda found: True
) -> Any:
    """The object called ``name`` in ``known``, or a user's own ``package.module:attribute``.

    An import path works in every process that can import the module, Ray's workers included. ``kind`` and ``expected``
    are for messages; ``fits`` says whether an object is of the right kind.

    Raises:
        ValueError: There is no such object; lists those there are.
    """
    found = known.get(name, name)
    if isinstance(found, str) and all(found.partition(":")):
        try:
            found = resolve_name(found)
        except Exception as error:  # importing a user's module may raise anything
            raise ValueError(f"{kind} {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(found, str) or not fits(found):
        raise ValueError(
            f"no {kind} {name!r}{did_you_mean(name, known)}: expected one of {', '.join(sorted(known))}, or {expected}"
        )
    return found


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well; otherwise ``path`` stays as it was.

    A link stays one. OSErrors name ``path``; a ValueError refuses a device, a pipe or a folder in its place.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file: name another one")
    path, asked = path.resolve(), path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and error.filename in (None, str(temporary)):  # a full disk's error names no file
            error.filename = str(asked)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()
