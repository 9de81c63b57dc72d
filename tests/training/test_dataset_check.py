"""The start-up check reads a dataset as verl does and refuses what could not be played as planned."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import NOTE, TOKENIZER, extra_info
from verl.utils.dataset.rl_dataset import RLHFDataset

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.opponent import OpponentConfig
from medserl_agentloop.core.run_check import RunConfig
from medserl_agentloop.core.run_check.machine import check_dataset, check_files, check_stop_strings
from medserl_agentloop.core.run_check.machine import data as problems_of_data
from medserl_agentloop.data.rows import AGENT_NAME, write_parquet
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import load_profile, plan_row
from medserl_agentloop.games.medical.types import Category, GameSpec, Role, VanillaAttacker
from medserl_agentloop.testing.tiny import compose_run

ENCODER = ChatEncoder(TOKENIZER)
SELFPLAY = MedicalConfig()


def row(category: str, **changes: Any) -> dict[str, Any]:
    facts = extra_info(category)
    role = Role.ATTACKER if Category(category).has_attack else Role.ASSESSOR
    return {
        "data_source": f"toy/{category}",
        "agent_name": AGENT_NAME,
        "prompt": load_profile("medserl").messages(role, Category(category), facts["seed_note"]),
        "ability": "medical_error_detection",
        "reward_model": {"style": "rule", "ground_truth": facts["target_label"]},
        "extra_info": {**facts, "split": "train", "sentences": []},
        **changes,
    }


def check(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    *,
    prompt: int = 4096,
    response: int = 16384,
    selfplay: MedicalConfig = SELFPLAY,
) -> str:
    path = tmp_path / "rows.parquet"
    write_parquet(rows, path)
    config = compose_run().data
    config.dataloader_num_workers = 0
    dataset = RLHFDataset(str(path), TOKENIZER, config)
    game = MedicalGameInteraction(selfplay, ENCODER)
    config.max_prompt_length, config.max_response_length = prompt, response
    return check_dataset(dataset, "rows.parquet", game, ENCODER, config)


def copied(category: str) -> dict[str, Any]:
    """A vanilla row that begins with an attacker who copies the note."""
    note = extra_info(category)["seed_note"]
    return row(category, prompt=load_profile("medserl").messages(Role.ATTACKER, Category(category), note))


ASKS_FOR_A_DECOY = load_profile("medserl").messages(Role.ATTACKER, Category.DECOY_BENIGN, NOTE)
VARIATION = row("adversarial_benign", prompt=ASKS_FOR_A_DECOY)  # a decoy, whatever its category is called
VARIATION["extra_info"]["target_label"] = "safe"
EVALUATED = row("vanilla_benign")
EVALUATED["extra_info"]["split"] = "eval"
COPY = MedicalConfig(vanilla_attacker=VanillaAttacker.COPY)
OTHER_PROMPT = "row 0: its prompt is not the one that --profile medserl"


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (row("vanilla_benign", agent_name="other"), {}, "row 0: agent_name is 'other', expected 'medserl_selfplay'"),
        (row("vanilla_benign", prompt=[{"role": "user", "content": "{{ note }}"}]), {}, OTHER_PROMPT),
        (row("decoy_benign"), {}, "decoy_benign games need a judge"),
        (VARIATION, {}, "decoy_benign games need a judge"),
        (row("adversarial_benign"), {"prompt": 10}, r"longest row needs \d+ tokens, but data.max_prompt_length"),
        (row("adversarial_benign"), {"response": 10}, r"longest row needs \d+ tokens, but data.max_response"),
        (copied("vanilla_benign"), {}, f"{OTHER_PROMPT} --vanilla-attacker skip gives it"),
        (row("vanilla_harmful"), {"selfplay": COPY}, r"--vanilla-attacker copy gives it. Write the file again"),
        (copied("vanilla_harmful"), {"selfplay": COPY}, None),
        (EVALUATED, {"selfplay": COPY}, None),  # begins with the assessor whatever the run does
        (VARIATION, {"selfplay": MedicalConfig(judge="http")}, None),
    ],
)
def test_a_row_that_cannot_be_played_is_named_with_its_remedy(
    tmp_path: Path, made: dict[str, Any], options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert "plays all of its 1 rows" in check(tmp_path, [made], **options)
        return
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, [made], **options)


def problems(config: Any) -> list[str]:
    return list(problems_of_data(RunConfig(config, MedicalConfig.from_run(config))))


def test_a_file_without_the_columns_of_a_game_is_named_and_what_is_not_here_is_left_to_the_trainer(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"text": ["a"] * 16}), file := tmp_path / "rows.parquet")
    config = compose_run("+recipes=own_notes", f"data.train_files={file}", "data.val_files=hdfs://rows.parquet")
    (problem,) = problems(config)
    assert "rows.parquet has no column extra_info, prompt" in problem
    pq.write_table(pa.Table.from_pylist([row("decoy_benign")] * 16), file)
    assert "decoy_benign games need a judge" in problems(config)[0]
    config.actor_rollout_ref.model.path = "someone/not-here-yet"
    assert not problems(config)


def test_what_an_opponent_plays_takes_no_room() -> None:
    attacked, untouched = (GameSpec.from_extra_info(extra_info(c)) for c in ("adversarial_benign", "vanilla_benign"))
    opponent = OpponentConfig(kind="endpoint", url="http://host")
    attacker = MedicalConfig(train="attacker", opponent=opponent)
    assessor = MedicalConfig(train="assessor", opponent=opponent)
    attack, assess = (ENCODER.opening(load_profile().turn(role, attacked.category, NOTE)) for role in Role)
    budget = SELFPLAY.budget
    assert plan_row(attacked, attacker, ENCODER) == (len(attack.ids), budget.attacker(attack.data_tokens))
    grown = budget.rewritten_note(assess.data_tokens) - assess.data_tokens
    assert plan_row(attacked, assessor, ENCODER) == (len(assess.ids) + grown, budget.assessor)
    assert plan_row(untouched, attacker, ENCODER) == (1, 1)
    assert plan_row(untouched, assessor, ENCODER) == (len(assess.ids), budget.assessor)


def test_files_of_two_conversions_are_refused(tmp_path: Path) -> None:
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_bytes(name.encode())
    hashes = {name: {"sha256": sha256(name.encode()).hexdigest()} for name in ("train.parquet", "val.parquet")}
    (tmp_path / "manifest.json").write_text(json.dumps({"outputs": hashes}))
    check_files([str(tmp_path / "train.parquet"), str(tmp_path / "val.parquet")])
    (tmp_path / "val.parquet").write_bytes(b"of an older conversion")
    check_files(str(tmp_path / "train.parquet"))
    with pytest.raises(ConfigError, match=r"val\.parquet: the file is not the one"):
        check_files([str(tmp_path / "train.parquet"), str(tmp_path / "val.parquet")])


def test_stop_strings_that_an_engine_would_refuse_are_named(tmp_path: Path) -> None:
    for role in ("attacker", "assessor"):
        (tmp_path / role).mkdir()
    (tmp_path / "profile.yaml").write_text("stop: {assessor: ['</answer>', '<|endoftext|>']}")
    stop = load_profile(str(tmp_path)).settings.stop
    assert ENCODER.stop(stop[Role.ASSESSOR]) == {
        "stop_token_ids": [TOKENIZER.convert_tokens_to_ids("<|endoftext|>")],
        "stop": ["</answer>"],
    }
    assert Role.ATTACKER not in stop and load_profile().settings.stop == {} and ENCODER.stop([]) == {}
    rollout = compose_run("actor_rollout_ref.rollout.name=sglang").actor_rollout_ref.rollout
    with pytest.raises(ConfigError, match=r"'</answer>' are more than one token.*skip_tokenizer_init=False"):
        check_stop_strings(["</answer>"], rollout)
    check_stop_strings([], rollout)
    rollout.skip_tokenizer_init = False
    check_stop_strings(["</answer>"], rollout)
