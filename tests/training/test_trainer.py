"""The trainer's own tensor work and columns, and the loss that reads the anchor's; its runs are in
test_main_ppo.py.
"""

import json
import math
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.losses import ppo_loss

from medserl_agentloop.core import columns, loss
from medserl_agentloop.core import trainer as core_trainer
from medserl_agentloop.core.advantages import RoleCredit, role_token_metrics
from medserl_agentloop.core.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    CertificateError,
    Measure,
)
from medserl_agentloop.core.columns import ANCHOR_COLUMN, TOKEN_COUNTS, TOKEN_ROLES, token_counts
from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.loss import context_gaps, context_leak_metrics, selfplay_loss
from medserl_agentloop.core.metrics import HealthError, turn_metrics
from medserl_agentloop.core.recorder import StepRecorder
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.step_file import RunFiles
from medserl_agentloop.core.trainer import SelfPlayReplayBuffer, SelfPlayTrainer
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.kuhn_poker import KuhnPoker
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.testing import compose_run

NAMES = MedicalGameInteraction.roles


@pytest.mark.parametrize(("on_alarm", "saved"), [("warn", []), ("stop", [1])])
def test_a_step_with_an_alarm_is_the_last_one_only_if_the_run_is_to_stop(
    on_alarm: str, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mismatch = {"training/rollout_probs_diff_mean": 0.5}
    monkeypatch.setattr(PPOTrainer, "step", lambda self, metrics, _: metrics.update(mismatch))
    trainer: Any = object.__new__(SelfPlayTrainer)
    config = MedicalConfig(judge="labels", on_alarm=on_alarm, alarms={"patience": 1})
    trainer.files = RunFiles(tmp_path)
    trainer.recorder = StepRecorder(MedicalGameInteraction(config), trainer.files)
    trainer.global_steps, trainer.total_training_steps = 1, 4
    trainer._certificate_metrics = {}
    trainer.config, found = OmegaConf.create({"trainer": {"save_freq": 2}}), list[int]()
    trainer._save_checkpoint = lambda: found.append(trainer.global_steps)
    trainer.step({}, {})
    assert found == saved
    stopped = r"stopped after step 1 .* rollout_mismatch: training/rollout_probs_diff_mean is 0\.5"
    with pytest.raises(HealthError, match=stopped) if saved else nullcontext():
        trainer.step({}, {})
    steps = [json.loads(line) for line in trainer.files.metrics.path.read_text().splitlines()]
    assert len(steps) == 2 - len(saved) and steps[0]["selfplay/alarm/rollout_mismatch"] == 1.0


def test_abandoned_requests_are_aborted_before_the_engine_sleeps() -> None:
    trainer: Any = object.__new__(SelfPlayTrainer)
    calls: list[str] = []
    steps = ["abort_replicas", "resume_generation_replicas", "sleep_replicas"]
    trainer.checkpoint_manager = SimpleNamespace(
        **{step: partial(calls.append, step) for step in steps}
    )
    trainer.check_processes = partial(calls.append, "check")
    trainer.curr_step_profile = False
    trainer.on_sample_end()
    assert calls == ["check", *steps]


def test_two_conversations_of_a_role_are_credited_apart() -> None:
    settings = {"adv_estimator": "role_reinforce_pp", "use_kl_in_reward": False}
    algorithm = OmegaConf.create({**settings, "gamma": 1.0, "lam": 1.0})
    plain = {"normalize": {"only": "none"}}
    selfplay = SelfPlayConfig.model_validate({"game": "mine", "credit": plain})
    credit = RoleCredit(algorithm, selfplay, roles=("only",))
    columns = {
        "rm_scores": torch.tensor([[0.0, 1.0, 0.0, 0.0, 5.0]]),
        "contexts": torch.tensor([[0, 0, 1, 1, 1]]),
        **{name: torch.tensor([[1, 1, 0, 1, 1]]) for name in ("response_mask", "role_ids")},
    }
    names = {name: np.array(["x"], dtype=object) for name in ("uid", "kind")}
    batch = DataProto(batch=TensorDict(columns, batch_size=1), non_tensor_batch=names)
    data, metrics = credit.credit(batch, repeated_roles=())
    assert data.batch["returns"].tolist() == data.batch["advantages"].tolist() == [[1, 1, 0, 5, 5]]
    assert metrics["selfplay/only/trained_tokens"] == 4


def test_turns_and_their_lengths_are_counted_for_any_game() -> None:
    games = [GameRecord(), GameRecord(), GameRecord(void="no room")]
    role_ids = [torch.tensor(ids) for ids in ([1, 1, 0, 2, 0, 1], [1, 1, 1], [2, 2, 2, 2])]
    assert turn_metrics(games, role_ids, ["a", "b", "c"]) == {
        "selfplay/a/turns": 3.0,
        "selfplay/a/tokens": 2.0,
        "selfplay/b/turns": 1.0,
        "selfplay/b/tokens": 1.0,
    }


@pytest.mark.parametrize("certify", ["stop", "only", "warn"])
def test_a_claim_that_does_not_hold_ends_a_run_unless_it_is_only_to_warn(
    certify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    problem = "the loss couples the roles"
    found = Certificate([Measure("loss", "actor", 1.0, 1e-5, {}, problem)], 0, games=2, seconds=1.0)
    monkeypatch.setattr(core_trainer, "certify", lambda *_: found)
    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.encoder, trainer.selfplay = None, SimpleNamespace(certify=certify, records=tmp_path)
    ends = pytest.raises(CertificateError, match=problem)
    with nullcontext() if certify == "warn" else ends:
        trainer._certify()
    assert f"certificate: {problem}" in capsys.readouterr().out
    assert (tmp_path / CERTIFICATE_FILE).is_file()


def test_a_validation_without_the_games_that_raised_is_not_written(tmp_path: Path) -> None:
    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.check_processes = Mock(side_effect=RuntimeError("the code of a game raised"))
    trainer.files = RunFiles(tmp_path)
    with pytest.raises(RuntimeError, match="the code of a game raised"):
        trainer._val_metrics_update([], [], {})
    assert not trainer.files.metrics.path.exists()


MASK = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]])


