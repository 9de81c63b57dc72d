"""Self-play RL for medical error detection, as a plugin for verl."""

GAMES = {
    "medical": "medserl_agentloop.games.medical.interaction:MedicalGameInteraction",
    "kuhn_poker": "medserl_agentloop.games.kuhn_poker:KuhnPoker",
}
"""The path of each game's class by its name in ``selfplay.game``; imported on demand."""

DEFAULT_GAME = "medical"  # of a run that names none
