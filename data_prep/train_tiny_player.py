"""Make the tiny player in ``assets/tiny_player``: a byte-level tokenizer and a Qwen3 of about 1 M parameters.

Run once by hand, on one CPU thread in about a quarter of an hour. The player learns the format of
both roles from ``toy.transcripts`` and is left with blind spots for self-play to remove.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from medserl_agentloop.game.parsing.medserl import parse_assessment, parse_attack
from medserl_agentloop.game.types import Category, Label, Role
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.rollout.encoding import ChatEncoder
from medserl_agentloop.toy.clinic import (
    Wording,
    check_attack,
    error_detail,
    inject_error,
    sample_clean_note,
)
from medserl_agentloop.toy.transcripts import Transcript, sample_transcript, transcripts

OUTPUT = Path(__file__).parents[1] / "assets" / "tiny_player"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 1600
MAX_ANSWER_TOKENS = 200
ATTACKS = (Category.ADVERSARIAL_BENIGN, Category.ADVERSARIAL_HARMFUL, Category.DECOY_BENIGN)

# Everyday clinical English, so that notes from elsewhere do not fall apart into single bytes.
GENERAL_TEXT = """\
A 45-year-old man comes to the emergency department because of chest pain and shortness of breath.
A 28-year-old woman is brought to the physician because of a 3-day history of fever, nausea and vomiting.
The patient has a history of hypertension, type 2 diabetes mellitus, asthma and hyperlipidemia.
His temperature is 38.5 C (101.3 F), pulse is 110/min, respirations are 22/min,
and blood pressure is 145/90 mm Hg.
Her vital signs are within normal limits. Oxygen saturation is 96% on room air.
Physical examination shows tenderness to palpation of the right lower abdomen without guarding or rebound.
Cardiac examination shows a systolic murmur at the left upper sternal border that radiates to the neck.
The lungs are clear to auscultation bilaterally. There is no edema of the lower extremities.
Neurologic examination shows weakness and decreased sensation of the left arm; reflexes are normal.
Laboratory studies show: hemoglobin 11.2 g/dL, leukocyte count 14,500/mm3, platelet count 250,000/mm3.
Serum studies: sodium 138 mEq/L, potassium 4.2 mEq/L, creatinine 0.9 mg/dL, glucose 180 mg/dL,
calcium 9.4 mg/dL.
An x-ray of the chest shows an infiltrate in the lower lobe. A CT scan of the head shows no abnormalities.
An ECG shows sinus tachycardia with ST-segment elevation. An MRI of the spine is scheduled.
Current medications include aspirin, lisinopril, metformin, atorvastatin, insulin and an oral contraceptive.
He does not smoke cigarettes and drinks alcohol occasionally. He has no known allergies.
She was diagnosed with an infection two weeks ago and treated with an antibiotic for seven days.
The symptoms began 6 months ago and have gotten progressively worse over the past several weeks.
Treatment with intravenous fluids and antibiotics is started, and the patient is admitted to the hospital.
A diagnosis of acute myocardial infarction is made. Surgery was performed without complications.
Blood cultures were obtained before therapy was given. Gram stain shows gram-positive cocci in clusters.
The child has received all immunizations. She is at the 50th percentile for height and weight.
Biopsy of the lesion shows inflammation. Urine pregnancy test is negative;
the last menstrual period was 4 weeks ago.
Family history is significant for cancer, stroke and coronary artery disease in his father and mother.
The patient was discharged home with instructions to follow up with the primary care physician.
"""


def _clinic_texts(count: int) -> Iterator[str]:
    """Prompts and answers as the player meets them, without the tags (they are tokens already)."""
    profile = load_profile("medserl")
    for example in itertools.islice(transcripts(seed=0), count):
        [message] = profile.messages(example.role, example.category, example.note)
        text = f"user\n{message['content']}\nassistant\n{example.answer}"
        for tag in TAGS:
            text = text.replace(tag, "\0")
        yield from filter(None, text.split("\0"))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template; any text encodes and decodes unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    general = GENERAL_TEXT.splitlines() * 40  # against some 2,000 prompts of their own words
    tokenizer.train_from_iterator([*_clinic_texts(2000), *general], trainer)
    # Plain tokens, not special ones: a player's tags are text that the game reads.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3 with tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Example:
    """A transcript in tokens: what follows the constant instructions of its template.

    Attributes:
        ids: Note, end of the prompt, answer, end-of-turn token.
        note_tokens: How many of them are the note.
        answer_tokens: How many of them are the answer with its end-of-turn token.
    """

    ids: list[int]
    note_tokens: int
    answer_tokens: int


class PromptCodec:
    """The product's own prompt encoding, with the constant instructions kept apart."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatEncoder(tokenizer, load_profile("medserl"))

    def instructions(self, role: Role, category: Category) -> list[int]:
        """Prompt tokens before the note, the same for every example of a template."""
        # Every template ends with the note, so the first end-of-turn token stands where the note goes.
        ids = self.chat.opening(role, category, "").ids
        return ids[: ids.index(self.tokenizer.eos_token_id)]

    def example(self, transcript: Transcript) -> Example:
        """Encode a transcript."""
        prompt = self.chat.opening(transcript.role, transcript.category, transcript.note)
        shared = len(self.instructions(transcript.role, transcript.category))
        answer = self.tokenizer.encode(transcript.answer, add_special_tokens=False)
        answer = [*answer, self.tokenizer.eos_token_id]
        return Example([*prompt.ids[shared:], *answer], prompt.note_tokens, len(answer))


