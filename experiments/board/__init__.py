"""Compare MEDEC with its sister benchmarks: floors, overlap and a small model, set by set."""
