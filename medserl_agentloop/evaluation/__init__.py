"""Playing and scoring models outside of training. Nothing else in the package imports from here."""