def template_loss(
    model: Qwen3ForCausalLM, instructions: Sequence[int], examples: list[Example], note_weight: float
) -> torch.Tensor:
    """Summed cross-entropy over answers, plus ``note_weight`` times that over notes.

    The instructions run through the model once and their keys and values, gradients included, are
    shared by all examples: the loss is that of repeating them, most of the arithmetic is saved.
    """
    shared = model.model(input_ids=torch.tensor([list(instructions)]), use_cache=True)
    cache: DynamicCache = shared.past_key_values
    cache.batch_repeat_interleave(len(examples))
    length = max(len(e.ids) for e in examples)
    ids = torch.zeros((len(examples), length), dtype=torch.long)  # (B, T), padded on the right
    weights = torch.zeros((len(examples), length))  # (B, T): of predicting the token at t
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        weights[row, 1 : e.note_tokens] = note_weight
        weights[row, len(e.ids) - e.answer_tokens : len(e.ids)] = 1.0
    # No padding mask: causal attention never looks right, where the padding is.
    hidden = model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
    chosen = weights[:, 1:] > 0
    logits = model.lm_head(hidden[:, :-1][chosen])  # (N, V): only where there is a loss
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][chosen], reduction="none")
    return (losses * weights[:, 1:][chosen]).sum()


def warm_start(model: Qwen3ForCausalLM, codec: PromptCodec, args: argparse.Namespace, console: Console) -> None:
    """Train on streamed transcripts: true labels and practice first, the blind spots in the last part."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    smoothed = math.nan
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        task = progress.add_task("warm start", total=args.steps)
        for step in range(1, args.steps + 1):
            done = step / args.steps
            decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, step / 50) * decay
            finishing = done > args.true_labels
            groups: dict[tuple[int, ...], list[Example]] = defaultdict(list)
            for _ in range(args.batch):
                transcript = sample_transcript(rng, blind_spots=args.blind_spots * finishing, practice=0.0 if finishing else 0.7)
                instructions = tuple(codec.instructions(transcript.role, transcript.category))
                groups[instructions].append(codec.example(transcript))
            tokens = sum(e.answer_tokens for examples in groups.values() for e in examples)
            total = 0.0
            optimizer.zero_grad()
            for instructions, examples in groups.items():
                loss = template_loss(model, instructions, examples, args.note_weight) / tokens
                torch.autograd.backward(loss)
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            smoothed = total if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * total
            progress.update(task, advance=1, description=f"warm start, loss {smoothed:.3f}")
            if step % 100 == 0:
                console.print(f"step {step}: loss {smoothed:.3f}")


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


def evaluate(model: Qwen3ForCausalLM, codec: PromptCodec, items: int, seed: int) -> dict[str, dict[str, float]]:
    """Measure both roles on notes in wordings that the warm start did not see.

    Args:
        model: The player.
        codec: Its prompt encoding.
        items: Notes per attacker category, and per label for the assessor.
        seed: Seed of the notes and of the sampled answers.

    Returns:
        Rates by row of the printed table.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    results: dict[str, dict[str, float]] = {}
    for category in ATTACKS:
        notes = [sample_clean_note(rng, Wording.HELD_OUT) for _ in range(items)]
        if category.seed_label is Label.HARMFUL:
            notes = [inject_error(rng, note)[0] for note in notes]
        prompts = [codec.chat.opening(Role.ATTACKER, category, note.text).ids for note in notes]
        attacks = [parse_attack(text) for text in sample_turns(model, codec, prompts)]
        pairs = list(zip(notes, attacks, strict=True))
        valid = [check_attack(n.text, a.note, category).valid for n, a in pairs if a.note is not None]
        results[f"attacker, {category.value}"] = {
            "parses": sum(not a.violations for a in attacks) / items,
            "valid edit": sum(valid) / items,
        }
    clean = [sample_clean_note(rng, Wording.HELD_OUT) for _ in range(items)]
    wrong = [inject_error(rng, sample_clean_note(rng, Wording.HELD_OUT)) for _ in range(items)]
    shown = [*clean, *(note for note, _ in wrong)]
    prompts = [codec.chat.opening(Role.ASSESSOR, Category.VANILLA_BENIGN, note.text).ids for note in shown]
    answers = [parse_assessment(text) for text in sample_turns(model, codec, prompts)]
    on_clean, on_wrong = answers[:items], answers[items:]
    found: dict[str, list[bool]] = defaultdict(list)
    for (note, index), answer in zip(wrong, on_wrong, strict=True):
        found[error_detail(note, index)].append(answer.verdict is Label.HARMFUL)
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
    results["assessor finds"] = {kind: sum(hits) / len(hits) for kind, hits in sorted(found.items())}
    return results


