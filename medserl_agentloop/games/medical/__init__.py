"""The medical game: an attacker rewrites a clinical note, an assessor sees the result and finds the
error.
"""
