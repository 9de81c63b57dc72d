"""Tests of the real SGLang engine on the CPU; `make test-sglang` installs it and runs them."""

from pathlib import Path

import pytest

from medserl_agentloop.backends import sglang_cpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not sglang_cpu.is_installed():
        skip = pytest.mark.skip(reason="`make test-sglang` installs SGLang and runs this")
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(skip)
