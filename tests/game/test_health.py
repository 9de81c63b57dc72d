"""Health: an alarm begins and ends with its number, never on chance, never on a handful of
games."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.core.metrics import Alarms, HealthMonitor, HealthReport
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction

RULES = MedicalGameInteraction.View.rules(MedicalGameInteraction.roles)

COUNTS = {rule.games: 100.0 for rule in RULES if rule.games}
# A little on the healthy side of every limit; the rate of success has one on both.
HEALTHY = {
    **{rule.metric: rule.limit + (-0.05 if rule.above else 0.05) for rule in RULES},
    **{"selfplay/attacker/success_rate": 0.5, **COUNTS},
}
BY_NAME = {rule.name: rule for rule in RULES}
ILL = {r.name: {r.metric: r.limit + (0.01 if r.above else -0.01)} for r in RULES}
ILL["fewer_kinds"] = {BY_NAME["fewer_kinds"].metric: 0.27}  # of its first value, 0.55


def monitor(patience: int = 1, **config: Any) -> HealthMonitor:
    return HealthMonitor(Alarms(patience=patience, **config), RULES)


def names(report: HealthReport) -> list[str]:
    return [alarm.rule.name for alarm in report.firing]


@pytest.mark.parametrize("name", BY_NAME)
def test_one_alarm_fires_beyond_its_default_threshold_and_no_other(name: str) -> None:
    watching = monitor()
    assert not watching.observe(HEALTHY).firing
    report = watching.observe({**HEALTHY, **ILL[name]})
    [alarm] = report.firing
    assert (alarm.rule.name, alarm.value) == (name, ILL[name][alarm.rule.metric])
    assert report.metrics[f"selfplay/alarm/{name}"] == 1.0
    assert f"selfplay.alarms.limits.{name}" in str(alarm) and alarm.rule.advice in str(alarm)
    assert not watching.observe(HEALTHY).firing


def test_a_limit_of_the_config_counts_and_null_switches_the_alarm_off() -> None:
    for name, below in (("void_games", False), ("invalid_attacks", True)):
        ill, limit = {**HEALTHY, **ILL[name]}, -99.0 if below else 99.0
        for limits in ({name: None}, {name: limit}):
            assert name not in names(monitor(limits=limits).observe(ill))
        assert name in names(monitor(limits={name: -limit}).observe(HEALTHY))


def test_certain_alarms_fire_at_once_and_others_after_their_patience() -> None:
    ill = {**ILL["attacker_format"], **ILL["context_leak"], **ILL["lost_games"]}
    assert names(monitor(patience=3).observe({**HEALTHY, **COUNTS, **ill})) == [
        "attacker_format",
        "context_leak",
    ]


def test_a_number_from_a_handful_of_games_says_nothing() -> None:
    rule, ill = BY_NAME["void_games"], {**HEALTHY, **ILL["void_games"]}
    assert rule.games is not None
    for count, fires in ((7.0, False), (8.0, True)):
        assert (rule.name in names(monitor().observe({**ill, rule.games: count}))) == fires
    del ill[rule.games]
    assert rule.name not in names(monitor().observe(ill))


STEPS = {
    "ill": {**HEALTHY, **ILL["assessor_wins"]},
    "well": HEALTHY,
    "none": {},
    "nan": {"selfplay/attacker/success_rate": float("nan"), **COUNTS},
}


@pytest.mark.parametrize(
    ("steps", "firing", "lines"),
    [
        ("ill well ill ill ill well ill well", [0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1, 0, 0]),
        ("ill none ill none ill", [0, 0, 1, 0, 1], [0, 0, 1, 0, 0]),
        ("ill nan ill nan ill", [0, 0, 1, 0, 1], [0, 0, 1, 0, 0]),
    ],
)
def test_an_alarm_begins_after_steps_in_a_row_and_ends_with_a_healthy_one(
    steps: str, firing: list[int], lines: list[int]
) -> None:
    watching = monitor(patience=2)
    reports = [watching.observe(STEPS[step]) for step in steps.split()]
    assert [len(report.firing) for report in reports] == firing
    assert [len(report.lines) for report in reports] == lines
    first, *over = [line for report in reports for line in report.lines]
    assert first.startswith("assessor_wins: selfplay/attacker/success_rate is 0.04, below 0.05")
    assert over in ([], ["assessor_wins is over: selfplay/attacker/success_rate is 0.5"])


metric_values = st.floats(0, 1) | st.just(float("nan"))
steps = st.lists(
    st.dictionaries(st.sampled_from(sorted({r.metric for r in RULES})), metric_values).map(
        lambda s: {**COUNTS, **s}
    ),
    max_size=12,
)


@given(steps, st.integers(0, 12))
def test_a_resumed_run_alarms_like_one_that_was_never_killed(
    run: list[dict[str, float]], killed: int
) -> None:
    whole, resumed = monitor(patience=2), monitor(patience=2)
    for number, step in enumerate(run):
        if number == killed:
            state = json.loads(json.dumps(resumed.state))
            resumed = monitor(patience=2)
            resumed.state = state
        assert whole.observe(step) == resumed.observe(step)
    assert whole.state == resumed.state
