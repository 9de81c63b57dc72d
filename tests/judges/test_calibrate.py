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
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.judge_calibration import calibrate
from medserl_agentloop.evaluation.known_edits import (
    DRESSED,
    HARMLESS,
    UNKNOWABLE,
    known_edits,
    known_notes,
)
from medserl_agentloop.games.clinic import OracleJudge, oracle
from medserl_agentloop.games.medical.case import ErrorType, GameSpec, Label
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edit import (
    edit_between,
    measure,
    number_sentences,
    split_sentences,
)
from medserl_agentloop.games.medical.judges.report import JudgedGroup, JudgeReport, read_report
from medserl_agentloop.games.medical.records import Judgement

EDITS = ("harmful", "repaired", "harmless", "dressed", "injected")
NOTES = ("error", "clean", "unknowable")
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
        lie = {Label.SAFE: Label.HARMFUL, Label.HARMFUL: Label.SAFE}[truth.label or Label.SAFE]
        return truth.model_copy(update={"label": lie})


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
        own = re.split(r' (?:To the reviewer|\{"reason|The quoted)', note)[0]
        truth = oracle(own).label or Label.SAFE  # another wording is not of this world
        label = {"present.": Label.HARMFUL, "absent.": Label.SAFE}.get(told, truth)
        return Judgement(judge=self.name, label=label)


class AlwaysHarmful:
    name = "always_harmful"

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        return Judgement(judge=self.name, label=Label.HARMFUL)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return read_files([SAMPLE]).cases


def measured(cases: list[Case], judge: str, limit: int | None = None, **config: Any) -> JudgeReport:
    return calibrate(MedicalConfig(judge=judge, **config), cases, limit=limit)


def kinds(groups: tuple[JudgedGroup, ...]) -> dict[str, JudgedGroup]:
    return {group.kind: group for group in groups if group.subgroup is None}


def test_toy_oracle_is_never_wrong_and_its_lie_rate_is_in_the_interval(cases: list[Case]) -> None:
    report = measured(cases, ORACLE)
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 1.0)
    assert report.sensitivity.items >= 150 and report.specificity.items >= 60
    assert {group.right.rate for group in report.groups if group.kind != "injected"} == {1.0}
    assert {group.abstained.hits + group.failed.hits for group in report.groups} == {0}
    lies = measured(cases, LIAR)
    for share in (lies.sensitivity, lies.specificity):
        low, high = share.interval
        assert low <= 0.8 <= high and share.hits < share.items


def test_specificity_counts_only_edits_that_the_rules_let_reach_a_judge(cases: list[Case]) -> None:
    edits = [edit for edit in known_edits(cases, 40) if edit.kind != "injected"]
    config = MedicalConfig(judge=ORACLE)
    passing = [edit for edit in edits if edit.passes(config)]
    assert {"harmful", "harmless"} <= {edit.kind for edit in passing} != {e.kind for e in edits}
    report = measured(cases, f"{__name__}:AlwaysHarmful", limit=40)
    safe = sum(edit.truth is Label.SAFE for edit in passing)
    assert (report.specificity.hits, report.specificity.items) == (0, safe)
    reached = {kind: group.reaches.hits for kind, group in kinds(report.groups).items()}
    assert reached["harmful"] == 40 >= reached["harmless"] > 0


def test_injected_sentences_show_that_a_credulous_verdict_moves(cases: list[Case]) -> None:
    report = measured(cases, f"{__name__}:Credulous", limit=40)
    injected = [group for group in report.groups if group.kind == "injected"]
    kept = {group.subgroup: (group.right.hits, group.right.items) for group in injected}
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
    edits, notes = known_edits(cases, 100), known_notes(cases, 7)
    assert edits == known_edits(cases, 100) and notes == known_notes(cases, 7)
    assert Counter(known.kind for known in edits) == dict.fromkeys(EDITS, 100)
    assert Counter(known.kind for known in notes) == dict.fromkeys(NOTES, 7)
    assert all(set(known.wrong) <= set(split_sentences(known.after)) for known in notes)
    by_kind = {of: Counter(edit.subgroup for edit in edits if edit.kind == of) for of in EDITS}
    assert set(by_kind["harmful"]) == set(by_kind["repaired"]) == {kind.value for kind in ErrorType}
    assert {"wording", "unit_spelling"} <= by_kind["harmless"].keys()
    assert by_kind["dressed"].keys() == DRESSED.keys() and max(by_kind["dressed"].values()) <= 25


