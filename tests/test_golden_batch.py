"""Sixty-four recorded medical games still give the same columns, rewards and advantages."""

import gzip
import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
from golden.replay import FILE, replay

GOLDEN = json.loads(gzip.decompress(FILE.read_bytes()))


@cache
def played() -> Any:
    return replay(GOLDEN["games"])


def test_the_batch_holds_games_of_every_kind() -> None:
    outcomes = Counter(game["columns"]["outcome"] for game in GOLDEN["games"])
    assert sum(outcomes.values()) == 64
    assert len(outcomes) == 7
    assert len({game["run"] for game in GOLDEN["games"]}) == 4


@pytest.mark.parametrize("number", range(64))
def test_the_columns_of_a_recorded_game_are_what_they_were(number: int) -> None:
    assert played()[0][number] == GOLDEN["games"][number]["columns"]


@pytest.mark.parametrize("estimator", sorted(GOLDEN["advantages"]))
def test_the_advantages_of_the_recorded_batch_are_what_they_were(estimator: str) -> None:
    recorded, now = GOLDEN["advantages"][estimator], played()[1][estimator]
    assert len(recorded) == len(now)
    for before, after in zip(recorded, now, strict=True):
        assert after == pytest.approx(before, abs=1e-6)
