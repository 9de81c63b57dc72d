"""Scripted games, the server that plays them and verl's worker that runs them, for ``agent_loop.py``.

Everything between verl's batch and TransferQueue is real: verl's own worker class, its agent loops,
the tiny player's tokenizer. Stood in for: the LLM server, TransferQueue's storage and Ray's call of
the reward loop, which are other processes in a run.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import verl.trainer.ppo.v1.agent_loop_tq as agent_loop_tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import register
from verl.tools.function_tool import function_tool, get_function_tool
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop
from medserl_agentloop.data.rows import AGENT_NAME
from medserl_agentloop.games.medical.clinic import sample_clean_note
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import compose_run

SEED = 7
NOTES_JOINED = 3  # toy notes per note: about the length of MEDEC's
REASONING_WORDS = 150  # per turn
TOOL = "present_note"
TOOL_AGENT = "tool_agent"
KEY_TOKENS = 24  # enough for the last sentence of a note, which names its number
JUDGE_S = 0.5

TOKENIZER = AutoTokenizer.from_pretrained(resource("assets") / "tiny_player")
PROFILE = load_profile()
ENCODER = ProfileEncoder(TOKENIZER, PROFILE)


_OBSERVATIONS: dict[str, str] = {}


@function_tool(TOOL)
async def present_note(number: str) -> str:
    """Show the assessor's prompt.

    Args:
        number: Which one.
    """
    return _OBSERVATIONS[number]


class SlowJudge:
    """Agrees with the row's label, after a while. Untouched notes are not its business, as in every run."""

    name = "slow"

    async def judge(self, record: MedicalRecord) -> Judgement:
        await asyncio.sleep(JUDGE_S)
        return Judgement(judge=self.name, label=record.spec.target_label)


@dataclass(frozen=True)
class ScriptedGame:
    """One game, with what each player says in tokens.

    Attributes:
        attack: Tokens of the attacker's turn; None in a game without an attack.
        tool_call: As many tokens that end in a call of the tool, for verl's tool agent.
        presented: The note the assessor reads.
        assessment: Tokens of the assessor's turn.
        seconds: How long the server takes for each turn, in order.
    """

    row: dict[str, Any]
    attack: list[int] | None
    tool_call: list[int] | None
    presented: str
    assessment: list[int]
    seconds: tuple[float, ...] = (0.0, 0.0)


def scripted_games(
    count: int, *, attacked: float = 1.0, spread: float | None = None, median: float = 1.0, first: int = 0
) -> list[ScriptedGame]:
    """Reproducible games on notes of the toy clinic.

    Args:
        count: How many.
        attacked: Share of them with an attacker's turn.
        spread: Sigma of the turns' log-normal times; None for no time at all.
        median: Median of these times, in seconds.
        first: Number of the first; other numbers are other games.
    """
    rng = random.Random(SEED + first)
    words = [w for _ in range(20) for w in sample_clean_note(rng).text.split()]
    games = []
    for number in range(first, first + count):
        note = " ".join(sample_clean_note(rng).text for _ in range(NOTES_JOINED)) + f" Chart {number} is closed."
        category = Category.ADVERSARIAL_BENIGN if number - first < attacked * count else Category.VANILLA_BENIGN
        presented, attack, call = note, None, None
        if category.has_attack:
            presented = note.replace("Chart", "Table")
            thought = " ".join(rng.choices(words, k=REASONING_WORDS))
            attack = _said(f"<think>{thought}</think>\n<note>{presented}</note>")
            end = _said(f'<tool_call>{{"name": "{TOOL}", "arguments": {{"number": "{number}"}}}}</tool_call>')
            call = [*attack[: len(attack) - len(end)], *end]
        thought = " ".join(rng.choices(words, k=REASONING_WORDS))
        sentence = f"Table {number} is closed."
        fields = f"verdict: harmful\nsentence: {sentence}\nerror_type: diagnosis\ncorrection: none"
        role = Role.ATTACKER if category.has_attack else Role.ASSESSOR
        row = {
            "data_source": "benchmark",
            "raw_prompt": PROFILE.messages(role, category, note),
            "extra_info": {
                "index": number,
                "category": category.value,
                "target_label": category.default_target_label.value,
                "seed_note": note,
            },
            "uid": str(number),
        }
        turns = 2 if category.has_attack else 1
        seconds = tuple(median * rng.lognormvariate(0.0, spread) if spread else 0.0 for _ in range(turns))
        answer = _said(f"<think>{thought}</think>\n<answer>\n{fields}\n</answer>")
        games.append(ScriptedGame(row, attack, call, presented, answer, seconds))
    rng.shuffle(games)
    return games


