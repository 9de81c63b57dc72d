"""What holds for every scheme, and how a scheme is found: by its name, or by where a user's function is."""

from pathlib import Path

import pytest
from game.builders import any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, load_scheme, medserl
from medserl_agentloop.games.medical.types import Role


@given(any_game(), st.sampled_from(sorted(SCHEMES)))
def test_a_scheme_rewards_whoever_generated_a_turn_that_counts_and_leaves_the_record_as_it_was(
    record: MedicalRecord, name: str
) -> None:
    scheme, before = SCHEMES[name], record.model_dump_json()
    rewards = scheme(record)
    assert scheme(record) == rewards
    assert record.model_dump_json() == before
    played = {Role.ATTACKER: record.attack, Role.ASSESSOR: record.assessment}
    assert set(rewards) == {
        role for role, turn in played.items() if turn is not None and record.outcome is not Outcome.VOID
    }
    record.rewards = rewards
    for role in Role:
        assert record.reward(role) == (sum(rewards[role].values()) if role in rewards else None)


USERS_SCHEME = """
def flat(record):
    return {role: {"flat": 0.25} for role in record.rewards}
number = 3
"""


def test_constants_of_a_scheme_can_be_replaced() -> None:
    record = finished(Outcome.CORRECT_REJECTION, category="adversarial_benign")
    assert medserl(record)[Role.ATTACKER]["validity"] == -2.0
    assert load_scheme("medserl", {"failed_attack": -1.6})(record)[Role.ATTACKER]["validity"] == -1.6
    assert load_scheme("medserl", {"failed_attack": None}) is medserl
    assert set(SCHEMES) == {"medserl", "zero_sum", "learnable", "medical_general_sum", "medical_general_sum_no_cot"}


@pytest.mark.parametrize(
    ("name", "terms", "says"),
    [
        ("medsrl", {}, r"\(did you mean 'medserl'\?\): expected one of learnable, .*or package.module:function"),
        ("", {}, "no reward scheme"),
        ("no_such_module:flat", {}, "cannot be loaded: ModuleNotFoundError"),
        ("flat_rewards:sharp", {}, "cannot be loaded: AttributeError"),
        ("flat_rewards:number", {}, "no reward scheme 'flat_rewards:number'"),
        (
            "medserl",
            {"faild_attack": -1.0},
            r"has no term 'faild_attack' \(did you mean 'failed_attack'\?\): it has win, invalid_attack, ",
        ),
        (
            "flat_rewards:flat",
            {"faild_attack": -1.0},
            "it has none, so leave selfplay.reward_terms as it is",
        ),
    ],
)
def test_a_scheme_or_a_constant_that_cannot_be_found_is_named(
    name: str, terms: dict[str, float], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_rewards.py").write_text(USERS_SCHEME)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_scheme("flat_rewards:flat").__name__ == "flat"
    with pytest.raises(ValueError, match=says):
        load_scheme(name, terms)
