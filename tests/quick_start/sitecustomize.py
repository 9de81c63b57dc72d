"""Loaded by every process of a run that a test starts: imports take a quarter less processor time.

A run has nine Python processes that all import verl, so most of its processor time is imports.
"""

import gc
import sys

# The objects of an import stay, and the collector counts them again and again meanwhile.
gc.set_threshold(1_000_000)
# transformers imports scikit-learn (with scipy) where it is installed; of our extras only `eval`,
# which no run needs.
sys.modules["sklearn"] = None  # type: ignore[assignment]
