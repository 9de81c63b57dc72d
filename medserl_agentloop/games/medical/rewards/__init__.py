"""Reward schemes: pure functions from a judged game to named reward components of each role.

Called by whoever scores a game: the reward manager, ``medserl play``, ``medserl rescore``. A scheme is a
frozen dataclass of constants and one function; another one is named by its import path.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module

from medserl_agentloop.games.medical.records import GameRecord, Rewards
from medserl_agentloop.games.medical.rewards.general_sum import GeneralSumTerms, medical_general_sum
from medserl_agentloop.games.medical.rewards.zero_sum import MedserlTerms, ZeroSumTerms, medserl, zero_sum

__all__ = [
    "SCHEMES",
    "GeneralSumTerms",
    "MedserlTerms",
    "RewardScheme",
    "ZeroSumTerms",
    "load_scheme",
    "medical_general_sum",
    "medserl",
    "zero_sum",
]

RewardScheme = Callable[[GameRecord], Rewards]

SCHEMES: dict[str, RewardScheme] = {
    "medserl": medserl,
    "zero_sum": zero_sum,
    "medical_general_sum": medical_general_sum,
    "medical_general_sum_no_cot": partial(medical_general_sum, terms=GeneralSumTerms(chain_of_thought=False)),
}


def load_scheme(name: str) -> RewardScheme:
    """The scheme called ``name``, or a user's own as ``package.module:function``.

    An import path works in every process that can import the module, Ray's workers included.

    Raises:
        ValueError: There is no such scheme; lists those there are.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    module, _, attribute = name.partition(":")
    try:
        scheme = getattr(import_module(module), attribute) if module and attribute else None
    except Exception as error:  # importing a user's module may raise anything
        raise ValueError(f"reward scheme {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(scheme):
        close = get_close_matches(name, SCHEMES, n=1)
        raise ValueError(
            f"no reward scheme {name!r}{f' (did you mean {close[0]!r}?)' if close else ''}: expected one of "
            f"{', '.join(sorted(SCHEMES))}, or package.module:function of a function GameRecord -> Rewards"
        )
    found: RewardScheme = scheme
    return found
