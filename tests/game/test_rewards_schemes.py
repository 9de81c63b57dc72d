"""What holds for every scheme, and how a scheme is found: by its name, or by where a user's function is."""

from pathlib import Path

import pytest
from game.builders import any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, load_scheme, medserl
from medserl_agentloop.games.medical.types import Category, Role

each_scheme = pytest.mark.parametrize("name", SCHEMES)
a_scheme = st.sampled_from(sorted(SCHEMES))


@given(any_game(), a_scheme)
def test_scoring_leaves_the_record_as_it_was(record: MedicalRecord, name: str) -> None:
    scheme, before = SCHEMES[name], record.model_dump_json()
    assert scheme(record) == scheme(record)
    assert record.model_dump_json() == before


@given(any_game(), a_scheme)
def test_a_role_s_reward_is_the_sum_of_its_components(record: MedicalRecord, name: str) -> None:
    record.rewards = SCHEMES[name](record)
    for role in Role:
        components = record.rewards.get(role)
        assert record.reward(role) == (None if components is None else sum(components.values()))


@given(any_game(), a_scheme)
def test_whoever_generated_a_turn_that_counts_is_rewarded_and_nobody_else(record: MedicalRecord, name: str) -> None:
    played = {Role.ATTACKER: record.attack, Role.ASSESSOR: record.assessment}
    expected = {role for role, turn in played.items() if turn is not None and record.outcome is not Outcome.VOID}
    assert set(SCHEMES[name](record)) == expected


@each_scheme
@pytest.mark.parametrize("category", Category)
def test_a_void_game_gives_nothing(name: str, category: Category) -> None:
    assert SCHEMES[name](finished(Outcome.VOID, category=category)) == {}


USERS_SCHEME = """
def flat(record):
    return {role: {"flat": 0.25} for role in record.rewards}
number = 3
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("medsrl", r"\(did you mean 'medserl'\?\): expected one of learnable, .*or package.module:function"),
        ("", "no reward scheme"),
        ("no_such_module:flat", "cannot be loaded: ModuleNotFoundError"),
        ("flat_rewards:sharp", "cannot be loaded: AttributeError"),
        ("flat_rewards:number", "no reward scheme 'flat_rewards:number'"),
    ],
)
def test_a_scheme_that_cannot_be_found_is_named(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_rewards.py").write_text(USERS_SCHEME)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_scheme("flat_rewards:flat").__name__ == "flat"
    with pytest.raises(ValueError, match=says):
        load_scheme(name)


def test_constants_of_a_scheme_can_be_replaced() -> None:
    record = finished(Outcome.CORRECT_REJECTION, category="adversarial_benign")
    assert medserl(record)[Role.ATTACKER]["validity"] == -2.0
    assert load_scheme("medserl", {"failed_attack": -1.6})(record)[Role.ATTACKER]["validity"] == -1.6
    assert load_scheme("medserl", {"failed_attack": None}) is medserl
    assert set(SCHEMES) == {"medserl", "zero_sum", "learnable", "medical_general_sum", "medical_general_sum_no_cot"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("medserl", r"has no term 'faild_attack' \(did you mean 'failed_attack'\?\): it has win, invalid_attack, "),
        ("flat_rewards:flat", "it has none, so leave selfplay.reward_terms as it is"),
    ],
)
def test_a_constant_that_a_scheme_lacks_is_named(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_rewards.py").write_text(USERS_SCHEME)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=says):
        load_scheme(name, {"faild_attack": -1.0})
