"""Where the files that travel with the package are, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

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
