"""Kuhn poker, the second game, whose first player comes back to its conversation."""

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from real_runs import Run, printed_by
from serving import ChatServer
from support import TOKENIZER, judge, run_game

from experiments.kuhn_poker import warm_start
from experiments.kuhn_poker.exploitability import Policy, information_sets, nash_conv, value_of
from experiments.kuhn_poker.run import measure
from medserl_agentloop.core.certificate import CertificateError, sample_games
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Prompt, Turn
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.kuhn_poker import ACTIONS, KuhnGame, KuhnPoker, KuhnRecord, winnings
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import MockSGLangEngine, compose_run

RUN = compose_run(
    "+recipes=kuhn_poker", f"actor_rollout_ref.model.path={resource('assets/tiny_player')}"
)


def equilibrium(alpha: float) -> Policy:
    """Kuhn's family of solutions, for alpha from 0 to 1/3."""
    first = {("J", ""): alpha, ("Q", ""): 0.0, ("K", ""): 3 * alpha}
    later = {("J", "check bet"): 0.0, ("Q", "check bet"): alpha + 1 / 3, ("K", "check bet"): 1.0}
    facing_a_bet = {("J", "bet"): 0.0, ("Q", "bet"): 1 / 3, ("K", "bet"): 1.0}
    after_a_check = {("J", "check"): 1 / 3, ("Q", "check"): 0.0, ("K", "check"): 1.0}
    return {**first, **later, **facing_a_bet, **after_a_check}


UNIFORM = dict.fromkeys(information_sets(), 0.5)


@pytest.mark.parametrize(
    ("policy", "loses"),
    [(UNIFORM, 11 / 12), *((equilibrium(alpha), 0.0) for alpha in (0.0, 0.1, 1 / 3))],
)
def test_the_known_solutions_cannot_be_exploited_and_uniform_play_can(
    policy: Policy, loses: float
) -> None:
    assert nash_conv(policy) == pytest.approx(loses, abs=1e-12)
    assert value_of(policy) == pytest.approx(-1 / 18 if loses == 0 else 1 / 8)


WON = {"check check": -1, "bet fold": 1, "bet call": -2, "check bet fold": -1, "check bet call": -2}


@pytest.mark.parametrize(("moves", "won"), [*WON.items(), ("", None), ("check bet", None)])
def test_first_player_with_the_lower_card_wins_what_the_moves_give(
    moves: str, won: int | None
) -> None:
    assert winnings(("J", "K"), tuple(moves.split())) == won


@given(
    st.sampled_from(list(permutations("JQK", 2))),
    st.lists(st.text(max_size=6) | st.sampled_from(["check", "bet", "fold", "Call "])),
)
def test_every_game_ends_and_what_one_wins_the_other_loses(
    cards: tuple[str, str], said: list[str]
) -> None:
    game = KuhnGame(cards)
    for text in [*said, "check", "bet", "call", "fold"]:
        if not game.record.rewards:
            game.play(text)
    assert game.record.rewards
    assert game.record.reward("first") == -(game.record.reward("second") or 0)
    assert set(game.record.moves) <= {*ACTIONS[True], *ACTIONS[False], "illegal"}


def play(*replies: str, run: Any = RUN) -> tuple[Any, KuhnRecord, MockSGLangEngine]:
    engine = MockSGLangEngine(list(replies), TOKENIZER)
    output = run_game(engine, {"index": 0, "first": "Q", "second": "K"}, run)
    return output, KuhnRecord.model_validate(output.extra_fields[RECORD_KEY]), engine


def test_an_opponent_remembers_its_own_conversation() -> None:
    run = RUN.copy()
    with ChatServer() as server:
        server.answer = lambda role, prompt: "call" if "fold or call" in prompt else "check"
        run.selfplay.train = "second"
        OmegaConf.update(run, "selfplay.opponent", {"url": server.url, "model": "frozen"})
        _, record, engine = play("bet", run=run)
    assert record.moves == ("check", "bet", "call")
    assert "You hold Q" not in TOKENIZER.decode(engine.calls[0].prompt_ids)
    said = [message["content"] for message in server.requests[1]["messages"]]
    assert said == ["You hold Q. check or bet?", "check", "The other says bet. fold or call?"]


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_self_play_learns_to_look_at_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of the page's runs. Betting and calling with every card has 0.667."""
    monkeypatch.chdir(tmp_path)  # the start lies in models/
    warm_start.main()
    deals = "data/kuhn_poker/deals.parquet"
    printed_by(tmp_path, "-m", "medserl_agentloop.games.kuhn_poker", deals)
    changed = ["data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=12"]
    changed += ["actor_rollout_ref.rollout.n=8"]
    changed += [f"trainer.{key}" for key in ("total_training_steps=24", "save_freq=24")]
    optim = ("lr=1e-3", "lr_warmup_steps=2", "min_lr_ratio=0.1")
    changed += [f"actor_rollout_ref.actor.optim.{key}" for key in optim]
    Run(tmp_path, *changed, "selfplay.anchor={first: 0.3, second: 0.3}", recipe="kuhn_poker").wait()
    start, end = (nash_conv(policy) for policy in measure(tmp_path / "run").values())
    assert start > 0.9 and end < 0.5


# --- a conversation that a role comes back to: its context, and a reward for each of its turns ---


class PaidByTurn(KuhnPoker):
    """Every turn after the first earns its number. The first player's turns are 0 and 2."""

    def next_turn(self, game: KuhnGame) -> Turn | None:
        game.record.turn_rewards = {
            number: {"place": float(number)} for number in range(1, len(game.record.moves))
        }
        return super().next_turn(game)


def test_conversations_stand_in_the_order_in_which_they_began() -> None:
    output, _, engine = play("check", "bet", "call")
    first, second, again = engine.calls
    contexts = [[*call.prompt_ids, *call.output.token_ids] for call in (again, second)]
    assert again.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert [*output.prompt_ids, *output.response_ids] == [
        token for context in contexts for token in context
    ]
    assert output.context_lengths == [len(context) for context in contexts]
    assert "You hold K" not in TOKENIZER.decode(again.prompt_ids)


def test_turn_reward_stands_on_its_own_last_token() -> None:
    run = RUN.copy()
    run.selfplay.game = f"{__name__}:PaidByTurn"
    output, _, _ = play("check", "bet", "call", run=run)
    columns = judge(output, run)
    paid = [int(r) for r in columns["rm_scores"].tolist() if r]
    assert paid == [2, 1]  # the turns in the order of the trajectory; turn 0 earns nothing
    ends = [i for i, r in enumerate(columns["rm_scores"].tolist()) if r]
    assert all(output.response_ids[end] == TOKENIZER.eos_token_id for end in ends)
    assert columns["extra_fields"][RECORD_KEY].turn_rewards
    assert torch.equal(columns["role_ids"].unique(), torch.tensor([0, 1, 2]))


def test_certificate_pairs_conversations_of_two_roles_where_there_are_two() -> None:
    one, same, other = (
        Turn(role, Prompt(({"role": "user", "content": role},)), 1) for role in ("a", "a", "b")
    )
    dataset = SimpleNamespace(dataframe={"prompt": ["one row"], "extra_info": [{}]})

    def roles_of(*turns: Turn) -> list[str]:
        game: Any = SimpleNamespace(sample_turns=lambda _: turns)
        return [turn.role for turn in sample_games(game, dataset, ChatEncoder(TOKENIZER), 1)[0]]

    assert roles_of(one, same, other) == ["a", "b"]
    assert roles_of(one, same) == ["a", "a"]
    with pytest.raises(CertificateError, match="fewer than two conversations"):
        roles_of(one)
