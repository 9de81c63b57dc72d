"""Make a small player under ``assets``: a byte-level tokenizer and a Qwen3 of about 1 M parameters.

Run once by hand, on one CPU thread in about a quarter of an hour:
``python -m experiments.learning.train_tiny_player``. The player learns the format of both roles from
``experiments.learning.transcripts`` and is left with blind spots for self-play to remove:
``tiny_player`` for the quickstart, ``novice`` for the learning curves. ``--player novice_edits --output FOLDER`` makes
a novice that attacks by edits.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from experiments.clinic import (
    Note,
    Split,
    error_detail,
    inject_error,
    sample_clean_note,
)
from experiments.learning.attack_check import check_attack
from experiments.learning.player import build_model, build_tokenizer, save_player
from experiments.learning.transcripts import BRIEF_EDITS, CURRICULA
from experiments.learning.warm_start import PromptCodec, WarmStart, warm_start
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, Role

ASSETS = Path(__file__).parents[2] / "assets"
PROFILES = {"tiny_player": "medserl", "novice": "brief", "novice_edits": BRIEF_EDITS}
MAX_ANSWER_TOKENS = 200
ATTACKS = (Category.ADVERSARIAL_BENIGN, Category.ADVERSARIAL_HARMFUL, Category.DECOY_BENIGN)


def sample_turns(model: Qwen3ForCausalLM, codec: PromptCodec, prompts: list[list[int]], batch: int = 64) -> list[str]:
    """One answer per prompt at temperature 1, as text without the end-of-turn token."""
    texts = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        length = max(map(len, part))
        padded = [[codec.tokenizer.pad_token_id] * (length - len(p)) + p for p in part]
        mask = [[0] * (length - len(p)) + [1] * len(p) for p in part]
        output = model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        texts += codec.tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
    return texts


def evaluate(
    model: Qwen3ForCausalLM, codec: PromptCodec, items: int, facts: Split, seed: int
) -> dict[str, dict[str, float]]:
    """Measure both roles on notes in wordings that the warm start did not see.

    Args:
        model: The player.
        codec: Its prompt encoding.
        items: Notes per attacker category, and per label for the assessor.
        facts: Which facts the notes state.
        seed: Seed of the notes and of the sampled answers.

    Returns:
        Rates by row of the printed table.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    results: dict[str, dict[str, float]] = {}
    for category in ATTACKS:
        notes = [sample_clean_note(rng, Split.HELD_OUT, facts) for _ in range(items)]
        if category.seed_label is Label.HARMFUL:
            notes = [inject_error(rng, note)[0] for note in notes]
        prompts = [codec.opening(Role.ATTACKER, category, note.text).ids for note in notes]
        pairs = list(zip(notes, sample_turns(model, codec, prompts), strict=True))
        attacks = [(n, a) for n, text in pairs if (a := _read(codec, category, n, text).attack)]
        valid = [check_attack(n.text, a.note, category) == "ok" for n, a in attacks if a.note is not None]
        results[f"attacker, {category.value}"] = {
            "parses": sum(not a.violations for _, a in attacks) / items,
            "valid edit": sum(valid) / items,
        }
    clean = [sample_clean_note(rng, Split.HELD_OUT, facts) for _ in range(items)]
    wrong = [inject_error(rng, sample_clean_note(rng, Split.HELD_OUT, facts)) for _ in range(items)]
    shown = [*clean, *(note for note, _ in wrong)]
    prompts = [codec.opening(Role.ASSESSOR, Category.VANILLA_BENIGN, note.text).ids for note in shown]
    answers = [
        assessment
        for note, text in zip(shown, sample_turns(model, codec, prompts), strict=True)
        if (assessment := _read(codec, Category.VANILLA_BENIGN, note, text).assessment)
    ]
    on_clean, on_wrong = answers[:items], answers[items:]
    detected: dict[str, list[bool]] = defaultdict(list)
    for (note, index), answer in zip(wrong, on_wrong, strict=True):
        detected[error_detail(note, index)].append(answer.verdict is Label.HARMFUL)
    safe_right = sum(a.verdict is Label.SAFE for a in on_clean) / items
    harmful_right = sum(a.verdict is Label.HARMFUL for a in on_wrong) / items
    caught = [
        (note.sentences[index], answer)
        for (note, index), answer in zip(wrong, on_wrong, strict=True)
        if answer.verdict is Label.HARMFUL
    ]
    results["assessor"] = {
        "parses": sum(not a.violations for a in answers) / len(answers),
        "balanced accuracy": (safe_right + harmful_right) / 2,
        "clean notes right": safe_right,
        "error notes right": harmful_right,
        "right sentence, of found": sum(s.text == a.sentence for s, a in caught) / max(1, len(caught)),
    }
    results["assessor finds"] = {kind: sum(hits) / len(hits) for kind, hits in sorted(detected.items())}
    return results


