"""Files and objects by name: finding them, writing them whole or not at all, knowing a file again by its hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, BinaryIO

PACKAGE = Path(__file__).resolve().parent
CHECKOUT_ONLY = (
    "experiments/ is in the repository and not in the installed package: start the command in the root of a checkout, "
    "a medserl command with PYTHONPATH=. before it"
)


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
            missing = str(getattr(error, "name", "")).partition(".")[0]
            hint = f". {CHECKOUT_ONLY}" if missing == "experiments" else ""
            raise ValueError(f"{kind} {name!r} cannot be loaded: {type(error).__name__}: {error}{hint}") from error
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


@contextmanager
def all_or_none(folder: Path) -> Iterator[Path]:
    """An empty folder to write into; what is in it goes to ``folder`` when the block ends well.

    A new folder comes into being at once; in one that exists the files are exchanged one by one, and other files in it
    stay. What stops between two exchanges leaves whole files, some of them old: ``differs_from_manifest`` tells. A
    process that is killed also leaves the hidden folder it wrote into, which nothing reads.

    Raises:
        ValueError: A file cannot be written.
    """
    exists = folder.exists()
    # Inside an existing folder, so that the exchange stays on one file system.
    temporary = (folder if exists else folder.absolute().parent) / f".{folder.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if exists:
            for path in sorted(temporary.iterdir()):
                os.replace(path, folder / path.name)
        else:
            os.rename(temporary, folder)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror or error}); give a folder that you may write to."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


MANIFEST = "manifest.json"
"""Says of the files of a data set, beside which it is, what is in them."""
DIFFERS = (
    f"the file is not the one that {MANIFEST} beside it describes: a run was killed while it put its files in place, "
    f"or the file was changed since; write the folder again with data_prep/medec_to_parquet.py, or remove {MANIFEST} "
    "if the change was meant"
)


def hash_in_manifest(path: Path) -> str | None:
    """The hash that the manifest beside an output file has for it; None where it has none."""
    return _in_manifest(path, "outputs", path.name, "sha256")


def option_in_manifest(path: Path, option: str) -> str | None:
    """The value of an option that an output file was written with, e.g. ``--profile``; None where it is not known."""
    return None if hash_in_manifest(path) is None else _in_manifest(path, "options", option)


def _in_manifest(path: Path, *keys: str) -> str | None:
    try:
        value = json.loads((path.parent / MANIFEST).read_bytes())
        for key in keys:
            value = value[key]
        return None if value is None else str(value)
    except (OSError, ValueError, LookupError, TypeError):  # no such file, or one that is about something else
        return None


def differs_from_manifest(path: Path) -> bool:
    """Whether the manifest beside an output file has another hash for it; False where it has none, or no file is."""
    expected = hash_in_manifest(path)
    return expected is not None and path.is_file() and expected != sha256_of(path)
