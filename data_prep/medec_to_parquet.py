"""MEDEC files -> ``train.parquet`` and ``val.parquet`` for self-play training with verl:

``medserl data convert``.
"""

from medserl_agentloop.data.cli import convert, script

app = script(convert)

if __name__ == "__main__":
    app()
