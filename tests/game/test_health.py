"""Health: an alarm begins and ends with its number, never on chance, never on a handful of games."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from medserl_agentloop.core.alarms import HealthMonitor, HealthReport, Rule, stop_message
from medserl_agentloop.games.medical.alarms import MedicalAlarms as Alarms
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction

RULES = MedicalGameInteraction.rules()

EARLY = {"patience": 1, "reference_steps": 2, "min_games": 8}
COUNTS = {rule.games: 100.0 for rule in RULES if rule.games}
HEALTHY = {
    **COUNTS,
    "selfplay/attacker/success_rate": 0.5,
    "selfplay/attacker/no_signal_rate": 0.2,
    "selfplay/assessor/no_signal_rate": 0.2,
    "selfplay/attacker/valid_rate": 0.9,
    "selfplay/void_rate": 0.0,
    "selfplay/judge/answer_rate": 1.0,
    "selfplay/judge/no_error_rate": 0.0,
    "selfplay/shortcut/index": 0.1,
    "selfplay/judge/knowable_rate": 0.95,
    "selfplay/attacker/self_similarity": 0.4,
    "selfplay/attacker/tokens": 100.0,
    "selfplay/assessor/tokens": 50.0,
    "training/rollout_probs_diff_mean": 1e-6,
    "selfplay/context_leak": 1.0,
    "selfplay/lost_rate": 0.0,
}
ILL = {
    "attacker_wins": {"selfplay/attacker/success_rate": 0.96},
    "assessor_wins": {"selfplay/attacker/success_rate": 0.04},
    "attacker_no_signal": {"selfplay/attacker/no_signal_rate": 0.81},
    "assessor_no_signal": {"selfplay/assessor/no_signal_rate": 0.81},
    "invalid_attacks": {"selfplay/attacker/valid_rate": 0.49},
    "void_games": {"selfplay/void_rate": 0.16},
    "judge_answers": {"selfplay/judge/answer_rate": 0.89},
    "no_error_present": {"selfplay/judge/no_error_rate": 0.16},
    "unknowable_errors": {"selfplay/judge/knowable_rate": 0.79},
    "edit_detector": {"selfplay/shortcut/index": 0.41},
    "unseen_errors": {"selfplay/shortcut/recall": -0.41},
    "self_similar_attacks": {"selfplay/attacker/self_similarity": 0.71},
    "attacks_growing_alike": {"selfplay/attacker/self_similarity": 0.61},
    "attacker_longer": {"selfplay/attacker/tokens": 201.0},
    "attacker_shorter": {"selfplay/attacker/tokens": 49.0},
    "assessor_longer": {"selfplay/assessor/tokens": 101.0},
    "assessor_shorter": {"selfplay/assessor/tokens": 24.0},
    "rollout_mismatch": {"training/rollout_probs_diff_mean": 0.051},
    "context_leak": {"selfplay/context_leak": 5.1},
    "lost_games": {"selfplay/lost_rate": 0.03},
}
BY_NAME = {rule.name: rule for rule in RULES}


def monitor(**thresholds: Any) -> HealthMonitor:
    return HealthMonitor(Alarms(**thresholds), RULES)


def early(**thresholds: Any) -> HealthMonitor:
    """One that has seen the run's first steps and fires at once."""
    watching = monitor(**{**EARLY, **thresholds})
    assert not watching.observe(HEALTHY).firing
    assert not watching.observe(HEALTHY).firing
    return watching


def names(report: HealthReport) -> list[str]:
    return [alarm.rule.name for alarm in report.firing]


def test_every_rule_is_tested_here() -> None:
    assert set(ILL) == set(BY_NAME)


@pytest.mark.parametrize("name", ILL)
def test_an_alarm_fires_beyond_its_default_threshold(name: str) -> None:
    report = early().observe({**HEALTHY, **ILL[name]})
    assert name in names(report)
    alarm = next(a for a in report.firing if a.rule.name == name)
    assert alarm.value == ILL[name][alarm.rule.metric]
    assert report.metrics[f"selfplay/alarm/{name}"] == 1.0
    assert f"selfplay.alarms.{alarm.rule.setting}" in str(alarm) and alarm.rule.advice in str(alarm)


def test_the_other_numbers_fire_nothing() -> None:
    watching = early()
    both = {"self_similar_attacks", "attacks_growing_alike"}  # one number, two thresholds
    for name, ill in ILL.items():
        fired = set(names(watching.observe({**HEALTHY, **ill})))
        assert fired == {name} or fired == both == {name} | both
        assert not watching.observe(HEALTHY).firing


def test_a_healthy_run_never_alarms() -> None:
    watching = monitor()
    reports = [watching.observe(HEALTHY) for _ in range(50)]
    assert not any(r.firing or r.lines or r.metrics for r in reports)


@pytest.mark.parametrize("name", ILL)
def test_null_switches_a_threshold_off(name: str) -> None:
    watching = early(**{BY_NAME[name].setting: None})
    assert name not in names(watching.observe({**HEALTHY, **ILL[name]}))


