"""Runs of other games than the medical one are shown, drawn and compared like it: what it adds is an addition."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoking import invoke

from medserl_agentloop.core.interaction import Message, Reply, Turn, play_game
from medserl_agentloop.core.step_file import CONFIG_FILE, GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.kuhn_poker import KuhnPoker
from medserl_agentloop.report import games

MOVES = [("check", "bet", "call"), ("bet", "fold"), ("<b>all in</b>\x1b[2J",)]


def played(moves: Sequence[str]) -> Any:
    interaction, left = KuhnPoker(None), iter(moves)

    async def reply(turn: Turn, messages: Sequence[Message]) -> Reply:
        return Reply(next(left), tokens=2)

    player = SimpleNamespace(name="", reply=reply)
    game = interaction.new_game({"first": "K", "second": "J"})
    asyncio.run(play_game(interaction, game, dict.fromkeys(interaction.roles, player)))
    return game.record.to_json()


PLAYED = [played(moves) for moves in MOVES]


def run(folder: Path, name: str | None = "kuhn_poker") -> Path:
    """A run of two steps of poker, whose game is called ``name``; without one, as ``medserl play`` writes games."""
    rows = ({**game, "step": step, "uid": "deal", "session": n} for step in (1, 2) for n, game in enumerate(PLAYED))
    StepFile(folder / GAMES_FILE).append(rows)
    numbers = {"selfplay/games": 3.0, "selfplay/first/reward": 0.25, "selfplay/illegal_rate": 1 / 3}
    StepFile(folder / METRICS_FILE).append({"step": step, **numbers} for step in (1, 2))
    if name:
        (folder / CONFIG_FILE).write_text(f"selfplay: {{game: '{name}'}}\n")
    return folder


@pytest.fixture(params=["kuhn_poker", "nonesuch.module:Poker", None], ids=["shipped", "not importable", "no config"])
def poker(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return run(tmp_path / "poker", request.param)


def test_the_frame_has_its_rewards_and_tokens(poker: Path) -> None:
    frame = games(poker)
    assert list(frame["first_reward"][:3]) == [2.0, 1.0, -2.0] == list(-frame["second_reward"][:3])
    assert list(frame["outcome"][:3]) == ["first earned more", "first earned more", "second earned more"]
    assert list(frame["first_tokens"][:3]) == [4, 2, 2] and list(frame["reward/second/chips"][:2]) == [-2.0, -1.0]


def test_show_prints_its_turns_rewards_and_metrics(poker: Path) -> None:
    done = invoke("show", poker, "--game", 3)
    assert done.exit_code == invoke("show", poker / GAMES_FILE).exit_code == 0, done.output
    for text in ("first · 2 tokens", "<b>all in</b>\\x1b[2J", 'moves: ["illegal"]', "second +2.00 = chips +2.00"):
        assert text in done.output
    assert "selfplay/first/reward" in done.output
    named = any("nonesuch" in config.read_text() for config in poker.glob("*.yaml"))
    assert ("is it on PYTHONPATH" in done.stderr) == named


def test_compare_has_its_roles_and_outcomes(poker: Path) -> None:
    done = invoke("compare", poker, poker)
    assert done.exit_code == 0, done.output
    rows = {cells[1].strip(): cells[2:] for line in done.output.splitlines() if len(cells := line.split("|")) > 3}
    assert rows["first"][0].strip() == "0.3333, 1.6997 (6)"
    assert rows["outcome: first earned more"][0].startswith(" 0.667 [")
    assert rows["second truncated"][0].startswith(" 0.000 [")


def test_the_page_draws_its_games_turns_and_prompts(poker: Path, viewed: Callable[..., Any]) -> None:
    view = viewed(poker, game="#3")
    assert view.locator("#head span").all_text_contents() == ["step", "outcome", "first reward", "second reward"]
    titles = view.locator(".turn h3").all_text_contents()
    assert titles == ["first · 2 tokens", "second · 2 tokens", "first · 2 tokens", "game"]
    assert [view.locator(".turn > pre").nth(n).inner_text() for n in range(3)] == list(MOVES[0])
    assert "You hold J. The other says check" in view.locator(".turn details").nth(1).text_content()
    rewards = view.locator("table.rewards").inner_text().split()
    assert " ".join(rewards) == "first 2.00 chips 2.00 second -2.00 chips -2.00"
    view.select_option("[data-filter=outcome]", label="outcome: second earned more")
    assert view.inner_text("#count") == "2 of 6 games"


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (run(tmp_path) / CONFIG_FILE).write_text("selfplay: [")
    done = invoke("show", tmp_path)
    assert done.exit_code == 2 and f"{CONFIG_FILE} is no config of a run" in done.output
