"""The alarms of the medical game, beside those of any game. To add one, add a row; docs/metrics.md lists them all."""

from __future__ import annotations

from medserl_agentloop.core.alarms import Rule

_STALEMATE = "Train the loser alone for a while (selfplay.train), or check the games for a shortcut."

RULES = (
    # Beyond these two the loser rarely sees the reward it should learn from.
    Rule(
        name="attacker_wins",
        metric="selfplay/attacker/success_rate",
        limit=0.95,
        advice=_STALEMATE,
        games="selfplay/attacker/decided",
    ),
    Rule(
        name="assessor_wins",
        metric="selfplay/attacker/success_rate",
        limit=0.05,
        advice=_STALEMATE,
        games="selfplay/attacker/decided",
        above=False,
    ),
    Rule(
        name="invalid_attacks",
        metric="selfplay/attacker/valid_rate",
        limit=0.5,  # below it most attackers' games end unassessed
        advice="See selfplay/attacker/invalid/<reason>: truncated needs a larger selfplay.budget.attacker_reasoning, "
        "too_many_words a larger selfplay.edits, unparsed a model that knows the format.",
        games="selfplay/attacker/turns",
        above=False,
    ),
    Rule(
        name="judge_answers",
        metric="selfplay/judge/answer_rate",
        limit=0.9,
        advice="Check the judge's server and its timeout; the log names every failure.",
        games="selfplay/judge/asked",
        above=False,
    ),
    Rule(
        name="no_error_present",
        metric="selfplay/judge/no_error_rate",
        limit=0.15,
        advice="Read the judge's reasons in the games: the attacker edits harmlessly, or the judge misses errors.",
        games="selfplay/judge/injected",
    ),
    Rule(
        name="unknowable_errors",
        metric="selfplay/judge/knowable_rate",
        limit=0.8,
        advice="Read the void games: the attacker swaps facts that the note does not decide, or the reader misses "
        "errors that it should find (medserl judge calibrate).",
        games="selfplay/judge/gated",
        above=False,
    ),
    Rule(
        name="edit_detector",
        metric="selfplay/shortcut/index",
        limit=0.4,
        advice="The assessor follows the edit, not the error: balance rewritten and untouched notes (--mix with "
        "decoy_benign), and evaluate on untouched notes.",
        games="selfplay/shortcut/compared",
    ),
    Rule(
        name="unseen_errors",
        metric="selfplay/shortcut/recall",
        limit=-0.4,
        advice="Far fewer errors are found in rewritten notes than in untouched ones: read the undetected attacks. If "
        "their errors cannot be seen in the note, use the blind gate (selfplay.blind).",
        games="selfplay/shortcut/compared",
        above=False,
    ),
    Rule(
        name="self_similar_attacks",
        # Unrelated error sentences measure 0.33 to 0.42 in MEDEC, attacks 0.33 to 0.52 in the quickstart; one sentence
        # written everywhere measures 1.
        metric="selfplay/attacker/self_similarity",
        limit=0.7,
        advice="The attacker repeats itself: raise the temperature or the entropy bonus, or stop training it.",
        games="selfplay/attacker/compared",
    ),
)