def leak(rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor = MASK) -> Any:
    return context_leak_metrics(context_gaps(rollout, actor, mask))


def test_the_leak_metric_compares_later_contexts_with_the_first_ones() -> None:
    rollout, actor = torch.zeros(2, 6), torch.where(MASK > 0, 0.01, 9.0)
    assert leak(rollout, actor)["selfplay/context_leak"] == pytest.approx(1.0)
    actor[0, 4:] = 0.2
    metrics = leak(rollout, actor)
    assert metrics["selfplay/context_leak"] == pytest.approx(20.0)
    assert metrics["selfplay/log_prob_gap/first_context"] == pytest.approx(0.01)
    assert metrics["selfplay/context_leak_games"] == 1
    actor = torch.zeros(2, 6)
    actor[0, 4] = 5e-7  # less than float32 can tell
    assert leak(rollout, actor)["selfplay/context_leak"] < 1
    assert leak(rollout[1:], actor[1:], MASK[1:]) == {}  # no second context


ROLES = torch.tensor([[1, 1, 0, 0, 2, 2], [2, 2, 2, 0, 0, 0]])


def test_role_metrics_cover_trained_tokens_and_signal_shares_sum_to_one() -> None:
    advantages = torch.where(ROLES == 1, torch.tensor([-4.0, -2.0, 9.0, 9.0, 9.0, 9.0]), 1.0)
    assert role_token_metrics({"advantage": advantages}, MASK, ROLES, NAMES) == {
        "selfplay/attacker/trained_tokens": 2.0,
        "selfplay/attacker/advantage_mean": -3.0,
        "selfplay/attacker/advantage_std": 1.0,
        "selfplay/attacker/signal_share": pytest.approx(3 / 4),
        "selfplay/attacker/largest_game_share": 1.0,
        "selfplay/assessor/trained_tokens": 5.0,
        "selfplay/assessor/advantage_mean": 1.0,
        "selfplay/assessor/advantage_std": 0.0,
        "selfplay/assessor/signal_share": pytest.approx(1 / 4),
        "selfplay/assessor/largest_game_share": pytest.approx(3 / 5),
    }
    by_tokens = role_token_metrics({"advantage": advantages}, MASK, ROLES, NAMES, per_role=False)
    assert by_tokens["selfplay/attacker/signal_share"] == pytest.approx(6 / 11)
    nothing = role_token_metrics({"advantage": advantages}, MASK * 0, ROLES, NAMES)
    assert nothing == {f"selfplay/{role}/trained_tokens": 0.0 for role in NAMES}


# --- the replay buffer that the recipes name ---


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(core_trainer, "CHECK_INTERVAL_S", 0.25)
    config, nothing = compose_run("+recipes=core"), {"_add_prompts_to_generate": lambda count: None}
    reduced = SimpleNamespace(config=config, trainer_mode="sync", **nothing)
    buffer = PPOTrainer._build_replay_buffer(reduced)  # verl's own builder
    assert type(buffer) is SelfPlayReplayBuffer
    return buffer


