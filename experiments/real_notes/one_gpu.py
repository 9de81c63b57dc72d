"""Warm starts of SmolLM2 by format and length on one GPU, played and scored: for a machine that
reaches nothing.

python -m experiments.real_notes.one_gpu prepare FOLDER NOTES   # conversations and prompts in
tokens, in FOLDER python one_gpu.py train FOLDER GGUF OUT                         # there, beside
torch, transformers, gguf, pyarrow alone python -m experiments.real_notes.one_gpu score FOLDER OUT
# rules and official scores -> results/one_gpu.csv

``train`` is a plain loop with the settings of ``+recipes=warm_start_smollm2``; there is no verl on
that machine. In the committed table the row "edits, number alone" is of conversations whose
reasoning named the number, not the words that change, and the row of 410 steps had 256 and 224
tokens for a turn; one of its batches was one micro-batch.
"""

from __future__ import annotations

import csv
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

DATA = {"brief": "data/sft_brief", "edits": "data/sft_edits"}
"""Folders of ``sft_to_parquet.py`` by profile."""
RUNS = (("brief", 60), ("edits", 60), ("edits", 410))
"""Profile and steps: 60 as in the other tables, 410 are two epochs."""
BATCH, LR, WARM_UP, WEIGHT_DECAY, SEED = 16, 4e-4, 0.05, 0.01, 0
END, PADDING = 2, 0  # <|im_end|>, <|endoftext|>
ATTACKS = Path("data/attacks/val.parquet")
BUDGET = {"attack": 768, "assessment": 256}
TEMPERATURE = {"attack": 0.5, "assessment": 0.0}
RESULTS = Path(__file__).parent / "results" / "one_gpu.csv"


# -- train: torch and transformers alone -----------------------------------------------------------


def train(folder: Path, gguf: Path, output: Path, runs: Any = RUNS) -> None:
    """Train every run from the same weights and write what it answers to every prompt."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    start = load(gguf).to(device)
    weights = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    conversations = pq.read_table(folder / "conversations.parquet").to_pylist()
    prompts = pq.read_table(folder / "prompts.parquet").to_pylist()
    output.mkdir(parents=True, exist_ok=True)
    for name, steps in runs:
        start.load_state_dict(weights)
        taught = [row for row in conversations if row["format"] == name]
        began = time.monotonic()
        losses = warm_start(start, taught, steps, device)
        facts = {
            "format": name,
            "steps": steps,
            "seconds": time.monotonic() - began,
            "losses": losses,
        }
        facts["tokens"] = sum(len(row["ids"]) for row in taught) / len(taught) * BATCH * steps
        asked = [row for row in prompts if row["profile"] == name]
        began = time.monotonic()
        facts["answers"] = answer(start, asked, device)
        facts["seconds_of_answers"] = time.monotonic() - began
        (output / f"{name}_{steps}.json").write_text(json.dumps(facts))
        print(
            f"{name} {steps}: {facts['seconds']:.0f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}, ",
            end="",
        )
        print(f"answers {facts['seconds_of_answers']:.0f} s", flush=True)


def load(gguf: Path) -> Any:
    """SmolLM2 in fp32, from the values that ``get_smollm2.py`` writes in bf16."""
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": gguf.name, "attn_implementation": "sdpa", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
    for weights in model.parameters():
        weights.data = weights.data.to(torch.bfloat16).float()
    return model


def warm_start(model: Any, rows: list[dict[str, Any]], steps: int, device: str) -> list[float]:
    """Train on batches of whole conversations, in bf16 over weights in fp32; the loss of every
    step.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    rng, losses = random.Random(SEED), []
    order: list[int] = []
    for step in range(steps):
        if len(order) < BATCH:
            order = rng.sample(range(len(rows)), len(rows))
        batch, order = [rows[number] for number in order[:BATCH]], order[BATCH:]
        warm_up = WARM_UP * steps
        share = (
            (step + 1) / warm_up
            if step + 1 < warm_up
            else 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        optimizer.param_groups[0]["lr"] = LR * share
        answered = sum(len(row["ids"]) - row["answer_from"] for row in batch)
        loss = 0.0
        for part in filter(None, (batch[:8], batch[8:])):
            ids = torch.full((len(part), max(len(row["ids"]) for row in part)), PADDING)
            chosen = torch.zeros(ids.shape, dtype=torch.bool)
            for line, row in enumerate(part):
                ids[line, : len(row["ids"])] = torch.tensor(row["ids"])
                chosen[line, row["answer_from"] : len(row["ids"])] = True
            ids, chosen = ids.to(device), chosen.to(device)
            with torch.autocast(device, torch.bfloat16):  # no padding mask: padding is on the right
                hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][chosen[:, 1:]]
                logits = model.lm_head(hidden)
            of_part = torch.nn.functional.cross_entropy(
                logits.float(), ids[:, 1:][chosen[:, 1:]], reduction="sum"
            )
            (of_part / answered).backward()
            loss += float(of_part.detach()) / answered
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


