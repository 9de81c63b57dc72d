"""MEDEC pairs -> conversations of both roles for verl's SFT trainer: ``medserl data sft``."""

from installed import or_say_how_to_install

with or_say_how_to_install():
    from medserl_agentloop.data.cli import script, sft

app = script(sft)

if __name__ == "__main__":
    app()
