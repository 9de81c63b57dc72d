"""The game of ``benchmarks/gpu.py``, and the model and rows of its runs: nothing of it needs a
download.

Ray's processes import it by name, as they would a user's game.
"""

from __future__ import annotations

import csv
import shutil
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medserl_agentloop.core.interaction import AGENT_NAME, Interaction, Prompt, Turn, place
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.tools import plan

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "assets" / "tiny_player"
FILLER = " a"  # one token of that tokenizer


def fit(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """``text``, cut or filled up to so many tokens."""
    text = text[
        : bisect_right(range(len(text) + 1), tokens, key=lambda end: count(text[:end])) - 1
    ].rstrip()
    return text + FILLER * (tokens - count(text))


def share(text: str) -> float:
    """The share of the letter e: a reward that random text varies in."""
    return text.count("e") / max(1, len(text))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The same reward for verl's own GRPO."""
    return share(solution_str)


class Record(GameRecord):
    """Both players' texts, and the text that the second one read."""

    said: tuple[str, ...] = ()
    read: str = ""


class Game:
    """One game in progress. Every answer counts, whatever a random model writes."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts, self.record = facts, Record()

    def play(
        self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False
    ) -> None:
        self.record.said += (text,)
        self.record.rewards[Relay.roles[len(self.record.said) - 1]] = {"e": share(text)}

    def make_void(self, reason: str) -> None:
        self.record.void, self.record.rewards = reason, {}


class Relay(Interaction[Game, Record]):
    """The first player reads a note, the second one what the first wrote.

    Roles and keys are those of the recipes.
    """

    roles, Config, Record = ("attacker", "assessor"), MedicalConfig, Record

    def new_game(self, facts: Mapping[str, Any]) -> Game:
        return Game(facts)

    def next_turn(self, game: Game) -> Turn | None:
        said, facts = game.record.said, game.facts
        if len(said) == 2 or game.record.void is not None:
            return None
        text = facts["note"]
        if said:
            assert self.tokens is not None
            game.record.read = text = fit(
                f"{said[0]} {text}", facts["note_tokens"], self.tokens.count
            )
        message = {"role": "user", "content": f"Go on with this note.\n{place('text')}"}
        return Turn(
            self.roles[len(said)],
            Prompt((message,), {"text": text}),
            max_tokens=facts["turn_tokens"],
        )

    def sample_turns(self, facts: Mapping[str, Any]) -> list[Turn]:
        game = self.new_game(facts)
        first = self.next_turn(game)
        game.play("")
        return [turn for turn in (first, self.next_turn(game)) if turn is not None]


def model_config(size: str) -> Any:
    """Transformers' config of a Qwen3, as it is published, or of the quickstart's player.

    No token ends a turn.
    """
    from transformers import Qwen3Config

    if size == "tiny":
        return Qwen3Config.from_pretrained(TOKENIZER, eos_token_id=None)
    config = plan.model_config(size.replace("_", "-").replace("0-6", "0.6"))
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    config.max_position_embeddings = 40960
    return config


def write_model(size: str, folder: Path) -> None:
    """Write random weights in bf16, and the tokenizer of the quickstart's player; 4B take 8 GB of
    memory and disk.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(size), dtype=torch.bfloat16).save_pretrained(
        folder
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, folder)


def write_rows(folder: Path, rows: int, note: int, turn: int) -> int:
    """Write ``relay.parquet``, and ``single.parquet`` with prompts as long as both of a game;
    returns tokens of one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    from medserl_agentloop.core.encoding import ChatEncoder

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    encoder = ChatEncoder(tokenizer)
    with (ROOT / "data_prep" / "sample" / "medserl_sample.csv").open(encoding="utf-8") as file:
        texts = [row["Text"] for row in csv.DictReader(file)]

    def asked(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def count(text: str) -> int:
        rendered = tokenizer.apply_chat_template(
            asked(text), add_generation_prompt=True, tokenize=False
        )
        return len(tokenizer.encode(rendered, add_special_tokens=False))

    relay, single, prompt = [], [], 0
    for index in range(rows):
        text = " ".join(texts[(index + other) % len(texts)] for other in range(len(texts)))
        facts = {
            "index": index,
            "note": fit(text, note, encoder.count),
            "note_tokens": note,
            "turn_tokens": turn,
        }
        opening, other = Relay(None, encoder).sample_turns(facts)
        prompt = len(encoder.opening(opening).ids)
        assert len(encoder.opening(other).ids) == prompt
        row = {
            "ability": "relay",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": facts,
        }
        relay.append(
            {
                **row,
                "data_source": "relay",
                "agent_name": AGENT_NAME,
                "prompt": opening.prompt.filled(),
            }
        )
        message = asked(fit(text, 2 * prompt, count))
        single.append(
            {**row, "data_source": "single", "agent_name": "single_turn_agent", "prompt": message}
        )
    for name, table in (("relay", relay), ("single", single)):
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
    return prompt
