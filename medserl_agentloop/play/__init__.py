"""Playing games without verl: models behind an OpenAI-compatible server, and people at a terminal."""
