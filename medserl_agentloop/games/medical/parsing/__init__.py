"""Reading what a player wrote, and writing it: one format per prompt profile.

Model text is untrusted: nothing here raises, and nothing but the parsed note ever travels on to
the other role. Called by ``medical.rules``; a prompt profile names its parser.
"""

from __future__ import annotations

from importlib import import_module

from medserl_agentloop.games.medical.parsing.base import ParsedAssessment, ParsedAttack, TurnFormat, UnwritableTurn
from medserl_agentloop.games.medical.parsing.baseline import BASELINE
from medserl_agentloop.games.medical.parsing.classic import CLASSIC
from medserl_agentloop.games.medical.parsing.medserl import MEDSERL

__all__ = ["PARSERS", "ParsedAssessment", "ParsedAttack", "TurnFormat", "UnwritableTurn", "load_parser"]

PARSERS: dict[str, TurnFormat] = {"medserl": MEDSERL, "classic": CLASSIC, "baseline": BASELINE}


def load_parser(name: str) -> TurnFormat:
    """The parser called ``name``, or a user's own as ``package.module:NAME``.

    Raises:
        ValueError: There is no such parser; lists those there are.
    """
    if name in PARSERS:
        return PARSERS[name]
    module, _, attribute = name.partition(":")
    try:
        parser = getattr(import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"parser {name!r} cannot be loaded: {error}") from error
    if not isinstance(parser, TurnFormat):
        raise ValueError(
            f"no parser {name!r}: expected one of {', '.join(sorted(PARSERS))}, "
            "or package.module:NAME of a medserl_agentloop.games.medical.parsing.TurnFormat"
        )
    return parser