def _read(codec: PromptCodec, category: Category, note: Note, text: str) -> MedicalRecord:
    """The first turn of a game, as the rules take it."""
    spec = GameSpec(category, category.default_target_label, note.text)
    game = MedicalGame(spec, EditLimits(), codec.profile.parser)
    game.play(text)
    return game.record


MODEL_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# {title}

A Qwen3 with {parameters:,} parameters and a byte-level tokenizer of {vocabulary:,} tokens that plays both
roles of the game with the `{profile}` prompts. It exists so that a whole
self-play run, tests included, fits on a laptop without a download. It knows sixteen diseases of a
closed toy world (`experiments/clinic.py`), has deliberate blind spots as an assessor, and has never
seen a real note. **Not medical advice, and of no use on real notes.**

Made by

```
{command}
```

from generated text only; the weights are stored in bfloat16. Licence: Apache-2.0.

## What it does before any self-play

Temperature 1, {items} notes per line (per label for the assessor), {unseen} not seen in training.
"Valid edit" is judged by the toy world's exact oracle.

| player | measure | value |
|---|---|---|
{rows}
"""


def write_model_card(folder: Path, results: dict[str, dict[str, float]], **facts: object) -> None:
    """Write the README of the asset with the measured rates."""
    rows = [f"| {who} | {what} | {rate:.3f} |" for who, rates in results.items() for what, rate in rates.items()]
    text = MODEL_CARD.format(rows="\n".join(rows), **facts)
    (folder / "README.md").write_text(text, encoding="utf-8")


def print_results(console: Console, results: dict[str, dict[str, float]]) -> None:
    """Show the measured rates as a table."""
    table = Table("player", "measure", "value", title="temperature 1, unseen wordings")
    for who, rates in results.items():
        for what, rate in rates.items():
            table.add_row(who, what, f"{rate:.3f}")
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--player", choices=list(CURRICULA), default="tiny_player")
    parser.add_argument("--output", type=Path, help="folder; the player's own under assets by default")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--note-weight", type=float, default=0.1, help="loss weight of the note in the prompt")
    parser.add_argument("--first-lesson", type=float, default=0.7, help="share of the steps before the blind spots")
    parser.add_argument("--items", type=int, default=200, help="notes per evaluated category")
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
    plan = WarmStart(args.steps, args.batch, args.lr, args.note_weight, lessons, args.first_lesson, args.seed)
    warm_start(model, codec, plan, console)

    # The folder appears complete or not at all: others may be loading the previous player.
    unfinished = output.with_name(f".{output.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    save_player(model, tokenizer, unfinished)
    saved = AutoModelForCausalLM.from_pretrained(unfinished, dtype=torch.float32).eval()
    codec = PromptCodec(AutoTokenizer.from_pretrained(unfinished), PROFILES[args.player])
    facts = Split.HELD_OUT if lessons[0].facts is Split.SEEN else Split.ANY
    results = evaluate(saved, codec, args.items, facts, seed=args.seed + 7)
    print_results(console, results)
    changed = [f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if v != parser.get_default(k)]
    write_model_card(
        unfinished,
        results,
        title=args.player.replace("_", " ").capitalize(),
        profile=PROFILES[args.player],
        unseen="wordings and facts" if facts is Split.HELD_OUT else "wordings",
        parameters=parameters,
        vocabulary=len(tokenizer),
        items=args.items,
        command=" ".join(
            ["python -m experiments.learning.train_tiny_player", *(c for c in changed if "--output" not in c)]
        ),
    )
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    console.print(f"saved to {output}")


if __name__ == "__main__":
    main()