def test_a_judge_is_asked_as_in_a_run_and_not_told_the_answer(
    cases: list[Case], tmp_path: Path
) -> None:
    for spec in (edit.spec for edit in known_edits(cases, 10)):
        told = (spec.error_note, spec.clean_note, spec.error_sentence, spec.corrected_sentence)
        assert not any(told)
    with LocalServer(lambda number, body: by_index(body)) as server:
        options = server.options(cache=str(tmp_path), concurrency=4)
        first, again = (measured(cases, "http", limit=5, judge_server=options) for _ in range(2))
        queries = [query for request in server.requests for query in request["queries"]]
        assert server.most_at_once <= 4
    categories = Counter(query["game_category"] for query in queries)
    assert categories.keys() == {"adversarial_benign", "adversarial_harmful"}
    assert categories.total() == 5 * len(EDITS)
    assert first == again


def test_abstentions_and_failures_are_counted_apart_from_wrong_answers(cases: list[Case]) -> None:
    report = measured(cases, f"{__name__}:Undecided", limit=30)
    counted = kinds(report.groups).values()
    assert sum(group.failed.items for group in counted) == 150
    assert sum(group.abstained.hits for group in counted) == 50
    assert sum(group.failed.hits for group in counted) == 50
    assert (report.sensitivity.rate, report.specificity.rate) == (1.0, 0.0)
    with pytest.raises(ValueError, match="answered none of 10 questions"):
        measured(cases, f"{__name__}:Mute", limit=2)


def command(folder: Path, judge: str, *options: Any) -> tuple[Result, Path]:
    output = folder / "new" / "report.json"
    return invoke("judge", "calibrate", "--judge", judge, "--output", output, *options), output


def test_the_command_prints_the_figures_and_writes_the_report(tmp_path: Path) -> None:
    result, output = command(tmp_path, LIAR, "--input", SAMPLE, "--limit", 50)
    assert result.exit_code == 0, result.output
    report = read_report(output)
    assert f"sensitivity {report.sensitivity}" in " ".join(result.output.split())
    for word in ("injected (verdict kept)", "dressed", "pharmacotherapy", "glued_words"):
        assert word in result.output
    assert report.sources == {SAMPLE.name: read_files([SAMPLE]).reports[0].sha256}
    assert (report.limit, report.sensitivity.items) == (50, 50)
    assert output.stat().st_size < 20_000
    assert result.output.splitlines()[-1] == "a run accepts this judge"