@torch.inference_mode()
def answer(model: Any, prompts: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Sample an answer to every prompt; batches of similar length, padded on the left."""
    model.eval()
    torch.manual_seed(SEED)
    answers = []
    for kind in BUDGET:
        of_kind = sorted((p for p in prompts if p["kind"] == kind), key=lambda p: len(p["ids"]))
        for first in range(0, len(of_kind), 128):
            batch = of_kind[first : first + 128]
            width = max(len(p["ids"]) for p in batch)
            ids = torch.full((len(batch), width), PADDING)
            mask = torch.zeros_like(ids)
            for line, prompt in enumerate(batch):
                ids[line, width - len(prompt["ids"]) :] = torch.tensor(prompt["ids"])
                mask[line, width - len(prompt["ids"]) :] = 1
            drawn: dict[str, Any] = {"do_sample": False}
            if TEMPERATURE[kind]:
                drawn = {
                    "do_sample": True,
                    "temperature": TEMPERATURE[kind],
                    "top_k": 0,
                    "top_p": 1.0,
                }
            given = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=BUDGET[kind],
                eos_token_id=END,
                pad_token_id=PADDING,
                **drawn,
            )
            for prompt, line in zip(batch, given[:, width:].tolist(), strict=True):
                end = line.index(END) if END in line else len(line)
                own = {
                    "kind": kind,
                    "number": prompt["number"],
                    "ids": line[:end],
                    "truncated": END not in line,
                }
                answers.append(own)
    return answers


# -- prepare and score: with the package -----------------------------------------------------------


def prepare(folder: Path, notes: Path) -> None:
    """Write conversations and prompts in tokens, as the warm start's recipe and the game make
    them."""
    from transformers import AutoTokenizer

    from medserl_agentloop.core.encoding import ChatEncoder

    tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
    encoder, rows, questions = ChatEncoder(tokenizer), [], []
    for name, data in DATA.items():
        for row in pq.read_table(f"{data}/sft_train.parquet").to_pylist():
            *question, taught = row["messages"]
            opening = tokenizer.apply_chat_template(
                question, add_generation_prompt=True, tokenize=False
            )
            prompt = tokenizer.encode(opening, add_special_tokens=False)
            given = tokenizer.encode(taught["content"] + "<|im_end|>\n", add_special_tokens=False)
            if len(prompt) + len(given) <= 2048:  # the recipe's data.max_length
                rows.append({"format": name, "ids": [*prompt, *given], "answer_from": len(prompt)})
    for profile in DATA:
        for kind, turns in {
            "attack": attack_turns(profile),
            "assessment": assessment_turns(profile, notes),
        }.items():
            for number, turn in enumerate(turns):
                ids = encoder.opening(turn).ids
                questions.append({"profile": profile, "kind": kind, "number": number, "ids": ids})
    folder.mkdir(parents=True, exist_ok=True)
    tokens = pa.list_(pa.uint16())
    texts = {"format": pa.string(), "ids": tokens, "answer_from": pa.int32()}
    pq.write_table(
        pa.Table.from_pylist(rows, pa.schema(texts)),
        folder / "conversations.parquet",
        compression="zstd",
    )
    asked = {"profile": pa.string(), "kind": pa.string(), "number": pa.int32(), "ids": tokens}
    pq.write_table(
        pa.Table.from_pylist(questions, pa.schema(asked)),
        folder / "prompts.parquet",
        compression="zstd",
    )
    (folder / "notes.txt").write_text(str(notes))
    print(f"{len(rows)} conversations, {len(questions)} prompts")


def games_of(profile: str) -> tuple[Any, list[Any]]:
    """The interaction and a game for each row of ``ATTACKS``."""
    from medserl_agentloop.evaluation.play import start_games
    from medserl_agentloop.games.medical.config import MedicalConfig

    count = pq.read_metadata(ATTACKS).num_rows
    named = {"profile": profile, "judge": "labels"}
    return start_games({}, MedicalConfig, named, None, ATTACKS, count)


def attack_turns(profile: str) -> list[Any]:
    """The attacker's turn of each game."""
    from medserl_agentloop.games.medical.prompting import load_profile

    prompts = load_profile(profile)
    games = games_of(profile)[1]
    return [prompts.turn(game.next_role, game.spec.task, game.note) for game in games]


def assessment_turns(profile: str, notes: Path) -> list[Any]:
    """The assessor's turn about each note of a MEDEC set."""
    from medserl_agentloop.evaluation.score import read_reference
    from medserl_agentloop.games.medical.case import Category, Role
    from medserl_agentloop.games.medical.prompting import load_profile

    prompts = load_profile(profile)
    of_set = read_reference([notes]).notes
    shown = [prompts.shown(note.text, note.sentences) for note in of_set]
    return [prompts.turn(Role.ASSESSOR, Category.VANILLA_BENIGN, text) for text in shown]


def score(folder: Path, output: Path) -> None:
    """Play the attacks by the rules, score the assessments as ``medserl evaluate`` does; one row a
    run.
    """
    from transformers import AutoTokenizer

    from medserl_agentloop.core.interaction import Reply
    from medserl_agentloop.evaluation.evaluate import Answers, read_answers
    from medserl_agentloop.evaluation.score import read_reference
    from medserl_agentloop.games.medical.prompting import load_profile
    from medserl_agentloop.scoring.metrics import summarise
    from medserl_agentloop.scoring.official import grade

    tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
    reference = read_reference([Path((folder / "notes.txt").read_text())])
    table: list[dict[str, Any]] = []
    for file in sorted(output.glob("*.json")):
        ran = json.loads(file.read_text())
        profile = ran["format"].partition(",")[0]
        prompts = load_profile(profile)
        prefix = prompts.settings.assistant_prefix
        answers = sorted(ran["answers"], key=itemgetter("number"))
        given = {kind: [answer for answer in answers if answer["kind"] == kind] for kind in BUDGET}
        counts, games = Counter[str](), games_of(profile)[1]
        for game, answer in zip(games, given["attack"], strict=True):
            text = tokenizer.decode(answer["ids"])
            game.play(
                text, prefill=prefix, tokens=len(answer["ids"]), truncated=answer["truncated"]
            )
            attack, task = game.record.attack, game.spec.task.seed_label.value
            counts[f"attacks on {task} notes"] += 1
            counts[f"valid on {task} notes"] += attack.invalid is None
            counts[f"invalid: {attack.invalid.value}" if attack.invalid else "valid"] += 1
        shown = [prompts.shown(note.text, note.sentences) for note in reference.notes]
        texts = [tokenizer.decode(answer["ids"]) for answer in given["assessment"]]
        replies = {
            (note, 0): Reply(text, prefill=prefix) for note, text in zip(shown, texts, strict=True)
        }
        predictions, _ = read_answers(reference.notes, Answers(replies), 1, prompts)
        measures = summarise([grade(reference.notes, predictions)]).measures
        pairs = list(zip(predictions, reference.notes, strict=True))
        table.append(
            {
                "format": ran["format"],
                "steps": ran["steps"],
                "tokens of the warm start": round(ran["tokens"]),
                "tokens of an attack": round(
                    mean(len(answer["ids"]) for answer in given["attack"]), 1
                ),
                **counts,
                "called wrong": sum(one.flag for one in predictions),
                "rightly": sum(one.flag and note.flag for one, note in pairs),
                "and in the right sentence": sum(
                    note.flag and one.sentence_id == note.sentence_id for one, note in pairs
                ),
                **{
                    name: f"{e.value:.4f} [{e.low:.4f}, {e.high:.4f}]"
                    for name, e in measures.items()
                    if e.value
                },
            }
        )
    columns = dict.fromkeys(column for row in table for column in row)
    with RESULTS.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns, restval=0, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"prepare": prepare, "train": train, "score": score}
    commands[sys.argv[1]](*map(Path, sys.argv[2:]))
