"""The reward manager scores with the run's scheme, and every step has its table in W&B."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from game.builders import finished
from support import TOKENIZER, run_with, scored
from verl.utils.tracking import Tracking

from medserl_agentloop.core.agent_loop import PerTurnRewardManager
from medserl_agentloop.core.metrics import game_metrics
from medserl_agentloop.core.recorder import TABLE_NAME, games_table, log_games
from medserl_agentloop.core.records import Rewards, TurnRecord
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.kuhn_poker import KuhnRecord
from medserl_agentloop.games.medical import interaction
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import ZeroSum
from medserl_agentloop.medical_team.utils import MedicalGeneralSum
from medserl_agentloop.testing import compose_run


def answer_to(record: Any, run: Any) -> dict[str, Any]:
    return asyncio.run(scored(PerTurnRewardManager(run, TOKENIZER), record))


def test_run_of_the_baseline_scheme_gets_its_components() -> None:
    judged = finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful")
    answer = answer_to(judged, run_with(selfplay__reward="medical_general_sum"))
    record, paid = answer["reward_extra_info"][RECORD_KEY], {"detection": 1.0, "format": 1.0}
    assert record.rewards == MedicalGeneralSum().rewards(record) == {Role.ASSESSOR: paid}
    assert (record.scheme, answer["reward_score"]) == ("medical_general_sum", 2.0)


def kuhn(**fields: Any) -> KuhnRecord:
    return KuhnRecord(cards=("Q", "K"), **fields)


def of_kuhn(record: KuhnRecord) -> dict[str, Any]:
    return answer_to(record, compose_run("+recipes=kuhn_poker"))


# The last one is infinite in float32.
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e39])
def test_a_reward_that_is_no_number_makes_its_game_void(number: float) -> None:
    answer = of_kuhn(kuhn(rewards={"first": {"chips": 1.0}, "second": {"chips": number}}))
    voided = answer["reward_extra_info"][RECORD_KEY]
    reason = f"reward 'chips' is no number within 1e+15: {number}"
    assert (voided.void, voided.rewards, answer["reward_score"]) == (reason, {}, 0)
    assert game_metrics([voided], ["first"])["selfplay/void/no_number"] == 1


@pytest.mark.parametrize("numbers", [(1, 2), (-1, 0)], ids=str)
def test_rewards_of_turns_are_numbered_from_0(numbers: tuple[int, ...]) -> None:
    record = kuhn(
        turns=[TurnRecord(role=role) for role in ("first", "second")],
        rewards={"first": {"chips": 1.0}, "second": {"chips": -1.0}},
        turn_rewards={number: {"chips": 1.0} for number in numbers},
    )
    with pytest.raises(ValueError, match=rf"turn {'2' if 2 in numbers else '-1'},"):
        of_kuhn(record)
    record.turn_rewards = {0: {"chips": 1.0}, 1: {"chips": -1.0}}
    of_kuhn(record)


def test_rewards_of_a_role_that_the_game_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards \['frist'\], but its roles are \('first'"):
        of_kuhn(kuhn(rewards={"frist": {"chips": 1.0}}))


class Slow(ZeroSum):
    def rewards(self, record: MedicalRecord) -> Rewards:
        released.wait(30)
        return {}


class Cancelled(ZeroSum):
    def rewards(self, record: MedicalRecord) -> Rewards:
        raise asyncio.CancelledError


released = threading.Event()


@pytest.mark.parametrize(("scheme", "error"), [(Slow, TimeoutError), (Cancelled, RuntimeError)])
def test_a_scheme_that_blocks_or_cancels_ends_the_run_in_words(
    scheme: type[ZeroSum], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interaction, "REWARD_LIMIT_S", 0.5)
    judged = finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful")
    with pytest.raises(error):
        answer_to(judged, run_with(selfplay__reward=f"{__name__}:{scheme.__name__}"))
    released.set()


# --- the table of games: real offline runs, written by verl's own tracking ---


GAME = MedicalGameInteraction(MedicalConfig(judge="labels"))


def games(step: int) -> list[MedicalRecord]:
    """Three of each outcome, and one with a lone surrogate and without a role's reward."""
    attack = {"note": "a \ud800 note", "reasoning": "\x1b[31m"}
    odd = {"attack": attack, "rewards": {Role.ATTACKER: {"game": 1.0}}}
    usual = [finished(outcome, step=step) for outcome in list(Outcome) * 3]
    return [finished(Outcome.MISSED_ERROR, step=step, **odd), *usual]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads the environment once per process
    yield tmp_path
    wandb.teardown()


def test_every_step_has_its_table_beside_verls_metrics(offline: Path) -> None:
    tracking = Tracking("medserl", "test", ["wandb"], config={"trainer": {}})
    tracking.log({"val-core/acc": 0.5}, step=0)
    count = len(games(1))
    for step in (1, 2, 3):
        log_games(*games_table(GAME, games(step), count), step)
        tracking.log({"selfplay/games": 20.0 + step}, step=step)
        row = wandb.run.summary  # of the step before, which is complete now
        facts = (row["_step"], row.get("selfplay/games"), row.get(TABLE_NAME) is not None)
        assert facts == ((0, None, False) if step == 1 else (step - 1, 19.0 + step, True))
    tracking.finish()
    files = offline.glob("wandb/offline-run-*/files/media/**/*.table.json")
    tables = [json.loads(file.read_text()) for file in files]
    assert sorted(table["data"][0][0] for table in tables) == [1, 2, 3]
    for table in tables:
        assert table["columns"][0] == "step"
        assert {"attacker", "assessor", "judge"} <= set(table["columns"])
        assert [line[0] for line in table["data"]] == [table["data"][0][0]] * count


@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_a_rare_outcome_is_not_crowded_out(count: int) -> None:
    played = [finished(Outcome.CORRECT_DETECTION, step=n) for n in range(20)]
    played.append(finished(Outcome.MISSED_ERROR, step=20))
    columns, rows = games_table(GAME, played, count)
    assert len(rows) == min(count, 21)
    assert count < 2 or "missed_error" in [values[columns.index("outcome")] for values in rows]
    assert len({values[columns.index("step")] for values in rows}) == len(rows)
