"""A Hugging Face data set with the columns of MEDEC's CSV: a local folder, or ``hf:NAME`` from the hub.

Called by ``reader.py``; ``hf:NAME:SPLIT`` takes one split, otherwise all of them are read.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace
from medserl_agentloop.data.official_csv import COLUMNS, check_header, read_official_records
from medserl_agentloop.data.vignettes import Vignette

_HUB = "hf:"
_HUB_SECONDS = 10.0
_LOADERS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json"}


def is_dataset(path: Path | str) -> bool:
    """Whether an input is a data set: a folder, or a name on the hub."""
    return str(path).startswith(_HUB) or Path(path).is_dir()


def read_dataset(path: Path | str, intake: Intake) -> tuple[str, str, Iterator[Vignette]]:
    """Name, hash of the rows, and vignettes of a data set."""
    name = str(path) if str(path).startswith(_HUB) else Path(path).name
    digest = hashlib.sha256()
    records: list[tuple[RowPlace, dict[str, str]]] = []
    for split, data in _load(str(path)).items():
        check_header(f"{name} ({split})", list(data.column_names))
        for row in data.select_columns(list(COLUMNS)):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            cells = {column: _cell(row[column]) for column in COLUMNS}
            records.append((RowPlace(name, len(records) + 1), cells))  # counted over all splits
    sha256 = digest.hexdigest()
    return name, sha256, read_official_records(records, sha256, intake)


def _cell(value: Any) -> str:
    """A value as the CSV would spell it; an absent one is an empty cell, never ``nan``."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value)


def _load(path: str) -> dict[str, Any]:
    """The data set's splits by name."""
    # Imported here: it takes a second, and most inputs are files.
    import datasets

    try:
        if path.startswith(_HUB):
            found = _from_hub(path)
        elif any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(path)
        else:
            found = _from_files(Path(path))
    except MedecFormatError:
        raise
    except Exception as error:  # the library's errors have no common base
        raise MedecFormatError(
            f"{path}: cannot be loaded as a data set ({_first_line(error)}); give a folder written by "
            "datasets.save_to_disk, one with .parquet, .csv or .jsonl files, or hf:NAME of a data set on the hub."
        ) from error
    return dict(found) if isinstance(found, dict) else {"all": found}


def _from_hub(path: str) -> Any:
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    repository, _, split = path.removeprefix(_HUB).partition(":")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        # Asked once before: load_dataset goes on trying for half a minute and more.
        try:
            huggingface_hub.HfApi().dataset_info(repository, timeout=_HUB_SECONDS)
        except HFValidationError:
            raise
        except RepositoryNotFoundError:
            raise MedecFormatError(
                f"{path}: the hub has no such data set, or it is not open to you; "
                "check the name, or log in with `hf auth login`."
            ) from None
        except Exception as error:  # whatever the network does
            raise MedecFormatError(
                f"{path}: the hub does not answer ({_first_line(error)}); try again, set HF_HUB_OFFLINE=1 "
                "to use a data set that was loaded before, or give a local folder."
            ) from error
    return datasets.load_dataset(repository, split=split or None)


def _from_files(folder: Path) -> Any:
    import datasets

    for suffix, loader in _LOADERS.items():
        files = sorted(str(file) for file in folder.glob(f"*{suffix}"))
        if files and loader == "csv":
            # Everything as text: inference would read the flag as a number and NA as nothing.
            with Path(files[0]).open(encoding="utf-8-sig", newline="") as file:
                text = datasets.Features({name: datasets.Value("string") for name in next(csv.reader(file), ())})
            return datasets.load_dataset("csv", data_files=files, split="train", features=text, keep_default_na=False)
        if files:
            return datasets.load_dataset(loader, data_files=files, split="train")
    raise MedecFormatError(
        f"{folder}: the folder has no data set; give a folder written by datasets.save_to_disk, "
        "or one with .parquet, .csv or .jsonl files."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
