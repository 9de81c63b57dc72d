"""Faults on verl's own agent-loop worker: every game is stored once, and none has a reward that it
did not earn.

Everything between verl's batch and TransferQueue is real: verl's worker class, its agent loop, the
tiny player's tokenizer. Stood in for: the LLM server, TransferQueue's storage and Ray's call of the
reward loop.
"""

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import verl.trainer.ppo.v1.agent_loop_tq as agent_loop_tq
from ray.exceptions import ActorDiedError
from support import NOTE, assessment_text, attack_text, extra_info
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import register
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.core import liveness
from medserl_agentloop.core.agent_loop import PerTurnRewardManager, SelfPlayAgentLoop
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.data.rows import AGENT_NAME
from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import compose_run

GAMES = 6
TIMEOUT_S = 0.4
NOTES = [f"{NOTE} Chart {number} is closed." for number in range(GAMES)]
PLAYER = AutoTokenizer.from_pretrained(resource("assets/tiny_player"))
RUN = compose_run(
    "+recipes=own_notes", "actor_rollout_ref.rollout.n=1", f"selfplay.turn_timeout_s={TIMEOUT_S}"
)
Fault = Callable[[TokenOutput], Any]


def batch() -> TensorDict:
    """The rows of the games as verl's trainer gives them to a worker."""
    messages = [
        load_profile().messages(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, note) for note in NOTES
    ]
    rows = enumerate(NOTES)
    columns = {
        "raw_prompt": messages,
        "extra_info": [extra_info("adversarial_benign", index=n, clean_note=s) for n, s in rows],
        "uid": list(map(str, range(GAMES))),
        "index": list(range(GAMES)),
        "data_source": ["tests"] * GAMES,
        "agent_name": [AGENT_NAME] * GAMES,
    }
    return get_tensordict(columns, {"global_steps": 1})


class Server:
    """In the place of verl's server client. With a fault it fails in one turn of every other
    game."""

    def __init__(self, turn: int = -1, fault: Fault | None = None) -> None:
        self._turn, self._fault = turn, fault

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        prompt = PLAYER.decode(prompt_ids)
        [number] = map(int, re.findall(r"Chart (\d) is closed", prompt))
        turn = int("giardia" in prompt)
        attacked = NOTES[number].replace("candida", "giardia")
        text = assessment_text() if turn else attack_text(attacked)
        ids = [*PLAYER.encode(text, add_special_tokens=False), PLAYER.eos_token_id]
        extra = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 1)
        output = TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="stop", extra_fields=extra
        )
        fails = self._fault is not None and turn == self._turn and number % 2 == 0
        return await self._fault(output) if fails else output


class Kept:
    """In the place of TransferQueue: keeps what a step would train on."""

    def __init__(self) -> None:
        self.games: list[MedicalRecord] = []
        self.paid: dict[str, float] = {}
        self.failed: list[str] = []

    def init(self) -> None: ...

    async def async_kv_put(self, key: str, tag: dict[str, Any], **_: Any) -> None:
        self.failed += [key] if tag["status"] == "failure" else []

    async def async_kv_batch_put(
        self, keys: list[str], fields: Any, tags: list[dict[str, Any]], **_: Any
    ) -> None:
        for extra, scores in zip(list(fields["extra_fields"]), fields["rm_scores"], strict=True):
            self.games.append(MedicalRecord.model_validate(extra[RECORD_KEY]))
            self.paid[self.games[-1].uid] = float(scores.abs().sum())

    def of(self, failed: bool) -> dict[str, Any]:
        """Return the games that failed, or the others, without their times."""
        times: Any = {"finished": True, "seconds": True, "judgement": {"seconds"}}
        facts = {g.uid: g.model_dump(exclude=times) for g in self.games}
        return {uid: game for uid, game in facts.items() if (game["void"] is not None) == failed}


def stored(server: Any, monkeypatch: pytest.MonkeyPatch, score: Any = None) -> Kept:
    storage, score = Kept(), score or PerTurnRewardManager(RUN, PLAYER).run_single
    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=score))  # of a Ray actor
    monkeypatch.setattr(agent_loop_tq, "tq", storage)
    register(AGENT_NAME)(SelfPlayAgentLoop)
    worker_class = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class

    async def games() -> None:
        worker = worker_class(RUN, server, None, [handle])
        await worker.generate_sequences(batch())
        await asyncio.gather(*worker.background_tasks)

    asyncio.run(games())
    return storage


