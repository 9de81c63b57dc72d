"""The study of the opponent: rare kinds of error, the frozen attacker's server, the CSV files and
their tables.
"""

import asyncio
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from game.builders import finished
from medec.builders import run as in_this_process
from real_runs import REPOSITORY, SMALL, environment, printed_by
from serving import serving

from experiments.learning.transcripts import error_of
from experiments.opponent import clinic, frozen_player, picture, results
from experiments.opponent import run as opponent
from experiments.opponent.frozen_player import SEARCHED_FILE, Searcher, app_of
from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.config import OpponentConfig
from medserl_agentloop.core.interaction import Reply, Turn
from medserl_agentloop.core.step_file import LATEST
from medserl_agentloop.data.sample import write_sample
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.clinic import error_detail, oracle, parse_note, sample_clean_note
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.paths import resource


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_lesson_says_how_often_an_error_is_of_an_unseen_kind(share: float) -> None:
    rng, lesson = random.Random(0), replace(clinic.LESSON, unseen_share=share)
    errors = [error_of(rng, sample_clean_note(rng), lesson) for _ in range(400)]
    unseen = sum(error_detail(*error) in clinic.LESSON.overlooked for error in errors)
    assert unseen == 400 * share if share in (0.0, 1.0) else 70 < unseen < 130


def test_labelled_notes_have_the_errors_that_are_drawn_for_them(tmp_path: Path) -> None:
    lesson = replace(clinic.LESSON, unseen_share=0.0)
    write_sample(tmp_path / "notes.csv", 40, overlap=1, draw=partial(error_of, lesson=lesson))
    notes = pd.read_csv(tmp_path / "notes.csv", keep_default_na=False)
    wrong = notes[notes["Error Flag"] == 1]
    for text, number, kind in zip(
        wrong["Text"], wrong["Error Sentence ID"], wrong["Error Type"], strict=True
    ):
        assert oracle(text).errors == ((number, kind),)
        note = parse_note(text)
        assert note and error_detail(note, number) not in clinic.LESSON.overlooked


def test_frozen_player_answers_each_request_with_its_own_attack() -> None:
    prompt = (
        load_profile(clinic.PROFILE).turn(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, NOTE).prompt
    )
    turn = Turn(Role.ATTACKER.value, prompt, 160)
    with serving(app_of(resource("assets/novice"))) as url:
        model = ServedModel(OpponentConfig(url=url).client(), temperature=1.0)
        asyncio.run(model.check())

        async def ask() -> list[str]:
            replies = await asyncio.gather(*(model.reply(turn, prompt.messages) for _ in range(12)))
            return [reply.text for reply in replies]

        texts = asyncio.run(ask())
    assert len(set(texts)) > 6
    assert sum(MEDSERL.attack(text).note is not None for text in texts) >= 10


NOTE = (
    "A 42-year-old woman has dysuria. The diagnosis is cystitis. We ordered urinalysis. Nurses "
    "began hydration."
)


def test_search_answers_with_a_valid_attack_that_the_newest_assessor_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of games whose outcome is known; the assessor is the run's newest checkpoint."""
    write_sample(tmp_path / "notes.csv", 6, overlap=1)
    files = ("--input", tmp_path / "notes.csv", "--output", tmp_path, "--val-fraction", 0)
    done = in_this_process("medec_to_parquet", *files, "--mix", "adversarial_benign=1")
    assert done.exit_code == 0, done.output
    run, novice = tmp_path / "run", load_player(resource("assets/novice"))
    run.mkdir()
    loaded: list[Path] = []
    monkeypatch.setattr(frozen_player, "load_player", lambda at: loaded.append(at) or novice)
    searcher = Searcher(novice, tmp_path / "train.parquet", run, draws=4)
    assert searcher.newest_assessor() is novice and not loaded
    (run / LATEST).write_text("5")
    assert searcher.newest_assessor() is novice and loaded == [run / "global_step_5"]

    outcomes = iter([Outcome.INVALID_ATTACK, Outcome.CORRECT_DETECTION, Outcome.MISSED_ERROR] * 2)

    async def play(facts: Any, assessor: Any, number: int) -> tuple[MedicalRecord, Reply]:
        judgement = Judgement(judge="oracle", label=Label.HARMFUL, realistic=True)
        outcome = next(outcomes)
        record = finished(outcome, category="adversarial_benign", judgement=judgement)
        return record, Reply(outcome.value)

    monkeypatch.setattr(searcher, "_play", play)
    searcher.draws = 3
    messages = json.loads(next(iter(searcher._facts)))
    for number in range(2):
        assert asyncio.run(searcher.answer(messages, number)).text == "missed_error"
    searched = (run / SEARCHED_FILE).read_text().splitlines()
    assert json.loads(searched[0]) == {"step": 5, "attacks": 3, "assessed": 2, "missed": 1}


