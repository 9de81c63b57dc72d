"""The clinic of the study: its game, and the player that all arms start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.learning.run import PROFILE, prepare_data
from experiments.learning.transcripts import CURRICULA, sample_transcript
from experiments.shortcuts.run import LESSONS, teach
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.paths import resource

RUNS = Path("runs/opponent")
NOTES = Path("data/opponent")
# As recipes/quickstart.yaml has it, where a turn's length depends on the game.
CONFIG = MedicalConfig.model_validate(
    {
        "profile": PROFILE,
        "judge": "medserl_agentloop.games.clinic:OracleJudge",
        "budget": {"attacker_reasoning": 64, "assessor": 128},
    }
)
LESSON = CURRICULA["novice"][1]
TAUGHT = {0.03: (0.0, 400), 0.01: (0.0, 800)}
"""Share of unseen kinds in the lesson, and its steps, by the share that the player then shows.

It remembers the novice's own lessons. What it shows was counted in its valid attacks on the notes
of the runs.
"""


def start_of(unseen: float, start: int) -> Path:
    """The player that all arms start from, which shows this share of unseen kinds among its errors.

    ``start`` is the seed of its lessons. 0 is the novice as it is shipped, for any start.
    """
    return RUNS / f"start_{unseen:g}_{start}" if unseen else resource("assets/novice")


def prepare(unseen: float, start: int) -> None:
    """Teach the starting player and write the notes of all arms, unless they are there."""
    if unseen:
        share, steps = TAUGHT[unseen]
        taught = replace(LESSON, unseen_share=share)
        lessons = replace(LESSONS, lr=3e-3, lessons=(taught, taught), steps=steps, seed=start)
        teach(start_of(unseen, start), lessons, sample_transcript)
    prepare_data(NOTES, "adversarial_benign=3,decoy_benign=2")
