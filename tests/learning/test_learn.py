"""Self-play that learns, run again: both roles get better in every seed, by a margin."""

import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import REPOSITORY, environment

from experiments.learning.results import Rates

pytestmark = [pytest.mark.learn, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Rates:
    folder: Path = tmp_path_factory.mktemp("learn")
    command = [
        sys.executable,
        "-m",
        "experiments.learning.run",
        "headline",
        "--results",
        str(folder),
    ]
    subprocess.run(command, cwd=folder, env=environment(REPOSITORY), check=True)
    return Rates.of("headline", folder)


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
