"""A game as text: readable, complete, and safe whatever the model wrote.

Runs of other games are looked at like it.
"""

import asyncio
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, paid
from hypothesis import given
from hypothesis import strategies as st
from invoking import invoke
from rich.console import Console

from medserl_agentloop.core.encoding import Message
from medserl_agentloop.core.interaction import Reply, Turn, play_game
from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.core.step_file import CONFIG_FILE, GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.evaluation.tournament import shares, tables
from medserl_agentloop.games.kuhn_poker import KuhnPoker
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.report import show_run
from medserl_agentloop.terminal import visible

game = partial(paid, Outcome.CORRECT_DETECTION, step=1)


def shown(folder: Path, records: list[MedicalRecord], width: int = 160, **kwargs: Any) -> str:
    StepFile(folder / GAMES_FILE).append(r.to_json() for r in records)
    out = io.StringIO()
    show_run(folder, Console(file=out, width=width, color_system=None), **kwargs)
    return out.getvalue()


def test_a_game_shows_the_change_the_verdict_and_every_reward_component(tmp_path: Path) -> None:
    text = shown(tmp_path, [game(attack={"note": ERROR_NOTE, "edit_share": 1 / 24})])
    assert "edit_share: 0.0417" in text
    assert "[-heparin-] {+warfarin+}" in text and "assessor: harmful" in text
    assert re.search(r"attacker -1\.\d\d = game -1\.00  format \+0\.00  faithfulness -0", text)
    assert "assessor +1.00 = game +1.00  format +0.00" in text


def test_the_first_and_last_step_stand_side_by_side(tmp_path: Path) -> None:
    StepFile(tmp_path / METRICS_FILE).append(
        {"step": s, "actor/grad_norm": s / 10} for s in (1, 2, 3)
    )
    text = shown(tmp_path, [game(step=step) for step in (1, 2, 3)])
    assert "step 1" in text and "step 3" in text and "step 2" not in text.split("metric")[1]
    assert "0.1" in text and "0.3" in text and "validation" not in text
    scores = {"val-core/panel/f1": 0.25, "val-core/panel/vanilla_benign/acc/mean@1": 0.75}
    StepFile(tmp_path / "validated" / METRICS_FILE).append([{"step": s, **scores} for s in (0, 1)])
    text = shown(tmp_path / "validated", [game(step=1)])
    assert "panel/f1" in text and "mean@1" not in text


HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""Characters that a terminal obeys or does not show, except the newline."""


ODD = st.sampled_from("\x1b\x0e\0\x7f\x9b\u202e\u2066\u200f\ud800\r\t[]")


@given(st.text(st.characters(codec=None) | ODD))
def test_no_text_reaches_the_terminal_with_what_it_would_obey(text: str) -> None:
    assert not HIDDEN.search(visible(text))
    assert visible(text).count("\n") == text.count("\n")
    assert not text.isascii() or not text.isprintable() or visible(text) == text


HOSTILE = "[bold red]x[/] [/] \x1b[31m \x07 \x0e \0 \x7f \x9b2J \u202e \u2066 \u200f \ud800 \r"


def hostile() -> MedicalRecord:
    """A game with such text wherever others than we may write."""
    wrote = {
        "attack": {"note": f"{CLEAN_NOTE} {HOSTILE}", "reasoning": HOSTILE},
        "players": {"assessor": HOSTILE},
    }
    opponent = OpponentRecord(role="attacker", kind="endpoint", version=HOSTILE)
    record = game(scheme=HOSTILE, opponent=opponent, **wrote)
    rewards = {role: {HOSTILE: 1.0} for role in Role}
    return record.model_copy(update={"void": HOSTILE, "rewards": rewards})


def test_untrusted_text_is_shown_as_text_wherever_it_stands(tmp_path: Path) -> None:
    text = shown(tmp_path, [hostile()], width=1000)
    assert not HIDDEN.search(text)
    # In the reasoning and, for both roles, the note; as component of two roles, reason, player and
    # opponent.
    assert text.count("[bold red]x[/] [/] \\x1b[31m \\x07 \\x0e \\x00 \\x7f \\x9b2J \\u202e") == 8


def test_the_names_of_served_players_are_shown_as_text() -> None:
    names = [HOSTILE.replace("\ud800", "") + number for number in "12"]
    players = dict(zip(("attacker", "assessor"), names, strict=True))
    out = io.StringIO()
    for table in tables(shares([game(players=players)]), names):
        Console(file=out, width=400, color_system=None).print(table)
    assert "[bold red]x[/] [/] \\x1b[31m" in out.getvalue() and not HIDDEN.search(out.getvalue())


def test_the_chosen_game_is_shown_or_the_latest_that_was_decided(tmp_path: Path) -> None:
    records = [game(), game(), paid(Outcome.INVALID_ATTACK)]
    for number, title in ((None, "game 2 of 3"), (1, "game 1 of 3"), (3, "game 3 of 3")):
        assert title in shown(tmp_path / str(number), records, number=number)
    for wrong in (0, 4):
        with pytest.raises(ValueError, match="holds games 1 to 3"):
            shown(tmp_path / str(wrong), records, number=wrong)


# --- other games than the medical one: what it adds is an addition ---


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
    """A run of two steps of poker, whose game is called ``name``; without one, as ``medserl play``
    writes games.
    """
    rows = (
        {**game, "step": step, "uid": "deal", "session": n}
        for step in (1, 2)
        for n, game in enumerate(PLAYED)
    )
    StepFile(folder / GAMES_FILE).append(rows)
    numbers = {"selfplay/games": 3.0, "selfplay/first/reward": 0.25, "selfplay/illegal_rate": 1 / 3}
    StepFile(folder / METRICS_FILE).append({"step": step, **numbers} for step in (1, 2))
    if name:
        (folder / CONFIG_FILE).write_text(f"selfplay: {{game: '{name}'}}\n")
    return folder


@pytest.fixture(params=["kuhn_poker", None], ids=["shipped", "no config"])
def poker(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return run(tmp_path / "poker", request.param)


def test_show_prints_its_turns_rewards_and_metrics(poker: Path) -> None:
    done = invoke("show", poker, "--game", 3)
    assert done.exit_code == invoke("show", poker / GAMES_FILE).exit_code == 0, done.output
    for text in ("first · 2 tokens", "<b>all in</b>\\x1b[2J", "second +2.00 = chips +2.00"):
        assert text in done.output
    assert 'moves: ["illegal"]' in done.output
    assert "selfplay/first/reward" in done.output


def test_a_game_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    done = invoke("show", run(tmp_path, "nonesuch.module:Poker"))
    assert done.exit_code == 2 and "nonesuch" in done.stderr and "PYTHONPATH" in done.stderr


def test_compare_has_its_roles_and_outcomes(poker: Path) -> None:
    done = invoke("compare", poker, poker)
    assert done.exit_code == 0, done.output
    split = (line.split("|") for line in done.output.splitlines())
    rows = {cells[1].strip(): cells[2:] for cells in split if len(cells) > 3}
    assert rows["first reward"][0].strip() == "0.3333 ± 1.7 (6)"
    assert rows["outcome: first earned more"][0].startswith(" 66.7 % [")
    assert rows["second truncated"][0].startswith(" 0.0 % [")


def test_the_page_draws_its_games_turns_and_prompts(
    tmp_path: Path, viewed: Callable[..., Any]
) -> None:
    view = viewed(run(tmp_path / "poker"), game="#3")
    heads = view.locator("#head span").all_text_contents()
    assert heads == ["step", "outcome", "first reward", "second reward"]
    titles = view.locator(".turn h3").all_text_contents()
    assert titles == ["first · 2 tokens", "second · 2 tokens", "first · 2 tokens", "game"]
    assert [view.locator(".turn > pre").nth(n).inner_text() for n in range(3)] == list(MOVES[0])
    assert "You hold J. The other says check" in view.locator(".turn details").nth(1).text_content()
    rewards = view.locator("table.rewards").inner_text().split()
    assert " ".join(rewards) == "first 2.00 chips 2.00 second -2.00 chips -2.00"
    view.select_option("[data-filter=outcome]", label="outcome: second earned more")
    assert view.inner_text("#count") == "2 of 6 games"
