"""State beside the weights: written whole, taken up again, missing parts named."""

import resource
from pathlib import Path
from typing import Any

import pytest

from medserl_agentloop.core.step_file import STATE_FILE, load_state, save_state


class Counter:
    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_every_part_goes_on_as_it_was_to_the_last_bit(tmp_path: Path) -> None:
    save_state(tmp_path / "global_step_3", {"baselines": Counter(0.1 + 0.2), "alarms": Counter(7)})
    parts = {"baselines": Counter(), "alarms": Counter()}
    assert load_state(tmp_path / "global_step_3", parts) == []
    assert (parts["baselines"].value, parts["alarms"].value) == (0.1 + 0.2, 7)
    assert [path.name for path in (tmp_path / "global_step_3").iterdir()] == [STATE_FILE]


def test_parts_that_a_checkpoint_does_not_know_are_named(tmp_path: Path) -> None:
    assert load_state(tmp_path, {"alarms": Counter()}) == ["alarms"]
    save_state(tmp_path, {"alarms": Counter()})
    assert load_state(tmp_path, {"alarms": Counter(), "opponents": Counter()}) == ["opponents"]


def test_a_full_disk_leaves_the_state_that_was_there(tmp_path: Path) -> None:
    save_state(tmp_path, {"alarms": Counter(7)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=STATE_FILE):
            save_state(tmp_path, {"alarms": Counter(8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    load_state(tmp_path, {"alarms": (alarms := Counter())})
    assert alarms.value == 7 and [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"alarms": {}}', '{"alarms": 3}', "[" * 100_000])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match=STATE_FILE):
        load_state(tmp_path, {"alarms": Counter()})