def test_attacks_of_a_step_are_counted_by_what_the_judge_says() -> None:
    def attack(kind: str, outcome: Outcome, label: Label = Label.HARMFUL) -> MedicalRecord:
        judged = Judgement(judge="oracle", label=label, realistic=True, error_type=kind)
        return finished(outcome, category="adversarial_benign", judgement=judged)

    games = [
        attack("dose", Outcome.MISSED_ERROR),
        attack("treatment", Outcome.CORRECT_DETECTION),
        attack("drug", Outcome.CORRECT_DETECTION),
        attack("drug", Outcome.CORRECT_REJECTION, Label.SAFE),
        finished(Outcome.INVALID_ATTACK, category="adversarial_benign"),
        finished(Outcome.CORRECT_REJECTION, category="decoy_benign"),
    ]
    counts = opponent.attacks_of(games)
    assert {name: counts[name] for name in opponent.STEPS[4:10]} == {
        "attacker_turns": 6,
        "valid_attacks": 3,
        "unseen_shown": 2,
        "unseen_found": 1,
        "doses_shown": 1,
        "assessments": 5,
    }


def test_rows_are_added_in_order_and_take_the_place_of_older_ones(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    first = [("0.03", 12, "static", 10, "a", 1, 2), ("0.03", 12, "static", 5, "a", 1, 2)]
    opponent.add(file, opponent.RATES, first)
    second = [("0.03", 12, "static", 10, "a", 2, 2), ("0.01", 12, "search", 0, "b", 0, 1)]
    opponent.add(file, opponent.RATES, second)
    lines = file.read_text().splitlines()[1:]
    assert lines == ["0.01,12,search,0,b,0,1", "0.03,12,static,5,a,1,2", "0.03,12,static,10,a,2,2"]


def study(folder: Path, gains: dict[str, float]) -> None:
    """CSV files of a whole study; an arm finds so many points more than ``static`` at each step."""
    rates, steps = [], []
    for number, start in enumerate(range(12, 28)):
        for arm, gain in gains.items():
            for step in range(0, 61, 5):
                hits = round(300 + 10 * (number % 3 - 1) + gain * 10 * (step > 0))
                rates.append(("0.03", start, arm, step, "assessor/error/treatment", hits, 1000))
                rates.append(("0.03", start, arm, step, "assessor/clean", 99, 100))
                if step:
                    steps.append(("0.03", start, arm, step, 64, 40, 2, 1, 1, 60, 0, 0, "5.00"))
    opponent.add(folder / "study_rates.csv", opponent.RATES, rates)
    opponent.add(folder / "study_steps.csv", opponent.STEPS, steps)
    (folder / "rates.csv").write_bytes((results.FIGURES / "rates.csv").read_bytes())


def test_contrasts_say_yes_no_or_open_as_the_plan_does(tmp_path: Path) -> None:
    study(tmp_path, {"self_play": 20.0, "static": 0.0, "search": 19.0, "optimism": 20.5})
    made = results.contrasts(tmp_path)
    assert [row[-1] for row in made[1:]] == ["yes", "yes", "yes"]
    assert results.verdict(-3.0, 4.0) == "no" and results.verdict(-3.0, 12.0) == "open"
    average = results.time_average(tmp_path)
    assert average.loc[12, "self_play"] == pytest.approx((29.0 + 12 * 49.0) / 13)
    assert "contrasts_3" in results.tables(tmp_path)


def test_doses_are_counted_among_the_attacks_of_ten_steps(tmp_path: Path) -> None:
    steps = [
        ("0", seed, "optimism", step, 64, 40, 30, 15, 10 * seed * (step > 90), 60, 0, 0, "5.00")
        for seed in (1, 3)
        for step in range(1, 101)
    ]
    opponent.add(tmp_path / "study_steps.csv", opponent.STEPS, steps)
    assert results.dead_table(tmp_path)[1:] == [
        ["`optimism`", "2", "0 (0 to 0)", "50 (25 to 75)", "50 (50 to 50)"]
    ]


def test_the_picture_is_drawn_from_the_committed_counts(tmp_path: Path) -> None:
    picture.draw(output=tmp_path / "study.svg")
    assert (tmp_path / "study.svg").read_bytes() == (results.FIGURES / "study.svg").read_bytes()


def test_an_interval_stays_in_the_range_of_its_quantity() -> None:
    mean, low, high, p = results.interval([1.0, 2.0, 3.0], 0.05)
    assert (mean, p) == (2.0, pytest.approx(0.0742, abs=1e-4)) and low < 0 < high
    wide = results.interval([99.0, -99.0, 99.0], 0.05)
    assert wide[1:3] == (-100.0, 100.0), "no interval leaves the range of its quantity"


@pytest.mark.learn
@pytest.mark.timeout(1800)
def test_every_arm_trains_and_is_measured(tmp_path: Path) -> None:
    options = ["--starts=3", "--steps=5", f"--results={tmp_path / 'results'}"]
    options += [f"--override={each}" for each in SMALL]
    printed_by(tmp_path, "-m", opponent.__name__, *options, **environment(REPOSITORY))
    found = results.recall(tmp_path / "results")
    assert set(found.columns) == set(results.ARMS)
