"""One judge server for the whole folder; every test finds it as new."""

from collections.abc import Iterator

import pytest
from medical_team.openrlhf import JudgeServer, judge_server
from serving import as_new


@pytest.fixture(scope="session")
def _judge() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


@pytest.fixture
def judge(_judge: JudgeServer) -> JudgeServer:
    return as_new(_judge)
