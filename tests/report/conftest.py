"""A real browser for the pages that reports write."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke


@pytest.fixture(scope="module")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    # Scroll bars take room on the reader's screen.
    options = {"args": ["--no-sandbox"], "ignore_default_args": ["--hide-scrollbars"]}
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, **options)
        yield opened
        opened.close()


@pytest.fixture
def viewed(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of runs offline, at one of its games, with options of the browser; it must not
    complain.
    """
    contexts, complaints, pages, asked = [], [], [], []

    def open_page(*runs: Path, game: str = "", **options: Any) -> Any:
        done = invoke("report", *runs)
        assert done.exit_code == 0, done.output
        file = runs[0] / "report.html"
        options = {"viewport": {"width": 1400, "height": 900}, **options}
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda message: complaints.append(message.text))
        view.on("pageerror", lambda error: complaints.append(str(error)))
        view.on("request", lambda request: asked.append(request.url))
        pages.append(file.as_uri())
        view.goto(file.as_uri() + game)
        view.wait_for_selector("body[data-ready]")
        return view

    yield open_page
    assert complaints == [] and set(asked) <= set(pages)
    for context in contexts:
        context.close()