def save_player(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (bfloat16), tokenizer and configuration."""
    rounded = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config.eos_token_id = tokenizer.eos_token_id
    rounded.generation_config.pad_token_id = tokenizer.pad_token_id
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Names that both Transformers 4 and 5 read; what 5 writes by itself, 4 does not know.
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [TURN_START])
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


MODEL_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# Tiny player

A Qwen3 with {parameters:,} parameters and a byte-level tokenizer of {vocabulary:,} tokens that plays both
roles of the game in the output format of the `medserl` prompts. It exists so that a whole
self-play run, tests included, fits on a laptop without a download. It knows sixteen diseases of a
closed toy world (`medserl_agentloop/toy`), has deliberate blind spots as an assessor, and has never
seen a real note. **Not medical advice, and of no use on real notes.**

Made by

```
{command}
```

from generated text only; the weights are stored in bfloat16. Licence: Apache-2.0.

## What it does before any self-play

Temperature 1, {items} notes per line (per label for the assessor), wordings not seen in training.
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
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--note-weight", type=float, default=0.1, help="loss weight of the note in the prompt")
    parser.add_argument("--true-labels", type=float, default=0.7, help="share of the steps without blind spots")
    parser.add_argument("--blind-spots", type=float, default=1.0, help="scale of the blind spots in the other steps")
    parser.add_argument("--items", type=int, default=200, help="notes per evaluated category")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    console = Console()

    tokenizer = build_tokenizer()
    codec = PromptCodec(tokenizer)
    model = build_model(tokenizer)
    parameters = model.num_parameters()
    console.print(f"{parameters:,} parameters, {len(tokenizer):,} tokens")
    warm_start(model, codec, args, console)

    # The folder appears complete or not at all: others may be loading the previous player.
    unfinished = args.output.with_name(f".{args.output.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    save_player(model, tokenizer, unfinished)
    saved = AutoModelForCausalLM.from_pretrained(unfinished, dtype=torch.float32).eval()
    codec = PromptCodec(AutoTokenizer.from_pretrained(unfinished))
    results = evaluate(saved, codec, args.items, seed=args.seed + 7)
    print_results(console, results)
    changed = [f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if v != parser.get_default(k)]
    write_model_card(
        unfinished,
        results,
        parameters=parameters,
        vocabulary=len(tokenizer),
        items=args.items,
        command=" ".join(["python data_prep/train_tiny_player.py", *(c for c in changed if "--output" not in c)]),
    )
    shutil.rmtree(args.output, ignore_errors=True)
    unfinished.rename(args.output)
    console.print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
