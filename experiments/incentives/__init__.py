"""Where the rewards lead: a simulation of the medical game with tabular players."""
