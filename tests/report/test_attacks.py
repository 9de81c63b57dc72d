"""The ledger of a run's attacks: every attack in one class, what it exports, and that model text does no harm in it."""

import csv
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from evaluation.mock_server import MODEL, mock_server
from game.builders import CLEAN_NOTE, HARMFUL_ANSWER, SAFE_ANSWER, any_game, attack_text, finished, game, spec
from hypothesis import given
from support import assessment_text
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.step_file import GAMES_FILE, StepFile
from medserl_agentloop.games.medical.clinic import Split, inject_error, oracle, reworded, sample_clean_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome, Vote
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.games.medical.types import Category, GameSpec, Label
from medserl_agentloop.report.attacks import MEANINGS, Kind, kind_of
from medserl_agentloop.scoring.notes import read_reference

DOCS = Path(__file__).parents[2] / "docs"
FILES = {
    "README.md", "ledger.csv", "patterns.csv", "hard_notes.csv", "panel.csv", "sheet.html", "sheet.csv", "sheet_key.csv"
}  # fmt: skip


def votes(*labels: Label | None) -> Judgement:
    said = [Vote(model="m", edited_first=False, label=label) for label in labels]
    return Judgement(judge="llm", label=Label.HARMFUL, votes=said)


HARMFUL, SAFE = Label.HARMFUL, Label.SAFE
CLASSES = [
    (finished(Outcome.INVALID_ATTACK, attack={"invalid": InvalidAttack.UNCHANGED}), Kind.NO_OP),
    (finished(Outcome.INVALID_ATTACK), Kind.INVALID),
    (finished(Outcome.INVALID_ATTACK, void="the assessor failed"), Kind.INVALID),
    (finished(Outcome.VOID, void="judge abstained"), Kind.AMBIGUOUS),
    (finished(Outcome.VOID, void="error not knowable: found in 0 of 3 readings"), Kind.AMBIGUOUS),
    (finished(Outcome.MISSED_ERROR, judgement=votes(HARMFUL, SAFE, HARMFUL)), Kind.AMBIGUOUS),
    (finished(Outcome.MISSED_ERROR, judgement=votes(HARMFUL, None)), Kind.UNDETECTED),
    (finished(Outcome.VOID), Kind.UNDECIDED),
    (finished(Outcome.UNREADABLE), Kind.UNDECIDED),
    (finished(Outcome.CORRECT_REJECTION), Kind.HARMLESS),
    (finished(Outcome.FALSE_POSITIVE), Kind.HARMLESS),
    (finished(Outcome.CORRECT_REJECTION, category="adversarial_harmful"), Kind.HARMLESS),
    (finished(Outcome.UNREADABLE, category="decoy_benign"), Kind.DECOY),
    (finished(Outcome.FALSE_POSITIVE, category="decoy_benign"), Kind.DECOY),
    (finished(Outcome.MISSED_ERROR, category="decoy_benign"), Kind.UNDETECTED),
    (finished(Outcome.CORRECT_DETECTION), Kind.VALID),
    (finished(Outcome.MISSED_ERROR, category="adversarial_harmful"), Kind.UNDETECTED),
]


def played(
    note: str, answer: str = SAFE_ANSWER, *, label: Label = HARMFUL, step: int = 1, **facts: Any
) -> MedicalRecord:
    """A game whose attacker wrote ``note``, judged."""
    one = game(facts.pop("category", "adversarial_benign"), **{"text_id": "ms-train-7", **facts})
    one.play(attack_text(note))
    if one.next_role is not None:
        one.play(answer)
        one.record.judgement = Judgement(judge="llm", label=label)
    one.record.step = step
    return one.record


def attacks(records: list[MedicalRecord], folder: Path, *more: Any) -> Result:
    run = folder / "run"
    StepFile(run / GAMES_FILE).append(record.to_json() for record in records)
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["attacks", str(run), "-o", str(folder / "ledger"), *map(str, more)]
    )


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "ledger" / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("record", "kind"), CLASSES)
def test_an_attack_has_the_class_that_its_record_says(record: MedicalRecord, kind: Kind) -> None:
    assert kind_of(record) is kind


@given(any_game())
def test_every_attack_has_a_class_and_undetected_means_that_an_error_was_missed(record: MedicalRecord) -> None:
    if record.attack is not None:
        kind = kind_of(record)
        assert (kind is Kind.UNDETECTED) == (record.outcome is Outcome.MISSED_ERROR)
        assert (kind is Kind.VALID) == (record.outcome is Outcome.CORRECT_DETECTION)


