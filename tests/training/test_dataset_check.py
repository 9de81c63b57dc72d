"""The start-up check reads a dataset as verl does and refuses what could not be played as
planned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from datasets import Dataset
from support import NOTE, TOKENIZER, extra_info
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from medserl_agentloop.core.config import ConfigError, OpponentConfig
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.run_check.machine import check_dataset, check_stop_strings
from medserl_agentloop.data.rows import AGENT_NAME, write_parquet
from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.testing import compose_run

ENCODER = ChatEncoder(TOKENIZER)
SELFPLAY = MedicalConfig(judge="labels")


def row(category: str, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": f"toy/{category}",
        "agent_name": AGENT_NAME,
        "prompt": [{"role": "user", "content": NOTE}],
        "ability": "medical_error_detection",
        "reward_model": {"style": "rule"},
        "extra_info": {**extra_info(category), "split": "train", "sentences": []},
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
    return check_dataset(dataset, "rows.parquet", game, config)


VARIATION = row("adversarial_benign")  # a decoy, whatever its category is called
VARIATION["extra_info"]["target_label"] = "safe"
NO_NOTE = row("adversarial_benign")
NO_NOTE["extra_info"]["clean_note"] = " \n\t"
EVALUATED = row("vanilla_benign")
EVALUATED["extra_info"]["split"] = "eval"


ATTACKED = row("adversarial_benign")


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (row("vanilla_benign", agent_name="other"), {}, "row 0: agent_name is 'other', not"),
        (NO_NOTE, {}, r"rows\.parquet row 0: .*extra_info\['clean_note'\]"),
        (row("decoy_benign"), {}, "decoy_benign games need a judge"),
        (VARIATION, {}, "decoy_benign games need a judge"),
        (ATTACKED, {"prompt": 10}, r"row 0 needs data.max_prompt_length=\d+"),
        (ATTACKED, {"response": 10}, r"row 0 needs data.max_response"),
        (EVALUATED, {}, None),
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


def test_filter_overlong_prompts_leaves_out_rows_by_their_games(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt of the assessor alone, in its run's profile, is longer than the column
    ``prompt``."""
    rows = [row("vanilla_benign"), row("vanilla_benign"), row("adversarial_benign")]
    rows[1]["extra_info"]["clean_note"] = f"{NOTE} {NOTE}"
    write_parquet(rows, path := tmp_path / "rows.parquet")
    run = compose_run("+recipes=own_notes", f"data.train_files={path}")
    game = MedicalGameInteraction(MedicalConfig.from_run(run), ENCODER)
    lengths = [game.plan(each["extra_info"]) for each in rows]
    _, run.data.max_prompt_length, run.data.max_response_length = lengths[0]
    run.data.filter_overlong_prompts = True
    dataset = create_rl_dataset(run.data.train_files, run.data, TOKENIZER, None)
    assert [facts["category"] for facts in dataset.dataframe["extra_info"]] == ["vanilla_benign"]
    assert "rows.parquet: data.filter_overlong_prompts leaves out 2 of 3" in capsys.readouterr().out
    run.data.filter_overlong_prompts = False
    everything = create_rl_dataset(run.data.train_files, run.data, TOKENIZER, None)
    with pytest.raises(ConfigError, match=r"row 1, 2 needs .*data\.filter_overlong_prompts=true"):
        check_dataset(everything, "rows.parquet", game, run.data)


def test_rows_without_the_columns_of_a_game_are_refused() -> None:
    rows: Any = SimpleNamespace(dataframe=Dataset.from_dict({"prompt": ["a"], "extra_info": [{}]}))
    game = MedicalGameInteraction(SELFPLAY, ENCODER)
    with pytest.raises(ConfigError, match=r"rows\.parquet has no column agent_name"):
        check_dataset(rows, "rows.parquet", game, compose_run().data)


def test_turns_of_an_opponent_take_no_room() -> None:
    opponent = OpponentConfig(url="http://host")

    def planned(category: str, trained: Literal["attacker", "assessor"]) -> tuple[Any, ...]:
        selfplay = MedicalConfig(judge="labels", train=trained, opponent=opponent)
        return MedicalGameInteraction(selfplay, ENCODER).plan(extra_info(category))[1:]

    turns = (load_profile().turn(role, Category.ADVERSARIAL_BENIGN, NOTE) for role in Role)
    attack, assess = map(ENCODER.opening, turns)
    budget = SELFPLAY.budget
    room = budget.attacker(attack.data_tokens)
    assert planned("adversarial_benign", "attacker") == (len(attack.ids), room)
    grown = budget.rewritten_note(assess.data_tokens) - assess.data_tokens
    assert planned("adversarial_benign", "assessor") == (len(assess.ids) + grown, budget.assessor)
    assert planned("vanilla_benign", "attacker") == (1, 1)
    assert planned("vanilla_benign", "assessor") == (len(assess.ids), budget.assessor)


def test_stop_strings_that_an_engine_would_refuse_are_named() -> None:
    rollout = compose_run("actor_rollout_ref.rollout.name=sglang").actor_rollout_ref.rollout
    with pytest.raises(ConfigError, match=r"'</answer>' are .*skip_tokenizer_init=False"):
        check_stop_strings(["</answer>"], rollout)
    check_stop_strings([], rollout)
    rollout.skip_tokenizer_init = False
    check_stop_strings(["</answer>"], rollout)
