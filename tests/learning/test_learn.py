"""Self-play that learns, run again: both roles get better in every seed, by a margin."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from real_runs import REPOSITORY, environment
from typer.testing import CliRunner

from experiments.learning.measure import held_out_cases, spec_of
from experiments.learning.results import Rates
from experiments.learning.run import CASES_SEED
from medserl_agentloop.cli import app
from medserl_agentloop.data.rows import write_parquet
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Category

pytestmark = [pytest.mark.learn, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learn")
    command = [sys.executable, "-m", "experiments.learning.run", "headline", "--results", str(folder / "results")]
    subprocess.run(command, cwd=folder, env=environment(REPOSITORY), check=True)
    return folder / "results"


@pytest.fixture(scope="module")
def rates(results: Path) -> Rates:
    return Rates.of("headline", results)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_roles_get_better_against_opponents_that_stand_still(rates: Rates, seed: int) -> None:
    start, end = rates.steps[0], rates.steps[-1]
    for temperature, margin in ((1.0, 0.15), (0.0, 0.08)):
        before, after = (rates.balanced(step, temperature, (seed,)).value for step in (start, end))
        assert after - before > margin
    first, last = (rates.share("attacker/undetected", step, 1.0, (seed,)) for step in (start, end))
    assert last.interval[0] > first.interval[1]
    attacks = ("attacker/valid", "attacker/valid_decoys")
    first, last = (rates.share(attacks, step, 1.0).complement for step in (start, end))
    assert last.value < min(first.value, 0.2), "it does not win by breaking the rules"


def test_a_tournament_of_the_checkpoints_says_what_the_page_says(results: Path, rates: Rates, tmp_path: Path) -> None:
    cases = enumerate(held_out_cases(500, CASES_SEED))
    specs = [spec_of(case, Category.ADVERSARIAL_BENIGN, number) for number, case in cases]
    write_parquet(
        [{"extra_info": MedicalRecord(spec=spec).to_json()["spec"]} for spec in specs], tmp_path / "held.parquet"
    )
    run = results.parent / "runs" / "learn" / "headline" / "0"
    options = ["--data", str(tmp_path / "held.parquet"), "--games", "500", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["tournament", f"run={run}", *options])  # profile and judge are the run's
    assert done.exit_code == 0, done.output

    table = pd.read_csv(tmp_path / "out" / "tournament.csv").set_index(["measure", "attacker", "assessor"])
    novice, trained = rates.steps[0], rates.steps[-1]
    for attacker, assessor, of_the_page in (
        (novice, novice, rates.share("attacker/undetected", novice, 1.0, (0,)).complement),
        (trained, novice, rates.share("attacker/undetected", trained, 1.0, (0,)).complement),
        (novice, trained, rates.share("assessor/frozen_attacks", trained, 1.0, (0,))),
        (trained, trained, rates.share("self/attacks", trained, 1.0, (0,))),
    ):
        found = table.loc[("detection", f"run/{attacker}", f"run/{assessor}")]
        low, high = of_the_page.interval
        assert found.low <= high and low <= found.high, (attacker, assessor)
