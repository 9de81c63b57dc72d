"""What a step leaves: a step that moved no weights, numbers that vanish, lines that can be read."""

import json
import math
from pathlib import Path

import pytest

from medserl_agentloop.core.recorder import LOST_METRICS, NO_UPDATE, StepRecorder
from medserl_agentloop.core.step_file import RunFiles, from_line, to_line
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction

TRAINED = {"actor/grad_norm": 0.5, "actor/lr": 1e-3, "training/rollout_probs_diff_mean": 1e-7}


@pytest.fixture
def recorder(tmp_path: Path) -> StepRecorder:
    game = MedicalGameInteraction(MedicalConfig(judge="labels"))
    return StepRecorder(game, RunFiles(tmp_path))


def recorded(recorder: StepRecorder, step: int, **changes: float | None) -> dict[str, float]:
    """What is added to a step's numbers: those of a good step, but for ``changes``."""
    numbers = {**TRAINED, **{name.replace("__", "/"): v for name, v in changes.items()}}
    held = {name: value for name, value in numbers.items() if value is not None}
    return recorder.step(step, 9, held, {"step": 1.0})


@pytest.mark.parametrize(
    "changes",
    [{"actor__grad_norm": math.nan}, {"actor__grad_norm": math.inf}, {"actor__grad_norm": 0.0},
     {"actor__lr": 0.0}],
    ids=str,
)  # fmt: skip
def test_a_step_that_moves_no_weights_is_an_alarm_at_once(
    recorder: StepRecorder, changes: dict[str, float]
) -> None:
    assert recorded(recorder, 1)[NO_UPDATE] == 0.0
    added = recorded(recorder, 2, **changes)
    assert added[NO_UPDATE] == 1.0 and added["selfplay/alarm/no_update"] == 1.0
    assert "selfplay/alarm/no_update" not in recorded(recorder, 3)


def test_a_number_of_verl_s_that_was_always_there_and_is_gone_is_an_alarm(
    recorder: StepRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        assert recorded(recorder, step)[LOST_METRICS] == 0.0
    gone = {"training__rollout_probs_diff_mean": math.nan}
    for step in (3, 4):
        added = recorded(recorder, step, **gone)
        assert added["selfplay/alarm/lost_metrics"] == 1.0
    assert capsys.readouterr().out.count("a step lacks training/rollout_probs_diff_mean") == 1
    assert recorded(recorder, 5)[LOST_METRICS] == 0.0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_line_is_written_that_cannot_be_read(number: float) -> None:
    with pytest.raises(ValueError):
        from_line(json.dumps({"step": 1, "x": number}).encode())
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_line({"step": 1, "x": number})