def test_wait_for_games_ends_where_the_check_fails(
    buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = Mock()
    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", polls)  # no game ends
    buffer.check = Mock(side_effect=[None, RuntimeError("agent-loop worker 0 died")])
    with pytest.raises(RuntimeError, match="agent-loop worker 0 died"):
        buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert polls.call_count > buffer.check.call_count == 2


def test_games_that_end_in_any_order_make_one_batch(
    buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"is_prompt": True, "status": "finished", "global_steps": 1}
    listed = {"f": dict(prompt), "b": dict(prompt)}
    listed |= {key: {"seq_len": 9} for key in ("b_10_0", "f_2_0", "b_9_0", "f_0_0")}
    monkeypatch.setattr("transfer_queue.kv_list", lambda: {"train": listed})
    monkeypatch.setattr("transfer_queue.kv_clear", lambda **asked: None)
    batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert batch.keys == ["f_0_0", "f_2_0", "b_9_0", "b_10_0"]


# --- the columns that know contexts and roles ---


CONFIG = omega_conf_to_dataclass(compose_run("+recipes=quickstart").actor_rollout_ref.actor)


class Queue:
    """The transfer queue, in this process."""

    def __init__(self, rows: dict[str, dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Any) -> TensorDict:
        rows = [self.rows[key] for key in keys]
        return list_of_dict_to_tensordict(
            [{name: row[name] for name in select_fields if name in row} for row in rows]
        )

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> None:
        for name, column in fields.items():
            for key, row in zip(keys, column.unbind(), strict=True):
                self.rows[key][name] = row


def queued(
    rows: dict[str, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, **lengths: int
) -> KVBatchMeta:
    monkeypatch.setattr(columns, "tq", Queue(rows))
    tags = [{"seq_len": lengths.get(key, 0), "is_padding": key == "padding"} for key in rows]
    return KVBatchMeta(keys=list(rows), tags=tags, partition_id="train")


def test_positions_restart_in_every_context_before_verl_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = {"two": [3, 2], "one": [4], "three": [2, 2, 3], "padding": [3, 2]}
    others = {"old_log_probs": torch.zeros(2), "response_mask": torch.ones(2)}
    rows = {
        key: {
            "context_lengths": torch.tensor(contexts),
            "position_ids": torch.arange(sum(contexts)),  # as verl's agent loop counts them
            **others,
        }
        for key, contexts in lengths.items()
    }
    batch = queued(rows, monkeypatch, **{key: sum(contexts) for key, contexts in lengths.items()})
    read: dict[str, list[int]] = {}

    def compute(self: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        read.update({key: row["position_ids"].tolist() for key, row in rows.items()})
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", compute)
    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.selfplay = SimpleNamespace(adapters="shared", reuse_log_probs=False)
    trainer._compute_old_log_prob(batch, {})
    assert read == {
        "two": [0, 1, 2, 0, 1],
        "one": [0, 1, 2, 3],
        "three": [0, 1, 0, 1, 0, 1, 2],
        "padding": [0, 1, 2, 3, 4],
    }


def test_every_token_of_a_context_belongs_to_the_role_that_answers_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths, role_ids = torch.tensor([4, 3, 2]), torch.tensor([1, 1, 0, 2, 2, 0, 0])
    row = {"context_lengths": lengths, "role_ids": role_ids}
    # verl copies a row as padding, but its response is one masked token.
    rows = {"game": row, "padding": dict(row)}
    columns.write_token_roles(queued(rows, monkeypatch, game=9, padding=3))
    assert rows["game"][TOKEN_ROLES].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert rows["padding"][TOKEN_ROLES].tolist() == [0, 0, 0]


# --- the anchor ---


def test_coefficients_follow_roles_and_skip_observations_and_void_games(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"game": ([1, 1, 0, 2], [1, 1, 0, 1]), "void": ([2, 2], [0, 0])}
    rows = {
        key: {"role_ids": torch.tensor(ids), "response_mask": torch.tensor(mask)}
        for key, (ids, mask) in numbers.items()
    }
    columns.write_anchor(queued(rows, monkeypatch), {1: 0.5, 2: 0.1})
    torch.testing.assert_close(rows["game"][ANCHOR_COLUMN], torch.tensor([0.5, 0.5, 0.0, 0.1]))
    assert rows["void"][ANCHOR_COLUMN].tolist() == [0.0, 0.0]


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(
    trained_tokens: int,
    anchor: list[list[float]] | None = None,
    lengths: tuple[int, ...] = (4, 2),
    **changed: list[list[float]],
) -> tuple[dict[str, Any], TensorDict]:
    """Games of so many response tokens behind prompts of 1, as verl's engine passes them."""
    rows = {
        "prompts": [torch.zeros(1, dtype=torch.long)] * len(lengths),
        "responses": [torch.zeros(n, dtype=torch.long) for n in lengths],
        "response_mask": [torch.tensor([1] + [0] * (n - 1)) for n in lengths],
        "role_ids": [torch.ones(n, dtype=torch.long) for n in lengths],
        "old_log_probs": [torch.full((n,), -1.0) for n in lengths],
        "ref_log_prob": [torch.full((n,), -1.5) for n in lengths],
        "advantages": [torch.ones(n) for n in lengths],
        **{name: list(map(torch.tensor, column)) for name, column in changed.items()},
    }
    if anchor is not None:
        rows[ANCHOR_COLUMN] = list(map(torch.tensor, anchor))
    columns = {name: nested(column) for name, column in rows.items()}
    data = TensorDict(columns, batch_size=len(lengths))
    sizes = {"dp_size": 1, "batch_num_tokens": trained_tokens, "global_batch_size": 2}
    tensordict_utils.assign_non_tensor(data, **sizes, **{TOKEN_COUNTS: token_counts(data)})
    log_probs = nested([torch.full((n + 1,), -1.0, requires_grad=True) for n in lengths])
    return {"log_probs": log_probs}, data


@pytest.mark.parametrize(("roles", "tokens"), [((), 2), ((1,), 3)])
def test_the_anchor_adds_its_share_of_kl_to_verls_loss(roles: tuple[int, ...], tokens: int) -> None:
    """verl's is a mean over the trained tokens of all roles, the loss per role one over the role's
    anchored tokens.
    """
    plain, _ = ppo_loss(CONFIG, *micro_batch(trained_tokens=2))
    assert torch.equal(selfplay_loss(CONFIG, roles, *micro_batch(trained_tokens=2))[0], plain)
    loss, metrics = selfplay_loss(
        CONFIG, roles, *micro_batch(2, [[0.0, 0.0, 0.0, 0.1], [0.1, 0.1]])
    )
    # low_var_kl of log-probs -1.0 and -1.5: exp(-0.5) + 0.5 - 1, on three tokens.
    kl = torch.tensor(-0.5).exp() + 0.5 - 1
    torch.testing.assert_close(loss, plain + 3 * 0.1 * kl / tokens)
    assert metrics["anchor_kl_loss"].aggregate() == pytest.approx(3 * 0.1 * kl.item() / tokens)


def test_what_a_game_settles_reaches_records_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a game whose first role is settled, one that is not, and one without tokens of it."""
    role_ids = [[1, 1, 0, 2, 2], [1, 0, 2], [2, 2]]
    before = [[0.0, 0.5, 0.0, 0.0, -1.0], [0.25, 0.0, 1.0], [0.0, 1.0]]
    records = [
        KuhnPoker.Record(cards=("K", "Q"), rewards={"first": {"chips": 0.5}}) for _ in role_ids
    ]
    scores, ids = map(torch.tensor, before), map(torch.tensor, role_ids)
    rows = {
        str(n): {"role_ids": of, "rm_scores": score, "extra_fields": {RECORD_KEY: record}}
        for n, (of, score, record) in enumerate(zip(ids, scores, records, strict=True))
    }

    def settle(records: list[Any], counts: dict[str, Any]) -> None:
        records[0].rewards = records[2].rewards = {"first": {"chips": 3.0}}
        counts["seen"] = {"KQ": 1.0}

    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.roles, trainer.run_state = dict(enumerate(KuhnPoker.roles, 1)), {"counts": {}}
    trainer.interaction = SimpleNamespace(settle=settle)
    trainer._settle(queued(rows, monkeypatch))
    written = [rows[key]["rm_scores"].tolist() for key in rows]
    assert written == [[0.0, 3.0, 0.0, 0.0, -1.0], *before[1:]]
    assert trainer.run_state["counts"] == {"seen": {"KQ": 1.0}}
    assert trainer._records["0"].rewards == {"first": {"chips": 3.0}}


@pytest.mark.parametrize("roles", [(), (2,)])
def test_mini_batch_without_trained_tokens_has_a_differentiable_zero_loss(
    roles: tuple[int, ...],
) -> None:
    loss, metrics = selfplay_loss(CONFIG, roles, *micro_batch(trained_tokens=0))
    assert loss.item() == 0 and loss.requires_grad and metrics == {}


def of_assessor(
    roles: tuple[int, ...], games: list[tuple[int, int]], where: list[tuple[int, int]] | None = None
) -> torch.Tensor:
    """The update's gradient of the assessor's log-probs, in the order of ``games``: tokens of
    attacker and assessor. ``where`` says which of two workers' micro-batches each game is in.
    """
    where = where or [(0, 0)] * len(games)
    parts = {place: [n for n, at in enumerate(where) if at == place] for place in where}
    told: dict[str, Any] = {"dp_size": 2, "batch_num_tokens": sum(map(sum, games))}
    told[TOKEN_COUNTS] = Counter[tuple[str, int]]()
    micro_batches = {}
    for place, members in parts.items():
        role_ids = [[1] * games[n][0] + [0] + [2] * games[n][1] for n in members]
        mask = [[int(role > 0) for role in row] for row in role_ids]
        lengths = tuple(map(len, role_ids))
        anchor = [[0.1 * trained for trained in row] for row in mask]
        output, data = micro_batch(0, anchor, lengths, role_ids=role_ids, response_mask=mask)
        told[TOKEN_COUNTS] += token_counts(data)
        micro_batches[place] = output, data
    gradients = {}
    for place, (output, data) in micro_batches.items():
        tensordict_utils.assign_non_tensor(data, **told)
        log_probs = output["log_probs"]
        leaf = log_probs.values().detach().requires_grad_()
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, log_probs.offsets())}
        selfplay_loss(CONFIG, roles, output, data)[0].backward()
        rows = torch.split(leaf.grad / told["dp_size"], log_probs.offsets().diff().tolist())
        for n, row in zip(parts[place], rows, strict=True):
            gradients[n] = row[games[n][0] + 1 : -1]
    return torch.cat([gradients[n] for n in range(len(games))])


def test_verls_token_mean_couples_assessor_gradient_to_attacker_length() -> None:
    before, after = (of_assessor((), [(tokens, 45)]) for tokens in (62, 124))
    torch.testing.assert_close(after, before * 107 / 169)


GAMES = st.tuples(
    st.integers(0, 9), st.integers(0, 9), st.tuples(st.integers(0, 1), st.integers(0, 2))
)


@given(st.lists(GAMES, min_size=1, max_size=6), st.sampled_from([0, 2]))
@example([(62, 45, (0, 0))], 2)
def test_loss_of_a_role_does_not_know_the_other_roles_length(games: Any, times: int) -> None:
    where = [place for *_, place in games]
    lengths = [(attacker, assessor) for attacker, assessor, _ in games]
    before = of_assessor((1, 2), lengths)
    longer = [(attacker * times, assessor) for attacker, assessor in lengths]
    after = of_assessor((1, 2), longer, where)
    torch.testing.assert_close(after, before)


def test_update_pass_measures_the_leak_with_an_untrained_role_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A game of two contexts of which the later is trained, a void game, and padding."""
    output, data = micro_batch(
        trained_tokens=1,
        lengths=(4, 2, 1),
        response_mask=[[0, 0, 0, 1], [0, 0], [0]],
        role_ids=[[1, 1, 0, 2], [1, 2], [1, 1, 0, 2]],
        rollout_log_probs=[[-1.1, -1.1, 0.0, -1.5], [-9.0, -9.0], [-9.0]],
    )
    del data["old_log_probs"]
    _, metrics = selfplay_loss(CONFIG, (2,), output, data)
    numbers = {name: getattr(of, "aggregate", lambda of=of: of)() for name, of in metrics.items()}
    of_verl = {f"actor/{name}": number for name, number in numbers.items()}
    monkeypatch.setattr(PPOTrainer, "_update_actor", lambda self, batch, own: own.update(of_verl))
    found: dict[str, Any] = {}
    object.__new__(SelfPlayTrainer)._update_actor(None, found)
    assert found["selfplay/log_prob_gap/first_context"] == pytest.approx(0.1, abs=1e-6)
    assert found["selfplay/context_leak"] == pytest.approx(5.0, abs=1e-4)
    assert found["selfplay/context_leak_games"] == 1
    apart = math.exp(-1.0) - math.exp(-1.5)
    assert [found[f"training/{name}"] for name in loss.DIFFS] == pytest.approx([apart] * 2)
    assert not {f"actor/{name}" for name in (*loss.GAPS, *loss.DIFFS)} & set(found)