def test_a_leak_fires_at_once_and_other_alarms_wait_for_their_patience() -> None:
    report = monitor(patience=3).observe({**HEALTHY, **COUNTS, **ILL["context_leak"], **ILL["lost_games"]})
    assert names(report) == ["context_leak"]


@pytest.mark.parametrize("rule", [r for r in RULES if r.games], ids=lambda r: r.name)
def test_a_number_from_a_handful_of_games_says_nothing(rule: Rule) -> None:
    assert rule.games is not None
    ill = {**HEALTHY, **ILL[rule.name]}
    watching = early()
    assert rule.name not in names(watching.observe({**ill, rule.games: 7.0}))
    without_count = {n: v for n, v in ill.items() if n != rule.games}
    assert rule.name not in names(watching.observe(without_count))
    assert rule.name in names(watching.observe({**ill, rule.games: 8.0}))


def test_an_alarm_begins_after_steps_in_a_row_and_ends_after_as_many() -> None:
    watching, ill, well = monitor(patience=2), {**HEALTHY, **ILL["assessor_wins"]}, HEALTHY
    steps = (ill, well, ill, ill, ill, well, ill, well, well, ill, ill)
    reports = [watching.observe(step) for step in steps]
    assert [len(r.firing) for r in reports] == [0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert [len(r.lines) for r in reports] == [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1]
    assert reports[3].lines[0].startswith("assessor_wins: selfplay/attacker/success_rate is 0.04, below 0.05")
    assert reports[8].lines == ("assessor_wins is over: selfplay/attacker/success_rate is 0.5",)


@pytest.mark.parametrize("missing", [{}, {"selfplay/attacker/success_rate": float("nan"), **COUNTS}])
def test_a_step_without_the_number_neither_fires_nor_ends(missing: dict[str, float]) -> None:
    watching, ill = monitor(patience=2), {**HEALTHY, **ILL["attacker_wins"]}
    reports = [watching.observe(step) for step in (ill, missing, ill, missing, ill)]
    assert [bool(r.firing) for r in reports] == [False, False, True, False, True]
    assert [len(r.lines) for r in reports] == [0, 0, 1, 0, 0]


def test_lengths_are_compared_with_the_mean_of_the_first_steps() -> None:
    watching = monitor(patience=1, reference_steps=2)
    tokens = (100.0, 300.0, 399.0, 401.0, 101.0, 99.0)
    fired = [names(watching.observe({**HEALTHY, "selfplay/attacker/tokens": t})) for t in tokens]
    assert fired == [[], [], [], ["attacker_longer"], [], ["attacker_shorter"]]


def test_first_steps_with_a_handful_of_games_are_no_reference() -> None:
    watching = monitor(patience=1, reference_steps=1)
    few = {**HEALTHY, "selfplay/attacker/turns": 3.0, "selfplay/attacker/tokens": 1.0}
    assert not [r for r in (watching.observe(few), watching.observe(HEALTHY), watching.observe(HEALTHY)) if r.firing]


metric_values = st.floats(0, 1) | st.just(float("nan"))
steps = st.lists(
    st.dictionaries(st.sampled_from(sorted({r.metric for r in RULES})), metric_values).map(lambda s: {**COUNTS, **s}),
    max_size=12,
)


@given(steps, st.integers(0, 12))
def test_a_resumed_run_alarms_like_one_that_was_never_killed(run: list[dict[str, float]], killed: int) -> None:
    thresholds = Alarms(patience=2, reference_steps=2)
    whole, resumed = HealthMonitor(thresholds, RULES), HealthMonitor(thresholds, RULES)
    for number, step in enumerate(run):
        if number == killed:
            state = json.loads(json.dumps(resumed.to_dict()))
            resumed = HealthMonitor(thresholds, RULES)
            resumed.load_dict(state)
        assert whole.observe(step) == resumed.observe(step)
    assert whole.to_dict() == resumed.to_dict()


def test_the_state_is_a_copy() -> None:
    watching = monitor(patience=2)
    before = watching.to_dict()
    watching.observe({**HEALTHY, **ILL["attacker_wins"]})
    assert before == monitor().to_dict() != watching.to_dict()


@pytest.mark.parametrize("state", [{"streaks": {"a": "many"}}, {"references": {"x": {"total": 1}}, "other": 1}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        HealthMonitor(Alarms(), RULES).load_dict(state)


def test_the_stop_message_says_which_alarm_the_value_and_how_to_go_on() -> None:
    report = early().observe({**HEALTHY, **ILL["void_games"], **ILL["attacker_wins"]})
    message = stop_message(report.firing, 12)
    for part in ("after step 12", "void_games", "0.16", "attacker_wins", "0.96", "selfplay.on_alarm=warn"):
        assert part in message
    assert "change selfplay.alarms.win_rate, selfplay.alarms.voids (null" in message


@pytest.mark.parametrize(
    "wrong", [{"win_rate": 0.4}, {"voids": 15}, {"patience": 0}, {"length_factor": 1.0}, {"judge_answer": 0.9}]
)
def test_a_threshold_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Alarms(**wrong)


def test_every_threshold_belongs_to_a_rule() -> None:
    assert {r.setting for r in RULES} | set(EARLY) == set(Alarms.model_fields)
