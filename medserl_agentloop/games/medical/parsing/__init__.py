"""Reading what a player wrote, and writing it: one format per prompt profile.

Model text is untrusted: nothing here raises, and nothing but the parsed note ever travels on to
the other role. Called by ``medical.rules``; a prompt profile names its parser.
"""

from __future__ import annotations

from medserl_agentloop.games.medical.parsing.base import ParsedAssessment, ParsedAttack, TurnFormat, UnwritableTurn
from medserl_agentloop.games.medical.parsing.baseline import BASELINE
from medserl_agentloop.games.medical.parsing.classic import CLASSIC
from medserl_agentloop.games.medical.parsing.medserl import MEDSERL
from medserl_agentloop.paths import find_object

__all__ = ["PARSERS", "ParsedAssessment", "ParsedAttack", "TurnFormat", "UnwritableTurn", "load_parser"]

PARSERS: dict[str, TurnFormat] = {"medserl": MEDSERL, "classic": CLASSIC, "baseline": BASELINE}


def load_parser(name: str) -> TurnFormat:
    """The parser called ``name``, or a user's own as ``package.module:NAME``.

    Raises:
        ValueError: There is no such parser; lists those there are.
    """
    expected = f"package.module:NAME of a {__name__}.TurnFormat"
    parser: TurnFormat = find_object("parser", name, PARSERS, expected, lambda found: isinstance(found, TurnFormat))
    return parser
