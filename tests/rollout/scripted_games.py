"""Scripted games and the server that plays them, for tests on verl's own agent-loop worker.

Everything between verl's batch and TransferQueue is real: verl's worker class, its agent loop, the tiny player's
tokenizer. Stood in for: the LLM server, TransferQueue's storage and Ray's call of the reward loop.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl import DataProto
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.replica import TokenOutput

from experiments.clinic import sample_clean_note
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import compose_run

SEED = 7
NOTES_JOINED = 3  # toy notes per note: about the length of MEDEC's
REASONING_WORDS = 150  # per turn
KEY_TOKENS = 24  # enough for the last sentence of a note, which names its number

TOKENIZER = AutoTokenizer.from_pretrained(resource("assets") / "tiny_player")
PROFILE = load_profile()
ENCODER = ProfileEncoder(TOKENIZER, PROFILE)


@dataclass(frozen=True)
class ScriptedGame:
    """A row with what each player writes in tokens, and the note that the assessor reads."""

    row: dict[str, Any]
    attack: list[int]
    presented: str
    assessment: list[int]


def scripted_games(count: int) -> list[ScriptedGame]:
    """Reproducible games on correct notes of the toy clinic, with an attack in each."""
    rng = random.Random(SEED)
    words = [w for _ in range(20) for w in sample_clean_note(rng).text.split()]
    category = Category.ADVERSARIAL_BENIGN
    games = []
    for number in range(count):
        note = " ".join(sample_clean_note(rng).text for _ in range(NOTES_JOINED)) + f" Chart {number} is closed."
        presented = note.replace("Chart", "Table")
        attack, assessment = (" ".join(rng.choices(words, k=REASONING_WORDS)) for _ in range(2))
        fields = f"verdict: harmful\nsentence: Table {number} is closed.\nerror_type: diagnosis\ncorrection: none"
        row = {
            "data_source": "tests",
            "raw_prompt": PROFILE.messages(Role.ATTACKER, category, note),
            "extra_info": {
                "index": number,
                "category": category.value,
                "target_label": category.default_target_label.value,
                "seed_note": note,
            },
            "uid": str(number),
        }
        attack = _tokens(f"<think>{attack}</think>\n<note>{presented}</note>")
        answer = _tokens(f"<think>{assessment}</think>\n<answer>\n{fields}\n</answer>")
        games.append(ScriptedGame(row, attack, presented, answer))
    rng.shuffle(games)
    return games


def _tokens(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


class ScriptedServer:
    """verl's server client. A prompt is recognised by its last tokens, which name the game."""

    def __init__(self, games: list[ScriptedGame]) -> None:
        self._replies: dict[int, TokenOutput] = {}
        for game in games:
            category, note = Category(game.row["extra_info"]["category"]), game.row["extra_info"]["seed_note"]
            self._script(ENCODER.of(Role.ATTACKER, category, note).ids, game.attack)
            self._script(ENCODER.of(Role.ASSESSOR, category, game.presented).ids, game.assessment)

    def _script(self, prompt: list[int], tokens: list[int]) -> None:
        extra = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        log_probs = [-1.0] * len(tokens)
        output = TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="stop", extra_fields=extra)
        self._replies[_key(prompt)] = output

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        return self._replies[_key(prompt_ids)].model_copy()


def _key(prompt: list[int]) -> int:
    return hash(tuple(prompt[-KEY_TOKENS:]))


class RewardLoop:
    """In the place of the handle of a reward-loop worker."""

    def __init__(self, score: Callable[[DataProto], Awaitable[dict[str, Any]]]) -> None:
        self.compute_score = SimpleNamespace(remote=score)


def run_config(*overrides: str) -> DictConfig:
    """The quickstart's config with room for the games."""
    room = ("data.max_prompt_length=4096", "data.max_response_length=8192", "actor_rollout_ref.rollout.n=1")
    budget = ("selfplay.budget.attacker_reasoning=1024", "selfplay.budget.assessor=1024")
    return compose_run("+recipes=quickstart", *room, *budget, *overrides)


def batch_of(games: list[ScriptedGame], agent: str) -> TensorDict:
    """The games' rows as verl's trainer gives them to a worker."""
    columns = {name: [game.row[name] for game in games] for name in games[0].row}
    columns |= {"agent_name": [agent] * len(games), "index": [g.row["extra_info"]["index"] for g in games]}
    return get_tensordict(columns, {"global_steps": 1})
