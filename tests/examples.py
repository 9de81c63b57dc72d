"""Numbers of examples of property tests: a tenth in ``make test``, all with
``--hypothesis-profile=thorough``.
"""

from typing import Any

from hypothesis import settings


def examples(count: int, **more: Any) -> settings:
    """Settings of a test that draws ``count`` examples in the thorough profile."""
    return settings(max_examples=count * settings().max_examples // 100, **more)