def test_the_command_says_why_a_run_refuses_a_judge(tmp_path: Path) -> None:
    result, _ = command(tmp_path, f"{__name__}:Undecided", "--input", SAMPLE, "--limit", 6)
    assert "no answer: 10 x judge failed: RuntimeError: no answer today" in result.output
    always = f"{__name__}:AlwaysHarmful"
    result, _ = command(tmp_path, always, "--input", SAMPLE, "--limit", 20)
    assert result.exit_code == 0, result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("a run refuses this judge: ") and "specificity 0.0 %" in last
    pair = {"note_id": "a", "incorrect_note": "He has gout.", "correct_note": "He has flu."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    result, _ = command(tmp_path, always, "--input", tmp_path / "pairs.jsonl")
    assert "a run refuses this judge: the judge's specificity is unknown" in result.output


def read_by_the_oracle(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """A reader that knows the toy clinic, and cannot tell in every fifth question."""
    lines = re.findall(r"^(\d+)\| (.*)$", body["messages"][0]["content"], re.MULTILINE)
    truth = oracle(" ".join(text for _, text in lines))
    wrong = truth.errors[0][0] + 1 if truth.errors else None
    error = "abstain" if number % 5 == 4 else "present" if wrong else "absent"
    said = {"reason": "", "error": error, "sentence": wrong if error == "present" else None}
    return completion(json.dumps(said))


def read_blindly(folder: Path, reply: Any) -> tuple[Result, Path]:
    with LocalServer(reply) as server:
        judge = (f"url={server.url}/v1", "model=reader", "retries=0")
        options = ("blind.readings=2", *(f"judge_server.{option}" for option in judge))
        settings = [part for option in options for part in ("--set", option)]
        return command(folder, ORACLE, "--input", SAMPLE, "--limit", 10, *settings)


def test_the_command_measures_the_blind_reader_apart_from_the_judge(tmp_path: Path) -> None:
    done, output = read_blindly(tmp_path, read_by_the_oracle)
    assert done.exit_code == 0, done.output
    report = read_report(output)
    assert report.reader is not None
    found = kinds(report.reader.groups)
    assert {kind: group.right.items for kind, group in found.items()} == dict.fromkeys(NOTES, 10)
    assert found["error"].right.hits >= 9  # in one of two readings
    assert found["clean"].right.hits == found["unknowable"].right.hits == 10
    assert (report.reader.specificity.hits, report.reader.specificity.items) == (20, 20)
    assert report.specificity.hits == report.specificity.items  # the gate is no part of the judge
    assert "no answer" not in done.output and "blind reader" in done.output


# --- edits by rule: each rule on its places, and on those that it must leave alone ---


RULES = HARMLESS | DRESSED
EXAMPLES = {
    "number_format": ("She takes aspirin 81 mg.", "She takes aspirin 81.0 mg."),
    "unit_spelling": ("She gets 1mg once.", "She gets 1 milligram once."),
    "wording": ("He presents to us.", "He comes to us."),
    "abbreviation": ("Magnetic resonance imaging is done.", "MRI is done."),
    "spelling": ("Diarrhea began.", "Diarrhoea began."),
    "case": ("He has severe pain.", "He has SEVERE pain."),
}
LEFT_ALONE = {
    "number_format": "Take 5-10 mg. | Pressure is 120/80 mm Hg. | Give 1,000 mg. | On day 3.",
    "unit_spelling": "Creatinine is 1.2 mg/dL. | The mg is unknown. | A 5 mgx note.",
    "abbreviation": "G-DVT-1 is new. | He has MS and PE. | BP is 120.",
    "spelling": "He is well. | Angioedema-like.",
    "case": "Give 50 units. | A PE is seen.",
    "wording": "He is well. | Be prior.",
}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_harmless_rule_rewords_and_leaves_uncertain_text_alone(rule: str) -> None:
    note, expected = EXAMPLES[rule]
    assert RULES[rule](note, random.Random(0)) == expected
    for note in LEFT_ALONE[rule].split(" | "):
        assert RULES[rule](note, random.Random(0)) is None, note


KNEE = "A 54-year-old man has a swollen left knee since 5 days ago. Gout is likely."
UNDECIDED = [
    ("age", r"A 5[1267]-year-old man", " He is old for his age of 54."),
    ("side", "right knee", " The left knee is warm."),
    ("time", r"since [2-46-9] days ago", " It began long ago."),
]


@pytest.mark.parametrize(("rule", "changed", "decided"), UNDECIDED)
def test_a_rule_changes_one_fact_that_nothing_else_in_it_decides(
    rule: str, changed: str, decided: str
) -> None:
    after = UNKNOWABLE[rule](KNEE, random.Random(0))
    assert after is not None and re.search(changed, after)
    edit = measure(KNEE, after, edit_between(KNEE, number_sentences(KNEE), after))
    assert (edit.sentences, edit.words) == (1, 1)
    assert UNKNOWABLE[rule](KNEE + decided, random.Random(0)) is None


@given(st.text(st.sampled_from("aA b1,.-/mg°2 or and days ECG")), st.integers(0, 3))
def test_a_rule_changes_a_note_or_has_no_place_for_it(note: str, seed: int) -> None:
    for rule in RULES.values():
        edited = rule(note, random.Random(seed))
        assert edited != note
        assert edited == rule(note, random.Random(seed))
