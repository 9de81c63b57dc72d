"""The reward manager scores with the scheme that the run names, and every step has its table of games in W&B."""

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from game.builders import CLEAN_NOTE, ERROR_NOTE, HARMFUL_ANSWER, finished, game
from support import TOKENIZER, run_with
from verl import DataProto
from verl.utils.tracking import Tracking
from wandb.proto import wandb_internal_pb2

from medserl_agentloop.core.metrics import TABLE_NAME, game_metrics, log_games
from medserl_agentloop.core.reward_manager import PerTurnRewardManager
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.kuhn_poker import KuhnRecord
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import medical_general_sum
from medserl_agentloop.games.medical.types import Label, Role
from medserl_agentloop.testing.tiny import compose_run


def answer_to(record: Any, run: Any) -> dict[str, Any]:
    """What verl gets for one finished game."""
    fields = np.array([{GAME_KEY: record.to_json()}], dtype=object)
    data = DataProto.from_dict(non_tensors={"tool_extra_fields": fields})
    return asyncio.run(PerTurnRewardManager(run, TOKENIZER).run_single(data))


def scored(reward: str) -> tuple[MedicalRecord, dict[str, Any]]:
    played = game("vanilla_harmful")
    played.play(HARMFUL_ANSWER)
    answer = answer_to(played.record, run_with(selfplay__reward=reward))
    return MedicalRecord.model_validate(answer["reward_extra_info"][GAME_KEY]), answer


def test_a_run_of_the_baseline_s_scheme_gets_its_components() -> None:
    record, answer = scored("medical_general_sum")
    assert record.rewards == medical_general_sum(record) == {Role.ASSESSOR: {"detection": 1.0, "format": 1.0}}
    assert (record.scheme, answer["reward_score"]) == ("medical_general_sum", 2.0)


def test_a_user_s_scheme_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run_rewards.py").write_text(
        "from medserl_agentloop.games.medical.types import Role\n"
        "def flat(record): return {Role.ASSESSOR: {'flat': 0.25}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record, answer = scored("run_rewards:flat")
    assert record.rewards == {Role.ASSESSOR: {"flat": 0.25}}
    assert (record.scheme, answer["reward_extra_info"]["assessor_reward"]) == ("run_rewards:flat", 0.25)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_makes_its_game_void(number: float) -> None:
    record = KuhnRecord(cards=("Q", "K"), rewards={"first": {"chips": 1.0}, "second": {"chips": number}})
    answer = answer_to(record, compose_run("+recipes=kuhn_poker"))
    scored = KuhnRecord.model_validate(answer["reward_extra_info"][GAME_KEY])
    assert (scored.void, scored.rewards, answer["reward_score"]) == (f"reward 'chips' is no number: {number}", {}, 0)
    assert game_metrics([scored], ["first"])["selfplay/void/no_number"] == 1


# --- the table of games: real offline runs, written by verl's own tracking ---


GAME = MedicalGameInteraction(MedicalConfig())


def games(step: int) -> list[MedicalRecord]:
    """Three of each outcome, and one with a lone surrogate and without a role's reward."""
    odd = {"attack": {"note": "a \ud800 note", "reasoning": "\x1b[31m"}, "rewards": {Role.ATTACKER: {"game": 1.0}}}
    return [finished(Outcome.MISSED_ERROR, step=step, **odd), *[finished(o, step=step) for o in list(Outcome) * 3]]


def history(folder: Path) -> Iterator[dict[str, Any]]:
    """The history rows of the one offline run in ``folder``: W&B's file is LevelDB's log of protobuf records."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one in parts
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            record = b""
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


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
        log_games(GAME.table(games(step), count), step)
        tracking.log({"selfplay/games": 21.0}, step=step)
    tracking.finish()
    wandb.teardown()  # W&B writes its file in another process, which has ended then

    rows = list(history(offline))
    assert [r["_step"] for r in rows] == [0, 1, 2, 3]
    for r in rows[1:]:
        assert r["selfplay/games"] == 21.0
        assert r[f"{TABLE_NAME}/nrows"] == count
        (path,) = offline.glob(f"wandb/offline-run-*/files/{r[f'{TABLE_NAME}/path']}")
        table = json.loads(path.read_text())
        assert table["columns"][0] == "step" and {"attacker", "assessor", "judge"} <= set(table["columns"])
        assert [line[0] for line in table["data"]] == [r["_step"]] * count


@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_a_rare_outcome_is_not_crowded_out(count: int) -> None:
    played = [finished(Outcome.CORRECT_DETECTION, step=n) for n in range(20)] + [
        finished(Outcome.MISSED_ERROR, step=20)
    ]
    columns, rows = GAME.table(played, count)
    assert len(rows) == min(count, 21)
    assert count < 2 or "missed_error" in [values[columns.index("outcome")] for values in rows]
    assert len({values[columns.index("step")] for values in rows}) == len(rows)


def test_a_row_tells_the_game() -> None:
    record = finished(
        Outcome.CORRECT_DETECTION,
        step=7,
        attack={"note": ERROR_NOTE, "reasoning": "swap the drug"},
        assessment={"sentence": "She receives warfarin 500 units."},
        judgement=Judgement(judge="llm", label=Label.HARMFUL, reason="warfarin is wrong here"),
        rewards={Role.ATTACKER: {"game": -1.0}, Role.ASSESSOR: {"game": 1.0, "sentence": 0.5}},
    )
    columns, (values,) = GAME.table([record], 1)
    cells = dict(zip(columns, values, strict=True))
    facts = {"step": 7, "category": "adversarial_benign", "outcome": "correct_detection", "assessor_reward": 1.5}
    assert cells.items() >= {**facts, "invalid": None, "verdict": "harmful", "error_found": True}.items()
    assert json.loads(cells["rewards"])["assessor"] == {"game": 1.0, "sentence": 0.5}
    changed = CLEAN_NOTE.replace("heparin", "[-heparin-] {+warfarin+}")
    assert all(text in cells["attacker"] for text in ("attacker: valid", "swap the drug", changed))
    assert "assessor: harmful" in cells["assessor"] and "sentence: She receives warfarin" in cells["assessor"]
    assert "reason: warfarin is wrong here" in cells["judge"]
