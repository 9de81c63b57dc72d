"""Check parquet files of games before training on them: ``medserl data verify``."""

from medserl_agentloop.data.cli import script, verify

app = script(verify)

if __name__ == "__main__":
    app()
