"""The driver on the medical game: who is asked what, what their text does, and what the game is worth."""

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from support import NOTE, REWRITTEN, assessment_text, attack_text, extra_info

from medserl_agentloop.core.interaction import Message, NoReplyError, Reply, Turn, play_game
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Category, Role


class Scripted:
    """Says what it is told to say, and remembers what it was asked; an exception is raised."""

    name = "scripted"

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[Turn, list[Message]]] = []

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        self.asked.append((turn, list(messages)))
        said = self.replies.pop(0)
        if isinstance(said, Exception):
            raise said
        return Reply(said)


def play(*replies: Any) -> tuple[MedicalRecord, Scripted]:
    interaction, player = MedicalGameInteraction(MedicalConfig()), Scripted(*replies)
    game = interaction.new_game(extra_info("adversarial_benign"))

    async def whole_game() -> None:
        await play_game(interaction, game, dict.fromkeys(interaction.roles, player))
        await interaction.score(game.record)

    asyncio.run(whole_game())
    return game.record, player


def test_the_attackers_note_becomes_what_the_assessor_reads_and_the_record_says_who_played_and_when() -> None:
    record, player = play(attack_text(), assessment_text())
    assert [turn.role for turn, _ in player.asked] == [Role.ATTACKER, Role.ASSESSOR]
    assert [turn.prompt.data["note"] for turn, _ in player.asked] == [NOTE, REWRITTEN]
    expected = load_profile("medserl").messages(Role.ASSESSOR, Category.ADVERSARIAL_BENIGN, REWRITTEN)
    assert player.asked[1][1] == expected
    assert record.players == dict.fromkeys(Role, "scripted")
    assert record.finished is not None and record.finished.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - record.finished) < timedelta(minutes=5)
    assert len(record.seconds) == 2 and min(record.seconds) >= 0
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.to_json()["finished"])


def test_a_player_without_an_answer_makes_the_game_void_and_earns_nothing() -> None:
    record, _ = play(attack_text(), NoReplyError("the engine is gone"))
    assert (record.void, record.rewards) == ("the engine is gone", {})
