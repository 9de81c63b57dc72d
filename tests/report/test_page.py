"""The page of a run in a real browser: it works offline, filters, and runs nothing that a model
wrote.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from game.builders import paid
from invoking import invoke
from support import attack_text

from medserl_agentloop.core.step_file import (
    CONFIG_FILE,
    GAMES_FILE,
    METRICS_FILE,
    StepFile,
    write_prompts,
)
from medserl_agentloop.games.medical.case import Category
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.paths import resource
from medserl_agentloop.report import page as module

HOSTILE = (
    "</script><script>document.title='owned'</script></style><img src=x "
    "onerror=\"document.title='owned'\">"
    "<a href=\"javascript:document.title='owned'\">\"quoted\" 'single'</a> &lt; \\u003c {{ 1 }} "
    "\ud800 é"
)
STEPS = [Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION, Outcome.INVALID_ATTACK]
STEPS += [Outcome.UNREADABLE, Outcome.VOID]


def scored(outcome: Outcome, step: int, session: int = 0, **changes: Any) -> MedicalRecord:
    changes = {"uid": f"group {step}", "session": session, "profile": "medserl", **changes}
    return paid(outcome, step=step, **changes)


def write_run(folder: Path, records: list[MedicalRecord]) -> Path:
    StepFile(folder / GAMES_FILE).append(record.to_json() for record in records)
    steps: list[dict[str, float]] = [{"step": 0, "val-aux/panel/recall": 0.25}]
    steps += [{"step": n, "actor/grad_norm": n / 10} for n in range(1, 7)]
    steps[2]["selfplay/alarm/no_signal"] = 1.0
    steps.append({"step": 6, "val-aux/panel/recall": 0.75, "val-aux/panel/notes": 8})
    StepFile(folder / METRICS_FILE).append(steps)
    config = {
        "selfplay": {"reward": "zero_sum", "judge": "games.clinic:OracleJudge"},
        "actor_rollout_ref": {"model": {"path": "/models/novice"}},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    (folder / "global_step_3").mkdir()
    return folder


def test_page_shows_the_prompts_of_the_run_though_the_profile_changed(tmp_path: Path) -> None:
    for step, words in ((1, "Old: "), (3, "New: ")):
        for template in ("attacker/adversarial_benign.jinja", "assessor/assess.jinja"):
            (tmp_path / "mine" / template).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mine" / template).write_text(words + "{{ note }}")
        for at in (step, step + 1):  # the second is unchanged: nothing is written
            write_prompts(tmp_path, at, PromptProfile(tmp_path / "mine").templates())
    stored = module.prompts_of(tmp_path)
    assert [row["step"] for row in stored] == [3, 3, 1, 1]

    for step, words in ((2, "Old: "), (3, "New: ")):
        game = scored(Outcome.MISSED_ERROR, step, profile="./nonesuch")
        notes = (game.spec.seed_note, game.presented_note)
        assert reads(game, stored) == [f"[user] {words}{note}" for note in notes]
        assert reads(game, []) == ["", ""]


def reads(game: MedicalRecord, prompts: list[dict[str, Any]]) -> list[str]:
    """Return the text that each role of a game read."""
    sections = MedicalGameInteraction.View.sections(game, prompts)
    folded = (named for section in sections for named in section.folded.items())
    return [text for label, text in folded if label.startswith("what the")]


PROFILES = sorted(path.name for path in resource("prompts").iterdir() if path.is_dir())


@pytest.mark.parametrize("profile", PROFILES)
def test_the_stored_prompts_of_every_profile_are_those_that_its_roles_read(profile: str) -> None:
    stored = [{"step": 1, **prompt} for prompt in load_profile(profile).templates()]
    for category in Category:
        game = scored(Outcome.UNREADABLE, 1, category=category, profile=profile)
        assert reads(game, stored) == reads(game, []) and all(reads(game, []))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [scored(o, n, s) for n, o in enumerate(STEPS, start=1) for s in range(2)]
    records.append(scored(Outcome.CORRECT_REJECTION, 5, 2, category="vanilla_benign"))
    assessment = {"response": HOSTILE, "sentence": HOSTILE, "reasoning": HOSTILE}
    attack = {"response": attack_text(HOSTILE), "note": f"Before. {HOSTILE} After."}
    attack["reasoning"] = HOSTILE
    parts = {"attack": attack, "assessment": assessment, "facts": {"vignette_id": HOSTILE}}
    records.append(scored(Outcome.MISSED_ERROR, 6, **parts))
    return write_run(tmp_path_factory.mktemp("runs") / "first", records)


@pytest.fixture
def view(viewed: Callable[..., Any], run: Path) -> Any:
    return viewed(run)


def test_the_page_opens_offline_on_a_game_that_fooled_the_assessor(view: Any) -> None:
    assert view.inner_text("#count") == "12 of 12 games"
    assert view.locator(".row").count() == 12
    assert "undetected error" in view.inner_text("h2")
    assert view.locator("#plots svg[role=img]").count() == 3
    for mark in ("alarm: point at it for its name", "checkpoint"):
        assert mark in view.inner_text("#plots")
    heads = view.locator("#head span").all_text_contents()
    assert heads == ["step", "kind", "outcome", "attacker reward", "assessor reward"]
    cut_off = "list.style.overflowY = 'scroll'; return list.scrollWidth > list.clientWidth;"
    assert not view.locator("#list").evaluate(f"list => {{ {cut_off} }}")  # beside a scroll bar


def test_the_first_screen_says_what_was_run_and_what_was_gained(view: Any) -> None:
    said = view.inner_text("#runs")
    for words in ("first", "model novice", "reward zero_sum", "judge OracleJudge"):
        assert words in said
    assert view.inner_text(".gained") == "errors found 25 → 75 %, 8 held-out notes"
    legend = view.locator("#plots figure").first.locator(".legend")
    assert "errors found 75 %" in " ".join(legend.inner_text().split())
    view.locator("#plots figure").first.locator(".step").first.hover()
    assert "errors found 25 %" in " ".join(legend.inner_text().split())


def test_a_filter_greys_what_it_leaves_out_and_can_be_taken_back(view: Any) -> None:
    colours = (
        "[...document.querySelectorAll('#plots path:not(.rest) title')]"
        ".map(title => title.parentNode.style.fill)"
    )
    before = view.evaluate(colours)
    assert view.locator("#plots path.rest").count() == 0
    view.select_option("[data-filter=outcome]", label="outcome: undetected error")
    view.wait_for_selector("#plots path.rest")
    assert view.evaluate(colours) == before
    view.click("#set button")
    view.wait_for_function("() => document.querySelector('#count').textContent.startsWith('12 of')")
    assert view.locator("#set button").count() == 0


def test_escape_leaves_the_list_where_it_was(viewed: Callable[..., Any], tmp_path: Path) -> None:
    outcomes = (Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION)
    games = [scored(outcomes[n % 2], n + 1) for n in range(200)]
    view = viewed(write_run(tmp_path / "run", games), game="#100")
    view.select_option("[data-filter=outcome]", label="outcome: undetected error")
    view.evaluate("document.querySelector('.row.chosen').scrollIntoView({ block: 'center' })")
    top = "document.querySelector('.row.chosen').getBoundingClientRect().top"
    before = view.evaluate(top)
    view.keyboard.press("Escape")
    view.wait_for_function("() => document.querySelector('#count').textContent.startsWith('200')")
    assert abs(view.evaluate(top) - before) < 2


def test_a_phone_shows_both_rewards(viewed: Callable[..., Any], run: Path) -> None:
    view = viewed(run, viewport={"width": 400, "height": 800})
    assert view.evaluate("document.documentElement.scrollWidth") <= 400
    for cell in view.locator(".row").first.locator("span").all()[-2:]:
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= 400


def test_model_text_is_shown_as_text_and_runs_nothing(view: Any) -> None:
    view.evaluate("location.hash = '#11'")
    view.wait_for_function("() => document.querySelector('#game p').textContent.includes('step 6')")
    for fold in view.locator("#game details").all():
        fold.evaluate("fold => fold.open = true")
    shown = view.inner_text("#game")
    assert "</script><script>document.title='owned'</script>" in shown
    assert view.locator("mark").inner_text().startswith("</script>")
    assert view.locator("#game img, #game script, #game a[href^=javascript]").count() == 0
    view.wait_for_timeout(100)
    assert "owned" not in view.title()
    policy = view.locator("meta[http-equiv]").get_attribute("content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_a_select_a_step_a_cell_and_a_text_filter_the_games(view: Any) -> None:
    def left(shown: int) -> None:
        view.wait_for_function(
            f"() => document.querySelector('#count').textContent.startsWith('{shown} of 12')"
        )

    view.select_option("[data-filter=outcome]", label="outcome: undetected error")
    left(3)
    view.click("#clear")
    left(12)
    view.click("#more summary")
    view.fill("#first", "2")
    view.fill("#last", "3")
    left(4)
    view.keyboard.press("Escape")
    left(12)
    view.locator(".cross button", has_text="3").first.click()
    left(3)
    view.click("#clear")
    for text, games in (("in no game", 0), ('ONERROR="document', 1), ("", 12)):
        view.fill("#text", text)
        left(games)
    view.locator("#plots figure").nth(1).locator(".step").first.click()
    left(2)


def test_a_text_too_long_to_be_drawn_is_cut_with_a_word_on_it(
    viewed: Callable[..., Any], tmp_path: Path
) -> None:
    long = "x" * 1_000_000
    turn = {"response": long, "reasoning": long}
    answers = {"attack": {**turn, "note": long}, "assessment": {**turn, "sentence": long}}
    run = write_run(tmp_path / "run", [scored(Outcome.MISSED_ERROR, 1, **answers)])
    started = time.monotonic()
    view = viewed(run)
    for fold in view.locator("#game details").all():
        fold.evaluate("fold => fold.open = true")
    assert "980000 more characters are in the games file" in view.inner_text("#game")
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (600, "dark")])
def test_the_page_fits_its_window(
    viewed: Callable[..., Any], run: Path, width: int, scheme: str
) -> None:
    view = viewed(run, game="#4", color_scheme=scheme, viewport={"width": width, "height": 900})
    assert "invalid attack" in view.inner_text("h2")
    parts = "[...document.querySelectorAll('html, #plots, #list, #game, .row span')]"
    wide = f"{parts}.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
    assert view.evaluate(wide) == []
    style = "getComputedStyle(document.body)"
    assert view.evaluate(f"{style}.color") != view.evaluate(f"{style}.backgroundColor")
    view.emulate_media(media="print")
    assert not view.is_visible("#list") and view.is_visible("#game")


@pytest.mark.parametrize("names", [("alpha", "omega"), ("omega", "alpha")])
def test_several_runs_stand_side_by_side(
    viewed: Callable[..., Any], tmp_path: Path, names: tuple[str, str]
) -> None:
    steps = {"alpha": 1, "omega": 5}
    runs = []
    for name in names:
        games = [scored(Outcome.MISSED_ERROR, steps[name], n) for n in range(5)]
        runs.append(write_run(tmp_path / name, games))
    view = viewed(*runs)
    assert ", ".join(names) in view.title()
    figures = view.locator("#plots figure")
    assert figures.count() == 4  # all games ended alike, so there is nothing to cross
    assert view.inner_text("#head span >> nth=0") == "run"
    for place, name in enumerate(names, start=1):
        assert f"outcomes by step, {name}" in figures.nth(place).inner_text()
        assert f"step {steps[name]}" in figures.nth(place).locator("svg[role=img]").inner_html()
    view.click("#more summary")
    view.select_option("[data-filter=run]", label=f"run: {names[0]}")
    assert view.inner_text("#count") == "5 of 10 games"
    view.select_option("#plots select >> nth=0", label="actor/grad_norm")
    drawn = view.locator("#plots path title").all_text_contents()
    drawn = [title for title in drawn if "grad_norm" in title]
    assert drawn == [f"actor/grad_norm, {name}" for name in names]


def test_too_many_games_are_sampled_by_whole_groups(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MOST_GAMES", 6)
    assert 0 < int(invoke("report", run, "-o", tmp_path / "report.html").output.split()[0]) < 12


def test_a_user_is_told_what_is_wrong(run: Path, tmp_path: Path) -> None:
    for runs, says in (((run, run), "named twice"), ((tmp_path,), "does not exist")):
        refused = invoke("report", *runs, "-o", tmp_path / "x.html")
        assert refused.exit_code == 2 and says in refused.output
        assert not (tmp_path / "x.html").exists()


@pytest.mark.slow
@pytest.mark.long
def test_the_benchmark_runs_to_its_end(chromium: str) -> None:
    report_page = pytest.importorskip(
        "report_page", reason="playwright is not installed: pip install playwright"
    )
    command = [sys.executable, report_page.__file__, "--games", "60", "--chromium", chromium]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "60 games" in run.stdout and "a search through all texts" in run.stdout
