"""Write ``docs/example.html``, the page of a quickstart run, and its picture ``docs/report.png``.

    medserl quickstart
    python docs/make_example.py runs/quickstart

The picture needs Chromium and ``pip install playwright``. ``tests/report/test_example.py`` fails
when the page's code has changed since.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.console import Console

from medserl_agentloop.report.page import write_page

DOCS = Path(__file__).resolve().parent
EXAMPLE, PICTURE = DOCS / "example.html", DOCS / "report.png"
MOST_BYTES = 400_000


def main(run: Path) -> None:
    games = write_page([run], EXAMPLE, Console(quiet=True))
    if (size := EXAMPLE.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"{EXAMPLE} has {size:,} bytes, at most {MOST_BYTES:,} are wanted")
    print(f"{EXAMPLE}: {games} games, {size:,} bytes")

    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1280, "height": 860})
        view.goto(EXAMPLE.as_uri())
        view.wait_for_selector("body[data-ready]")
        view.screenshot(path=PICTURE)
        browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
