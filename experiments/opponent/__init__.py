"""Study what the opponent is worth: self-play against a frozen attacker and against labels
alone."""
