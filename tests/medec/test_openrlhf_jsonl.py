"""OpenRLHF rows in their three shapes: each finds its case, or is counted and named."""

from itertools import product

import pyarrow.parquet as pq
import pytest
from medec.builders import assert_one_sentence, manifest_of, message_of, pair, run
from note_files import OFFICIAL, medec_file

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import seed_note
from medserl_agentloop.games.medical.case import Category, ErrorType


@pytest.fixture
def join(write_pairs):
    return write_pairs(*(pair(n) for n in range(4)), name="join.jsonl")


def row(note, category="vanilla_benign", completion=None):
    own = "Safe" if category == "vanilla_benign" else ""
    answer = own if completion is None else completion
    return {"prompt": note, "completion": answer, "data_type": category}


def prompt_completion(category, error, clean):
    note = error if category.endswith("harmful") else clean
    return row(note, category)


def four_way(category, error, clean):
    made = prompt_completion(category, error, clean)
    note, vanilla = made.pop("prompt"), category.startswith("vanilla")
    return {"vanilla": note if vanilla else "", "adversarial": "" if vanilla else note, **made}


def with_both_notes(category, error, clean):
    notes = {"error_note": error, "clean_note": clean}
    return {"game_category": category, "error_type": "diagnosis", **notes}


SHAPES = [prompt_completion, four_way, with_both_notes]


@pytest.fixture
def old_file(write_pairs):
    """Writes a file as the OpenRLHF system had it: two rows of every case, in turn vanilla and
    adversarial.
    """

    def write(shape, cases=80, name="ms_train.jsonl"):
        rows = []
        for n, label in product(range(cases), ("harmful", "benign")):
            kind, case = "adversarial" if n % 2 else "vanilla", pair(n)
            rows.append(shape(f"{kind}_{label}", case["incorrect_note"], case["correct_note"]))
        return write_pairs(*rows, name=name)

    return write


def facts_of(folder):
    tables = [pq.read_table(folder / f"{name}.parquet") for name in ("train", "val")]
    return [facts for table in tables for facts in table["extra_info"].to_pylist()]


def verified(folder):
    return run("verify_parquet", folder / "train.parquet", folder / "val.parquet")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_balanced_files_of_every_shape_convert_and_hold(
    convert, write_pairs, old_file, tmp_path, shape, joined
):
    join = ("--join", write_pairs(*map(pair, range(80)), name="join.jsonl"))
    result = convert("--input", old_file(shape), *(join if joined else ()))
    assert result.exit_code == 0, result.output
    report = verified(tmp_path / "out")
    assert report.exit_code == 0 and "warning" not in report.stdout
    (source,) = manifest_of(tmp_path / "out")["sources"]
    counts = ("records", "pairs", "clean_only", "error_only")
    assert [source[name] for name in counts] == [160, 80, 0, 0]
    known = joined or shape is with_both_notes
    facts = facts_of(tmp_path / "out")
    assert {fact["error_type"] for fact in facts} == {"diagnosis" if known else None}
    assert {fact["subset"] for fact in facts} == {"medec_ms"}


def test_every_row_is_kept_if_asked(convert, old_file, tmp_path):
    path = old_file(four_way)
    assert convert("--input", path, "--mix", "as-given").exit_code == 0
    facts = facts_of(tmp_path / "out")
    assert len(facts) == 160
    assert {fact["category"] for fact in facts} == {c.value for c in list(Category)[:4]}
    assert verified(tmp_path / "out").exit_code == 0


def test_validation_on_the_set_the_rows_were_made_of_names_both_files(
    convert, write_pairs, old_file
):
    val = write_pairs(*(pair(n, note_id=f"ms-val-{n}") for n in range(100)), name="official.jsonl")
    arguments = ("--input", old_file(four_way), "--val-input", val)
    assert_one_sentence(convert(*arguments), "80 not for training: it shares a note with a case")
    result = convert(*arguments, "--join", val)
    assert_one_sentence(result, "official.jsonl, line ", "is already that of ms_train.jsonl")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("UW.jsonl", "x", 1),
        ("MEDEC-UW/train.jsonl", "x", 1),
        ("train.jsonl", "text_id", "uw-train-7"),
        ("ms.jsonl", "subset", "medec_uw"),
        ("train.jsonl", "prompt", "Mr. <NAME/> has a cough."),
    ],
)
def test_uw_rows_without_ids_are_refused_without_the_agreement(
    convert, write_pairs, tmp_path, name, key, value
):
    (tmp_path / "MEDEC-UW").mkdir()
    path = write_pairs(row("A note about a cough.") | {key: value}, name=name)
    arguments = ("--input", path, "--mix", "vanilla_benign=1", "--val-fraction", 0)
    assert_one_sentence(convert(*arguments), "1 MEDEC-UW rows", "--i-have-the-uw-agreement")
    assert convert(*arguments, "--i-have-the-uw-agreement").exit_code == 0
    assert facts_of(tmp_path / "out")[0]["subset"] == "medec_uw"


def test_rows_of_one_case_become_one_case_with_their_categories(write_pairs, join):
    case = pair(2)
    rows = (row(case["incorrect_note"], "adversarial_harmful"), row(case["correct_note"]))
    path = write_pairs(*rows, name="rows.jsonl")
    result = read_files([path], join=(join,))
    (case,) = result.cases
    assert (case.case_id, case.error_type) == ("ms-train-2", ErrorType.DIAGNOSIS)
    served = {category.value for category in Category if seed_note(case, category)}
    assert served == {"adversarial_harmful", "vanilla_benign"}
    assert (result.reports[0].records, result.reports[0].joined) == (2, 2)


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([row("A note.", "vanilla")], "'data_type': found 'vanilla'; write one of vanilla_harmful"),
        ([row("A note.", "vanilla_harmful", "Safe")], "completion of a vanilla_harmful row is ''"),
        ([row(" ")], "write the text of the note"),
        ([four_way("vanilla_harmful", "a", "") | {"adversarial": "b"}], "under 'vanilla' alone"),
    ],
)
def test_row_that_contradicts_itself_is_an_error(write_pairs, rows, part):
    message = message_of(write_pairs(*rows, name="rows.jsonl"))
    assert message.startswith("rows.jsonl, line 1") and part in message


def test_rows_that_are_not_joined_are_named_with_the_reason(convert, write_pairs, join, tmp_path):
    rows = [row(f"Note {n} about a cough.") for n in range(4)]
    path = write_pairs(*rows, row(pair(0)["incorrect_note"], "vanilla_benign"), name="rows.jsonl")
    mix = ("--mix", "vanilla_benign=1", "--val-fraction", 0)
    told = convert("--input", path, "--join", join, *mix).stdout
    why = "not joined: rows.jsonl, its note is in no --join file (4)"
    assert f"{why}: rows-1, rows-2, rows-3, ...\n" in told
    (*_, last) = manifest_of(tmp_path / "out")["sources"][0]["not_joined"]
    assert last == ["rows-5", "vanilla_benign does not start from this note of ms-train-0"]
    assert {fact["error_type"] for fact in facts_of(tmp_path / "out")} == {None}


@pytest.mark.parametrize("name", ["openrlhf_four_way.jsonl", "openrlhf_prompt_completion.jsonl"])
def test_real_rows_all_get_their_error_type(name):
    (report,) = read_files([medec_file(name)], join=(medec_file(OFFICIAL),)).reports
    assert (report.records, report.joined, report.not_joined) == (320, 320, [])
    assert "unknown" not in report.error_types
