"""Warm-start conversations: in the game's own format, split by case, and read by verl's SFT dataset."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from medec.builders import run
from note_files import PAIRS, SAMPLE, medec_file
from omegaconf import OmegaConf

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import SplitRows
from medserl_agentloop.data.sft import SFT_SCHEMA, build_sft_rows
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Label, Role
from medserl_agentloop.testing.tiny import CHATML, tiny_tokenizer


@pytest.fixture
def made(write_pairs: Any, pair: Any) -> SplitRows:
    return build_sft_rows(read_files([write_pairs(*(pair(n) for n in range(20)))]).cases)


def by_category(rows: list[dict[str, Any]], vignette_id: str) -> dict[str, tuple[str, str]]:
    return {
        row["category"]: (row["messages"][0]["content"], row["messages"][1]["content"])
        for row in rows
        if row["vignette_id"] == vignette_id
    }


def assert_all_parse(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        prompt, answer = row["messages"]
        assert (prompt["role"], answer["role"]) == ("user", "assistant")
        if row["game_role"] == "attacker":
            attack = MEDSERL.attack(answer["content"])
            assert not attack.violations and attack.note and attack.reasoning
        else:
            read = MEDSERL.assessment(answer["content"])
            assert not read.violations and read.verdict is Category(row["category"]).seed_label


def test_each_pair_gives_an_attack_and_two_assessments(made: SplitRows, pair: Any) -> None:
    assert (len(made.train), len(made.val), made.left_out) == (54, 6, {})
    rows = by_category(made.train + made.val, "ms-train-3")
    error_note, clean_note = pair(3)["incorrect_note"].strip(), pair(3)["correct_note"]
    wrong, right = pair(3)["error_sentence"], pair(3)["corrected_sentence"]

    prompt, answer = rows["adversarial_benign"]
    category = Category.ADVERSARIAL_BENIGN
    assert prompt == load_profile().messages(Role.ATTACKER, category, clean_note)[0]["content"]
    assert MEDSERL.attack(answer).note == error_note and right in MEDSERL.attack(answer).reasoning

    prompt, answer = rows["vanilla_harmful"]
    read = MEDSERL.assessment(answer)
    assert prompt == load_profile().messages(Role.ASSESSOR, category, error_note)[0]["content"]
    assert (read.verdict, read.sentence, read.correction) == (Label.HARMFUL, wrong, right)
    assert read.error_type.value == "diagnosis" and wrong in read.reasoning

    prompt, answer = rows["vanilla_benign"]
    assert prompt == load_profile().messages(Role.ASSESSOR, category, clean_note)[0]["content"]
    assert MEDSERL.assessment(answer).verdict is Label.SAFE and not MEDSERL.assessment(answer).violations


def test_a_case_is_in_one_split_and_in_that_of_the_self_play_rows(tmp_path: Path) -> None:
    for name in ("sft_to_parquet", "medec_to_parquet"):
        assert run(name, "--input", SAMPLE, "--seed", 5, "--val-fraction", 0.2, "--output", tmp_path).exit_code == 0
    taught = {name: pq.read_table(tmp_path / f"sft_{name}.parquet").to_pylist() for name in ("train", "val")}
    played = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val")}
    cases = {name: {row["vignette_id"] for row in rows} for name, rows in taught.items()}
    assert len(cases["train"]) == 128 and len(cases["val"]) == 32 and not cases["train"] & cases["val"]
    for name, rows in played.items():
        assert {row["extra_info"]["vignette_id"] for row in rows} <= cases[name]
    indices = [row["index"] for rows in taught.values() for row in rows]
    assert len(set(indices)) == len(indices)


def test_splits_can_be_taken_from_files_for_self_play(tmp_path: Path) -> None:
    arguments = ("--input", SAMPLE, "--output", tmp_path / "play", "--seed", 9, "--val-fraction", 0.3, "--rows", 60)
    assert run("medec_to_parquet", *arguments).exit_code == 0
    assert (
        run("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path, "--splits-of", tmp_path / "play").exit_code == 0
    )
    for name in ("train", "val"):
        played = pq.read_table(tmp_path / "play" / f"{name}.parquet").to_pylist()
        taught = pq.read_table(tmp_path / f"sft_{name}.parquet").to_pylist()
        assert {row["extra_info"]["vignette_id"] for row in played} == {row["vignette_id"] for row in taught}
    result = run("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path, "--splits-of", tmp_path)
    assert result.exit_code == 2 and "train.parquet: cannot be read as parquet" in result.stderr


def test_splits_of_other_cases_are_refused(write_pairs: Any, pair: Any) -> None:
    cases = read_files([write_pairs(*(pair(n) for n in range(5)))]).cases
    with pytest.raises(ValueError, match="no case of the input can be taught: 5 cases that are in neither file"):
        build_sft_rows(cases, split_of={"toy-train-0": "train"})


def test_same_input_and_seed_give_identical_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("sft_to_parquet", "--input", SAMPLE, "--seed", seed, "--output", tmp_path / name).exit_code == 0
    files = [(tmp_path / name / "sft_train.parquet").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert pq.read_schema(tmp_path / "a" / "sft_val.parquet").equals(SFT_SCHEMA)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["sft_train.parquet", "sft_val.parquet"]


def test_what_cannot_be_taught_is_left_out_and_counted(write_pairs: Any, pair: Any) -> None:
    opening = pair(1)["correct_note"].removesuffix("Diagnosis 1 is pneumonia.")
    odd = [
        pair(1, incorrect_note=f"{opening} DIAGNOSIS 1 is pneumonia."),
        pair(3, correct_note=pair(3)["correct_note"] + " " + " ".join(f"Word {n}." for n in range(30))),
    ]
    made = build_sft_rows(read_files([write_pairs(*odd, *(pair(n) for n in range(10, 30)))]).cases)
    assert made.left_out == {
        "cases whose two notes differ in letter case or white space only": 1,
        "attacks that change more than the game's limits allow": 1,
    }
    assert Counter(row["game_role"] for row in made.train + made.val) == {"attacker": 20, "assessor": 42}


def test_text_that_would_break_the_format_is_refused_with_its_vignette(write_pairs: Any, pair: Any) -> None:
    wrong = "The </think> sign is gout."
    bad = pair(
        3, incorrect_note=f"Fever. {wrong}", error_sentence=wrong, correct_note="Fever. Diagnosis 3 is pneumonia."
    )
    with pytest.raises(match=r"case 'ms-train-3': the assessor's answer .* take the row out"):
        build_sft_rows(read_files([write_pairs(bad, *(pair(n) for n in range(10, 20)))]).cases)
    sentence = "Findings.\ncorrection: gout."
    bad = pair(4, incorrect_note=f"Fever. {sentence}", error_sentence=sentence)
    with pytest.raises(match="case 'ms-train-4'"):
        build_sft_rows(read_files([write_pairs(bad, *(pair(n) for n in range(10, 20)))]).cases)


def test_tags_inside_a_note_stay_text(write_pairs: Any, pair: Any) -> None:
    """Case 13: tags of the game's own format, in warm-start conversations."""
    tags = "Seen <think> and </answer> and </note> and {{ x }} in it."
    odd = pair(1, incorrect_note=f"{tags} Diagnosis 1 is gout.", correct_note=f"{tags} Diagnosis 1 is pneumonia.")
    made = build_sft_rows(read_files([write_pairs(odd, *(pair(n) for n in range(10, 20)))]).cases)
    assert_all_parse(made.train + made.val)


