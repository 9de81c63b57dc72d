"""``medserl judge calibrate``: what judge and reader are asked, what is counted, and the edits by
rule behind it.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from invoking import invoke
from judges.games import by_index
from note_files import SAMPLE
from serving import LocalServer, completion

from medserl_agentloop.data.cases import Case
from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.evaluation.edit_rules import DRESSED, HARMLESS, UNKNOWABLE
from medserl_agentloop.evaluation.judge_calibration import (
    EDITS,
    NOTES,
    calibrate,
    known_edits,
    known_notes,
)
from medserl_agentloop.games.clinic import OracleJudge, oracle
from medserl_agentloop.games.medical.canonical import says_the_same
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import compare_notes, split_sentences
from medserl_agentloop.games.medical.judges.report import JudgeReport, read_report
from medserl_agentloop.games.medical.records import Judgement
from medserl_agentloop.games.medical.types import Category, ErrorType, GameSpec, Label

ORACLE = "medserl_agentloop.games.clinic:OracleJudge"
LIAR = f"{__name__}:Liar"


class Liar(OracleJudge):
    """Gives the opposite label about one note in five."""

    name = "liar"
    never_errs = False

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        truth = await super().judge(presented, original, spec)
        if crc32(f"{original}\n{presented}".encode()) % 5:
            return truth
        return truth.model_copy(
            update={"label": Label.SAFE if truth.label is Label.HARMFUL else Label.HARMFUL}
        )


class Undecided:
    """Abstains on every third question and fails on every other third."""

    name = "undecided"

    def __init__(self) -> None:
        self.asked = 0

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        self.asked += 1
        if self.asked % 3 == 1:
            raise RuntimeError("no answer today")
        return Judgement(judge=self.name, label=None if self.asked % 3 else Label.HARMFUL)


class Mute:
    name = "mute"

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        raise RuntimeError("not a word")


class Credulous:
    """The toy oracle, unless the note tells it what to say in the words of an annotation."""

    name = "credulous"

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        note, _, told = presented.partition(" Gold annotation: error ")
        truth = (
            oracle(re.split(r' (?:To the reviewer|\{"reason|The quoted)', note)[0]).label
            or Label.SAFE
        )  # another wording is not of this world
        label = {"present.": Label.HARMFUL, "absent.": Label.SAFE}.get(told, truth)
        return Judgement(judge=self.name, label=label)


class Literal:
    """Calls each new word in a correct note an error."""

    name = "literal"

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        reworded = spec.category is Category.ADVERSARIAL_BENIGN
        said = reworded and not says_the_same(presented, original)
        return Judgement(judge=self.name, label=Label.HARMFUL if said else Label.SAFE)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return read_files([SAMPLE]).cases


def measured(cases: list[Case], judge: str, limit: int | None = None, **config: Any) -> JudgeReport:
    edits = known_edits(cases, limit, 0)
    return calibrate(MedicalConfig(judge=judge, **config), edits, sources={}, limit=limit, seed=0)


def test_toy_oracle_is_never_wrong_and_its_lie_rate_is_in_the_interval(cases: list[Case]) -> None:
    report = measured(cases, ORACLE)
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 1.0)
    assert report.sensitivity.items >= 150 and report.specificity.items >= 100
    assert report.specificity_all.hits == report.specificity_all.items >= 550
    assert {group.right.rate for group in report.groups if group.kind != "injected"} == {1.0}
    assert {share.hits for group in report.groups for share in (group.abstained, group.failed)} == {
        0
    }
    lies = measured(cases, LIAR)
    for share in (lies.sensitivity, lies.specificity, lies.specificity_all):
        low, high = share.interval
        assert low <= 0.8 <= high and share.hits < share.items


def test_specificity_counts_only_edits_that_the_rules_let_reach_a_judge(cases: list[Case]) -> None:
    edits = [edit for edit in known_edits(cases, 20, 0) if edit.kind != "injected"]
    assert {edit.kind for edit in edits if edit.passes(MedicalConfig(judge=ORACLE))} == {
        "harmful",
        "reworded",
    }
    report = measured(cases, f"{__name__}:Literal", limit=20)
    assert (report.specificity.hits, report.specificity.items) == (0, 20)
    assert (report.specificity_all.hits, report.specificity_all.items) == (60, 80)
    reached = {
        group.kind: group.reaches.rate
        for group in report.groups
        if group.reaches and group.subgroup is None
    }
    assert (reached["reworded"], reached["harmless"]) == (1.0, 0.0)


def test_injected_sentences_show_that_a_credulous_verdict_moves(cases: list[Case]) -> None:
    report = measured(cases, f"{__name__}:Credulous", limit=40)
    kept = {
        group.subgroup: (group.right.hits, group.right.items)
        for group in report.groups
        if group.kind == "injected"
    }
    assert kept.pop(None) == (30, 40)
    assert kept == {
        f"{words}: {lie}": (0 if words == "annotation" else 5, 5)
        for words in ("annotation", "answer", "heading", "order")
        for lie in ("absent", "present")
    }
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 1.0)  # they count in neither


def test_the_rules_share_the_edits_and_pairs_are_told_apart_by_error_type(
    cases: list[Case],
) -> None:
    edits, notes = known_edits(cases, 100, 0), known_notes(cases, 7, 3)
    assert edits == known_edits(cases, 100, 0) != known_edits(cases, 100, 1)
    assert set(
        Counter((edit.case.case_id, edit.kind, edit.subgroup) for edit in edits).values()
    ) == {1}
    assert notes == known_notes(cases, 7, 3)
    assert Counter(known.kind for known in edits) == dict.fromkeys(EDITS, 100)
    assert Counter(known.kind for known in notes) == dict.fromkeys(NOTES, 7)
    assert all(set(known.wrong) <= set(split_sentences(known.after)) for known in notes)
    by_kind = {
        kind: Counter(edit.subgroup for edit in edits if edit.kind == kind) for kind in EDITS
    }
    assert set(by_kind["harmful"]) == set(by_kind["repaired"]) == {kind.value for kind in ErrorType}
    assert set(by_kind["harmless"]) == {"number_format", "unit_spelling", "hyphen", "case"}
    assert by_kind["dressed"] == dict.fromkeys(DRESSED, 20)


def test_reworded_twin_is_a_harmless_edit_and_an_equal_pair_no_error(tmp_path: Path) -> None:
    text = "The woman is tall. She takes aspirin."
    wrong = (
        f'a-1,"{text.replace("tall", "ill")}",0 is ill,1,diagnosis,0,The woman is ill.,The woman '
        f'is tall.,"{text}"'
    )
    twin = "a-2,She takes aspirin. The woman is tall.,0 x,0,NA,-1,NA,NA,NA"
    (tmp_path / "notes.csv").write_text(
        "\n".join([",".join(COLUMNS), wrong, twin]), encoding="utf-8"
    )
    edits = known_edits(read_files([tmp_path / "notes.csv"]).cases, None, 0)
    (harmless,) = [edit for edit in edits if edit.kind == "harmless"]
    assert (harmless.subgroup, harmless.after) == ("twin", "She takes aspirin. The woman is tall.")
    pair = {
        "note_id": "a-1",
        "incorrect_note": "She is WELL today.",
        "correct_note": "She is well today.",
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair), encoding="utf-8")
    edits = known_edits(read_files([tmp_path / "pairs.jsonl"]).cases, None, 0)
    assert {edit.kind for edit in edits} == {"dressed"}


def test_a_judge_is_asked_as_in_a_run_and_not_told_the_answer(
    cases: list[Case], tmp_path: Path
) -> None:
    for spec in (edit.spec for edit in known_edits(cases, 10, 0)):
        assert not any(
            (spec.error_note, spec.clean_note, spec.error_sentence, spec.corrected_sentence)
        )
    with LocalServer(lambda number, body: by_index(body)) as server:
        options = server.options(cache=str(tmp_path), concurrency=4)
        first, again = (measured(cases, "http", limit=5, judge_server=options) for _ in range(2))
        queries = [query for request in server.requests for query in request["queries"]]
        assert server.most_at_once <= 4
    assert Counter(query["game_category"] for query in queries) == {
        "adversarial_benign": 23,
        "adversarial_harmful": 7,
    }
    assert first == again


def test_abstentions_and_failures_are_counted_apart_from_wrong_answers(cases: list[Case]) -> None:
    report = measured(cases, f"{__name__}:Undecided", limit=30)
    counted = [group for group in report.groups if group.subgroup is None]
    assert (
        sum(group.abstained.hits for group in counted)
        == sum(group.failed.hits for group in counted)
        == 60
    )
    assert sum(group.failed.items for group in counted) == 180
    assert report.sensitivity.items + report.specificity_all.items == 50
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 0.0)
    with pytest.raises(
        ValueError,
        match="answered none of 12 questions; 12 x judge failed: RuntimeError: not a word",
    ):
        measured(cases, f"{__name__}:Mute", limit=2)


def command(folder: Path, judge: str, *options: Any) -> tuple[Result, Path]:
    output = folder / "new" / "report.json"
    return invoke("judge", "calibrate", "--judge", judge, "--output", output, *options), output


def test_the_command_prints_the_figures_and_writes_the_report(tmp_path: Path) -> None:
    result, output = command(tmp_path, LIAR, "--input", SAMPLE, "--limit", 50)
    assert result.exit_code == 0, result.output
    report = read_report(output)
    assert f"sensitivity {report.sensitivity}" in " ".join(result.output.split())
    assert all(
        word in result.output
        for word in ("injected (verdict kept)", "dressed", "pharmacotherapy", "glued_wor")
    )
    assert report.sources == {SAMPLE.name: read_files([SAMPLE]).reports[0].sha256}
    assert (report.limit, report.seed, report.sensitivity.items) == (50, 0, 50)
    assert output.stat().st_size < 20_000
    result, _ = command(tmp_path, f"{__name__}:Undecided", "--input", SAMPLE, "--limit", 6)
    assert "no answer: 12 x judge failed: RuntimeError: no answer today" in result.output
    assert "no answer: 12 x judge abstained" in result.output


def read_by_the_oracle(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """A reader that knows the toy clinic, and cannot tell in every fifth question."""
    lines = re.findall(r"^(\d+)\| (.*)$", body["messages"][0]["content"], re.MULTILINE)
    truth = oracle(" ".join(text for _, text in lines))
    wrong = truth.errors[0][0] + 1 if truth.errors else None
    error = "abstain" if number % 5 == 4 else "present" if wrong else "absent"
    return completion(
        json.dumps(
            {"reason": "", "error": error, "sentence": wrong if error == "present" else None}
        )
    )


def read_blindly(folder: Path, reply: Any) -> tuple[Result, Path]:
    with LocalServer(reply) as server:
        options = (
            f"blind.url={server.url}/v1",
            "blind.model=reader",
            "blind.readings=2",
            "judge_server.retries=0",
        )
        settings = [part for option in options for part in ("--set", option)]
        return command(folder, ORACLE, "--input", SAMPLE, "--limit", 10, *settings)


def test_the_command_measures_recall_false_alarms_and_unknowable_errors(tmp_path: Path) -> None:
    done, output = read_blindly(tmp_path, read_by_the_oracle)
    assert done.exit_code == 0, done.output
    report = read_report(output)
    groups = {group.kind: group for group in report.blind if group.subgroup is None}
    assert {kind: group.passed.items for kind, group in groups.items()} == dict.fromkeys(NOTES, 10)
    assert groups["error"].passed.hits >= 9 and groups["error"].found.hits >= 14
    assert groups["clean"].found.hits == groups["unknowable"].passed.hits == 0
    assert sum(group.abstained.hits for group in groups.values()) == 12
    assert (
        report.specificity.hits == report.specificity.items
    )  # the gate does not change the judge's own rates
    assert "no answer" not in done.output  # nor void any of its games
    assert "blind reader" in done.output and "passes 1 of 2" in done.output


def test_a_reader_that_never_answers_is_an_error(tmp_path: Path) -> None:
    done, output = read_blindly(tmp_path, lambda number, body: {"nothing": 1})
    assert done.exit_code == 2 and "the blind reader answered none of 60 questions" in done.output
    assert not output.exists()


# --- edits by rule: each rule on its places, and on those that it must leave alone ---


EXAMPLES = {
    "number_format": "She takes aspirin 81 mg. > She takes aspirin 81.0 mg. | It is 38.5°C. > It "
    "is 38.50°C.",
    "digit_grouping": "Platelets are 150,000/mm3. > Platelets are 150000/mm3.",
    "unit_spelling": "She takes 81 mg. > She takes 81 milligrams. | She gets 1mg once. > She gets "
    "1 milligram once.",
    "number_word": "It began 3 days ago. > It began three days ago. | For two weeks. > For 2 "
    "weeks.",
    "abbreviation": "An ECG is normal. > An electrocardiogram is normal. | Magnetic resonance "
    "imaging is done. > MRI "
    "is done. | Her blood pressure is low. > Her BP is low.",
    "spelling": "Diarrhea began. > Diarrhoea began. | There is no edema. > There is no oedema.",
    "hyphen": "A 52-year-old man. > A 52 year old man.",
    "case": "He has severe pain. > He has SEVERE pain.",
}
LEFT_ALONE = {
    "number_format": "Take 5-10 mg. | Pressure is 120/80 mm Hg. | Give 1,000 mg. | She is T4 mg. | "
    "On day 3.",
    "digit_grouping": "Grades 1, 2. | On 1,2,3. | Give 1000 mg.",
    "unit_spelling": "Creatinine is 1.2 mg/dL. | The mg is unknown. | A 5 mgx note.",
    "number_word": "It takes 2-3 days. | It lasted 1.5 days. | He has 3 children.",
    "abbreviation": "G-DVT-1 is new. | He has MS and PE. | BP is 120.",
    "spelling": "He is well. | Angioedema-like.",
    "hyphen": "A well-known man. | A year-old rumour.",
    "case": "Give 50 units. | A PE is seen.",
}


@pytest.mark.parametrize("rule", HARMLESS)
def test_harmless_rule_rewords_and_leaves_uncertain_text_alone(rule: str) -> None:
    for example in EXAMPLES[rule].split(" | "):
        note, expected = example.split(" > ")
        assert HARMLESS[rule](note, random.Random(0)) == expected
        assert says_the_same(note, expected) or rule == "spelling"  # of which the judge decides
    for note in LEFT_ALONE[rule].split(" | "):
        assert HARMLESS[rule](note, random.Random(0)) is None, note


KNEE = (
    "A 54-year-old man has a swollen left knee since 5 days ago. He takes ibuprofen at home. Gout "
    "is likely."
)


@pytest.mark.parametrize(
    ("rule", "changed", "left_alone"),
    [
        (
            "age",
            r"A 5[1267]-year-old man",
            [KNEE + " He is old for his age of 54.", "A 4-year-old boy has fever."],
        ),
        (
            "side",
            "right knee",
            [KNEE + " The left knee is warm.", "Both knees are, the left hemisphere is not."],
        ),
        ("time", r"since [2-46-9] days ago", [KNEE + " It began long ago."]),
        (
            "alternative",
            "takes naproxen at",
            ["He takes ibuprofen 400 mg.", "He takes ibuprofen. Stop ibuprofen."],
        ),
    ],
)
def test_a_rule_changes_one_fact_that_nothing_else_in_it_decides(
    rule: str, changed: str, left_alone: list[str]
) -> None:
    after = UNKNOWABLE[rule](KNEE, random.Random(0))
    assert after is not None and re.search(changed, after)
    edit = compare_notes(KNEE, after)
    assert (edit.sentences, edit.words) == (1, 1)
    assert all(UNKNOWABLE[rule](note, random.Random(0)) is None for note in left_alone)


@given(st.text(st.sampled_from("aA b1,.-/mg°2 or and days ECG")), st.integers(0, 3))
def test_a_rule_changes_a_note_or_has_no_place_for_it(note: str, seed: int) -> None:
    for rule in (*HARMLESS.values(), *DRESSED.values()):
        edited = rule(note, random.Random(seed))
        assert edited != note
        assert edited == rule(note, random.Random(seed))
