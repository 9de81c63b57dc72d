"""The study of the opponent: rare kinds of error, the frozen attacker's server, the CSV files and
their tables.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from game.builders import finished
from medec.builders import run as in_this_process
from real_runs import REPOSITORY, SMALL, environment, printed_by
from serving import serving

from experiments.opponent import clinic, frozen_player, results
from experiments.opponent import run as opponent
from experiments.opponent.frozen_player import SEARCHED_FILE, Searcher, app_of
from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.config import OpponentConfig
from medserl_agentloop.core.interaction import Reply, Turn
from medserl_agentloop.core.step_file import LATEST
from medserl_agentloop.data.sample import write_sample
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.paths import resource


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


@pytest.mark.learn
@pytest.mark.timeout(1800)
def test_every_arm_trains_and_is_measured(tmp_path: Path) -> None:
    options = ["--starts=3", "--steps=5", f"--results={tmp_path / 'results'}"]
    options += [f"--override={each}" for each in SMALL]
    printed_by(tmp_path, "-m", opponent.__name__, *options, **environment(REPOSITORY))
    found = results.recall(tmp_path / "results")
    assert set(found.columns) == set(results.ARMS)