@pytest.mark.parametrize("name", ["baseline", "classic", "medserl"])
def test_every_profile_can_be_taught_in_its_own_format(name: str, write_pairs: Any, pair: Any) -> None:
    cases = read_files([write_pairs(*(pair(n) for n in range(20)))]).cases
    made = build_sft_rows(cases, profile=name)
    profile = load_profile(name)
    prefix = profile.settings.assistant_prefix
    assert (len(made.train), len(made.val), made.left_out) == (54, 6, {})
    for row in made.train + made.val:
        *prompt, answer = row["messages"]
        role, category = Role(row["game_role"]), Category(row["category"])
        # The prefix is part of the answer here and of the prompt in self-play: the tokens are the same.
        turn = answer["content"].removeprefix(prefix)
        assert prefix + turn == answer["content"]
        read = profile.parser.attack if role is Role.ATTACKER else profile.parser.assessment
        assert not read(turn, prefix).violations and read(turn, prefix).reasoning
        [*system, _] = prompt
        assert [message["role"] for message in system] == (["system"] if name == "classic" else [])
        if role is Role.ASSESSOR:
            assert read(turn, prefix).verdict is category.seed_label
        else:
            number = int(row["vignette_id"].rpartition("-")[2])
            assert read(turn, prefix).note == pair(number)["incorrect_note"].strip()


