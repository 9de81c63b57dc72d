"""Playing and scoring models outside of training. No other part of the package imports this."""
