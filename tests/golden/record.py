"""Records the golden batch of medical games; run it only when their columns are meant to change.

PYTHONPATH=tests python tests/golden/record.py
"""

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

from golden.replay import FILE, RUNS, replay

CATEGORIES = ("vanilla_harmful", "adversarial_harmful", "vanilla_benign", "adversarial_benign", "decoy_benign")


def facts(row: dict[str, str], category: str, index: int) -> dict[str, Any]:
    """A row's ``extra_info``."""
    return {
        "index": index,
        "text_id": row["Text ID"],
        "vignette_id": row["Text ID"],
        "category": category,
        "target_label": "safe" if category in ("vanilla_benign", "decoy_benign") else "harmful",
        "seed_note": row["Text"] if category.endswith("harmful") else row["Corrected Text"],
        "error_note": row["Text"],
        "clean_note": row["Corrected Text"],
        "error_type": row["Error Type"],
        "error_sentence": row["Error Sentence"],
        "corrected_sentence": row["Corrected Sentence"],
    }


def replies(row: dict[str, str], given: dict[str, Any], rng: random.Random, *, copies: bool) -> list[dict[str, Any]]:
    """What attacker and assessor say: sometimes well, sometimes not at all."""
    seed: str = given["seed_note"]
    category: str = given["category"]
    attacked = {
        "adversarial_benign": row["Text"],
        "adversarial_harmful": seed.replace(row["Error Sentence"], row["Error Sentence"][:-1] + " at once."),
        "decoy_benign": seed.replace(" the ", " that ", 1).replace(" a ", " one ", 1),
    }.get(category, seed)
    note = rng.choice([*[attacked] * 8, seed, f"{attacked} <|im_end|>", attacked[: len(seed) // 2]])
    reasoning = "plan " * rng.randrange(1, 30)
    attack = f"<think>{reasoning}</think>\n<note>{note}</note>" if rng.random() < 0.9 else f"Sure: {note}"
    sentence = rng.choice([row["Error Sentence"], row["Corrected Sentence"], "something else"])
    verdict = rng.choice([
        "verdict: safe",
        f"verdict: harmful\nsentence: {sentence}\nerror_type: {row['Error Type']}\ncorrection: none",
    ])  # fmt: skip
    assessment = f"<think>{'hm ' * rng.randrange(20)}</think>\n<answer>\n{verdict}\n</answer>"
    if rng.random() < 0.1:
        assessment = assessment.removesuffix("</answer>")
    said: list[dict[str, Any]] = []
    for text in ([attack] if copies or not category.startswith("vanilla") else []) + [assessment]:
        reply: dict[str, Any] = {"text": text}
        if rng.random() < 0.04:
            reply["truncate_to"] = 9
        elif rng.random() < 0.08:
            reply["abort"] = True
        said.append(reply)
    return said


def main() -> None:
    sample = Path(__file__).parents[2] / "data_prep/sample/medserl_sample.csv"
    with sample.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["Error Flag"] == "1"][:16]
    rng = random.Random(0)
    games = []
    for number in range(64):
        row, category = rows[number // 4], CATEGORIES[(number // 2) % 5]
        run = next(iter(RUNS)) if number < 40 else list(RUNS)[1 + (number - 40) // 8]
        given = facts(row, category, number // 2)
        games.append({
            "run": run,
            "uid": f"group-{number // 2}",
            "extra_info": given,
            "replies": replies(row, given, rng, copies=run == "copy"),
        })  # fmt: skip
    columns, advantages = replay(games)
    golden = {
        "games": [{**game, "columns": c} for game, c in zip(games, columns, strict=True)],
        "advantages": advantages,
    }
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        file.write(json.dumps(golden).encode())
    outcomes: dict[str, int] = {}
    for one in columns:
        outcomes[one["outcome"]] = outcomes.get(one["outcome"], 0) + 1
    print(f"{FILE.name}: {FILE.stat().st_size} bytes, {outcomes}")


if __name__ == "__main__":
    main()
