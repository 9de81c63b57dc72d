"""``medserl probe``: what is measured of a model that plays, and which settings follow."""

from pathlib import Path
from typing import Any

import pytest
from evaluation.chat_server import MODEL, ChatServer
from evaluation.test_play import good_player
from game.builders import finished
from hypothesis import given
from hypothesis import strategies as st
from invoking import invoke
from typer.testing import Result

from medserl_agentloop.evaluation.play import note_shares, settings_that_follow
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, read_games
from medserl_agentloop.games.medical.types import Role

P = "selfplay/probe/"


def probed(model: str, data: Path, output: Path, *more: str) -> Result:
    return invoke("probe", model, "--data", data, "--output", output, "--notes", 4, "--samples", 3, *more)


def earning(uid: str, reward: float) -> MedicalRecord:
    return finished(
        Outcome.CORRECT_DETECTION, category="vanilla_harmful", uid=uid, rewards={Role.ASSESSOR: {"game": reward}}
    )


def test_a_served_model_plays_each_note_several_times(server: ChatServer, rows: Path, tmp_path: Path) -> None:
    server.answer = good_player
    done = probed(server.url, rows, tmp_path / "probe.jsonl", "--model", MODEL)
    assert done.exit_code == 0, done.output
    records = list(read_games(tmp_path / "probe.jsonl"))
    assert len(records) == 12 and len({record.uid for record in records}) == 4
    assert len({(record.uid, record.spec.index) for record in records}) == 4
    assert "probe/agreement" in done.output and "selfplay.judge=llm" in done.output


def test_a_model_that_cannot_play_needs_a_warm_start(server: ChatServer, rows: Path, tmp_path: Path) -> None:
    server.answer = lambda role, prompt: "I am sorry"
    done = probed(server.url, rows, tmp_path / "probe.jsonl", "--model", MODEL)
    assert done.exit_code == 0, done.output
    assert "0% of the attacker's turns can be read, of 90 %: warm start first" in done.output
    assert "0% of the attacks are valid, most others are unparsed" in done.output


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([("a", 1.0), ("a", 1.0), ("b", -1.0), ("b", -1.0)], 1.0),
        ([("a", 1.0), ("a", -1.0), ("b", 1.0), ("b", -1.0)], 0.0),
        # Mean squares: 2.25 between the notes, 0.5 within; two games on each.
        ([("a", 1.0), ("a", 2.0), ("b", -0.5), ("b", 0.5)], (2.25 - 0.5) / (2.25 + 0.5)),
    ],
)
def test_the_share_of_the_note_in_a_reward(rewards: list[tuple[str, float]], share: float) -> None:
    found = note_shares([earning(uid, reward) for uid, reward in rewards])
    assert found[P + "assessor/note_share"] == pytest.approx(share)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-2, 2)), max_size=12))
def test_the_share_is_a_share_whatever_the_rewards(rewards: list[tuple[str, float]]) -> None:
    found = note_shares([earning(uid, reward) for uid, reward in rewards])
    assert all(0 <= value <= 1 + 1e-9 for value in found.values())


def test_samples_agree_where_all_verdicts_on_an_untouched_note_are_the_same() -> None:
    outcomes = {"a": [Outcome.CORRECT_DETECTION] * 3, "b": [Outcome.CORRECT_DETECTION, Outcome.MISSED_ERROR]}
    games = [finished(o, category="vanilla_harmful", uid=uid) for uid, group in outcomes.items() for o in group]
    assert note_shares(games)[P + "agreement"] == 0.5
    assert P + "agreement" not in note_shares([finished(Outcome.CORRECT_DETECTION, uid="c")])


@pytest.mark.parametrize(
    ("measured", "judge", "override"),
    [
        ({"selfplay/assessor/truncation_rate": 0.1}, "llm", "selfplay.budget.assessor=2048"),
        ({"selfplay/attacker/truncation_rate": 0.1}, "llm", "selfplay.budget.attacker_reasoning=1024"),
        ({"selfplay/assessor/truncation_rate": 0.5}, "llm", "+data.apply_chat_template_kwargs.enable_thinking=False"),
        ({P + "assessor/note_share": 0.7}, "llm", "algorithm.adv_estimator=role_grpo actor_rollout_ref.rollout.n=8"),
        ({P + "assessor/note_share": 0.2}, "llm", "algorithm.adv_estimator=role_rae"),
        ({}, "labels", "selfplay.judge=llm"),
        ({}, "llm", "'selfplay.blind={readings: 3, needed: 2}'"),
    ],
)
def test_a_setting_follows_from_what_was_measured(measured: dict[str, Any], judge: str, override: str) -> None:
    assert override in [override for _, override in settings_that_follow(measured, MedicalConfig(judge=judge))]
    fine = {"selfplay/judge/knowable_rate": 0.95, "selfplay/attacker/valid_rate": 0.9}
    assert list(settings_that_follow(fine, MedicalConfig(judge="llm"))) == []


@pytest.mark.parametrize(
    "measured",
    [
        {"selfplay/assessor/no_signal_rate": 1.0, "selfplay/attacker/valid_rate": 1.0},
        {"selfplay/attacker/parse_rate": 0.0, "selfplay/assessor/parse_rate": 0.0},
        {"selfplay/attacker/valid_rate": 0.1},
    ],
)
def test_where_nothing_can_be_learnt_no_estimator_follows(measured: dict[str, Any]) -> None:
    following = [*settings_that_follow({P + "assessor/note_share": 0.9, **measured}, MedicalConfig(judge="labels"))]
    assert not any("estimator" in override or "rollout.n" in override for _, override in following)
    assert len(following) == 1 + len([name for name in measured if measured[name] < 0.9 or "no_signal" in name])
