"""A run in the forms of other tools: an Inspect log, a Hugging Face dataset. ``medserl export``."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from jinja2 import Template

from medserl_agentloop.paths import PACKAGE
from medserl_agentloop.report.frames import GAMES, TURNS, Column, games_frame, read_run, turns, typed_frame

NOTES = {
    "seed_note": Column("string", "note that the game starts from", lambda g: g.spec.seed_note),
    "presented_note": Column("string", "note that the assessor saw", lambda g: g.presented_note),
}
"""Columns of the dataset's games besides :data:`GAMES`."""


def export_run(run: Path, to: Literal["inspect", "dataset"], output: Path | None) -> Path:
    """Write the games of a run (its ``selfplay.records``, or a games file) for another tool; return where they are.

    Without ``output`` that is named after the run. A ValueError says that there are no games, that the folder has files
    already, or how to install inspect_ai.
    """
    name = (run if run.is_dir() else run.parent).resolve().name
    if to == "dataset":
        return write_dataset(run, name, output or Path(f"{name}-dataset"))
    try:
        from medserl_agentloop.report.inspect_log import write_log
        from medserl_agentloop.report.page import prompts_of
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("inspect_ai"):
            raise
        raise ValueError(
            "inspect_ai is not installed here; its dependencies conflict with verl's. Give it an environment of its "
            "own: python -m venv .venv-inspect, then .venv-inspect/bin/pip install inspect_ai jinja2 omegaconf pandas "
            "pyarrow rapidfuzz typer, and --no-deps --editable . in a checkout; export with .venv-inspect/bin/medserl"
        ) from None
    file = output or Path(f"{name}.eval")
    write_log(read_run(run), prompts_of(run), name, file)
    return file


def write_dataset(run: Path, name: str, folder: Path) -> Path:
    """Write a folder for ``datasets.load_dataset``: parquet files of games and turns, and a card (README.md)."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder, or remove its files")
    records = read_run(run)
    notes = typed_frame([{name: column.value(game) for name, column in NOTES.items()} for game in records], NOTES)
    games, said = games_frame(records).join(notes), turns(run)
    for table, frame in (("games", games), ("turns", said)):
        (folder / table).mkdir(parents=True)
        frame.to_parquet(folder / table / f"{table}.parquet", index=False)
    counted = {"outcomes": games["outcome"], "kinds of games": games["category"], "judges": games["judge"]}
    counted["reward schemes"] = pd.Series([game.scheme for game in records])
    counted["prompt profiles"] = pd.Series([game.profile for game in records])
    card = Template((PACKAGE / "report" / "dataset_card.md.jinja").read_text(encoding="utf-8")).render(
        name=name,
        version=importlib.metadata.version("medserl-agentloop"),
        steps=(games["step"].min(), games["step"].max()),
        counted={what: Counter(values.dropna().replace("", "not named")) for what, values in counted.items()},
        tables={"games": _described(games, GAMES | NOTES), "turns": _described(said, TURNS)},
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def _described(frame: pd.DataFrame, schema: dict[str, Column]) -> dict[str, Any]:
    meanings = {name: column.meaning for name, column in schema.items()}
    columns = [(name, frame[name].dtype, meanings.get(name, "component of the reward")) for name in frame.columns]
    return {"rows": len(frame), "columns": columns}
