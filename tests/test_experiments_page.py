"""The arms of experiments/study/README.md pass the start-up check, but for what the page marks as planned."""

import re
import shlex
from pathlib import Path

import pytest

from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.testing.tiny import compose_run

PAGE = Path(__file__).parents[1] / "experiments" / "study" / "README.md"
SERVER = ("selfplay.judge_server.url=http://localhost:30000/v1", "selfplay.judge_server.model=judge")


def arms() -> list[tuple[str, list[str]]]:
    """Name and overrides of the arms that play games, without planned keys."""
    section = PAGE.read_text(encoding="utf-8").partition("## Arms")[2].partition("Arms without self-play")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    return [(name, shlex.split(" ".join(re.findall(r"`([^`]+)`(?!†)", overrides)))) for name, overrides in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), arms())
def test_every_arm_starts(name: str, overrides: list[str]) -> None:
    selfplay = check_run(compose_run("+recipes=qwen3_4b", *SERVER, *overrides))
    assert selfplay.judge == ("labels" if name in ("assessor_only", "labels") else "llm")


def test_the_page_has_the_arms_of_the_study() -> None:
    assert {name for name, _ in arms()} >= {"self_play", "assessor_only", "no_gate", "shared_context", "summed_credit"}
