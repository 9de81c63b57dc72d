"""A run in other tools: as an Inspect log or a Hugging Face dataset, and in a workspace of Weights & Biases.

Called by ``medserl export`` and ``medserl wandb-workspace``.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
from jinja2 import Template
from pyarrow.parquet import ParquetWriter

from medserl_agentloop.core.metrics import TABLE_NAME
from medserl_agentloop.paths import PACKAGE
from medserl_agentloop.report.frames import GAMES, TURNS, Column, all_games, parts, read_run, turns_frame, typed_frame

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
        from medserl_agentloop.report.page import MOST_GAMES, prompts_of, sample
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("inspect_ai"):
            raise
        raise ValueError(
            "inspect_ai is not installed here; its dependencies conflict with verl's. Give it an environment of its "
            "own: python -m venv .venv-inspect, then .venv-inspect/bin/pip install inspect_ai jinja2 omegaconf pandas "
            "pyarrow rapidfuzz scipy typer, and --no-deps --editable . in a checkout; export with "
            ".venv-inspect/bin/medserl"
        ) from None
    file = output or Path(f"{name}.eval")
    played = read_run(run)
    write_log(sample(played, MOST_GAMES), len(played), prompts_of(run), name, file)
    return file


def write_dataset(run: Path, name: str, folder: Path) -> Path:
    """Write a folder for ``datasets.load_dataset``: parquet files of games and turns, and a card (README.md)."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder, or remove its files")
    games = read_run(run)
    facts = all_games(games)
    tables = {"games": facts[:0].join(typed_frame([], NOTES)), "turns": typed_frame([], TURNS)}
    rows = Counter[str]()
    names: dict[str, Counter[str]] = {"reward schemes": Counter(), "prompt profiles": Counter()}
    with ExitStack() as stack:
        files = {}
        for table, frame in tables.items():
            (folder / table).mkdir(parents=True)
            file = ParquetWriter(
                folder / table / f"{table}.parquet", pa.Schema.from_pandas(frame, preserve_index=False)
            )
            files[table] = stack.enter_context(file)
        for part in parts(games):  # memory may not hold the texts of all games
            first = rows["games"]
            notes = typed_frame([{name: column.value(game) for name, column in NOTES.items()} for game in part], NOTES)
            played = facts[first : first + len(part)].reset_index(drop=True).join(notes)
            for table, frame in (("games", played), ("turns", turns_frame(part, first))):
                files[table].write_table(pa.Table.from_pandas(frame, files[table].schema))
                rows[table] += len(frame)
            names["reward schemes"].update(game.scheme for game in part)
            names["prompt profiles"].update(game.profile for game in part)
    kinds = {"outcomes": "outcome", "kinds of games": "category", "judges": "judge"}
    counted = {what: Counter(facts[column].dropna()) for what, column in kinds.items()} | names
    card = Template((PACKAGE / "report" / "dataset_card.md.jinja").read_text(encoding="utf-8")).render(
        name=name,
        version=importlib.metadata.version("medserl-agentloop"),
        steps=(facts["step"].min(), facts["step"].max()),
        counted={
            what: {value or "not named": count for value, count in each.items()} for what, each in counted.items()
        },
        tables={table: _described(frame, rows[table]) for table, frame in tables.items()},
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def _described(frame: pd.DataFrame, rows: int) -> dict[str, Any]:
    meanings = {name: column.meaning for name, column in (GAMES | NOTES | TURNS).items()}
    columns = [(name, frame[name].dtype, meanings.get(name, "component of the reward")) for name in frame.columns]
    return {"rows": rows, "columns": columns}


_ATTACKER, _ASSESSOR = "selfplay/attacker/", "selfplay/assessor/"

SECTIONS: dict[str, dict[str, list[str]]] = {
    "Who gets better (each is measured against the other: compare with validation)": {
        "errors undetected, of valid attacks": [_ATTACKER + "success_rate"],
        "right verdicts": [_ASSESSOR + "accuracy", _ASSESSOR + "balanced_accuracy"],
        "errors found, false alarms": [_ASSESSOR + "recall", _ASSESSOR + "false_positive_rate"],
        "reward": [_ATTACKER + "reward", _ASSESSOR + "reward"],
    },
    "Do they play by the rules": {
        "valid attacks": [_ATTACKER + "valid_rate"],
        "readable turns": [_ATTACKER + "parse_rate", _ASSESSOR + "parse_rate"],
        "tokens": [_ATTACKER + "tokens", _ASSESSOR + "tokens"],
        "truncated turns": [_ATTACKER + "truncation_rate", _ASSESSOR + "truncation_rate"],
    },
    "Can the numbers be trusted": {
        "games without a result": ["selfplay/void_rate", "selfplay/lost_rate"],
        "judge: answers, no error where one was injected": [
            "selfplay/judge/answer_rate",
            "selfplay/judge/no_error_rate",
        ],
        "assessor detects edits, not errors": ["selfplay/shortcut/index"],
        "attacks alike": [_ATTACKER + "self_similarity", _ATTACKER + "duplicate_rate"],
    },
    "Does it learn": {
        "groups without a signal": [_ATTACKER + "no_signal_rate", _ASSESSOR + "no_signal_rate"],
        "share of the gradient signal": [_ATTACKER + "signal_share", _ASSESSOR + "signal_share"],
        "gradient norm": ["actor/grad_norm"],
        "rollout against actor": ["training/rollout_probs_diff_max", "selfplay/context_leak"],
        "seconds per step": ["timing_s/step"],
    },
}
"""Sections, their panels by title, the metrics of each; docs/metrics.md says what they mean."""


def save_workspace(project: str) -> str:
    """Save a workspace with the panels to look at first to a project (``entity/project``), and return its address.

    A ValueError says what to do if the name has another form, wandb-workspaces is not installed, or W&B refuses.
    """
    entity, slash, name = project.partition("/")
    if not (entity and slash and name) or "/" in name:
        raise ValueError(f"{project!r} is not the name of a W&B project: write entity/project")
    try:
        import wandb
        from wandb_workspaces.reports import v2 as panels
        from wandb_workspaces.workspaces import Section, Workspace
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install wandb-workspaces") from None
    shown: dict[str, list[Any]] = {
        title: [panels.LinePlot(title=plot, x="Step", y=metrics) for plot, metrics in plots.items()]
        for title, plots in SECTIONS.items()
    }
    shown["Games of the last step"] = [panels.WeavePanelSummaryTable(table_name=TABLE_NAME)]
    sections = [Section(name=title, is_open=True, panels=drawn) for title, drawn in shown.items()]
    of = {"entity": entity, "project": name, "name": "self-play"}
    workspace = Workspace(**of, sections=sections, auto_generate_panels=False)
    try:
        return str(workspace.save().url)
    except wandb.errors.Error as error:
        raise ValueError(f"W&B did not save the workspace: {error}") from None
