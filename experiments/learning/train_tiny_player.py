"""Make a small player under ``assets``: a byte-level tokenizer and a Qwen3 of about 1 M parameters.

Run once by hand, on one CPU thread in about a quarter of an hour:
``python -m experiments.learning.train_tiny_player``. The player learns the format of both roles
from ``experiments.learning.transcripts`` and is left with blind spots for self-play to remove:
``tiny_player`` for the quickstart, ``novice`` for the learning curves.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console

from experiments.learning.measure import Measurement, Rate, held_out_cases
from experiments.learning.player import build_model, build_tokenizer, save_player
from experiments.learning.transcripts import CURRICULA
from experiments.learning.warm_start import PromptCodec, WarmStart, warm_start
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.prompting import load_profile

ASSETS = Path(__file__).parents[2] / "assets"
PROFILES = {"tiny_player": "medserl", "novice": "brief"}


def measure(folder: Path, profile: str, items: int, seed: int) -> list[Rate]:
    """Measure a player against itself, on held-out cases at temperature 1."""
    player = load_player(folder)
    measurement = Measurement(
        player, held_out_cases(items, seed), load_profile(profile), temperature=1.0, seed=seed
    )
    return [*measurement.each_role(player), *measurement.games(player)]


MODEL_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# {title}

A Qwen3 with {parameters:,} parameters and a byte-level tokenizer of {vocabulary:,} tokens that \
plays both
roles of the game with the `{profile}` prompts. It exists so that a whole
self-play run, tests included, fits on a laptop without a download. It knows sixteen diseases of a
closed toy world (`medserl_agentloop/games/clinic.py`), has deliberate blind spots as an assessor,
and has never seen a real note. **Not medical advice, and of no use on real notes.**

Made by

```
{command}
```

from generated text only; the weights are stored in bfloat16. Licence: Apache-2.0.

## What it does before any self-play

Temperature 1, against itself, on {items} cases in wordings that no training has shown. The toy \
world's exact oracle
judges; `experiments/learning/measure.py` says what is counted.

| measure | share | of |
|---|---:|---:|
{rows}
"""


def write_model_card(folder: Path, rates: Iterable[Rate], **facts: object) -> None:
    """Write the README of the asset with the measured rates."""
    rows = [
        f"| `{rate.measure}` | {rate.hits / max(1, rate.items):.3f} | {rate.items} |"
        for rate in rates
    ]
    (folder / "README.md").write_text(
        MODEL_CARD.format(rows="\n".join(rows), **facts), encoding="utf-8"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--player", choices=list(CURRICULA), default="tiny_player")
    parser.add_argument(
        "--output", type=Path, help="folder; the player's own under assets by default"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--note-weight", type=float, default=0.1, help="loss weight of the note in the prompt"
    )
    parser.add_argument(
        "--first-lesson", type=float, default=0.7, help="share of the steps before the blind spots"
    )
    parser.add_argument(
        "--items", type=int, default=200, help="held-out cases that the player is measured on"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    output = args.output or ASSETS / args.player
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    console = Console()

    tokenizer = build_tokenizer()
    codec = PromptCodec(tokenizer, PROFILES[args.player])
    model = build_model(tokenizer)
    parameters = model.num_parameters()
    console.print(f"{parameters:,} parameters, {len(tokenizer):,} tokens")
    lessons = CURRICULA[args.player]
    plan = WarmStart(
        args.steps, args.batch, args.lr, args.note_weight, lessons, args.first_lesson, args.seed
    )
    warm_start(model, codec, plan, console)

    # The folder appears complete or not at all: others may be loading the previous player.
    unfinished = output.with_name(f".{output.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    save_player(model, tokenizer, unfinished)
    rates = measure(unfinished, PROFILES[args.player], args.items, seed=args.seed + 7)
    for rate in rates:
        console.print(f"{rate.measure}: {rate.hits} of {rate.items}")
    changed = [
        f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if v != parser.get_default(k)
    ]
    write_model_card(
        unfinished,
        rates,
        title=args.player.replace("_", " ").capitalize(),
        profile=Path(PROFILES[args.player]).name,
        parameters=parameters,
        vocabulary=len(tokenizer),
        items=args.items,
        command=" ".join(
            [
                "python -m experiments.learning.train_tiny_player",
                *(c for c in changed if "--output" not in c),
            ]
        ),
    )
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    console.print(f"saved to {output}")


if __name__ == "__main__":
    main()
