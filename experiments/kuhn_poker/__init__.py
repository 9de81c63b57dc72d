"""Kuhn poker: how far models are from its known solution."""
