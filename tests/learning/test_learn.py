"""Self-play that learns, run again: both roles get better in every seed, by a margin."""

import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import REPOSITORY, environment

from experiments.learning.results import Rates

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
def test_the_assessor_gets_better_on_held_out_notes(rates: Rates, seed: int) -> None:
    for temperature, margin in ((1.0, 0.15), (0.0, 0.08)):
        before, after = (rates.balanced(step, temperature, (seed,)).value for step in (rates.steps[0], rates.steps[-1]))
        assert after - before > margin


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_attacker_gets_better_against_the_frozen_novice(rates: Rates, seed: int) -> None:
    first, last = (rates.share("attacker/undetected", step, 1.0, (seed,)) for step in (rates.steps[0], rates.steps[-1]))
    assert last.interval[0] > first.interval[1]


def test_the_attacker_does_not_win_by_breaking_the_rules(rates: Rates) -> None:
    attacks = ("attacker/valid", "attacker/valid_decoys")
    first, last = (rates.share(attacks, step, 1.0).complement.value for step in (rates.steps[0], rates.steps[-1]))
    assert last < min(first, 0.2)