def test_the_counts_add_up_to_the_games_with_an_attack(tmp_path: Path) -> None:
    copy = finished(Outcome.INVALID_ATTACK, category="vanilla_benign", attack={"invalid": InvalidAttack.NOT_COPIED})
    untouched = finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful")
    done = attacks([untouched, copy, *(record for record, _ in CLASSES)], tmp_path)
    assert done.exit_code == 0 and done.output.startswith(f"{len(CLASSES)} attacks: 1 no-op, 2 invalid, 3 ambiguous")
    assert {path.name for path in (tmp_path / "ledger").iterdir()} == FILES
    rows = table(tmp_path, "ledger.csv")
    assert [int(row["game"]) for row in rows] == list(range(3, len(CLASSES) + 3))
    assert [row["class"] for row in rows] == [kind.value for _, kind in CLASSES]
    text = (tmp_path / "ledger" / "README.md").read_text()
    found = dict(re.findall(r"^\| ([\w-]+) \| (\d+) \|", text, re.MULTILINE))
    assert int(found.pop("all")) == len(CLASSES) == sum(map(int, found.values()))
    assert "19 games, 17 with an attack; 1 copies of untouched notes" in text


def test_the_page_and_the_readme_explain_the_classes_alike() -> None:
    text = (DOCS / "attacks.md").read_text().partition("## Classes")[2]
    rows = re.findall(r"^\| ([\w-]+) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [("class", "meaning"), *((kind.value, text) for kind, text in MEANINGS.items())]


def test_the_same_edit_in_other_notes_and_other_spelling_is_one_pattern(tmp_path: Path) -> None:
    other = "A man has fever. Then HEPARIN was given."
    records = [
        played(CLEAN_NOTE.replace("heparin", "warfarin"), step=2),
        played(CLEAN_NOTE.replace("heparin", "Warfarin"), HARMFUL_ANSWER, step=5),
        played("A man has fever. Then warfarin was given.", step=9, seed_note=other, vignette_id="other"),
        played(CLEAN_NOTE.replace("500", "5,000")),
        played(CLEAN_NOTE),
    ]
    attacks(records, tmp_path)
    first, second = table(tmp_path, "patterns.csv")
    assert first["edit"] == "heparin -> warfarin" and second["edit"] == "500 -> 5000"
    assert [first[c] for c in ("attacks", "cases", "first_step", "last_step")] == ["3", "2", "2", "9"]
    assert (first["undetected_share"], first["undetected"], first["valid"]) == ("0.6667", "2", "1")
    assert [row["pattern"] for row in table(tmp_path, "ledger.csv")] == ["1", "1", "1", "2", ""]


def test_hard_notes_can_be_evaluated_with_their_twins(tmp_path: Path) -> None:
    missed = played(CLEAN_NOTE.replace("heparin", "warfarin"))
    records = [
        missed,
        missed,
        played(CLEAN_NOTE.replace("heparin", "insulin"), HARMFUL_ANSWER),
        played(CLEAN_NOTE.replace("500", "5000"), label=SAFE),
        played(spec("adversarial_harmful").seed_note.replace("500", "5000"), category="adversarial_harmful"),
    ]
    attacks(records, tmp_path)
    notes = tmp_path / "ledger" / "hard_notes.csv"
    injected, worsened = read_reference([notes]).notes
    assert (injected.text_id, injected.flag, injected.subset) == ("ms-train-7-hard-1", True, "medec_ms")
    assert injected.text == missed.presented_note and injected.error_type is None
    assert injected.sentences[injected.sentence_id].text == "She receives warfarin 500 units."
    assert injected.correction == worsened.correction == "She receives heparin 500 units."
    assert worsened.sentences[worsened.sentence_id].text == "She receives warfarin 5000 units."
    assert [row["hard_note"] for row in table(tmp_path, "ledger.csv")] == [
        "ms-train-7-hard-1", "ms-train-7-hard-1", "", "", "ms-train-7-hard-2"
    ]  # fmt: skip
    with mock_server(lambda prompt: assessment_text("safe")) as server:
        command = ["evaluate", server.url, "--model", MODEL, "--notes", str(notes), "--twins", "--output"]
        done = CliRunner().invoke(app, [*command, str(tmp_path / "evaluation")])
    assert done.exit_code == 0, done.output


def test_notes_that_are_as_asked_become_validation_rows_of_their_own(tmp_path: Path) -> None:
    records = [
        played(CLEAN_NOTE.replace("heparin", "warfarin")),
        played(CLEAN_NOTE.replace("heparin", "insulin"), HARMFUL_ANSWER),
        played(CLEAN_NOTE.replace("She receives", "She is given"), category="decoy_benign", label=SAFE),
        played(CLEAN_NOTE.replace("500", "5000"), label=SAFE),
    ]
    attacks(records, tmp_path)
    panel, rows = tmp_path / "ledger" / "panel.csv", tmp_path / "panel.parquet"
    assert [(note.text, note.flag) for note in read_reference([panel]).notes] == [
        (record.presented_note, record.label is not SAFE) for record in records[:3]
    ]
    done = CliRunner().invoke(app, ["data", "eval", "--input", str(panel), "--name", "panel", "--output", str(rows)])
    assert done.exit_code == 0, done.output
    sources = pq.read_table(rows)["data_source"].to_pylist()
    assert sources == ["panel_eval/vanilla_harmful"] * 2 + ["panel_eval/vanilla_benign"]


def test_hard_notes_made_from_medec_uw_stay_under_its_agreement(tmp_path: Path) -> None:
    attacks([played(CLEAN_NOTE.replace("heparin", "warfarin"), text_id="uw-train-3")], tmp_path)
    (note,) = read_reference([tmp_path / "ledger" / "hard_notes.csv"]).notes
    assert note.subset == "medec_uw"
    assert "1 notes of `panel.csv` are made from MEDEC-UW" in (tmp_path / "ledger" / "README.md").read_text()


def test_a_note_that_no_reader_takes_is_left_out_and_counted(tmp_path: Path) -> None:
    done = attacks([played(CLEAN_NOTE.replace("heparin", "warf\ud800arin"))], tmp_path)
    assert done.exit_code == 0 and "1 undetected" in done.output, done.output
    assert table(tmp_path, "hard_notes.csv") == []
    text = (tmp_path / "ledger" / "README.md").read_text()
    assert "**What:** 0 notes" in text and re.search(r"\*\*Left out:\*\* 1 x .*lone surrogate", text)


def test_cells_of_sheets_run_nothing_and_show_control_characters(tmp_path: Path) -> None:
    seed = '=HYPERLINK("http://x")\u202e. She <img src=x onerror=alert(1)> receives\x1b[31m heparin.'
    formula = played(seed.replace("heparin", "warfarin"), seed_note=seed, vignette_id="@SUM(1)")
    assert attacks([formula], tmp_path).exit_code == 0
    (line,), (pair,) = table(tmp_path, "ledger.csv"), table(tmp_path, "sheet.csv")
    assert line["case"] == "'@SUM(1)"
    for note in (pair["note_a"], pair["note_b"]):
        assert note.startswith('\'=HYPERLINK("http://x")\\u202e.') and "receives\\x1b[31m" in note
    page = (tmp_path / "ledger" / "sheet.html").read_text()
    assert "&lt;img src=x" in page and "<img" not in page and "\x1b" not in page


def many(count: int) -> list[MedicalRecord]:
    notes = [CLEAN_NOTE.replace("52", str(20 + n)) for n in range(count)]
    return [
        played(note.replace("heparin", f"{drug}"), (SAFE_ANSWER, HARMFUL_ANSWER)[n % 2], seed_note=note)
        for n, note in enumerate(notes)
        for drug in ("warfarin", "insulin")
    ]


def test_the_sheet_is_blind_and_has_a_case_once(tmp_path: Path) -> None:
    records = many(20)
    attacks(records, tmp_path, "--sheet", 12, "--seed", 3)
    pairs, key = table(tmp_path, "sheet.csv"), table(tmp_path, "sheet_key.csv")
    assert len(pairs) == len(key) == 12
    assert list(pairs[0]) == ["item", "note_a", "note_b", "error", "matters", "visible", "remarks"]
    seeds = [row[f"note_{row['original'].lower()}"] for row in [{**k, **p} for k, p in zip(key, pairs, strict=True)]]
    assert seeds == [records[int(row["game"]) - 1].spec.seed_note for row in key] and len(set(seeds)) == 12
    assert {row["original"] for row in key} == {"A", "B"}
    page = (tmp_path / "ledger" / "sheet.html").read_text()
    assert not re.search("attack|harmful|reward|judge|original|verdict", page, re.IGNORECASE)
    (tmp_path / "again").mkdir()
    attacks(records, tmp_path / "again", "--sheet", 12, "--seed", 3)
    assert table(tmp_path / "again", "sheet.csv") == pairs


def test_a_folder_with_files_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "sheet.csv").write_text("filled in")
    done = attacks(many(1), tmp_path)
    assert done.exit_code == 2 and "already holds files" in done.output
    assert (tmp_path / "ledger" / "sheet.csv").read_text() == "filled in"


