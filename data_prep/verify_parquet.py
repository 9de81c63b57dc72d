"""Check parquet files of games before training on them: ``medserl data verify``."""

from installed import or_say_how_to_install

with or_say_how_to_install():
    from medserl_agentloop.data.cli import script, verify

app = script(verify)

if __name__ == "__main__":
    app()
