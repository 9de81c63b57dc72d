"""The alarms of the medical game, beside those of any game.

To add one, add its threshold to :class:`MedicalAlarms` and a line to ``RULES``; docs/metrics.md lists them all.
"""

from __future__ import annotations

from pydantic import Field

from medserl_agentloop.core.alarms import Alarms, Rule, Share


class MedicalAlarms(Alarms):
    """Thresholds of the medical game and of any game. ``null`` switches one off."""

    win_rate: float | None = Field(
        default=0.95,
        gt=0.5,
        lt=1.0,
        description="Share of notes with an error that one role wins. Above it the loser rarely sees the reward "
        "it should learn from.",
    )
    invalid_attacks: Share = Field(
        default=0.5,
        description="Share of attacks that do not count. Above one half most attackers' games end unassessed.",
    )
    judge_answers: Share = Field(default=0.9, description="Share of rewritten notes that the judge must answer.")
    no_error: Share = Field(
        default=0.15,
        description="Share of injected errors in which the judge sees no error: the attacker edits harmlessly, or "
        "the judge misses errors and settles games wrongly.",
    )
    self_similarity: Share = Field(
        default=0.7,
        description="Mean likeness of what attacks insert into different notes. Unrelated error sentences measure "
        "0.33 to 0.42 in MEDEC, attacks 0.33 to 0.52 in the quickstart; one sentence written everywhere measures 1.",
    )
    self_similarity_rise: Share = Field(
        default=0.2,
        description="Rise of that likeness over the run's first steps; no step of the quickstart's rises as far.",
    )
    knowable: Share = Field(
        default=0.8,
        description="Share of injected errors that a reader of the presented note alone must find (selfplay.blind). "
        "Below it, the attacker has learnt to write errors that nobody can see.",
    )
    shortcut: Share = Field(
        default=0.4,
        description="How much more often the assessor calls a rewritten note harmful than an untouched one with the "
        "same label. Above it, the assessor detects edits rather than errors. Of notes with an error also how much "
        "less often: below minus it, the attacks hold errors that cannot be seen.",
    )


_STALEMATE = "Train the loser alone for a while (selfplay.train), or check the games for a shortcut."


RULES = (
    Rule(
        name="attacker_wins",
        metric="selfplay/attacker/success_rate",
        setting="win_rate",
        advice=_STALEMATE,
        games="selfplay/attacker/decided",
    ),
    Rule(
        name="assessor_wins",
        metric="selfplay/attacker/success_rate",
        setting="win_rate",
        advice=_STALEMATE,
        games="selfplay/attacker/decided",
        above=False,
        limit=lambda rate, reference: 1 - rate,
    ),
    Rule(
        name="invalid_attacks",
        metric="selfplay/attacker/valid_rate",
        setting="invalid_attacks",
        advice="See selfplay/attacker/invalid/<reason>: truncated needs a larger selfplay.budget.attacker_reasoning, "
        "too_many_words a larger selfplay.edits, unparsed a model that knows the format.",
        games="selfplay/attacker/turns",
        above=False,
        limit=lambda share, reference: 1 - share,
    ),
    Rule(
        name="judge_answers",
        metric="selfplay/judge/answer_rate",
        setting="judge_answers",
        advice="Check the judge's server and its timeout; the log names every failure.",
        games="selfplay/judge/asked",
        above=False,
    ),
    Rule(
        name="no_error_present",
        metric="selfplay/judge/no_error_rate",
        setting="no_error",
        advice="Read the judge's reasons in the games: the attacker edits harmlessly, or the judge misses errors.",
        games="selfplay/judge/injected",
    ),
    Rule(
        name="unknowable_errors",
        metric="selfplay/judge/knowable_rate",
        setting="knowable",
        advice="Read the void games: the attacker swaps facts that the note does not decide, or the reader misses "
        "errors that it should find (medserl judge calibrate).",
        games="selfplay/judge/gated",
        above=False,
    ),
    Rule(
        name="edit_detector",
        metric="selfplay/shortcut/index",
        setting="shortcut",
        advice="The assessor follows the edit, not the error: balance rewritten and untouched notes (selfplay.mix with "
        "decoy_benign), and evaluate on untouched notes.",
        games="selfplay/shortcut/compared",
    ),
    Rule(
        name="unseen_errors",
        metric="selfplay/shortcut/recall",
        setting="shortcut",
        advice="Far fewer errors are found in rewritten notes than in untouched ones: read the undetected attacks. If "
        "their errors cannot be seen in the note, use the blind gate (selfplay.blind).",
        games="selfplay/shortcut/compared",
        above=False,
        limit=lambda setting, reference: -setting,
    ),
    Rule(
        name="self_similar_attacks",
        metric="selfplay/attacker/self_similarity",
        setting="self_similarity",
        advice="The attacker repeats itself: raise the temperature or the entropy bonus, or stop training it.",
        games="selfplay/attacker/compared",
    ),
    Rule(
        name="attacks_growing_alike",
        metric="selfplay/attacker/self_similarity",
        setting="self_similarity_rise",
        advice="Diversity is going: raise the temperature, the KL or the entropy bonus before it is gone.",
        games="selfplay/attacker/compared",
        limit=lambda rise, reference: reference + rise,
        compares=True,
    ),
)
