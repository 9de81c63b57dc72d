"""Games against a frozen model: what is asked, what stays out of the tensors, who won."""

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf
from serving import ChatServer
from support import NOTE, REWRITTEN, assessment_text, attack_text, judge, play, run_with

from medserl_agentloop.core.metrics import opponent_metrics
from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.metrics import trained_role_won
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer("frozen-7b") as server:
        yield server


def against(server: ChatServer, train: str, **opponent: Any) -> Any:
    settings = {"url": server.url, "retries": 0, "timeout_s": 5.0, **opponent}
    of_opponent = {f"selfplay__opponent__{name}": value for name, value in settings.items()}
    return run_with(selfplay__train=train, **of_opponent)


def test_assessor_trained_against_an_opponent_is_alone_in_its_trajectory(
    server: ChatServer,
) -> None:
    server.answer = lambda *_: attack_text()
    run = against(server, "assessor")
    drawn = {"seed": 7, "top_p": 0.9}
    OmegaConf.update(run, "selfplay.opponent.extra_body", drawn, force_add=True)
    output, record, engine = play([assessment_text()], run=run)
    [asked] = server.requests
    assert asked["messages"] == load_profile("medserl").messages(
        Role.ATTACKER, Category.ADVERSARIAL_BENIGN, NOTE
    )
    assert (asked["temperature"], asked["top_p"], asked["seed"]) == (1.0, 0.9, 7)
    assert asked["max_tokens"] == 400 + int(len(NOTE.encode()) * 1.25) + 16
    [call] = engine.calls
    assert output.prompt_ids == call.prompt_ids
    assert output.response_ids == call.output.token_ids
    assert set(output.role_ids) == {Role.ASSESSOR.id}
    assert output.context_lengths == [len(call.prompt_ids) + len(call.output.token_ids)]
    assert record.presented_note == REWRITTEN
    assert record.attack is not None and record.attack.tokens == 12
    met = {"role": "attacker", "kind": "endpoint", "version": "frozen-7b"}
    assert record.opponent is not None and record.opponent.model_dump(mode="json") == met
    assert record.policy_version == 0  # the live policy's, whatever the opponent is
    columns = judge(output, run)
    judged = MedicalRecord.model_validate(columns["extra_fields"][RECORD_KEY])
    assert columns["rm_scores"][-1] == judged.reward(Role.ASSESSOR) != 0
    assert columns["rm_scores"][:-1].eq(0).all()


def test_attacker_trained_against_an_opponent_gets_the_result_of_the_game(
    server: ChatServer,
) -> None:
    run = against(server, "attacker")
    rewards = []
    for verdict in ("harmful", "safe"):
        server.answer = lambda *_, verdict=verdict: assessment_text(verdict)
        output, _, engine = play([attack_text()], run=run)
        assert output.response_ids == engine.calls[0].output.token_ids
        assert set(output.role_ids) == {Role.ATTACKER.id}
        rewards.append(judge(output, run)["rm_scores"][-1].item())
    caught, undetected = rewards
    assert undetected == pytest.approx(caught + 2.0)


def test_a_vanilla_game_needs_the_opponent_only_where_it_assesses(server: ChatServer) -> None:
    server.answer = lambda *_: assessment_text()
    _, record, _ = play([assessment_text()], "vanilla_harmful", run=against(server, "assessor"))
    assert record.opponent is None and not server.requests
    output, record, engine = play([], "vanilla_harmful", run=against(server, "attacker"))
    assert record.assessment is not None and not engine.calls
    assert output.response_mask == [0]
    # No weights played; verl casts both to int, and takes the age of a game from them.
    assert record.policy_version is None
    of_step_3 = [output.extra_fields[f"{end}_global_steps"] for end in ("min", "max")]
    assert of_step_3 == [2, 2]


def test_an_opponents_invalid_attack_leaves_nothing_to_train_on(server: ChatServer) -> None:
    server.answer = lambda *_: "no note here"
    output, record, engine = play([], run=(run := against(server, "assessor")))
    assert record.attack is not None and record.attack.invalid is InvalidAttack.UNPARSED
    assert not engine.calls
    columns = judge(output, run)
    assert columns["response_mask"].tolist() == columns["rm_scores"].tolist() == [0]


def test_an_opponent_that_fails_voids_the_game(server: ChatServer) -> None:
    server.answer = lambda *_: 500
    run = against(server, "assessor")
    output, record, engine = play([], run=run)
    assert not engine.calls
    assert record.void is not None and record.void.startswith("opponent failed: attacker: HTTP 500")
    columns = judge(output, run)
    assert columns["response_mask"].eq(0).all() and columns["rm_scores"].eq(0).all()
    judged = MedicalRecord.model_validate(columns["extra_fields"][RECORD_KEY])
    assert judged.rewards == {} and trained_role_won(judged) is None
    numbers = opponent_metrics([judged], [trained_role_won(judged)])
    assert numbers == {"selfplay/opponent/games": 1.0, "selfplay/opponent/failed": 1.0}


@pytest.mark.parametrize(
    "said", [[500, assessment_text()], [assessment_text(), 500]], ids=["first", "last"]
)
def test_one_failed_turn_of_two_side_by_side_counts_as_a_failure(
    server: ChatServer, said: list[Any]
) -> None:
    answers = iter(said)
    server.answer = lambda *_: next(answers)
    run = against(server, "attacker")
    run.selfplay.assessments = 2
    _, record, _ = play([], "vanilla_harmful", run=run)
    assert record.void is not None and record.void.startswith("opponent failed: assessor: HTTP 500")
    assert record.opponent == OpponentRecord(role="assessor", kind="endpoint", version=None)
