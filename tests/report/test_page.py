"""The page of a run in a real browser: it works offline, filters, and runs nothing that a model wrote."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from game.builders import finished, paid
from invoking import invoke
from support import attack_text

from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile, write_prompts
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category
from medserl_agentloop.paths import resource
from medserl_agentloop.report import page as module

HOSTILE = (
    "</script><script>document.title='owned'</script></style><img src=x onerror=\"document.title='owned'\">"
    "<a href=\"javascript:document.title='owned'\">\"quoted\" 'single'</a> &lt; \\u003c {{ 1 }} \ud800 é"
)
STEPS = (Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION, Outcome.INVALID_ATTACK, Outcome.UNREADABLE, Outcome.VOID)


def scored(outcome: Outcome, step: int, session: int = 0, **changes: Any) -> MedicalRecord:
    return paid(outcome, step=step, uid=f"group {step}", session=session, **{"profile": "medserl", **changes})


def hostile() -> MedicalRecord:
    return scored(
        Outcome.MISSED_ERROR,
        6,
        attack={"response": attack_text(HOSTILE), "note": HOSTILE, "reasoning": HOSTILE},
        assessment={"response": HOSTILE, "sentence": HOSTILE, "reasoning": HOSTILE},
        facts={"vignette_id": HOSTILE},
        presented_note=f"Before. {HOSTILE} After.",
    )


def write_run(folder: Path, records: list[MedicalRecord]) -> Path:
    StepFile(folder / GAMES_FILE).append(record.to_json() for record in records)
    StepFile(folder / METRICS_FILE).append(
        {"step": n, "actor/grad_norm": n / 10, **({"selfplay/alarm/no_signal": 1.0} if n == 2 else {})}
        for n in range(1, 7)
    )
    (folder / "global_step_3").mkdir()
    return folder


def report(*runs: Path, output: Path) -> str:
    done = invoke("report", *runs, "-o", output)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_s_own_prompts_are_what_its_roles_read_whatever_became_of_the_profile(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for step, words in ((1, "Old: "), (3, "New: ")):
        for role, name in (("attacker", "adversarial_benign"), ("assessor", "assess")):
            template = tmp_path / "mine" / role / f"{name}.jinja"
            template.parent.mkdir(exist_ok=True)
            template.write_text(words + "{{ note }}")
        write_prompts(tmp_path, step, PromptProfile(tmp_path / "mine").templates())
        write_prompts(tmp_path, step + 1, PromptProfile(tmp_path / "mine").templates())  # unchanged: nothing is written
    stored = module.prompts_of(tmp_path)
    assert [row["step"] for row in stored] == [3, 3, 1, 1]

    for step, words in ((2, "Old: "), (3, "New: ")):
        game = scored(Outcome.MISSED_ERROR, step, profile="./nonesuch")
        assert module.reads(game, stored) == {
            "attacker": [{"role": "user", "content": words + game.spec.seed_note}],
            "assessor": [{"role": "user", "content": f"{words}{game.presented_note}"}],
        }
        assert module.reads(game, []) == {}


@pytest.mark.parametrize("profile", sorted(p.name for p in resource("prompts").iterdir() if p.is_dir()))
def test_the_stored_prompts_of_every_profile_are_those_that_its_roles_read(profile: str) -> None:
    stored = [{"step": 1, **prompt} for prompt in load_profile(profile).templates()]
    for category in Category:
        game = scored(Outcome.UNREADABLE, 1, category=category, profile=profile)
        assert module.reads(game, stored) == module.reads(game, []) != {}


def test_the_main_curves_of_each_run_are_written_as_svg_and_png(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, [scored(outcome, n) for n, outcome in enumerate(STEPS, start=1)])
    options = ("-o", tmp_path / "r.html", "--figures", tmp_path / "figures")
    done = invoke("report", tmp_path / "a", tmp_path / "b", *options)
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    svg = (tmp_path / "figures" / "a.svg").read_text()
    assert svg == (tmp_path / "figures" / "b.svg").read_text()  # the same games give the same picture
    assert all(f"<!-- {title} -->" in svg for title in ("Reward", "Outcomes", "missed error", "Assessor: accuracy"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [scored(o, n, s) for n, o in enumerate(STEPS, start=1) for s in range(2)]
    records += [scored(Outcome.CORRECT_REJECTION, 5, 2, category="vanilla_benign"), hostile()]
    return write_run(tmp_path_factory.mktemp("runs") / "first", records)


@pytest.fixture
def view(browser: Any, run: Path, tmp_path: Path) -> Iterator[Any]:
    report(run, output=tmp_path / "report.html")
    yield from opened(browser, tmp_path / "report.html")


def opened(browser: Any, file: Path, game: str = "", **options: Any) -> Iterator[Any]:
    context = browser.new_context(offline=True, **{"viewport": {"width": 1400, "height": 900}, **options})
    view = context.new_page()
    complaints: list[str] = []
    view.on("console", lambda message: complaints.append(message.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("request", lambda request: complaints.append(request.url) if request.url != file.as_uri() else None)
    view.goto(file.as_uri() + game)
    view.wait_for_selector("body[data-ready]")
    yield view
    assert complaints == []
    context.close()


def count(view: Any) -> str:
    return str(view.inner_text("#count"))


def test_the_page_opens_offline_on_a_game_that_fooled_the_assessor(view: Any) -> None:
    assert count(view) == "12 of 12 games"
    assert view.locator(".row").count() == 12
    assert "missed error" in view.inner_text("h2")
    assert view.locator("#plots svg[role=img]").count() == 3


def test_what_a_model_wrote_is_text_and_runs_nothing(view: Any) -> None:
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


def test_the_policy_allows_the_pages_own_script_and_no_other(view: Any) -> None:
    view.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; }")
    policy = view.locator("meta[http-equiv]").get_attribute("content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_a_select_a_step_a_cell_and_a_text_filter_the_games(view: Any) -> None:
    view.select_option("[data-filter=outcome]", label="outcome: missed error")
    assert count(view) == "3 of 12 games"
    view.click("#clear")
    view.wait_for_function("() => document.querySelector('#count').textContent.startsWith('12 of')")
    view.fill("#first", "2")
    view.fill("#last", "3")
    assert count(view) == "4 of 12 games"
    view.keyboard.press("Escape")
    view.wait_for_function("() => document.querySelector('#count').textContent.startsWith('12 of')")
    view.locator(".cross button", has_text="3").first.click()
    assert count(view) == "3 of 12 games"
    view.click("#clear")
    view.fill("#text", "in no game")
    view.wait_for_function("() => /^0 of/.test(document.querySelector('#count').textContent)")
    view.fill("#text", 'ONERROR="document')
    view.wait_for_function("() => /^1 of/.test(document.querySelector('#count').textContent)")
    view.click("#clear")
    view.wait_for_function("() => document.querySelector('#count').textContent.startsWith('12 of')")
    view.locator("#plots .step").first.click()
    assert count(view) == "2 of 12 games"


def test_keys_walk_through_games_steps_groups_and_cases(view: Any) -> None:
    def game() -> str:
        view.wait_for_timeout(50)
        return str(view.evaluate("location.hash"))

    view.evaluate("location.hash = '#0'")
    walked = [game()]
    for key in ("j", "k", "n", "p", "g", "g"):
        view.keyboard.press(key)
        walked.append(game())
    assert walked == ["#0", "#1", "#0", "#2", "#0", "#1", "#0"]
    view.keyboard.press("/")
    view.keyboard.type("j")
    assert view.input_value("#text") == "j"


def test_what_each_role_read_is_its_own_prompt(view: Any) -> None:
    view.evaluate("location.hash = '#0'")
    view.wait_for_function("() => document.querySelector('#game p').textContent.includes('step 1')")
    read = {
        who: view.locator(f".{who} details", has_text="read").locator("pre").all_text_contents()
        for who in ("attacker", "assessor")
    }
    note, presented = finished(Outcome.MISSED_ERROR).spec.seed_note, finished(Outcome.MISSED_ERROR).presented_note
    assert note in "".join(read["attacker"]) and presented in "".join(read["assessor"])
    assert note not in "".join(read["assessor"])


@pytest.mark.parametrize(
    "options", [{"color_scheme": "dark"}, {"color_scheme": "light"}, {"viewport": {"width": 600, "height": 900}}]
)
def test_the_page_draws_in_every_style_the_game_that_its_address_names(
    browser: Any, run: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    report(run, output=tmp_path / "report.html")
    for view in opened(browser, tmp_path / "report.html", "#4", **options):
        assert "invalid attack" in view.inner_text("h2")
        style = "getComputedStyle(document.body)"
        assert view.evaluate(f"{style}.color") != view.evaluate(f"{style}.backgroundColor")
        view.emulate_media(media="print")
        assert not view.is_visible("#list") and view.is_visible("#game")


@pytest.mark.parametrize("names", [("alpha", "omega"), ("omega", "alpha")])
def test_several_runs_stand_side_by_side_each_under_its_own_name(
    browser: Any, tmp_path: Path, names: tuple[str, str]
) -> None:
    steps = {"alpha": 1, "omega": 5}
    runs = [
        write_run(tmp_path / name, [scored(Outcome.MISSED_ERROR, steps[name], n) for n in range(len(name))])
        for name in names
    ]
    assert "10 games:" in report(*runs, output=tmp_path / "report.html")
    for view in opened(browser, tmp_path / "report.html"):
        assert ", ".join(names) in view.title()
        figures = view.locator("#plots figure")
        assert figures.count() == 5
        for place, name in enumerate(names):
            assert f"outcomes by step, {name}" in figures.nth(place).inner_text()
            assert f"step {steps[name]}" in figures.nth(place).locator("svg").inner_html()
        view.select_option("[data-filter=run]", label=f"run: {names[0]}")
        assert count(view) == "5 of 10 games"
        assert f"outcomes by step, {names[0]}" in view.inner_text("#plots figure >> nth=0")
        view.select_option("#plots select >> nth=1", label="actor/grad_norm")
        drawn = view.locator("#plots path title").all_text_contents()
        assert [title for title in drawn if "grad_norm" in title] == [f"actor/grad_norm, {name}" for name in names]


def test_too_many_games_are_sampled_by_whole_groups(monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MOST_GAMES", 6)
    written = report(run, output=tmp_path / "report.html")
    games = int(written.split()[0])
    assert 0 < games <= 6


def test_a_user_is_told_what_is_wrong(run: Path, tmp_path: Path) -> None:
    twice = invoke("report", run, run, "-o", tmp_path / "x.html")
    assert twice.exit_code == 2 and "named twice" in twice.output
    empty = invoke("report", tmp_path, "-o", tmp_path / "x.html")
    assert empty.exit_code == 2 and "does not exist" in empty.output
    assert not (tmp_path / "x.html").exists()


@pytest.mark.slow
def test_the_benchmark_runs_to_its_end(chromium: str) -> None:
    report_page = pytest.importorskip("report_page", reason="playwright is not installed: pip install playwright")
    command = [sys.executable, report_page.__file__, "--games", "60", "--chromium", chromium]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "60 games" in run.stdout and "a search through all texts" in run.stdout
