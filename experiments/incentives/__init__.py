"""Simulate where the rewards lead: the medical game with tabular players."""
