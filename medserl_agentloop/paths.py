"""Files and objects: found by name, recognized by their content, and written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, BinaryIO

from medserl_agentloop.terminal import shown

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Path of a resource such as ``recipes``, in a wheel or next to the package."""
    for path in (PACKAGE / name, PACKAGE.parent / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"{name!r} is neither in the package {PACKAGE} nor next to it")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ``(did you mean ...?)`` with the closest of ``words``, or nothing."""
    close = get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def find_object(
    kind: str,
    name: str,
    known: Mapping[str, Any],
    expected: str,
    fits: Callable[[Any], bool] = lambda found: True,
) -> Any:
    """The object called ``name`` in ``known``, or a user's own ``package.module:attribute``.

    ``kind`` and ``expected`` are for messages; ``fits`` says whether an object is of the right
    kind. ValueError lists the choices.
    """
    found = known.get(name, name)
    if isinstance(found, str) and all(found.partition(":")):
        try:
            found = resolve_name(found)
        except (Exception, SystemExit) as error:  # importing a user's module may do anything
            is_missing = isinstance(error, ModuleNotFoundError) and name.startswith(str(error.name))
            hint = ". Put the folder that it is in on PYTHONPATH" if is_missing else ""
            raise ValueError(
                f"{kind} {name!r} cannot be loaded: {type(error).__name__}: {error}{hint}"
            ) from error
    if isinstance(found, str) or not fits(found):
        raise ValueError(
            f"no {kind} {name!r}{did_you_mean(name, known)}: expected one of "
            f"{', '.join(sorted(known))}, or {expected}"
        )
    return found


LONGEST_NOTE = 100_000  # characters, for every reader; MEDEC's longest has a few thousand


def regular_file(path: Path) -> Path:
    """``path``; ValueError for a device, a pipe or a folder, because reading may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is not a regular file: give a file, not a device, a pipe or a folder."
        )
    return path


def read_parquet(path: Path) -> Any:
    """The table of a parquet file; ValueError if it is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(regular_file(path))
    except (OSError, pa.ArrowException) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise ValueError(
            f"{path}: cannot be read as parquet ({reason}); convert it again"
        ) from error


def each_key_once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` for JSON that refuses a repeated key; json would keep the last."""
    values = dict(items)
    if len(values) < len(items):
        key = Counter(key for key, _ in items).most_common(1)[0][0]
        raise ValueError(f"key {shown(key)} occurs twice")
    return values


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` if the block succeeds; otherwise ``path`` stays unchanged.

    A link stays one. OSErrors name ``path``; ValueError for a device, a pipe or a folder.
    """
    path, asked = regular_file(path).resolve(), path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # A full disk's error names no file.
        if error.errno and error.filename in (None, str(temporary)):
            error.filename = str(asked)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def all_or_none(folder: Path) -> Iterator[Path]:
    """Open an empty folder whose content moves to ``folder`` if the block succeeds.

    In an existing folder files are replaced one by one, and others stay. A kill between two moves
    leaves complete files, some of them old (``differs_from_manifest`` tells), and a hidden folder
    that nothing reads. Raises ValueError if a file cannot be written.
    """
    exists = folder.exists()
    # Inside an existing folder, so that the exchange stays on one file system.
    place = folder if exists else folder.absolute().parent
    temporary = place / f".{folder.name}.{os.getpid()}.tmp"
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
            f"{folder}: cannot be written ({error.strerror or error}); give another"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# -- hashes: a resumed run, a cache and an unfinished evaluation compare content, not names --------


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of_values(*values: Any) -> str:
    """Hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def hash_of_file(path: Path) -> str:
    """Hash of a file's content; for JSON, of its values, whatever the formatting."""
    state = path.stat()
    return _hash_of(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4096)  # a start asks several times, and weights have gigabytes
def _hash_of(path: Path, changed_ns: int, size: int) -> str:
    with suppress(ValueError):
        if path.suffix == ".json":
            return hash_of_values(json.loads(path.read_bytes()))
    return sha256_of(path)


def hash_of_folder(folder: Path, patterns: Iterable[str] = ("**/*",)) -> str:
    """Hash of the names and contents of a folder's files, except hidden files and caches."""
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    names = {file.relative_to(folder).as_posix(): file for file in files}
    kept = {n: f for n, f in names.items() if not n.startswith(".") and "__pycache__" not in n}
    return hash_of_values(*((name, hash_of_file(file)) for name, file in sorted(kept.items())))


OF_A_MODEL = (
    *("*.safetensors", "*.bin", "model_world_size_*_rank_*.pt"),
    *("*.json", "*.jinja", "*.model", "*.txt"),  # configs, tokenizer.model, vocab.txt, merges.txt
    *("huggingface/*", "lora_adapter/*", "lora_adapters/*/*"),  # of a verl checkpoint
)
"""Files of a model's folder that its answers depend on."""


def hash_of_model(path: str | Path) -> str | None:
    """Hash of a model's weights, configs and tokenizer, or of a hub name's cached snapshot; None if
    the files are not local.
    """
    from huggingface_hub import try_to_load_from_cache

    folder, name = Path(path).expanduser(), str(path)
    if not folder.is_dir():
        is_repo = "://" not in name and not name.startswith((".", "/", "~")) and name.count("/") < 2
        cached = try_to_load_from_cache(name, "config.json") if is_repo else None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    return hash_of_folder(folder, OF_A_MODEL)


MANIFEST = "manifest.json"  # says what is in the data files of its folder
DIFFERS = (
    f"the file is not the one that {MANIFEST} next to it describes: a conversion was killed, or it "
    f"was changed since; convert again, or remove {MANIFEST} if the change was intended"
)


def differs_from_manifest(path: Path) -> bool:
    """Return whether the manifest next to a file has another hash for it."""
    try:
        outputs = json.loads((path.parent / MANIFEST).read_bytes())["outputs"]
        return bool(outputs[path.name]["sha256"] != sha256_of(path))
    except (OSError, ValueError, LookupError, TypeError):  # no such files, or unrelated ones
        return False
