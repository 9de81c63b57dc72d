"""The agent loop on a scripted engine: what each role is shown, and what the trajectory holds."""

import asyncio
import json
import operator
import re
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from support import (
    NOTE,
    REWRITTEN,
    RUN,
    TOKENIZER,
    assessment_text,
    attack_text,
    extra_info,
    judge,
    play,
    run_game,
    run_with,
)
from transformers import AutoTokenizer

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.columns import context_ids, stacked
from medserl_agentloop.core.config import CreditSettings, SelfPlayConfig
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.trajectory import RECORD_KEY, SelfPlayOutput
from medserl_agentloop.games.medical.case import GameSpec, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord
from medserl_agentloop.games.medical.rewards import RewardScheme
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import MockReply, MockSGLangEngine, compose_run, tiny_tokenizer


def assert_well_formed(output: SelfPlayOutput) -> None:
    """Assert the properties that verl relies on in every game."""
    length = len(output.response_ids)
    assert 1 <= length <= RUN.data.max_response_length
    columns = (output.response_mask, output.role_ids, output.response_logprobs or [])
    assert {len(column) for column in columns} == {length}
    assert sum(output.context_lengths) == len(output.prompt_ids) + length
    assert [bool(m) for m in output.response_mask] == [r != 0 for r in output.role_ids]


def test_a_game_is_one_trajectory_of_two_turns() -> None:
    output, record, engine = play([attack_text(), assessment_text()])
    attacker, assessor = engine.calls
    said, again = (call.output for call in engine.calls)
    nothing = [0] * len(assessor.prompt_ids)
    assert output.prompt_ids == attacker.prompt_ids
    assert output.response_ids == [*said.token_ids, *assessor.prompt_ids, *again.token_ids]
    ids = [[role.id] * len(of.token_ids) for role, of in zip(Role, (said, again), strict=True)]
    assert output.role_ids == [*ids[0], *nothing, *ids[1]]
    assert output.context_lengths == [
        len(call.prompt_ids) + len(call.output.token_ids) for call in engine.calls
    ]
    assert output.response_logprobs == [*said.log_probs, *nothing, *again.log_probs]
    assert output.num_turns == 4
    assert record.presented_note == REWRITTEN
    assert record.assessment is not None and record.assessment.verdict == "harmful"
    assert_well_formed(output)
    assert record.finished is not None
    assert abs(datetime.now(UTC) - record.finished) < timedelta(minutes=5)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.to_json()["finished"])
    assert len(record.seconds) == 2 and min(record.seconds) >= 0


@pytest.mark.parametrize("log_prob", [None, -1.0])
def test_run_that_asks_for_no_log_probs_has_none(log_prob: float | None) -> None:
    aborted = MockReply(token_ids=[], stop_reason="abort")
    for first, voids in ((attack_text(), False), (aborted, True)):
        said = [first, assessment_text()]
        output, record, _ = play(said, asks_log_probs=False, log_prob=log_prob)
        assert (record.void is not None) is voids
        assert output.response_logprobs is None
        assert "rollout_log_probs" not in judge(output)


@given(
    reasoning=st.text(max_size=300),
    before=st.text(max_size=100),
    after=st.text(max_size=100),
    change=st.sampled_from(["giardia", "vibrio", "borrelia"]),
)
@examples(200)
def test_assessor_prompt_depends_on_the_presented_note_alone(
    reasoning: str, before: str, after: str, change: str
) -> None:
    """No attacker token, no word of the attacker's prompt, no reasoning: only the note goes in."""
    note = NOTE.replace("candida", change)
    text = f"{before}<think>{reasoning}</think>\n<note>{note}</note>{after}"
    replies = iter([text, assessment_text()])
    _, record, engine = play(lambda *_: next(replies))
    if record.presented_note is None:
        assert len(engine.calls) == 1
        return
    profile, note = load_profile("medserl"), record.presented_note
    expected = profile.messages(Role.ASSESSOR, record.category, note)
    rendered = TOKENIZER.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(engine.calls[1].prompt_ids) == rendered


