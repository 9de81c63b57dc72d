"""MEDEC pairs -> conversations of both roles for verl's SFT trainer: ``medserl data sft``."""

from medserl_agentloop.data.cli import script, sft

app = script(sft)

if __name__ == "__main__":
    app()
