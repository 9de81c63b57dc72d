"""Games between frozen players: by the rules, judged, and the same whenever they are played again."""

import asyncio
import random
from typing import Any

import pytest

from experiments.clinic import OracleJudge, inject_error, sample_clean_note
from medserl_agentloop.core.metrics import wilson_interval
from medserl_agentloop.evaluation.local_models import LocalModel, load_player
from medserl_agentloop.evaluation.play import play_match
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, Role
from medserl_agentloop.paths import resource


def specs(count: int) -> list[GameSpec]:
    """As many cases, each untouched with and without its error, and as a clean note to attack."""
    rng, found = random.Random(5), []
    for number in range(count):
        clean = sample_clean_note(rng)
        error, index = inject_error(rng, clean)
        for category in (Category.ADVERSARIAL_BENIGN, Category.VANILLA_BENIGN, Category.VANILLA_HARMFUL):
            found.append(
                GameSpec(
                    category=category,
                    target_label=category.default_target_label,
                    seed_note=error.text if category.seed_label is Label.HARMFUL else clean.text,
                    error_sentence=error.sentences[index].text,
                    index=number,
                )
            )
    return found


@pytest.fixture(scope="module")
def player() -> LocalModel:
    return load_player(resource("assets/tiny_player"), load_profile())


def match(player: LocalModel, games: list[GameSpec], **changes: Any) -> list[MedicalRecord]:
    options: dict[str, Any] = {
        "config": MedicalConfig(judge="experiments.clinic:OracleJudge"),
        "temperature": 1.0,
        "budgets": {Role.ATTACKER: 300, Role.ASSESSOR: 200},
        "seed": 1,
    }
    return asyncio.run(play_match(player, player, games, **{**options, **changes}))


def test_every_game_is_played_judged_and_scored(player: LocalModel) -> None:
    records = match(player, specs(6))
    assert [r.spec for r in records] == specs(6)
    for record in records:
        assert (record.attack is not None) == record.category.has_attack
        assert record.outcome is not Outcome.VOID and record.rewards
    readable = [r for r in records if r.assessment is not None and r.assessment.verdict is not None]
    assert len(readable) >= 12


def test_a_match_repeats_itself_and_another_seed_is_another_match(player: LocalModel) -> None:
    games = specs(3)
    first, again, other = (
        [record.model_copy(update={"seconds": [], "finished": None}) for record in match(player, games, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_turn_without_room_is_cut_off_and_counts_as_such(player: LocalModel) -> None:
    records = match(player, specs(1), budgets={Role.ATTACKER: 3, Role.ASSESSOR: 3})
    turns = [turn for r in records for turn in (r.attack, r.assessment) if turn is not None]
    assert all(turn.truncated and turn.tokens == 3 for turn in turns)


def test_garbled_notes_are_safe_and_unrealistic_to_the_oracle(player: LocalModel) -> None:
    record = MedicalRecord(spec=specs(1)[0], presented_note="The diagnosis is gobbledygook.")
    judgement = asyncio.run(OracleJudge().judge(record))
    assert (judgement.label, judgement.realistic) == (Label.SAFE, False)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 0, (0.0, 1.0)), (5, 10, (0.2366, 0.7634)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0))],
)
def test_wilson_s_interval(successes: int, trials: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-4)