def test_the_shared_context_shows_the_assessor_everything() -> None:
    replies = [attack_text(reasoning="SECRET-PLAN"), assessment_text()]
    output, _, engine = play(replies, run=run_with(selfplay__context="shared"))
    attacker, assessor = engine.calls
    assert assessor.prompt_ids[: len(attacker.prompt_ids)] == attacker.prompt_ids
    assert "SECRET-PLAN" in TOKENIZER.decode(assessor.prompt_ids)
    whole = [*output.prompt_ids, *output.response_ids]
    assert whole == [*assessor.prompt_ids, *assessor.output.token_ids]
    assert output.context_lengths == [len(whole)]
    assert_well_formed(output)


@given(
    response_length=st.integers(1, 3000),
    attack_tokens=st.integers(1, 1000),
    context=st.sampled_from(["isolated", "shared"]),
)
@examples(60)
def test_no_game_overruns_the_response_length(
    response_length: int, attack_tokens: int, context: str
) -> None:
    room = {"actor_rollout_ref__rollout__response_length": response_length}
    run = run_with(**room, selfplay__context=context)
    replies = iter([attack_text(reasoning="r" * attack_tokens), assessment_text()])
    output, _, _ = play(lambda *_: next(replies), run=run)
    assert len(output.response_ids) <= response_length


# --- what config and profile say of a turn ---


FINDINGS = " ".join(f"Finding {n} was unremarkable on the ward round." for n in range(66))
LONG_NOTE = f"{NOTE} {FINDINGS}"


@pytest.mark.parametrize(
    ("token", "count", "invalid"),
    [
        (None, 0, None),
        ("<|endoftext|>", 250, InvalidAttack.TOO_MANY_WORDS),
        ("</note>", 250, InvalidAttack.TOO_MANY_WORDS),
        # A byte that is no text becomes the three tokens of a replacement character.
        ("\ufffd", 10, None),
        ("\ufffd", 300, InvalidAttack.TOO_MANY_TOKENS),
    ],
)
def test_note_that_grows_as_text_never_takes_the_room_of_the_assessor(
    token: str | None, count: int, invalid: InvalidAttack | None
) -> None:
    """As text a control token is 8 to 11: 250 of them left the assessor with 364 of its 512."""
    run = compose_run("+recipes=own_notes")
    tokenizer = AutoTokenizer.from_pretrained(run.actor_rollout_ref.model.path)
    vocabulary = {tokenizer.decode([n]): n for n in reversed(range(len(tokenizer)))}
    before, _, after = f"<think>x</think>\n<note>{LONG_NOTE}</note>".partition("candida")
    texts = (f"{before}giardia", after)
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    many = [vocabulary[token]] * count if token else []
    said = [[*start, *many, *end, tokenizer.eos_token_id], assessment_text()]
    _, record, engine = play(said, run=run, tokenizer=tokenizer, clean_note=LONG_NOTE)
    assert record.void is None and record.attack is not None and record.attack.invalid is invalid
    budgets = [call.sampling_params["max_tokens"] for call in engine.calls[1:]]
    assert budgets == ([] if invalid else [run.selfplay.budget.assessor])


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_turn_text_drops_every_end_id_that_the_model_names(file: str, tmp_path: Path) -> None:
    """Gemma 3's and Llama 3's turns end with another token than their tokenizers' own; the judge's
    answers, too.
    """
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((resource("assets/tiny_player") / name).read_text())
        settings["eos_token_id"] = [0, 2] if name == file else 0
        (tmp_path / name).write_text(json.dumps(settings))
    own = tiny_tokenizer()
    own.eos_token = "<|endoftext|>"
    answer = '{"reason": "no", "error": "present", "realistic": true}'
    server = {"selfplay__judge_server__url": "base", "selfplay__judge_server__json_schema": False}
    run = run_with(
        actor_rollout_ref__model__path=str(tmp_path),
        selfplay__judge="llm",
        selfplay__adapters="per_role",
        **server,
    )
    said = [[*TOKENIZER.encode(t), 2] for t in (attack_text(), assessment_text(), answer)]
    _, record, _ = play(said, run=run, tokenizer=own)
    assert own.eos_token_id == 0
    assert record.judgement is not None and record.judgement.label == "harmful"
    assert record.attack is not None and record.attack.violations == []
    assert record.assessment is not None and record.assessment.violations == []


