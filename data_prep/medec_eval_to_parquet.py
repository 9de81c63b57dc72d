"""An official MEDEC set -> one parquet file of assessor turns, for validation:

``medserl data eval``.
"""

from medserl_agentloop.data.cli import evaluation_rows, script

app = script(evaluation_rows)

if __name__ == "__main__":
    app()
