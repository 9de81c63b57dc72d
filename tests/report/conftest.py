"""A real browser for the pages that reports write."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke


@pytest.fixture(scope="module")
def chromium() -> str:
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with api.sync_playwright() as playwright:
        shown = [
            "--hide-scrollbars"
        ]  # of playwright's own options: scroll bars take room on the reader's screen
        opened = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"], ignore_default_args=shown
        )
        yield opened
        opened.close()


@pytest.fixture
def viewed(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of runs offline, at one of its games, with options of the browser; it must not
    complain.
    """
    contexts, complaints = [], []

    def open_page(*runs: Path, game: str = "", **options: Any) -> Any:
        done = invoke("report", *runs)
        assert done.exit_code == 0, done.output
        file = runs[0] / "report.html"
        context = browser.new_context(
            offline=True, **{"viewport": {"width": 1400, "height": 900}, **options}
        )
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda message: complaints.append(message.text))
        view.on("pageerror", lambda error: complaints.append(str(error)))
        view.on(
            "request",
            lambda request: (
                complaints.append(request.url) if request.url != file.as_uri() else None
            ),
        )
        view.goto(file.as_uri() + game)
        view.wait_for_selector("body[data-ready]")
        return view

    yield open_page
    assert complaints == []
    for context in contexts:
        context.close()
