"""``medserl quickstart``: the toy clinic's notes, a run on the CPU, its page, and what was gained.

It works from a checkout and from an installed wheel in an empty folder. Finished steps are skipped,
an interrupted run is resumed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf
from rich.console import Console

from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST
from medserl_agentloop.terminal import announce, errors_in_one_line

DATA = Path("data/quickstart")
NEW_NOTES = DATA / "new_notes.parquet"
"""Validation: one assessor turn per note."""
NEW_GAMES = DATA / "new" / "val.parquet"
"""The same notes as games of two turns, for ``medserl progress``."""
TRAIN_CASES, NEW_CASES = 1500, 100


def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides, as for verl's main_ppo.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
    recipe: Annotated[str, typer.Option(help="Recipe, or [several,recipes].")] = "quickstart",
) -> None:
    """Train both roles in the toy clinic and report the gain.

    Run it again to resume, or to see the result of a finished run.
    """
    announce("quickstart: notes of the toy clinic, 16 steps of training, a page. 3 to 4 minutes")
    with errors_in_one_line():
        write_data()
        if overrides or not _finished(folder):
            _train(folder, recipe, overrides or [])
        else:
            announce(f"{folder}: the run is finished; nothing is trained again")
        _conclude(folder)


def write_data() -> None:
    """Write the parquet files of the recipe that are missing below :data:`DATA`."""
    from medserl_agentloop.data.rows import build_eval_rows, write_parquet
    from medserl_agentloop.data.sample import write_sample
    from medserl_agentloop.games.clinic import Split

    train, new = DATA / "train.parquet", DATA / "new_notes.csv"
    if not train.exists():
        csv = DATA / "toy_clinic.csv"
        write_sample(csv, TRAIN_CASES, seed=7, split=Split.SEEN, overlap=1)
        _convert(csv, DATA, mix="adversarial_benign=3,decoy_benign=2")
    if not NEW_NOTES.exists() or not NEW_GAMES.exists():
        write_sample(new, NEW_CASES, 90001, Split.HELD_OUT, overlap=1, twin_share=1)
        games = NEW_GAMES.parent
        _convert(new, games, mix="adversarial_benign=1,vanilla_benign=1", val_fraction=1)
        write_parquet(build_eval_rows([new])[0], NEW_NOTES)
    announce(f"{train}: to train on, from {TRAIN_CASES:,} cases of the toy clinic")
    half = f"{2 * NEW_CASES} new notes, half of them with an error"
    announce(f"{NEW_NOTES}: {half}, in wordings and with facts that training never shows")


def _convert(csv: Path, folder: Path, **options: Any) -> None:
    from medserl_agentloop.data.cli import convert_files
    from medserl_agentloop.data.rows import RowPlan

    convert_files([csv], folder, RowPlan(**options))


def _finished(folder: Path) -> bool:
    """Return whether a run's newest checkpoint is from its last step."""
    config, latest = folder / CONFIG_FILE, folder / LATEST
    if not (config.is_file() and latest.is_file()):
        return False
    last = OmegaConf.select(OmegaConf.load(config), "trainer.total_training_steps")
    return last is not None and int(latest.read_text(encoding="utf-8")) >= last


def _train(folder: Path, recipe: str, overrides: list[str]) -> None:
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", f"+recipes={recipe}"),
        f"trainer.experiment_name={folder.name}",
        f"trainer.default_local_dir={folder}",
        "hydra.callbacks.medserl_log.hints=false",
        *overrides,
    ]
    announce(shlex.join(["python", *command[1:]]))
    announce("importing verl and torch")
    started = time.monotonic()
    code = subprocess.run(command).returncode
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)
    announce(f"trained in {time.monotonic() - started:.0f} s")


def _conclude(folder: Path) -> None:
    from medserl_agentloop.report import headline
    from medserl_agentloop.report.page import write_page

    page = folder / "report.html"
    write_page([folder], page, Console(quiet=True))
    announce(f"page: {page}")
    announce(
        f"next: medserl show {folder}, or medserl progress {folder} --data {NEW_GAMES}: "
        "first against last player"
    )
    announce(headline(folder) or "nothing was measured on held-out notes")
