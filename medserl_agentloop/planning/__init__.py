"""What a run needs of a GPU, computed before there is one: ``medserl plan``."""
