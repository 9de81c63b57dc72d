"""Identities of models, files, folders and servers: short strings, equal for equal content.

Resumed runs, caches and unfinished evaluations compare it, because content can change under the
same path or name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

OF_A_MODEL = (
    *("*.safetensors", "*.bin", "model_world_size_*_rank_*.pt"),
    *("*.json", "*.jinja", "*.model", "*.txt"),  # configs, tokenizer.model, vocab.txt, merges.txt
    *("huggingface/*", "lora_adapter/*", "lora_adapters/*/*"),  # of a checkpoint of verl's
)
"""Files of a model's folder that its answers depend on."""


def of_file(path: Path) -> str:
    """Hash of a file's content; for JSON, of its values, whatever the formatting."""
    state = path.stat()
    return _hash_of(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4096)  # a start asks several times, and weights have gigabytes
def _hash_of(path: Path, changed_ns: int, size: int) -> str:
    if path.suffix == ".json":
        try:
            values = json.loads(path.read_bytes())
        except ValueError:
            pass
        else:
            return of_values(values)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_values(*values: Any) -> str:
    """Hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def of_folder(folder: Path, patterns: Iterable[str] = ("**/*",)) -> str:
    """Hash of the names and contents of a folder's files, except hidden files and caches."""
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    names = {file.relative_to(folder).as_posix(): file for file in files}
    kept = {n: f for n, f in names.items() if not n.startswith(".") and "__pycache__" not in n}
    return of_values(*((name, of_file(file)) for name, file in sorted(kept.items())))


def of_model(path: str | Path) -> str | None:
    """Hash of a model's weights, configs and tokenizer; None if the files are not local.

    A hub name has the identity of the cached snapshot.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        cached = try_to_load_from_cache(str(path), "config.json") if _is_repo(str(path)) else None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    return of_folder(folder, OF_A_MODEL)


def _is_repo(name: str) -> bool:
    return "://" not in name and not name.startswith((".", "/", "~")) and name.count("/") <= 1


def of_server(url: str | None, model: str | None) -> str:
    """Identity of a model on a server: its address and its name there."""
    return of_values((url or "").rstrip("/"), model)
