"""What people look at after a run: games as text, metrics side by side."""
