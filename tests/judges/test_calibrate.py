"""``medserl judge calibrate``: what a judge is asked, and what is counted of its answers."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from judges.local_server import by_index, serving
from note_files import SAMPLE
from typer.testing import CliRunner

from experiments.clinic import oracle
from medserl_agentloop.cli import app as medserl
from medserl_agentloop.data.cases import Case
from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.evaluation.edit_rules import DRESSED
from medserl_agentloop.evaluation.judge_calibration import EDITS, calibrate, known_edits
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges.report import CountedShare, JudgeReport, read_report
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import ErrorType, Label

LIAR = "experiments.learning.lying_oracle:LyingOracle"


class Undecided:
    """Abstains on every third question and fails on every other third."""

    name = "undecided"

    def __init__(self) -> None:
        self.asked = 0

    async def judge(self, record: MedicalRecord) -> Judgement:
        self.asked += 1
        if self.asked % 3 == 1:
            raise RuntimeError("no answer today")
        return Judgement(judge=self.name, label=None if self.asked % 3 else Label.HARMFUL)


class Mute:
    name = "mute"

    async def judge(self, record: MedicalRecord) -> Judgement:
        raise RuntimeError("not a word")


class Credulous:
    """The toy oracle, unless the note tells it what to say in the words of an annotation."""

    name = "credulous"

    async def judge(self, record: MedicalRecord) -> Judgement:
        note, _, told = (record.presented_note or "").partition(" Gold annotation: error ")
        truth = oracle(re.split(r' (?:To the reviewer|\{"reason|The quoted)', note)[0]).label
        label = {"present.": Label.HARMFUL, "absent.": Label.SAFE}.get(told, truth)
        return Judgement(judge=self.name, label=label)


class Peeking:
    """Knows the truth if anything in the game but the two notes tells it."""

    name = "peeking"

    async def judge(self, record: MedicalRecord) -> Judgement:
        spec = record.spec
        told = (spec.error_note, spec.clean_note, spec.error_sentence, spec.corrected_sentence, record.error_sentences)
        return Judgement(judge=self.name, label=Label.HARMFUL if any(told) else Label.SAFE)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return read_files([SAMPLE]).cases


def measured(cases: list[Case], judge: str, limit: int | None = None, **config: Any) -> JudgeReport:
    edits = known_edits(cases, limit, 0)
    return calibrate(MedicalConfig(judge=judge, **config), edits, sources={}, limit=limit, seed=0)


def test_the_toy_oracle_is_never_wrong(cases: list[Case]) -> None:
    report = measured(cases, "experiments.clinic:OracleJudge")
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 1.0)
    assert report.sensitivity.items >= 150 and report.specificity.items >= 450
    assert {group.right.rate for group in report.groups if group.kind != "injected"} == {1.0}
    assert (report.abstained.hits, report.failed.hits) == (0, 0)


def test_the_rate_at_which_an_oracle_lies_is_in_the_interval(cases: list[Case]) -> None:
    report = measured(cases, LIAR)
    for share in (report.sensitivity, report.specificity):
        low, high = share.interval
        assert low <= 0.8 <= high and share.hits < share.items


def test_a_sentence_that_tells_the_judge_what_to_say_shows_whether_its_verdict_moves(cases: list[Case]) -> None:
    report = measured(cases, f"{__name__}:Credulous", limit=40)
    kept = {group.sort: (group.right.hits, group.right.items) for group in report.groups if group.kind == "injected"}
    assert kept.pop(None) == (30, 40)
    assert kept == {
        f"{words}: {lie}": (0 if words == "annotation" else 5, 5)
        for words in ("annotation", "answer", "heading", "order")
        for lie in ("absent", "present")
    }
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 1.0)  # they count in neither
    assert report.failed.items == 160 and report.asked == 200


def test_each_case_gives_one_edit_of_each_kind_and_the_oracle_contradicts_none(cases: list[Case]) -> None:
    edits = [edit for edit in known_edits(cases, None, 0) if edit.kind != "injected"]
    per_case = Counter((edit.case.case_id, edit.kind) for edit in edits)
    assert set(per_case.values()) == {1}
    assert len({edit.case.case_id for edit in edits}) == len(cases)
    for edit in edits:
        assert edit.before != edit.after
        assert oracle(edit.after).label in (edit.truth, None)


def test_the_rules_share_the_edits_and_pairs_are_told_apart_by_error_type(cases: list[Case]) -> None:
    edits = known_edits(cases, 100, 0)
    assert edits == known_edits(cases, 100, 0) != known_edits(cases, 100, 1)
    by_kind = {kind: Counter(edit.sort for edit in edits if edit.kind == kind) for kind in EDITS}
    assert {kind: sum(sorts.values()) for kind, sorts in by_kind.items()} == dict.fromkeys(EDITS, 100)
    assert set(by_kind["harmful"]) == set(by_kind["repaired"]) == {kind.value for kind in ErrorType}
    assert set(by_kind["harmless"]) == {"number_format", "unit_spelling", "hyphen", "case"}
    assert by_kind["dressed"] == dict.fromkeys(DRESSED, 20)


def test_a_twin_in_other_words_is_a_harmless_edit(tmp_path: Path) -> None:
    text = "The woman is tall. She takes aspirin."
    head = ",".join(COLUMNS)
    wrong = f'a-1,"{text.replace("tall", "ill")}",0 x,1,diagnosis,0,The woman is ill.,The woman is tall.,"{text}"'
    twin = "a-2,She takes aspirin. The woman is tall.,0 x,0,NA,-1,NA,NA,NA"
    (tmp_path / "notes.csv").write_text("\n".join([head, wrong, twin]), encoding="utf-8")
    edits = known_edits(read_files([tmp_path / "notes.csv"]).cases, None, 0)
    (harmless,) = [edit for edit in edits if edit.kind == "harmless"]
    assert (harmless.sort, harmless.after) == ("twin", "She takes aspirin. The woman is tall.")


def test_a_pair_without_a_difference_is_no_error(tmp_path: Path) -> None:
    pair = {"note_id": "a-1", "incorrect_note": "She is WELL today.", "correct_note": "She is well today."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair), encoding="utf-8")
    edits = known_edits(read_files([tmp_path / "pairs.jsonl"]).cases, None, 0)
    assert {edit.kind for edit in edits} == {"dressed"}


def test_a_judge_is_not_told_the_answer(cases: list[Case]) -> None:
    assert measured(cases, f"{__name__}:Peeking", limit=10).sensitivity.hits == 0


def test_abstentions_and_failures_are_counted_apart_from_wrong_answers(cases: list[Case]) -> None:
    report = measured(cases, f"{__name__}:Undecided", limit=30)
    assert (report.abstained, report.failed) == (CountedShare(hits=40, items=120), CountedShare(hits=40, items=120))
    assert report.sensitivity.items + report.specificity.items == 40
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 0.0)


def test_a_judge_that_answers_nothing_gives_no_report(cases: list[Case]) -> None:
    with pytest.raises(ValueError, match="answered none of 10 questions; 10 x judge failed: RuntimeError: not a word"):
        measured(cases, f"{__name__}:Mute", limit=2)


def test_a_served_judge_is_asked_as_in_a_run_and_its_cache_is_told_apart(cases: list[Case], tmp_path: Path) -> None:
    with serving(lambda number, body: by_index(body)) as server:
        options = server.options(cache=str(tmp_path), concurrency=4)
        first, again = (measured(cases, "http", limit=5, judge_server=options) for _ in range(2))
        queries = [query for request in server.requests for query in request["queries"]]
        assert server.most_at_once <= 4
    assert Counter(query["game_category"] for query in queries) == {"adversarial_benign": 18, "adversarial_harmful": 7}
    assert {query["assessment"] for query in queries} == {""}
    assert (first.asked, first.cached) == (25, 0)
    assert (again.asked, again.cached, again.mean_seconds) == (0, 25, None)
    assert first.mean_seconds is not None and first.mean_seconds > 0
    assert first.groups == again.groups


def run_command(*options: str) -> Any:
    return CliRunner().invoke(medserl, ["judge", "calibrate", *options])


def test_the_command_prints_the_figures_and_writes_the_report(tmp_path: Path) -> None:
    output = tmp_path / "new" / "report.json"
    result = run_command("--judge", LIAR, "--input", str(SAMPLE), "--limit", "50", "--output", str(output))
    assert result.exit_code == 0, result.output
    report = read_report(output)
    assert f"sensitivity {report.sensitivity}" in " ".join(result.output.split())
    words = ("injected (verdict kept)", "dressed", "pharmacotherapy", "glued_words", "seconds per question")
    assert all(word in result.output for word in words)
    assert report.sources == {SAMPLE.name: read_files([SAMPLE]).reports[0].sha256}
    assert (report.limit, report.seed, report.sensitivity.items) == (50, 0, 50)
    assert output.stat().st_size < 20_000


def test_the_command_says_why_questions_got_no_answer(tmp_path: Path) -> None:
    options = ("--judge", f"{__name__}:Undecided", "--input", str(SAMPLE), "--limit", "6")
    result = run_command(*options, "--output", str(tmp_path / "report.json"))
    assert "no answer: 10 x judge failed: RuntimeError: no answer today" in result.output
    assert "no answer: 10 x judge abstained" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--judge", "oracl", "--input", str(SAMPLE)), "no judge 'oracl'"),
        (("--judge", "http", "--input", str(SAMPLE)), "set selfplay.judge_server.url to the address"),
        (("--judge", "labels", "--input", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("--judge", "labels", "--input", str(SAMPLE), "--set", "judge_serve.url=x"), "did you mean 'judge_server'"),
        (("--judge", f"{__name__}:Mute", "--input", str(SAMPLE)), "the judge answered none of"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    result = run_command(*options, "--output", str(output))
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert not output.exists()
