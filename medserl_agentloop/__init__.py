"""Self-play RL for medical error detection, as a plugin for verl."""

GAMES = {
    "medical": "medserl_agentloop.games.medical.interaction:MedicalGameInteraction",
    "kuhn_poker": "medserl_agentloop.games.kuhn_poker:KuhnPoker",
}
"""Where the class of each game is, by the name that ``selfplay.game`` takes; imported when it is asked for."""

DEFAULT_GAME = "medical"  # of a run that names none
