"""The game as an interaction: the shape verl's interactions had, with text alone."""

import asyncio
from typing import Any

import pytest
from support import NOTE, REWRITTEN, assessment_text, attack_text, extra_info

from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "prompt"}, {"role": "assistant", "content": text}]


async def play(interaction: MedicalGameInteraction, *turns: str, category: str = "adversarial_benign") -> list[Any]:
    game = await interaction.start_interaction("g", extra_info=extra_info(category))
    answers = [await interaction.generate_response(game, said(turn)) for turn in turns]
    return [*answers, await interaction.calculate_score(game)]


def test_the_attackers_note_becomes_the_assessors_observation() -> None:
    interaction = MedicalGameInteraction(MedicalConfig())
    first, last, _ = asyncio.run(play(interaction, attack_text(), assessment_text()))
    [message] = load_profile("medserl").messages(Role.ASSESSOR, Category.ADVERSARIAL_BENIGN, REWRITTEN)
    assert first == (False, message["content"], 0.0, {"role": Role.ASSESSOR})
    assert last == (True, "", 0.0, {"role": None})


@pytest.mark.parametrize(("verdict", "score"), [("harmful", 0.0), ("safe", 0.0)])
def test_a_zero_sum_game_scores_zero_for_both_together(verdict: str, score: float) -> None:
    interaction = MedicalGameInteraction(MedicalConfig(reward="zero_sum"))
    assert asyncio.run(play(interaction, attack_text(), assessment_text(verdict)))[-1] == score


def test_an_invalid_attack_is_over_at_once_and_costs_the_attacker() -> None:
    interaction = MedicalGameInteraction(MedicalConfig(reward="zero_sum"))
    answer, score = asyncio.run(play(interaction, attack_text(NOTE)))
    assert answer[0] is True
    assert score == -1.0


def test_whose_turn_it_is_and_what_they_read() -> None:
    interaction = MedicalGameInteraction(MedicalConfig())

    async def turns() -> list[Any]:
        game = await interaction.start_interaction(extra_info=extra_info("adversarial_benign"))
        seen = [interaction.turn(game)]
        for text in (attack_text(), assessment_text()):
            await interaction.generate_response(game, said(text))
            seen.append(interaction.turn(game))
        return seen

    assert asyncio.run(turns()) == [(Role.ATTACKER, NOTE), (Role.ASSESSOR, REWRITTEN), None]


def test_a_void_game_scores_nothing() -> None:
    interaction = MedicalGameInteraction(MedicalConfig())

    async def score() -> float:
        game = await interaction.start_interaction(extra_info=extra_info("vanilla_benign"))
        interaction.make_void(game, "the engine is gone")
        return await interaction.calculate_score(game)

    assert asyncio.run(score()) == 0.0


def test_two_games_of_one_name_are_refused_until_the_first_is_forgotten() -> None:
    interaction = MedicalGameInteraction(MedicalConfig())

    async def twice() -> None:
        await interaction.start_interaction("g", extra_info=extra_info("vanilla_benign"))
        with pytest.raises(ValueError, match="'g' is in progress"):
            await interaction.start_interaction("g", extra_info=extra_info("vanilla_benign"))
        await interaction.finalize_interaction("g")
        await interaction.start_interaction("g", extra_info=extra_info("vanilla_benign"))

    asyncio.run(twice())
