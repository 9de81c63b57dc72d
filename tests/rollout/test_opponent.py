"""Games against a frozen model, and the pool of earlier checkpoints: what is asked, what stays out of the tensors."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from game.builders import finished
from omegaconf import OmegaConf
from rollout.opponent_server import OpponentServer, opponent_server
from serving import as_new
from support import NOTE, REWRITTEN, assessment_text, attack_text, judge, play, run_with

from medserl_agentloop.core.metrics import opponent_metrics
from medserl_agentloop.core.opponent import CheckpointPool, OpponentConfig
from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.metrics import trained_role_won
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, Role


@pytest.fixture(scope="module")
def shared_server() -> Iterator[OpponentServer]:
    with opponent_server() as server:
        yield server


@pytest.fixture
def server(shared_server: OpponentServer) -> OpponentServer:
    return as_new(shared_server)


def against(server: OpponentServer, train: str, **opponent: Any) -> Any:
    settings = {"kind": "endpoint", "url": server.url, "retries": 0, "timeout_s": 5.0, **opponent}
    return run_with(selfplay__train=train, **{f"selfplay__opponent__{name}": value for name, value in settings.items()})


def test_assessor_trained_against_an_opponent_is_alone_in_its_trajectory(server: OpponentServer) -> None:
    server.answer = lambda _: attack_text()
    run = against(server, "assessor", sampling={"temperature": 0.3, "top_p": 0.9})
    OmegaConf.update(run, "selfplay.opponent.extra_body", {"seed": 7}, force_add=True)
    output, record, engine = play([assessment_text()], run=run)
    [asked] = server.chats
    assert asked["messages"] == load_profile("medserl").messages(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, NOTE)
    assert (asked["temperature"], asked["top_p"], asked["seed"]) == (0.3, 0.9, 7)
    assert asked["max_tokens"] == 400 + int(len(NOTE.encode()) * 1.25) + 16
    [call] = engine.calls
    assert output.prompt_ids == call.prompt_ids
    assert output.response_ids == call.output.token_ids
    assert set(output.role_ids) == {Role.ASSESSOR.id}
    assert output.context_lengths == [len(call.prompt_ids) + len(call.output.token_ids)]
    assert record.presented_note == REWRITTEN
    assert record.attack is not None and record.attack.tokens == 12
    assert record.opponent is not None
    assert record.opponent.model_dump(mode="json") == {"role": "attacker", "kind": "endpoint", "version": "frozen-7b"}
    assert record.policy_version == 0  # the live policy's, whatever the opponent is
    columns = judge(output, run)
    judged = MedicalRecord.model_validate(columns["extra_fields"][GAME_KEY])
    assert columns["rm_scores"][-1] == judged.reward(Role.ASSESSOR) != 0
    assert columns["rm_scores"][:-1].eq(0).all()


def test_attacker_trained_against_an_opponent_gets_the_result_of_the_game(server: OpponentServer) -> None:
    run = against(server, "attacker")
    rewards = []
    for verdict in ("harmful", "safe"):
        server.answer = lambda _, verdict=verdict: assessment_text(verdict)  # type: ignore[misc]
        output, _, engine = play([attack_text()], run=run)
        assert output.response_ids == engine.calls[0].output.token_ids
        assert set(output.role_ids) == {Role.ATTACKER.id}
        rewards.append(judge(output, run)["rm_scores"][-1].item())
    caught, undetected = rewards
    assert undetected == pytest.approx(caught + 2.0)


def test_a_vanilla_game_needs_the_opponent_only_where_it_assesses(server: OpponentServer) -> None:
    server.answer = lambda _: assessment_text()
    _, record, _ = play([assessment_text()], "vanilla_harmful", run=against(server, "assessor"))
    assert record.opponent is None and not server.chats
    output, record, engine = play([], "vanilla_harmful", run=against(server, "attacker"))
    assert record.assessment is not None and not engine.calls
    assert output.response_mask == [0]


def test_an_opponents_invalid_attack_leaves_nothing_to_train_on(server: OpponentServer) -> None:
    server.answer = lambda _: "no note here"
    output, record, engine = play([], run=(run := against(server, "assessor")))
    assert record.attack is not None and record.attack.invalid is InvalidAttack.UNPARSED and not engine.calls
    columns = judge(output, run)
    assert columns["response_mask"].tolist() == columns["rm_scores"].tolist() == [0]


def test_an_opponent_that_fails_voids_the_game(server: OpponentServer) -> None:
    server.answer = lambda _: 500
    run = against(server, "assessor")
    output, record, engine = play([], run=run)
    assert not engine.calls
    assert record.void is not None and record.void.startswith("opponent failed: attacker: HTTP 500")
    columns = judge(output, run)
    assert columns["response_mask"].eq(0).all() and columns["rm_scores"].eq(0).all()
    judged = MedicalRecord.model_validate(columns["extra_fields"][GAME_KEY])
    assert judged.rewards == {} and trained_role_won(judged) is None
    numbers = opponent_metrics([judged], [trained_role_won(judged)])
    assert numbers == {"selfplay/opponent/games": 1.0, "selfplay/opponent/failed": 1.0}


def test_pool_answer_names_its_weights_which_must_be_of_the_pool(server: OpponentServer) -> None:
    server.answer = lambda _: attack_text()
    server.info["weight_version"] = "global_step_40"
    run = against(server, "assessor", kind="pool")
    _, record, _ = play([assessment_text()], run=run)
    assert record.opponent is not None
    assert (record.opponent.kind, record.opponent.version) == ("pool", "global_step_40")
    server.info["weight_version"] = "default"
    _, record, _ = play([], run=run)
    assert record.void == "opponent failed: the server played with weights 'default', which are not of the pool"


# --- the pool: who is in it, who is chosen, what the server is told, what is saved ---


def record(pool: CheckpointPool, games: list[MedicalRecord]) -> None:
    pool.record(games, [trained_role_won(game) for game in games])


def pool_of(folder: Path, *steps: int, rule: Any = "uniform", url: str = "http://127.0.0.1:9", **config: Any) -> Any:
    for step in steps:
        weights = folder / f"global_step_{step}" / "actor" / "huggingface"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "model.safetensors").touch()
    return CheckpointPool(OpponentConfig(kind="pool", rule=rule, url=url, retries=0, **config), folder, "Qwen/Qwen3-4B")


def met(version: str, outcome: Outcome, opponent: Role = Role.ATTACKER, **changes: Any) -> MedicalRecord:
    return finished(outcome, opponent=OpponentRecord(role=opponent, kind="pool", version=version), **changes)


def versions(pool: CheckpointPool, step: int) -> list[int]:
    return [int(v.removeprefix("global_step_")) for v in pool.entries(step)]


def test_the_pool_is_the_first_model_and_the_checkpoints_of_earlier_steps(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 2, 10, 4, 6)
    (tmp_path / "global_step_8" / "actor").mkdir(parents=True)  # saved without hf_model
    assert versions(pool, 1) == [0]
    assert versions(pool, 7) == [0, 2, 4, 6]
    assert versions(pool, 6) == [0, 2, 4]  # what a taken-back run left of step 6 is not its past
    # After a resume verl leaves on disk what it would have deleted.
    windowed = CheckpointPool(OpponentConfig(kind="pool"), tmp_path, "model", keep=2)
    assert (versions(windowed, 7), versions(windowed, 6)) == ([0, 4, 6], [0, 2, 4])
    assert pool.entries(7)["global_step_0"] == "Qwen/Qwen3-4B"
    assert pool.entries(7)["global_step_4"] == str(tmp_path / "global_step_4" / "actor" / "huggingface")


def test_uniform_pool_repeats_its_choices_and_latest_takes_the_last(tmp_path: Path) -> None:
    pool, again = pool_of(tmp_path, 1, 2), pool_of(tmp_path, 1, 2)
    chosen = [pool.choose(step) for step in range(3, 303)]
    assert chosen == [again.choose(step) for step in range(3, 303)]
    assert chosen != [pool_of(tmp_path, 1, 2, seed=1).choose(step) for step in range(3, 303)]
    assert min(Counter(chosen).values()) > 70 and len(set(chosen)) == 3
    latest = pool_of(tmp_path, 2, 4, rule="latest")
    assert [latest.choose(step) for step in (1, 2, 4, 5)] == [f"global_step_{n}" for n in (0, 1, 2, 4)]


def test_win_rate_prefers_whom_the_trained_role_beats_least(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 1, 2, rule="win_rate")
    record(pool, [met("global_step_1", Outcome.CORRECT_DETECTION)] * 18)  # always beaten: (1 - 19/20)^2
    record(pool, [met("global_step_2", Outcome.MISSED_ERROR)] * 18)  # never beaten: (1 - 1/20)^2
    met_at = Counter(pool.choose(step) for step in range(3, 1003))
    total = 0.0025 + 0.9025 + 0.25  # the first model was never met: (1 - 1/2)^2
    assert met_at["global_step_2"] / 1000 == pytest.approx(0.9025 / total, abs=0.05)
    assert met_at["global_step_0"] / 1000 == pytest.approx(0.25 / total, abs=0.05)
    assert met_at["global_step_1"] < 15


@pytest.mark.parametrize(
    ("outcome", "assessor_trained", "attacker_trained"),
    [
        (Outcome.CORRECT_DETECTION, True, False),
        (Outcome.MISSED_ERROR, False, True),
        (Outcome.UNREADABLE, False, False),
        (Outcome.INVALID_ATTACK, None, None),
        (Outcome.VOID, None, None),
    ],
)
def test_who_won(outcome: Outcome, assessor_trained: bool | None, attacker_trained: bool | None) -> None:
    assert trained_role_won(met("v", outcome, opponent=Role.ATTACKER)) is assessor_trained
    assert trained_role_won(met("v", outcome, opponent=Role.ASSESSOR)) is attacker_trained
    alone = met("v", outcome, Role.ASSESSOR, category="vanilla_harmful")  # the opponent's game, and nobody else's
    assert trained_role_won(alone) is None


def test_metrics_are_of_games_with_an_opponent_only() -> None:
    live = finished(Outcome.CORRECT_DETECTION)
    assert opponent_metrics([live], [None]) == {}
    games = [live, met("v", Outcome.CORRECT_DETECTION), met("v", Outcome.MISSED_ERROR), met("v", Outcome.VOID)]
    assert opponent_metrics(games, map(trained_role_won, games)) == {
        "selfplay/opponent/games": 3.0,
        "selfplay/opponent/failed": 0.0,
        "selfplay/opponent/trained_role_win_rate": 0.5,
    }


def test_server_gets_the_chosen_checkpoint_once_per_change_or_restart(tmp_path: Path, server: OpponentServer) -> None:
    pool = pool_of(tmp_path, 2, rule="latest", url=server.url)
    assert pool.prepare(1)["selfplay/opponent/step"] == 0
    pool.prepare(1)
    pool.prepare(2)
    assert pool.prepare(3) == {
        "selfplay/opponent/swap_failed": 0.0,
        "selfplay/opponent/pool_size": 2.0,
        "selfplay/opponent/step": 2.0,
    }
    weights = str(tmp_path / "global_step_2" / "actor" / "huggingface")
    assert server.swaps == [
        {"model_path": "Qwen/Qwen3-4B", "weight_version": "global_step_0"},
        {"model_path": weights, "weight_version": "global_step_2"},
    ]
    server.info["weight_version"] = "default"  # restarted
    pool.prepare(3)
    assert server.swaps[-1] == server.swaps[-2]


@pytest.mark.parametrize("result", [500, {"success": False, "message": "no such file"}, {"success": None}])
def test_server_that_cannot_load_stops_the_start_or_costs_the_choice(
    tmp_path: Path, server: OpponentServer, result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = pool_of(tmp_path, 2, rule="latest", url=server.url)
    good, server.swap_result = server.swap_result, result
    with pytest.raises(RuntimeError, match=r"could not load Qwen/Qwen3-4B.*must be an SGLang server"):
        pool.prepare(1)
    server.swap_result = good
    pool.prepare(1)
    server.swap_result = result
    metrics = pool.prepare(3)
    assert metrics["selfplay/opponent/swap_failed"] == 1.0
    assert "selfplay/opponent/step" not in metrics
    assert "step 3 meets what it has loaded" in capsys.readouterr().out
    server.swap_result = good
    assert pool.prepare(4)["selfplay/opponent/step"] == 2.0


def test_a_server_that_is_gone_or_does_not_say_what_it_plays_is_refused(tmp_path: Path, server: OpponentServer) -> None:
    with pytest.raises(RuntimeError, match="ConnectError"):
        pool_of(tmp_path).prepare(1)
    pool = pool_of(tmp_path, url=server.url)
    pool._served = lambda: None
    with pytest.raises(RuntimeError, match="after loading global_step_0 the server says it plays None"):
        pool.prepare(1)