@pytest.mark.parametrize(
    ("records", "more", "message"),
    [
        ([finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful")], [], "none of its 1 games has an attack"),
        ([finished(Outcome.MISSED_ERROR)], ["--set", "judge_server.votes=2"], "--set belongs to --judge"),
        ([finished(Outcome.MISSED_ERROR)], ["--judge", "orakel"], "no judge 'orakel'"),
        ([finished(Outcome.MISSED_ERROR)], ["--judge", f"{__name__}:Broken"], "answered none of 1 questions"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    tmp_path: Path, records: list[MedicalRecord], more: list[str], message: str
) -> None:
    done = attacks(records, tmp_path, *more)
    assert done.exit_code == 2 and message in done.output and not (tmp_path / "ledger").exists()


class Broken:
    name = "broken"

    async def judge(self, record: MedicalRecord) -> Judgement:
        raise RuntimeError("out of order")


def toy_games(count: int, harmless: float, seed: int = 0) -> list[MedicalRecord]:
    """Games of the toy clinic as a run without edit limits and without a reading judge records them."""
    rng, records = random.Random(seed), []
    limits = EditLimits(max_changed_sentences=100, max_changed_words=1000)
    for n in range(count):
        clean = sample_clean_note(rng, Split.ANY)
        changed = clean
        for index in rng.sample(range(1, len(clean.sentences)), rng.randint(1, 2)):
            changed = reworded(rng, changed, index)
        if rng.random() >= harmless:
            changed, _ = inject_error(rng, changed)
        facts = GameSpec(Category.ADVERSARIAL_BENIGN, HARMFUL, clean.text, clean_note=clean.text, text_id=f"toy-{n}")
        one = MedicalGame(replace(facts, vignette_id=f"toy-{n}"), limits, MEDSERL)
        one.play(attack_text(changed.text))
        assert one.next_role is not None
        one.play(rng.choice([SAFE_ANSWER, HARMFUL_ANSWER]))
        one.record.judgement = Judgement(judge="labels", label=HARMFUL)
        one.record.step = n
        records.append(one.record)
    return records


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_judge_that_reads_finds_the_harmless_attacks_of_a_run_that_believed_its_labels(
    tmp_path: Path, share: float
) -> None:
    records = toy_games(150, share)
    truth = {n for n, r in enumerate(records, start=1) if oracle(r.presented_note or "").label is SAFE}
    assert abs(len(truth) / len(records) - share) < 0.1
    (tmp_path / "believed").mkdir()
    attacks(records, tmp_path / "believed")
    assert {row["class"] for row in table(tmp_path / "believed", "ledger.csv")} == {"valid", "undetected"}
    assert "reads no note" in (tmp_path / "believed" / "ledger" / "README.md").read_text()
    attacks(records, tmp_path, "--judge", "oracle")
    found = {int(row["game"]) for row in table(tmp_path, "ledger.csv") if row["class"] == "harmless"}
    assert len(found & truth) >= 0.99 * len(truth) and not found - truth


def test_a_judge_that_is_asked_again_decides_games_that_the_first_one_left_open(tmp_path: Path) -> None:
    records = toy_games(4, 0.0)
    for record, void in zip(
        records, ["judge failed: no", "judge abstained", "error not knowable: 0 of 3", "no engine"], strict=True
    ):
        record.void = void
    attacks(records, tmp_path, "--judge", "oracle")
    *decided, lost = [row["class"] for row in table(tmp_path, "ledger.csv")]
    assert set(decided) <= {"valid", "undetected"} and lost == "undecided"


def test_the_answers_of_the_page_are_read_back(browser: Any, tmp_path: Path) -> None:
    attacks(many(3), tmp_path, "--sheet", 3)
    context = browser.new_context(offline=True, accept_downloads=True)
    view = context.new_page()
    complaints: list[str] = []
    view.on("console", lambda message: complaints.append(message.text))
    view.goto((tmp_path / "ledger" / "sheet.html").as_uri())
    originals = [row["original"] for row in table(tmp_path, "sheet_key.csv")]
    for item, original in enumerate(originals, start=1):
        edited = "B" if original == "A" else "A"
        view.check(f"fieldset[data-item='{item}'] [data-column=error][value={edited}]")
        view.check(f"fieldset[data-item='{item}'] [data-column=matters][value=yes]")
    view.fill("fieldset[data-item='1'] textarea", 'a "quoted", remark')
    with view.expect_download() as download:
        view.click("button")
    download.value.save_as(tmp_path / "alice.csv")
    assert complaints == [] and "0 pairs have no answer" in view.inner_text("output")
    context.close()
    key = tmp_path / "ledger" / "sheet_key.csv"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["agreement", str(tmp_path / "alice.csv"), "--key", str(key)])
    assert done.exit_code == 0 and re.search(r"alice, the judge\s+not defined\s+100.0%\s+3", done.output), done.output
    assert "alice.csv: 3 items have no answer to visible: 1, 2, 3" in done.output
