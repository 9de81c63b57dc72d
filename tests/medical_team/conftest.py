"""A judge server that can read, for each test its own."""

from collections.abc import Iterator

import pytest
from judges.local_server import LocalServer, serving
from medical_team.openrlhf import verdicts


@pytest.fixture
def judge() -> Iterator[LocalServer]:
    with serving(lambda number, body: verdicts(body)) as server:
        yield server