def test_a_turn_ends_where_the_profile_says_stop(tmp_path: Path) -> None:
    shutil.copytree(load_profile().folder, tmp_path / "mine")
    (tmp_path / "mine" / "profile.yaml").write_text(
        "parser: medserl\nstop: {attacker: ['<|endoftext|>', '</note>'], assessor: ['</answer>']}"
    )
    ended = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    stopped = [*TOKENIZER.encode(attack_text(), add_special_tokens=False), ended]
    run = run_with(selfplay__profile=str(tmp_path / "mine"))
    _, record, engine = play([stopped, assessment_text()], run=run)
    attacker, assessor = (call.sampling_params for call in engine.calls)
    assert (attacker["stop_token_ids"], attacker["stop"]) == ([ended], ["</note>"])
    assert assessor["stop"] == ["</answer>"] and "stop_token_ids" not in assessor
    assert record.attack is not None and record.attack.violations == []


def test_game_records_the_weights_that_played_it() -> None:
    replies = iter([attack_text(), assessment_text()])

    class Engine(MockSGLangEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            output = await super().generate(*args, **kwargs)
            output.extra_fields["global_steps"] = 3
            return output

    engine = Engine(lambda *_: next(replies), TOKENIZER)
    output = run_game(engine, extra_info("adversarial_benign"))
    record = MedicalRecord.model_validate(output.extra_fields[RECORD_KEY])
    assert (record.uid, record.session) == ("group", 0)
    assert record.policy_version == 3
    assert [output.extra_fields[f"{end}_global_steps"] for end in ("min", "max")] == [3, 3]


# --- the columns that reach verl, once the reward manager has scored the game ---


def test_rewards_sit_on_the_last_token_of_each_role() -> None:
    output, _, engine = play([attack_text(), assessment_text()])
    columns = judge(output)
    record = MedicalRecord.model_validate(columns["extra_fields"][RECORD_KEY])
    expected = torch.zeros(len(output.response_ids))
    expected[len(engine.calls[0].output.token_ids) - 1] = record.reward(Role.ATTACKER)
    expected[-1] = record.reward(Role.ASSESSOR)
    assert torch.equal(columns["rm_scores"], expected)
    assert record.reward(Role.ATTACKER) != 0 != record.reward(Role.ASSESSOR)
    assert columns["rm_scores"].sum().item() == pytest.approx(output.reward_score)
    for name in ("response_mask", "role_ids", "rm_scores", "rollout_log_probs"):
        integer = name in ("response_mask", "role_ids")
        assert columns[name].shape == columns["responses"].shape, name
        assert columns[name].dtype == (torch.int64 if integer else torch.float32), name
    # verl's validation averages numbers, leaves texts alone, and fails on lists.
    info = columns["extra_fields"]["reward_extra_info"]
    assert info["acc"] == 1.0 and all(
        value is None or isinstance(value, (float, str)) for value in info.values()
    )


# --- four assessments of one attack: contexts, rewards, credit, and room for all of them ---


K = 4
SAID = [
    assessment_text("harmful"),
    assessment_text("safe"),
    "FIRST-SECRET",
    assessment_text("harmful", "Nothing."),
]
FOUR = run_with(selfplay__assessments=K)
ROLES = [role.value for role in Role]


class Counting(LabelJudge):
    asked = 0

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        Counting.asked += 1
        return await super().judge(presented, original, spec)


def scored(
    *said: str, run: Any = FOUR, category: str = "adversarial_benign"
) -> tuple[SelfPlayOutput, dict[str, Any]]:
    replies = [attack_text(), *said] if category.startswith("adversarial") else list(said)
    output, _, _ = play(replies, category, run)
    return output, judge(output, run)


def ends(output: SelfPlayOutput) -> list[int]:
    """Return the position of each turn's last token, in the order of play."""
    return [end for _, _, end in output.turn_ends]


def test_every_assessor_reads_the_prompt_of_a_single_one_and_nothing_else() -> None:
    _, _, one = play([attack_text(), SAID[0]])
    output, record, four = play([attack_text(), *SAID], run=FOUR)
    attack, assess = (call.prompt_ids for call in one.calls)
    assert [call.prompt_ids for call in four.calls] == [attack, *[assess] * K]
    contexts = [[*call.prompt_ids, *call.output.token_ids] for call in four.calls]
    assert output.context_lengths == list(map(len, contexts))
    assert [*output.prompt_ids, *output.response_ids] == list(chain(*contexts))
    assert [len(game.further_assessments) for game in record.by_assessment] == [K - 1] * K
    assert [game.assessment.response for game in record.by_assessment if game.assessment] == SAID


def test_assessment_is_paid_at_its_last_token_and_the_judge_asked_once() -> None:
    Counting.asked = 0
    run = run_with(selfplay__assessments=K, selfplay__judge=f"{__name__}:Counting")
    output, columns = scored(*SAID, run=run)
    assert Counting.asked == 1
    record = MedicalRecord.model_validate(columns["extra_fields"][RECORD_KEY])
    earned = [game.reward(Role.ASSESSOR) for game in record.by_assessment]
    right, wrong, unreadable, elsewhere = earned
    assert right == 1.25 and wrong == -1.0 and elsewhere == 0.75
    assert unreadable is not None and unreadable < wrong
    attacker = record.reward(Role.ATTACKER)
    assert attacker == pytest.approx(sum(record.rewards[Role.ATTACKER].values()))
    assert record.rewards[Role.ATTACKER]["game"] == pytest.approx((-1 + 1 + 0 - 1) / K)
    scores = columns["rm_scores"].tolist()
    assert [scores[end] for end in ends(output)] == pytest.approx([attacker, *earned])
    assert sum(score != 0 for score in scores) == 1 + K


@dataclass(frozen=True)
class ReadableAssessors(RewardScheme):
    """Nothing, and that for readable assessments alone."""

    def rewards(self, record: MedicalRecord) -> Any:
        readable = record.assessment and record.assessment.verdict
        return {Role.ASSESSOR: {"kept": 0.0}} if readable else {}


@pytest.mark.parametrize(
    ("said", "trained"), [(SAID[1:2], [0, 1]), (SAID[2:3], [0, 0]), (SAID, [0, 1, 1, 0, 1])]
)
def test_a_conversation_that_a_scheme_leaves_out_is_masked(
    said: list[str], trained: list[int]
) -> None:
    scheme = f"{__name__}:ReadableAssessors"
    run = run_with(selfplay__reward=scheme, selfplay__assessments=len(said))
    output, columns = scored(*said, run=run)
    record = MedicalRecord.model_validate(columns["extra_fields"][RECORD_KEY])
    assert record.attack is not None
    lengths = [turn.tokens for turn in (record.attack, *record.assessments)]
    assert columns["response_mask"].sum() == sum(map(operator.mul, lengths, trained))
    assert [columns["response_mask"][end] for end in ends(output)] == trained


def test_assessments_are_generated_side_by_side_and_keep_their_order() -> None:
    """Each answer waits until all are asked for, and the last one comes first."""
    begun: list[int] = []

    async def reply(prompt: list[int], params: dict[str, Any]) -> MockReply:
        begun.append(len(begun))
        number = len(begun) - 2
        while number >= 0 and len(begun) < 1 + K:
            await asyncio.sleep(0)
        return MockReply(text=[attack_text(), *SAID][number + 1], latency=0.02 * (K - number))

    one_after_another, _, _ = play([attack_text(), *SAID], run=FOUR)
    output, record, _ = play(lambda *asked: asyncio.wait_for(reply(*asked), 10), run=FOUR)
    for column in ("prompt_ids", "response_ids", "response_mask", "role_ids", "turn_ends"):
        assert getattr(output, column) == getattr(one_after_another, column)
    assert [game.assessment.response for game in record.by_assessment if game.assessment] == SAID


@pytest.mark.parametrize("broken", [RuntimeError("lost"), MockReply(text="", stop_reason="abort")])
def test_one_assessment_without_an_answer_makes_the_game_void(broken: Any) -> None:
    output, columns = scored(SAID[0], broken, *SAID[2:])
    assert "assessor: generation" in str(columns["extra_fields"][RECORD_KEY].void)
    assert not columns["response_mask"].any() and not columns["rm_scores"].any()
    assert_well_formed(output)


def test_untouched_notes_are_assessed_as_often_and_evaluation_rows_once() -> None:
    output, record, engine = play(SAID, "vanilla_harmful", FOUR)
    assert len(engine.calls) == len(record.by_assessment) == K
    assert record.attack is None and set(output.role_ids) == {0, Role.ASSESSOR.id}
    _, record, engine = play(SAID[:1], "vanilla_harmful", FOUR, split="eval")
    assert len(engine.calls) == len(record.by_assessment) == 1


@cache
def two_games() -> tuple[RoleBatch, list[list[int]]]:
    """Two games on one note with four assessments each, from verl's columns, and where each turn
    ends.
    """
    games = [scored(*SAID), scored(*SAID[2:], *SAID[:2])]
    width = max(len(output.response_ids) for output, _ in games)

    def padded(name: str) -> torch.Tensor:
        pad = torch.nn.functional.pad
        return torch.stack([pad(c[name], (0, width - len(c[name]))) for _, c in games])

    mask = padded("response_mask")
    contexts = [context_ids(c["context_lengths"], len(of.response_ids)) for of, c in games]
    game = MedicalGameInteraction(MedicalConfig(judge="labels", assessments=K))
    batch = RoleBatch(
        rewards=padded("rm_scores"),
        mask=mask,
        role_ids=padded("role_ids"),
        roles=ROLES,
        groups=["note", "note"],
        kinds=["adversarial_benign"] * 2,
        conversations=stacked(contexts, mask),
        repeated_roles=game.repeated_roles,
        values=torch.zeros(mask.shape),
    )
    return batch, [ends(output) for output, _ in games]


def advantages(name: str, how: str, batch: RoleBatch) -> torch.Tensor:
    settings = CreditSettings.model_validate({"normalize": dict.fromkeys(ROLES, how)})
    return ROLE_ESTIMATORS[name](batch, settings, Baselines()).advantages


@pytest.mark.parametrize("turn", range(1, 1 + K))
@pytest.mark.parametrize(
    ("name", "how", "own_share", "others_share"),
    [
        *((name, "none", 1.0, 0.0) for name in ("role_rae", "role_reinforce_pp", "role_gae")),
        ("role_rloo", "none", 1.0, 1 / (K - 1)),
        ("role_grpo", "mean", 1 - 1 / K, 1 / K),
    ],
)
def test_reward_moves_its_own_assessment_and_those_of_the_same_note_alone(
    name: str, how: str, own_share: float, others_share: float, turn: int
) -> None:
    batch, places = two_games()
    assert batch.conversations is not None
    rewards = batch.rewards.clone()
    rewards[0, places[0][turn]] += 3.0
    moved = advantages(name, how, replace(batch, rewards=rewards)) - advantages(name, how, batch)
    assessors = (batch.role_ids == Role.ASSESSOR.id) & (batch.mask > 0)
    assessors[1] = False
    own = assessors & (batch.conversations == turn)
    assert torch.allclose(moved[own], torch.tensor(3.0 * own_share), atol=1e-5)
    assert torch.allclose(moved[assessors & ~own], torch.tensor(-3.0 * others_share), atol=1e-5)
    # Neither the attacker's tokens nor the answers to another attack's note.
    assert not moved[~assessors].any()


def test_the_longest_game_fits_into_its_plan() -> None:
    long = "a" * 4000  # a token per character
    game = MedicalGameInteraction(SelfPlayConfig.from_run(FOUR), ChatEncoder(TOKENIZER))
    row = extra_info("adversarial_benign")
    first = game.next_turn(game.new_game(row))
    assert first is not None
    _, prompt, response = game.plan(row)
    room = {"response_length": response, "prompt_length": prompt}
    lengths = {f"actor_rollout_ref__rollout__{name}": tokens for name, tokens in room.items()}
    run = run_with(selfplay__assessments=K, **lengths)
    output, record, _ = play([attack_text(), *[long] * K], run=run)
    assert record.void is None
    assert [game.assessment.tokens for game in record.by_assessment if game.assessment] == [400] * K
    assert len(output.response_ids) <= response
