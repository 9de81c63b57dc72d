"""Self-play RL for medical error detection, as a plugin for verl."""