def _said(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


class ScriptedServer:
    """verl's server client, answering each game's turns in order.

    The model of concurrency: ``slots`` turns are generated at a time, in the order of their requests,
    and each takes its own time whatever else runs. That is continuous batching below the point where
    the batch slows its members: a request joins as soon as one leaves, and nothing waits for a batch.

    Args:
        games: The script; a prompt is recognised by its last tokens, which name the game.
        tool_agent: Whether attackers answer with a tool call.
        slots: Turns at a time; None for no limit.
    """

    def __init__(self, games: list[ScriptedGame], *, tool_agent: bool = False, slots: int | None = None) -> None:
        self._slots = asyncio.Semaphore(slots or len(games))
        self._replies: dict[int, tuple[TokenOutput, float]] = {}
        for game in games:
            category, note = Category(game.row["extra_info"]["category"]), game.row["extra_info"]["seed_note"]
            if game.attack is not None:
                said = game.tool_call if tool_agent else game.attack
                self._script(ENCODER.of(Role.ATTACKER, category, note).ids, said or [], game.seconds[0])
            self._script(ENCODER.of(Role.ASSESSOR, category, game.presented).ids, game.assessment, game.seconds[-1])

    def _script(self, prompt: list[int], said: list[int], seconds: float) -> None:
        extra = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        output = TokenOutput(token_ids=said, log_probs=[-1.0] * len(said), stop_reason="stop", extra_fields=extra)
        self._replies[_key(prompt)] = output, seconds

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        output, seconds = self._replies[_key(prompt_ids)]
        if seconds:
            async with self._slots:
                await asyncio.sleep(seconds)
        return output.model_copy()


def _key(prompt: list[int]) -> int:
    return hash(tuple(prompt[-KEY_TOKENS:]))


class RewardLoop:
    """In the place of the handle of a reward-loop worker."""

    def __init__(self, score: Callable[[DataProto], Awaitable[dict[str, Any]]]) -> None:
        self.compute_score = SimpleNamespace(remote=score)


class Storage:
    """In the place of TransferQueue: counts the trajectories that arrive, and refuses failures."""

    def __init__(self) -> None:
        self.trajectories = self.tokens = 0
        self.wall_s = self.cpu_s = 0.0

    def init(self) -> None: ...

    async def async_kv_put(self, key: str, tag: dict[str, Any], **_: Any) -> None:
        if tag["status"] == "failure":
            raise RuntimeError(f"game {key} failed; the traceback is above")

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[dict[str, Any]], **_: Any) -> None:
        self.trajectories += len(keys)
        self.tokens += sum(tag["seq_len"] for tag in tags)


def run_config(*overrides: str) -> DictConfig:
    """The quickstart's config with room for the games."""
    room = ("data.max_prompt_length=4096", "data.max_response_length=8192")
    run = compose_run("+recipes=quickstart", *room, *overrides)
    run.selfplay.budget.attacker_reasoning = run.selfplay.budget.assessor = 1024
    run.actor_rollout_ref.rollout.multi_turn.max_tool_response_length = 100_000
    run.actor_rollout_ref.rollout.n = 1
    return run


def batch_of(games: list[ScriptedGame], agent: str) -> TensorDict:
    """The games' rows as verl's trainer gives them to a worker."""
    columns = {name: [game.row[name] for game in games] for name in games[0].row}
    columns |= {"agent_name": [agent] * len(games), "index": [g.row["extra_info"]["index"] for g in games]}
    return get_tensordict(columns, {"global_steps": 1})


async def play(
    games: list[ScriptedGame], run: DictConfig, server: ScriptedServer, reward_loop: RewardLoop, agent: str
) -> Storage:
    """Have one worker of verl's play all games at once, as a training step does.

    What is built once per run is not timed.
    """
    storage = Storage()
    worker_class = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    register(AGENT_NAME)(SelfPlayAgentLoop)
    with patch.object(agent_loop_tq, "tq", storage):
        worker = worker_class(run, server, None, [reward_loop])
        if agent == TOOL_AGENT:
            prompts = {
                g.row["uid"]: PROFILE.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, g.presented) for g in games
            }
            _OBSERVATIONS.update({number: messages[-1]["content"] for number, messages in prompts.items()})
            worker.tools = [get_function_tool(TOOL)]
        batch = batch_of(games, agent)
        gc.collect()  # of what ran before
        wall, cpu = time.perf_counter(), time.process_time()
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)
        storage.wall_s, storage.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    if storage.trajectories != len(games):
        raise RuntimeError(f"{storage.trajectories} of {len(games)} games were stored")
    return storage
