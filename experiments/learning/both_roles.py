"""What a run in the toy clinic gained: both roles at its start and its end, each against both of the other.

`make quickstart` ends with `python -m experiments.learning.both_roles runs/quickstart`: on held-out notes, at
temperature 1, with the run's own profile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from experiments.learning.measure import Measurement, held_out_cases
from experiments.learning.results import Rates, both_roles_table
from experiments.learning.run import CASES_SEED
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.evaluation.play import run_config
from medserl_agentloop.games.medical.prompting import load_profile

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Folder of a run in the toy clinic.")],
    cases: Annotated[int, typer.Option(help="Held-out cases that players are measured on.")] = 200,
) -> None:
    """Print who finds whose errors, with Wilson's 95 % intervals."""
    torch.set_num_threads(1)
    config = run_config(run)
    profile = load_profile(config["selfplay"]["profile"])
    start, end = (load_player(folder) for folder in (config["actor_rollout_ref"]["model"]["path"], run))
    measurement = Measurement(start, held_out_cases(cases, CASES_SEED), profile, temperature=1.0, seed=0)
    measured = {0: measurement.each_role(start), 1: measurement.each_role(end) + measurement.found(end)}
    rates = Rates({(0, step, 1.0, r.measure): (r.hits, r.items) for step, found in measured.items() for r in found})
    (corner, *columns), *rows = both_roles_table(rates)
    table = Table(corner, *columns, title=f"{run}: both roles, {cases} new notes, with 95 % intervals")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    app()
