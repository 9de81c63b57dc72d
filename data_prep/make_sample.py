"""Write the sample notes of the toy clinic, by default over the committed ones: ``medserl data sample``."""

from pathlib import Path

from medserl_agentloop.data.cli import sample, script

app = script(sample, output=str(Path(__file__).parent / "sample" / "medserl_sample.csv"))

if __name__ == "__main__":
    app()
