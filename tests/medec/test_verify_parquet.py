"""verify_parquet: a good file passes, and every kind of damage is named with file, row and remedy."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
from math import comb
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from medserl_agentloop.game.types import Category, Label, Role
from medserl_agentloop.medec.rows import AGENT_NAME
from medserl_agentloop.medec.schema import SCHEMA
from medserl_agentloop.medec.verify import Report, verify_files
from medserl_agentloop.medec.verify_leaks import LeakTest, _tail
from medserl_agentloop.medec.verify_rows import Check
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.testing.tiny import tiny_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "data_prep" / "verify_parquet.py"
TOKENIZER = tiny_tokenizer()
CATEGORIES = ["vanilla_harmful", "adversarial_harmful", "adversarial_benign", *["vanilla_benign"] * 3]


def good_row(n: int, split: str = "train", category: str | None = None, **facts: Any) -> dict[str, Any]:
    kind = Category(category or CATEGORIES[n % len(CATEGORIES)])
    opening = f"Patient number {n} came in with a cough and a temperature of 38.{n} degrees."
    wrong, right = "He was given warfarin for it.", "He was given amoxicillin for it."
    notes = {"error_note": f"{opening} {wrong}", "clean_note": f"{opening} {right}"}
    note = notes["error_note" if kind.seed_label is Label.HARMFUL else "clean_note"]
    label = kind.default_target_label.value
    return {
        "data_source": f"medec_ms/{kind.value}",
        "agent_name": AGENT_NAME,
        "prompt": load_profile().messages(Role.ATTACKER if kind.has_attack else Role.ASSESSOR, kind, note),
        "ability": "medical_error_detection",
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": {
            "index": n,
            "split": split,
            "subset": "medec_ms",
            "text_id": f"ms-train-{n}",
            "vignette_id": f"ms-train-{n}",
            "category": kind.value,
            "target_label": label,
            "seed_note": note,
            **notes,
            "error_type": "pharmacotherapy",
            "error_sentence": wrong,
            "corrected_sentence": right,
            "error_sentence_id": 1,
            "sentences": [{"id": 0, "text": opening}, {"id": 1, "text": wrong}],
            "pair_source": "in_row",
            "edit_tag": "local_edit",
            "source_sha256": "0" * 64,
            **facts,
        },
    }


def good_rows(count: int = 60, first: int = 0, split: str = "train") -> list[dict[str, Any]]:
    rows = [good_row(n, split) for n in range(first, first + count)]
    random.Random(0).shuffle(rows)
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return path


def replaced(path: Path, column: str, values: pa.Array) -> Path:
    """The good rows with one column of another type."""
    table = pa.Table.from_pylist(good_rows(), schema=SCHEMA)
    pq.write_table(table.set_column(SCHEMA.get_field_index(column), column, values), path)
    return path


def verify(*paths: Path, **options: Any) -> Report:
    return verify_files(paths, TOKENIZER, **options)


def assert_found(report: Report, check: Check, *parts: str) -> None:
    assert not report.ok
    assert report.failures[check]
    messages = [str(problem) for problem in report.problems if problem.check is check]
    assert any(all(part in message for part in parts) for message in messages), messages


def test_good_files_pass(tmp_path: Path) -> None:
    report = verify(
        write(tmp_path / "train.parquet", good_rows()), write(tmp_path / "val.parquet", good_rows(12, 60, "val"))
    )
    assert report.ok and not report.problems
    assert [(file.file, file.rows, dict(file.labels)) for file in report.files] == [
        ("train.parquet", 60, {"harmful": 30, "safe": 30}),
        ("val.parquet", 12, {"harmful": 6, "safe": 6}),
    ]
    assert all(file.longest_prompt > 100 for file in report.files)


# The four bugs that once let runs look alive.


def test_historical_prompt_as_json_string(tmp_path: Path) -> None:
    strings = pa.array([json.dumps(row["prompt"]) for row in good_rows()])
    report = verify(replaced(tmp_path / "train.parquet", "prompt", strings))
    assert report.failures[Check.PROMPT] == 60
    assert_found(report, Check.PROMPT, "train.parquet, row 0: the prompt is a JSON string", "medec_to_parquet.py")
    assert_found(report, Check.SCHEMA, "train.parquet: column 'prompt' is of type string, expected list<")


def test_historical_placeholder_prompt(tmp_path: Path) -> None:
    rows = good_rows()
    rows[7]["prompt"] = [{"role": "user", "content": "PLACEHOLDER: built at run time"}]
    report = verify(write(tmp_path / "train.parquet", rows))
    assert report.failures[Check.RENDERED] == 1
    assert_found(report, Check.RENDERED, "train.parquet, row 7: the prompt does not contain its seed note")


def test_historical_labels_replaced_by_note_ids(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows:
        row["reward_model"]["ground_truth"] = row["extra_info"]["text_id"]
    report = verify(write(tmp_path / "train.parquet", rows))
    assert report.failures[Check.LABELS] == 60
    assert_found(report, Check.LABELS, "train.parquet, row 0", "ground_truth is 'ms-train-", "a note's id", "'safe'")


def test_historical_constant_column(tmp_path: Path) -> None:
    rows = [good_row(n, category="vanilla_harmful") for n in range(40)]
    report = verify(write(tmp_path / "train.parquet", rows))
    for name in ("ground_truth", "category"):
        assert_found(report, Check.CONSTANT, f"train.parquet: {name} is the same in all 40 rows", "--mix")
    assert report.warnings[Check.BALANCE] == 1


def test_constant_reward_in_place_of_the_label(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows:
        row["reward_model"]["ground_truth"] = "0.5"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LABELS, "row 0", "'0.5', no label")
    assert_found(report, Check.CONSTANT, "ground_truth is the same in all 60 rows")


def test_extra_info_as_json_string(tmp_path: Path) -> None:
    strings = pa.array([json.dumps(row["extra_info"]) for row in good_rows()])
    report = verify(replaced(tmp_path / "train.parquet", "extra_info", strings))
    assert_found(report, Check.OPENS, "train.parquet, row 0: verl cannot hand out the row (AttributeError")
    assert_found(report, Check.SCHEMA, "column 'extra_info' is of type string")


def test_labels_of_another_type(tmp_path: Path) -> None:
    for number, values in enumerate(([0.5] * 60, ["harmful", "safe"] * 30, [{"ground_truth": 1}] * 60)):
        report = verify(replaced(tmp_path / f"train{number}.parquet", "reward_model", pa.array(values)))
        assert_found(report, Check.LABELS, f"train{number}.parquet, row 0: reward_model.ground_truth is")
        assert_found(report, Check.SCHEMA, "column 'reward_model' is of type")


# One value of one row.

NOTE = good_row(3)["extra_info"]["seed_note"]
PROMPT = good_row(3)["prompt"]


def message(role: str, content: str | None) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("key", "value", "check", "part"),
    [
        ("agent_name", "single_turn_agent", Check.AGENT, "agent_name is 'single_turn_agent', not 'medserl_selfplay'"),
        ("agent_name", None, Check.SCHEMA, "agent_name has no value"),
        ("prompt", [], Check.PROMPT, "the prompt is [], not a list of messages"),
        ("prompt", message("assistant", NOTE), Check.PROMPT, "the last one the user's"),
        ("prompt", message("doctor", NOTE), Check.PROMPT, "a role of system, user, assistant"),
        ("prompt", message("user", None), Check.PROMPT, "messages of {role, content}"),
        ("prompt", message("user", "Read this:\n{{ note }}"), Check.RENDERED, "still holds '{{ note }}'"),
        ("prompt", message("user", f"{{% if x %}}{NOTE}"), Check.RENDERED, "still holds '{% if x %}'"),
        ("prompt", message("user", f"Is this right? {NOTE}"), Check.RENDERED, "not what profile 'medserl' renders"),
        ("prompt", good_row(4)["prompt"], Check.RENDERED, "another row's note"),
        ("prompt", message("user", f"ms-train-3: {NOTE}"), Check.IDS, "contains the row's text_id 'ms-train-3'"),
        ("reward_model", {"style": "rule", "ground_truth": "harmful"}, Check.LABELS, "'harmful' and extra_info.target"),
        ("reward_model", {"style": "rule", "ground_truth": None}, Check.LABELS, "ground_truth is None"),
        ("reward_model", None, Check.SCHEMA, "reward_model has no value"),
        ("extra_info.target_label", "maybe", Check.FACTS, "'target_label'] is 'maybe'; expected one of safe, harmful"),
        ("extra_info.category", None, Check.SCHEMA, "extra_info.category has no value"),
        ("extra_info.category", "vanilla", Check.FACTS, "'category'] is 'vanilla'"),
        ("extra_info.seed_note", None, Check.SCHEMA, "extra_info.seed_note has no value"),
        ("extra_info.clean_note", "Another note.", Check.FACTS, "seed_note is not the row's clean_note"),
        ("extra_info.index", None, Check.SCHEMA, "extra_info.index has no value"),
        ("extra_info", None, Check.SCHEMA, "extra_info has no value"),
    ],
)
def test_damaged_value_is_found(tmp_path: Path, key: str, value: Any, check: Check, part: str) -> None:
    rows = good_rows(12)
    number = next(i for i, row in enumerate(rows) if row["extra_info"]["index"] == 3)
    target = rows[number]
    *parents, last = key.split(".")
    for parent in parents:
        target = target[parent]
    target[last] = value
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, check, f"train.parquet, row {number}:", part, "data_prep/medec_to_parquet.py")
    assert len({problem.row for problem in report.problems}) == 1


def test_wrong_label_of_a_note_that_is_presented_as_it_is(tmp_path: Path) -> None:
    rows = good_rows(12)
    row = next(r for r in rows if r["extra_info"]["category"] == "vanilla_benign")
    row["reward_model"]["ground_truth"] = row["extra_info"]["target_label"] = "harmful"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LABELS, "a vanilla_benign row presents its seed note as it is")


def test_braces_of_a_note_are_no_template(tmp_path: Path) -> None:
    rows = good_rows(12)
    for row in rows:
        facts = row["extra_info"]
        for key in ("seed_note", "error_note", "clean_note"):
            facts[key] += " Formula {{ x }} {% y %} \\1 <think>."
        category = Category(facts["category"])
        role = Role.ATTACKER if category.has_attack else Role.ASSESSOR
        row["prompt"] = load_profile().messages(role, category, facts["seed_note"])
    assert verify(write(tmp_path / "train.parquet", rows)).ok


def test_missing_and_extra_columns(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(good_rows(12), schema=SCHEMA)
    table = table.drop_columns(["agent_name"]).append_column("index", pa.array(range(12)))
    pq.write_table(table, tmp_path / "train.parquet")
    report = verify(tmp_path / "train.parquet")
    assert_found(report, Check.SCHEMA, "train.parquet: column 'agent_name' is missing")
    assert_found(report, Check.SCHEMA, "train.parquet: column 'index' is not part of the format")


def test_index_that_two_files_use(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    val[5]["extra_info"]["index"] = train[2]["extra_info"]["index"]
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", val))
    assert_found(report, Check.INDEX, "val.parquet, row 5: index", "already that of train.parquet, row 2")


def test_case_in_two_splits(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    val[4]["extra_info"]["vignette_id"] = train[1]["extra_info"]["vignette_id"]
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", val))
    assert_found(report, Check.SPLITS, "val.parquet, row 4: vignette", "'train' at train.parquet, row 1", "split by")


def test_note_in_two_splits_under_two_ids(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    twin = copy.deepcopy(train[3])
    twin["extra_info"] |= {"index": 99, "split": "val", "vignette_id": "ms-val-99", "text_id": "ms-val-99"}
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", [*val, twin]))
    assert_found(report, Check.SPLITS, "val.parquet, row 12: its note", "'train' at train.parquet, row 3")


def test_prompt_that_is_too_long(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", good_rows(12))
    longest = verify(path).files[0].longest_prompt
    assert verify(path, max_prompt_tokens=longest).ok
    report = verify(path, max_prompt_tokens=longest - 1)
    assert_found(report, Check.LENGTH, f"the prompt has {longest} tokens", f"max_prompt_length to at least {longest}")


def test_other_profile_than_the_files(tmp_path: Path) -> None:
    for role, names in (("attacker", ("adversarial_harmful", "adversarial_benign")), ("assessor", ("assess",))):
        (tmp_path / "mine" / role).mkdir(parents=True)
        for name in names:
            (tmp_path / "mine" / role / f"{name}.jinja").write_text("Play: {{ note }}")
    report = verify(write(tmp_path / "train.parquet", good_rows(12)), profile=str(tmp_path / "mine"))
    assert report.failures[Check.RENDERED] == 12
    assert_found(report, Check.RENDERED, "row 0", "not what profile 'mine' renders", "--profile")


def with_trailing_blanks(rows: list[dict[str, Any]], blank: str) -> list[dict[str, Any]]:
    for row in rows:
        facts = row["extra_info"]
        facts["error_note"] += blank
        if facts["category"].endswith("harmful"):
            facts["seed_note"] += blank
            row["prompt"][0]["content"] += blank
    return rows


@pytest.mark.parametrize(("blank", "feature"), [(" ", "white space after the note"), ("\n", "a line break at the")])
def test_white_space_that_tells_the_label(tmp_path: Path, blank: str, feature: str) -> None:
    rows = with_trailing_blanks(good_rows(), blank)
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LEAKS, f"train.parquet: {feature}", "tells the seed label in 100%", "strip the notes")


def test_order_that_tells_the_label(tmp_path: Path) -> None:
    rows = sorted(good_rows(), key=lambda row: row["extra_info"]["target_label"])
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LEAKS, "the row's place in the file tells the target_label", "shuffle")


def test_id_that_tells_the_label(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows:
        facts = row["extra_info"]
        facts["text_id"] = f"ms-train-{2 * facts['index'] + (facts['target_label'] == 'safe')}"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LEAKS, "the parity of the text id tells the target_label in 100%")


def test_leaks_of_an_official_set_are_warnings(tmp_path: Path) -> None:
    rows = with_trailing_blanks(good_rows(), " ")
    for row in rows:
        row["data_source"] = row["data_source"].replace("medec_ms", "medec_ms_eval")
    report = verify(write(tmp_path / "eval.parquet", rows))
    assert report.ok and report.warnings[Check.LEAKS] >= 1


def test_published_share_of_trailing_blanks_is_found_and_chance_is_not() -> None:
    """60 % of the error notes against 47 % of the clean ones, and labels drawn at random."""
    rng = random.Random(1)
    leaky = LeakTest()
    alarms = 0
    for _ in range(2000):
        label = rng.choice(list(Label))
        blank = rng.random() < (0.6 if label is Label.HARMFUL else 0.47)
        leaky.add(text_id=f"x-{rng.random()}", seed_note="a b" + " " * blank, target_label=label, seed_label=label)
    for _ in range(30):
        test = LeakTest()
        for n in range(300):
            label = rng.choices(list(Label), [0.7, 0.3])[0]
            note = "a  " * rng.randrange(20) + "b" + " " * rng.randrange(2)
            test.add(text_id=f"x-{n}", seed_note=note, target_label=label, seed_label=rng.choice(list(Label)))
        alarms += len(list(test.leaks()))
    assert [leak.feature for leak in leaky.leaks()] == ["white space after the note"]
    assert alarms == 0


def test_copies_of_a_row_do_not_make_a_leak() -> None:
    test = LeakTest()
    notes = [
        (n, label, " " * ((n % 3 == 0) if label is Label.SAFE else (n % 2 == 0))) for n in range(30) for label in Label
    ]
    for number in range(50 * len(notes)):
        n, label, blanks = notes[number * 7 % len(notes)]
        test.add(text_id=f"x-{n}", seed_note=f"Note {n}.{blanks}", target_label=label, seed_label=label)
    assert list(test.leaks()) == []


def test_chance_of_a_rule_is_the_exact_hypergeometric_tail() -> None:
    for rows, marked, drawn, hits in ((20, 10, 10, 9), (20, 10, 10, 1), (50, 7, 20, 5), (50, 40, 11, 6), (9, 3, 4, 0)):
        outcomes = range(max(0, drawn + marked - rows), min(drawn, marked) + 1)
        weights = {k: comb(marked, k) * comb(rows - marked, drawn - k) for k in outcomes}
        tail = range(hits, drawn + 1) if hits * rows >= drawn * marked else range(hits + 1)
        exact = sum(weights.get(k, 0) for k in tail) / comb(rows, drawn)
        assert _tail(hits, drawn, marked, rows) == pytest.approx(exact)


def test_many_problems_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    rows = good_rows(12)
    for row in rows:
        row["agent_name"] = "other"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert report.failures[Check.AGENT] == 12
    assert sum(problem.check is Check.AGENT for problem in report.problems) == 3


# The command line.


@pytest.fixture(scope="module")
def command() -> Any:
    spec = importlib.util.spec_from_file_location("verify_parquet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def run(command: Any, *arguments: Any) -> Any:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def test_exit_code_is_0_for_good_files(command: Any, tokenizer: str, tmp_path: Path) -> None:
    result = run(command, write(tmp_path / "train.parquet", good_rows()), "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("holds") == len(Check)


def test_exit_code_is_1_and_the_row_is_named_for_bad_files(command: Any, tokenizer: str, tmp_path: Path) -> None:
    rows = good_rows()
    rows[9]["agent_name"] = "other"
    result = run(command, write(tmp_path / "train.parquet", rows), "--tokenizer", tokenizer)
    assert result.exit_code == 1
    assert "failed: train.parquet, row 9: agent_name is 'other'" in result.stdout
    assert "agent name" in result.stdout and "failed: 1" in result.stdout


def test_exit_code_is_2_for_what_cannot_be_read(command: Any, tokenizer: str, tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", good_rows(12))
    (tmp_path / "bad.parquet").write_text("no parquet")
    write(tmp_path / "empty.parquet", [])
    for arguments, part in (
        ([tmp_path / "none.parquet"], "none.parquet: there is no such file"),
        ([tmp_path / "bad.parquet"], "bad.parquet: cannot be read as parquet"),
        ([tmp_path / "rows.csv"], "verl reads files that end in .parquet"),
        ([tmp_path / "empty.parquet", "--tokenizer", tokenizer], "has no rows"),
        ([good, "--tokenizer", tmp_path / "nowhere"], "no tokenizer can be loaded"),
        ([good, "--tokenizer", tokenizer, "--profile", "nonsense"], "no prompt profile 'nonsense'"),
    ):
        result = run(command, *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert part in result.stderr and result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr


def test_default_tokenizer_is_the_tiny_players_and_must_be_there(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "train.parquet", good_rows(12))
    assert run(command, path).exit_code == 0

    def missing(name: str) -> Path:
        raise FileNotFoundError(name)

    monkeypatch.setattr(command, "resource", missing)
    result = run(command, path)
    assert result.exit_code == 2
    assert "give the model's tokenizer with --tokenizer" in result.stderr