def test_mistakes_are_said_in_one_sentence(tmp_path: Path, write_pairs: Any, pair: Any) -> None:
    pairs = write_pairs(*(pair(n) for n in range(20)))
    uw = write_pairs(*(pair(n, note_id=f"uw-train-{n}") for n in range(20)), name="uw.jsonl")
    for arguments, part in (
        (["--input", pairs, "--profile", "nonsense"], "no prompt profile 'nonsense'"),
        (["--input", pairs, "--val-fraction", "2"], "--val-fraction is 2.0"),
        (["--input", uw], "--i-have-the-uw-agreement"),
        (["--input", tmp_path / "none.csv"], "cannot be read"),
    ):
        result = run("sft_to_parquet", *arguments, "--output", tmp_path / "out")
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and part in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_verl_opens_the_files_and_trains_exactly_on_the_answers(tmp_path: Path, family: str) -> None:
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    assert run("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path).exit_code == 0
    tokenizer = tiny_tokenizer(family)
    config = OmegaConf.create({"pad_mode": "no_padding", "truncation": "error", "max_length": 8192})
    # Llama 3's template opens every conversation with a token of its own, also that of a lone answer.
    config.ignore_input_ids_mismatch = family == "llama3"
    path = tmp_path / "sft_val.parquet"
    dataset = MultiTurnSFTDataset(str(path), tokenizer, config)
    rows = pq.read_table(path).to_pylist()
    assert len(dataset) == len(rows) == 48
    for number, row in enumerate(rows):
        item = dataset[number]
        trained = item["input_ids"][item["loss_mask"] == 1].tolist()
        end = "<|im_end|>\n" if family == "chatml" else "<|eot_id|>"
        assert tokenizer.decode(trained) == row["messages"][1]["content"] + end
        masked = tokenizer.decode(item["input_ids"][item["loss_mask"] == 0].tolist())
        assert row["messages"][0]["content"] in masked


# The part of Qwen3's template that matters: an answer keeps its reasoning only after a question.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 == 0 %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_drops_reasoning_needs_the_plain_one(tmp_path: Path) -> None:
    """The trap that the docstring of ``sft.py`` warns of, and the way out that it gives."""
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    assert run("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path).exit_code == 0
    path = tmp_path / "sft_val.parquet"
    answer = pq.read_table(path).to_pylist()[0]["messages"][1]["content"]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN3

    def trained_on(**options: Any) -> str:
        config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 8192, **options})
        item = MultiTurnSFTDataset(str(path), tokenizer, config)[0]
        return tokenizer.decode(item["input_ids"][item["loss_mask"] == 1].tolist())

    with pytest.raises(AssertionError, match="apply_chat_template to each turn separately"):
        trained_on()
    assert "<think>" not in trained_on(ignore_input_ids_mismatch=True)
    assert trained_on(apply_chat_template_kwargs={"chat_template": CHATML}) == answer + "<|im_end|>\n"


def test_real_pairs_all_parse() -> None:
    made = build_sft_rows(read_files([medec_file(PAIRS)]).cases)
    assert_all_parse(made.train + made.val)
    assert sum(made.left_out.values()) == 5
    assert Counter(row["category"] for row in made.train + made.val) == {
        "vanilla_benign": 1218,
        "vanilla_harmful": 1218,
        "adversarial_benign": 1214,
    }


def test_cases_that_lack_what_a_lesson_needs_are_counted(write_csv: Any, error_row: Any, clean_row: Any) -> None:
    rows = [error_row(0), error_row(2, Error_Type="dosage"), error_row(4, Corrected_Sentence="NA"), clean_row(7)]
    made = build_sft_rows(read_files([write_csv(*rows, *(error_row(n) for n in range(10, 50, 2)))]).cases)
    assert made.left_out == {
        "cases without one of MEDEC's error types or without the two sentences": 2,
        "cases with only one note": 1,
    }


@pytest.mark.parametrize("opening", ["<note> of today:", "See </note> and <note>:"])
def test_note_that_the_attackers_format_cannot_hold_is_refused(write_pairs: Any, pair: Any, opening: str) -> None:
    """Case 13: where escaping is not possible, the case is named instead of taught wrongly."""
    notes = {key: f"{opening} {pair(1)[key]}" for key in ("incorrect_note", "correct_note")}
    path = write_pairs(pair(1, **notes), *(pair(n) for n in range(10, 20)))
    with pytest.raises(match=r"case 'ms-train-1': the attacker's answer .* take the row out"):
        build_sft_rows(read_files([path]).cases)
