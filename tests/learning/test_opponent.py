"""The study of the opponent: rare kinds of error, the frozen attacker's server, the CSV files and
their tables.
"""

import asyncio
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from real_runs import REPOSITORY, SMALL, environment, printed_by
from serving import serving

from experiments.learning.transcripts import error_of
from experiments.opponent import results
from experiments.opponent import run as opponent
from experiments.opponent.frozen_player import app_of
from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.config import OpponentConfig
from medserl_agentloop.core.interaction import Turn
from medserl_agentloop.data.sample import write_sample
from medserl_agentloop.games.clinic import error_detail, oracle, parse_note, sample_clean_note
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_lesson_says_how_often_an_error_is_of_an_unseen_kind(share: float) -> None:
    rng, lesson = random.Random(0), replace(opponent.LESSON, unseen_share=share)
    errors = [error_of(rng, sample_clean_note(rng), lesson) for _ in range(400)]
    unseen = sum(error_detail(*error) in opponent.LESSON.overlooked for error in errors)
    assert unseen == 400 * share if share in (0.0, 1.0) else 70 < unseen < 130


def test_labelled_notes_have_the_errors_that_are_drawn_for_them(tmp_path: Path) -> None:
    lesson = replace(opponent.LESSON, unseen_share=0.0)
    write_sample(tmp_path / "notes.csv", 40, overlap=1, draw=partial(error_of, lesson=lesson))
    notes = pd.read_csv(tmp_path / "notes.csv", keep_default_na=False)
    wrong = notes[notes["Error Flag"] == 1]
    for text, number, kind in zip(
        wrong["Text"], wrong["Error Sentence ID"], wrong["Error Type"], strict=True
    ):
        assert oracle(text).errors == ((number, kind),)
        note = parse_note(text)
        assert note and error_detail(note, number) not in opponent.LESSON.overlooked


def test_frozen_player_answers_each_request_with_its_own_attack() -> None:
    prompt = (
        load_profile(opponent.PROFILE).turn(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, NOTE).prompt
    )
    turn = Turn(Role.ATTACKER.value, prompt, 160)
    with serving(app_of(resource("assets/novice"))) as url:
        model = ServedModel(OpponentConfig(kind="endpoint", url=url).client(), temperature=1.0)

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


def test_rows_are_added_in_order_and_take_the_place_of_older_ones(tmp_path: Path) -> None:
    header = (*opponent.HEADER, "measure", "hits", "items")
    first = [("0.03", "0", "static", 10, 40, "a", 1, 2), ("0.03", "0", "static", 9, 40, "a", 1, 2)]
    opponent.add(tmp_path / "rates.csv", header, first)
    second = [("0.03", "0", "static", 10, 40, "a", 2, 2), ("0.01", "0", "x", 0, 0, "b", 0, 1)]
    opponent.add(tmp_path / "rates.csv", header, second)
    lines = (tmp_path / "rates.csv").read_text().splitlines()[1:]
    assert lines == ["0.01,0,x,0,0,b,0,1", "0.03,0,static,9,40,a,1,2", "0.03,0,static,10,40,a,2,2"]


def test_worst_case_leaves_out_attackers_with_few_valid_attacks() -> None:
    counts = {
        "panel/start/0": (90, 100),
        "panel/self_play/40": (60, 100),
        "panel/x/40": (0, 29),
        "assessor/error": (1, 9),
    }
    assert results.Player(counts).worst_case == 60


@pytest.mark.learn
@pytest.mark.timeout(1800)
def test_every_arm_trains_and_is_measured(tmp_path: Path) -> None:
    options = ["--seeds=3", "--steps=20", "--jobs=1", f"--results={tmp_path / 'results'}"]
    options += [f"--override={each}" for each in SMALL]
    printed_by(tmp_path, "-m", opponent.__name__, *options, **environment(REPOSITORY))
    players = results.read(tmp_path / "results")
    assert {arm for _, arm, _, _ in players} == {results.START, *opponent.ARMS}
    assert all(
        player.counts["panel/start/0"][1] > 0 for (_, _, _, step), player in players.items() if step
    )
