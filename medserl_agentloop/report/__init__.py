"""Looking at runs: frames for notebooks, a page for the browser, text for the terminal."""

from medserl_agentloop.report.frames import games, metrics, scores, turns

__all__ = ["games", "metrics", "scores", "turns"]
