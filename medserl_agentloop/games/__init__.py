"""The games of this package, by the name that ``selfplay.game`` takes."""

GAMES = {
    "medical": "medserl_agentloop.games.medical.interaction:MedicalGameInteraction",
    "kuhn_poker": "medserl_agentloop.games.kuhn_poker:KuhnPoker",
}
"""Where each game's class is; imported when it is asked for."""

DEFAULT = "medical"  # the game of a run that names none