@pytest.fixture(scope="module")
def whole() -> Kept:
    """The games of a server that never fails."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return stored(Server(), monkeypatch)


def raises(error: Exception) -> Fault:
    async def fault(output: TokenOutput) -> TokenOutput:
        raise error

    return fault


def answers(**changes: Any) -> Fault:
    async def fault(output: TokenOutput) -> TokenOutput:
        return output.model_copy(update=changes)

    return fault


async def never_comes(output: TokenOutput) -> TokenOutput:
    return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    ("fault", "reason", "counted"),
    [
        (raises(RuntimeError("no memory")), "generation failed: RuntimeError: no mem", "failed"),
        (raises(ActorDiedError()), "generation failed: ActorDiedError", "failed"),
        (answers(stop_reason="abort"), "generation aborted", "aborted"),
        (answers(token_ids=[], log_probs=[]), "generation aborted", "aborted"),
        (answers(log_probs=None), "0 finite log-probs for ", "no_log_probs"),
        (never_comes, f"generation timed out after {TIMEOUT_S} s", "timed_out"),
    ],
)
def test_a_server_that_fails_costs_its_own_games_and_pays_nothing_for_them(
    fault: Fault, reason: str, counted: str, turn: int, whole: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = stored(Server(turn, fault), monkeypatch)
    assert not kept.failed and sorted(g.uid for g in kept.games) == sorted(whole.paid)  # each once
    failed, others = kept.of(failed=True), kept.of(failed=False)
    assert len(failed) == GAMES / 2 and not whole.of(failed=True)
    assert others == {uid: game for uid, game in whole.of(failed=False).items() if uid in others}
    for uid, game in failed.items():
        assert game["void"].startswith(f"{list(Role)[turn].value}: {reason}")
        assert game["rewards"] == {} and kept.paid[uid] == 0.0
    shares = role_metrics(kept.games).items()
    void = {name: share for name, share in shares if name.startswith("selfplay/void/")}
    assert void == {f"selfplay/void/{counted}": 0.5}


def test_answers_in_any_order_make_the_same_games(
    whole: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    generate = server.generate

    async def shuffled(*request: Any, **parts: Any) -> TokenOutput:
        output: TokenOutput = await generate(*request, **parts)
        await asyncio.sleep(sum(output.token_ids) % 7 * TIMEOUT_S / 20)
        return output

    monkeypatch.setattr(server, "generate", shuffled)
    kept = stored(server, monkeypatch)
    assert [g.uid for g in kept.games] != [g.uid for g in whole.games]
    assert kept.of(failed=False) == whole.of(failed=False) and kept.paid == whole.paid


def test_dead_reward_worker_voids_its_games_which_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends at the end of the step (core/liveness.py), so nothing of it is trained on or
    written.
    """
    manager, asked = PerTurnRewardManager(RUN, PLAYER), iter(range(GAMES))

    async def score(data: Any) -> Any:
        if next(asked) % 2:
            raise ActorDiedError()
        return await manager.run_single(data)

    kept = stored(Server(), monkeypatch, score)
    assert len(kept.games) == len(kept.failed) == GAMES / 2
    assert not {g.uid for g in kept.games} & set(kept.failed)
    assert all(g.void is None and g.rewards for g in kept.games)


@pytest.mark.parametrize("at", ["score", "new_game"])
def test_first_exception_of_game_code_ends_the_run_with_its_line(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise ZeroDivisionError("of a user's \x1b[2J\n[medserl] step 1/1")

    monkeypatch.setattr(liveness, "_failures", [])
    monkeypatch.setattr(MedicalGameInteraction, at, fails)
    assert not stored(Server(), monkeypatch).games
    shown = str(liveness.first_failure(None))
    assert 'raise ZeroDivisionError("of a user' in shown and shown.count("ZeroDivisionError: ") == 1
    assert "\x1b" not in shown and all(line.startswith("    ") for line in shown.splitlines())
