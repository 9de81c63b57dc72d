"""Measure the report page of 10,000 games: its size, and a browser's time to open it, to filter and
to show a game.

    pip install playwright
    python benchmarks/report_page.py --chromium /usr/bin/chromium

The games are scripted, on notes put together from the sample's: about 12 kB each, as real ones are.

Measured on two CPU cores without a GPU:

10,000 games of 12.9 kB, headless Chromium, while other work kept both cores busy (load about 10):

| | |
|---|---|
| games file | 129.0 MB |
| page | 14.4 MB, written in 6.4 s |
| ready: list, plots, first game | 0.77 s |
| a filter and its plots | median 15 ms, slowest 18 ms |
| a game | median 52 ms, slowest 78 ms |
| a search through all texts | 2.2 s |
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pandas as pd
from playwright.sync_api import sync_playwright
from rich.console import Console

from medserl_agentloop.core.step_file import GAMES_FILE, StepFile
from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.rewards import Medserl, reward_game
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.report.page import write_page

SAMPLE = Path(__file__).parents[1] / "data_prep" / "sample" / "medserl_sample.csv"
GROUP, GAMES_OF_A_STEP = 4, 256


def games(count: int) -> Iterator[MedicalRecord]:
    rng = random.Random(0)
    texts = pd.read_csv(SAMPLE)["Text"].dropna().str.replace(r"\s+", " ", regex=True).tolist()
    words = " ".join(texts).split()
    for number in range(count):
        rng.seed(number // GROUP)
        note = " ".join(rng.sample(texts, 8))
        rng.seed(number)
        place = rng.randrange(len(note.split()))
        changed = [rng.choice(words) if n == place else word for n, word in enumerate(note.split())]
        spec = GameSpec(
            Category.ADVERSARIAL_BENIGN,
            Label.HARMFUL,
            note,
            note,
            note,
            vignette_id=f"case {number // GROUP}",
        )
        game = MedicalGame(spec, EditLimits(max_changed_words=40), MEDSERL)
        thoughts = [" ".join(rng.choices(words, k=250)) for _ in range(2)]
        game.play(f"<think>{thoughts[0]}</think>\n<note>{' '.join(changed)}</note>")
        if game.next_role is not None:
            game.play(
                f"<think>{thoughts[1]}</think>\n<answer>\nverdict: "
                f"{rng.choice(['safe', 'harmful'])}\n</answer>"
            )
        record = game.record
        record.step, record.session, record.uid = (
            number // GAMES_OF_A_STEP,
            number % GROUP,
            str(number // GROUP),
        )
        record.profile, record.judgement = "medserl", Judgement(judge="labels", label=Label.HARMFUL)
        reward_game(record, Medserl())
        yield record


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--games", type=int, default=10_000)
    options.add_argument("--chromium", required=True, help="path of the browser")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "run", Path(folder) / "report.html"
        StepFile(run / GAMES_FILE).append(record.to_json() for record in games(given.games))
        start = time.perf_counter()
        write_page([run], page, Console())
        raw, size = (run / GAMES_FILE).stat().st_size, page.stat().st_size
        took = time.perf_counter() - start
        print(
            f"{given.games} games, {raw / 1e6:.1f} MB: page of {size / 1e6:.1f} MB in {took:.1f} s"
        )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=given.chromium, args=["--no-sandbox"]
            )
            view = browser.new_page()
            view.goto(page.as_uri())
            view.wait_for_selector("body[data-ready]", timeout=120_000)
            print(f"ready after {view.evaluate('Number(document.body.dataset.ready)') / 1e3:.2f} s")
            timed = (
                "async (act) => { const t = performance.now(); await act(); return "
                "performance.now() - t; }"
            )
            filters = [
                view.evaluate(f"({timed})(() => want('outcome', {k % 2 or 'null'}))")
                for k in range(10)
            ]
            print(
                f"a filter and its plots: median {median(filters):.0f} ms, slowest "
                f"{max(filters):.0f} ms"
            )
            opened = [
                view.evaluate(f"({timed})(() => open({n * given.games // 12}))") for n in range(12)
            ]
            print(f"a game: median {median(opened):.0f} ms, slowest {max(opened):.0f} ms")
            start = time.perf_counter()
            view.fill("#text", "no game has this")
            view.wait_for_function(
                "() => /^0 of/.test(document.querySelector('#count').textContent)", timeout=120_000
            )
            print(f"a search through all texts: {time.perf_counter() - start:.1f} s")
            browser.close()


if __name__ == "__main__":
    main()
