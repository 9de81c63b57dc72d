"""The alarms of the medical game, beside those of any game.

To add one, add its threshold to :class:`MedicalAlarms` and a line to ``RULES``; docs/metrics.md lists them all.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from medserl_agentloop.core.alarms import Alarms, Rule

_Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class MedicalAlarms(Alarms):
    """Thresholds of the medical game and of any game. ``null`` switches one off."""

    win_rate: Annotated[float, Field(gt=0.5, lt=1.0)] | None = Field(
        default=0.95,
        description="Share of notes with an error that one role wins. Above it the loser rarely sees the reward "
        "it should learn from.",
    )
    invalid_attacks: _Share | None = Field(
        default=0.5,
        description="Share of attacks that do not count. Above one half most attackers' games end unassessed.",
    )
    judge_answers: _Share | None = Field(
        default=0.9, description="Share of rewritten notes that the judge must answer."
    )
    no_error: _Share | None = Field(
        default=0.15,
        description="Share of injected errors in which the judge sees no error: the attacker edits harmlessly, or "
        "the judge misses errors and settles games wrongly.",
    )
    self_similarity: _Share | None = Field(
        default=0.7,
        description="Mean likeness of what attacks insert into different notes. Unrelated error sentences measure "
        "0.33 to 0.42 in MEDEC, attacks 0.33 to 0.52 in the quickstart; one sentence written everywhere measures 1.",
    )
    self_similarity_rise: _Share | None = Field(
        default=0.2,
        description="Rise of that likeness over the run's first steps; no step of the quickstart's rises as far.",
    )


_PREFIX = "selfplay/attacker/"
_SUCCESS, _DECIDED = _PREFIX + "success_rate", _PREFIX + "decided"
_STALEMATE = "Train the loser alone for a while (selfplay.train), or check the games for a shortcut."


def _rest(setting: float, reference: float) -> float:
    return 1 - setting


RULES = (
    Rule("attacker_wins", _SUCCESS, "win_rate", _STALEMATE, _DECIDED, "attacker"),
    Rule("assessor_wins", _SUCCESS, "win_rate", _STALEMATE, _DECIDED, "assessor", above=False, limit=_rest),
    Rule(
        "invalid_attacks",
        _PREFIX + "valid_rate",
        "invalid_attacks",
        "See selfplay/attacker/invalid/<reason>: truncated needs a larger selfplay.budget.attacker_reasoning, "
        "too_many_words a larger selfplay.edits, unparsed a model that knows the format.",
        _PREFIX + "turns",
        "attacker",
        above=False,
        limit=_rest,
    ),
    Rule(
        "judge_answers",
        "selfplay/judge/answer_rate",
        "judge_answers",
        "Check the judge's server and its timeout; the log names every failure.",
        "selfplay/judge/asked",
        above=False,
    ),
    Rule(
        "no_error_present",
        "selfplay/judge/no_error_rate",
        "no_error",
        "Read the judge's reasons in the games: the attacker edits harmlessly, or the judge misses errors.",
        "selfplay/judge/injected",
        "attacker",
    ),
    Rule(
        "self_similar_attacks",
        _PREFIX + "self_similarity",
        "self_similarity",
        "The attacker repeats itself: raise the temperature or the entropy bonus, or stop training it.",
        _PREFIX + "compared",
        "attacker",
    ),
    Rule(
        "attacks_growing_alike",
        _PREFIX + "self_similarity",
        "self_similarity_rise",
        "Diversity is going: raise the temperature, the KL or the entropy bonus before it is gone.",
        _PREFIX + "compared",
        "attacker",
        limit=lambda rise, reference: reference + rise,
        compares=True,
    ),
)
