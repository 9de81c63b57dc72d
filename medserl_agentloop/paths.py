"""Where the files that travel with the package are, and how a file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Path of a resource such as ``recipes`` or ``prompts/medserl``.

    A wheel carries the top-level folders inside the package; a checkout has them beside it.

    Raises:
        FileNotFoundError: The resource is in neither place.
    """
    candidates = [PACKAGE / name, PACKAGE.parent / name]
    for path in candidates:
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{name!r} is neither in the installed package nor in the checkout: looked at "
        + " and ".join(str(p) for p in candidates)
    )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well; otherwise ``path`` stays as it was.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
