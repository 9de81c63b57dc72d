"""What reaches the weights: one update of verl's real worker and engine, compared bit by bit."""

from pathlib import Path
from typing import Any

import pytest
from real_runs import answers_of

pytestmark = pytest.mark.slow

BASE = {"attacker": 1.0, "assessor": 1.0}
OTHER_ATTACKER = {"attacker": 5.0, "assessor": 1.0}
OTHER_ASSESSOR = {"attacker": 1.0, "assessor": -3.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "both": {"rewards": BASE},
    "assessor": {"rewards": BASE, "train": "assessor"},
    "assessor, other attacker rewards": {"rewards": OTHER_ATTACKER, "train": "assessor"},
    "assessor, attacker anchored": {"rewards": BASE, "train": "assessor", "anchor": {"attacker": 0.1}},
    "attacker": {"rewards": BASE, "train": "attacker"},
    "attacker, other assessor rewards": {"rewards": OTHER_ASSESSOR, "train": "attacker"},
    "attacker, other attacker rewards": {"rewards": {"attacker": -1.0, "assessor": 1.0}, "train": "attacker"},
    "void": {"rewards": BASE, "void": True},
    "void, anchored": {"rewards": BASE, "void": True, "anchor": {"attacker": 0.1, "assessor": 0.1}},
}


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return answers_of(Path(__file__).with_name("one_update.py"), tmp_path_factory.mktemp("update"), VARIANTS)


@pytest.mark.parametrize(
    ("trained", "perturbed"),
    [("assessor", "assessor, other attacker rewards"), ("attacker", "attacker, other assessor rewards")],
)
def test_rewards_of_the_untrained_role_change_no_bit_of_the_weights(
    updates: dict[str, dict[str, Any]], trained: str, perturbed: str
) -> None:
    assert updates[trained] == updates[perturbed]
    assert updates[trained]["grad_norm"] > 0


def test_each_mode_trains_something_of_its_own(updates: dict[str, dict[str, Any]]) -> None:
    names = ("both", "assessor", "attacker", "attacker, other attacker rewards", "assessor, attacker anchored", "void")
    assert len({updates[name]["weights"] for name in names}) == len(names)


def test_a_batch_of_void_games_has_no_gradient_and_no_nan(updates: dict[str, dict[str, Any]]) -> None:
    assert updates["void"]["grad_norm"] == 0
    assert updates["void, anchored"] == updates["void"]
