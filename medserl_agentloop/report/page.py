"""The page of a run, or of several: one HTML file that needs neither network nor library. ``medserl
report``.

The file holds one block of columns, which lists, filters and plots need, and the games in chunks,
which the browser unpacks when one is opened. page.js draws them with text nodes only, and the
page's policy allows no other script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Template
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import track

from medserl_agentloop import DEFAULT_GAME
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.metrics import METRIC_PREFIX
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.step_file import CONFIG_FILE, METRICS_FILE, PROMPTS_FILE, StepFile
from medserl_agentloop.paths import PACKAGE, regular_file, replacing
from medserl_agentloop.report import (
    GameClass,
    curves,
    games_file,
    games_frame,
    headline,
    metrics,
    read_run,
    reward_columns,
)

# more games than this are drawn as a sample: a browser holds about this many texts
MOST_GAMES = 20_000
CHUNK = 250
MOST_WORDS = 30  # a column with more words than this is not a filter
FACTS = {
    "model": "actor_rollout_ref.model.path",
    "reward": "selfplay.reward",
    "judge": "selfplay.judge",
    "profile": "selfplay.profile",
}
"""Labels of the first screen, and the config key of each."""


def write_page(runs: Sequence[Path], output: Path, console: Console) -> int:
    """Write the page of these runs, and return its number of games; above :data:`MOST_GAMES` it is
    a sample.
    """
    names = run_names(runs)
    played = sum(_lines(games_file(run)) for run in runs)
    sampled = [sample(run, MOST_GAMES / played) for run in runs]
    frames = [games_frame(records, game) for game, records in sampled if records]
    frame = pd.concat(frames, ignore_index=True)
    shown = [(place, record) for place, (_, records) in enumerate(sampled) for record in records]
    kinds = [*frame.select_dtypes("string"), *frame.select_dtypes("boolean")]
    words = {name: _coded(frame[name]) for name in kinds}
    # By position, because page.js draws the runs in order.
    run_column = {"words": names, "codes": [place for place, _ in shown]}
    numbers = frame.select_dtypes("number").round(4)
    values = {name: {"values": [*map(_number, numbers[name])]} for name in numbers}
    columns = {
        "played": played,
        "games": len(shown),
        "chunk": CHUNK,
        "first": max(range(len(shown)), key=lambda n: (shown[n][1].reading_rank, n)),
        "columns": {**values, **words, "run": run_column},
        "meanings": {n: c.meaning for game, _ in sampled for n, c in game.View.columns.items()},
        "filters": ["run", *(name for name in words if _is_filter(name, words[name]["words"]))],
        "shares": list(frame.select_dtypes("boolean")),
        "numbers": [n for n in numbers if n not in ("step", "session") and "reward" not in n],
        "rewards": reward_columns(frame),
        "components": [name for name in frame if name.startswith("reward/")],
        "metrics": {name: _by_step(run) for name, run in zip(names, runs, strict=True)},
        "runs": [about(run) for run in runs],
    }
    blocks = [("columns", _packed(json.dumps(columns, separators=(",", ":"), allow_nan=False)))]
    prompts = [prompts_of(run) for run in runs]
    starts = range(0, len(shown), CHUNK)
    packing = track(starts, "packing the games", console=console, transient=True)
    for number, start in enumerate(packing):
        lines = [
            _line(record, sampled[place][0], prompts[place])
            for place, record in shown[start : start + CHUNK]
        ]
        blocks.append((f"chunk{number}", _packed("\n".join(lines))))
    with replacing(output) as file:
        file.write(_render(blocks).encode("utf-8"))
    return len(shown)


def about(run: Path) -> dict[str, Any]:
    """The first screen of a run: its date, settings, caveats, and gain."""
    folder = run if run.is_dir() else run.parent
    written = datetime.fromtimestamp(games_file(run).stat().st_mtime)
    facts = {"date": f"{written:%Y-%m-%d}"}
    caveats: list[str] = []
    if (file := folder / CONFIG_FILE).is_file():
        config = OmegaConf.load(file)
        for name, key in FACTS.items():
            if (found := OmegaConf.select(config, key)) is not None:
                facts[name] = re.split("[/:]", str(found).rstrip("/"))[-1]
        caveats = _caveats(config)
    return {
        "facts": facts,
        "caveats": caveats,
        "headline": headline(folder),
        "curves": [[curve.label, sorted(curve.values.items())] for curve in curves(folder)],
    }


def _caveats(config: Any) -> list[str]:
    """The run's sentences on what it trains and what it cannot show."""
    try:
        game = game_class(OmegaConf.select(config, "selfplay.game") or DEFAULT_GAME)
        selfplay = game.Config.from_run(config)
        return [
            *filter(None, [selfplay.who_trains(game.roles)]),
            *game.View.caveats(config, selfplay),
        ]
    except (ConfigError, OmegaConfBaseException):  # from a class or a version that is not available
        return []


def _render(blocks: Sequence[tuple[str, str]]) -> str:
    """The page around these blocks of data; its content security policy allows its own script and
    style only.
    """
    script, style, html = (
        (PACKAGE / "report" / f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("js", "css", "html")
    )
    hashes = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    )
    allowed = "script-src 'sha256-{}'; style-src 'sha256-{}'".format(*hashes)
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page: str = Template(html, autoescape=True).render(
        policy=policy, script=script, style=style, blocks=blocks
    )
    return page


def _packed(text: str) -> str:
    # A model may write half of a surrogate pair, which UTF-8 cannot hold, but a JSON escape can.
    packed = gzip.compress(text.encode("utf-8", errors="backslashreplace"), 6, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _line(record: GameRecord, game: GameClass, prompts: list[dict[str, Any]]) -> str:
    shown = game.View.sections(record, prompts)
    sections = [section._asdict() | {"facts": section.known()} for section in shown]
    parts = (json.dumps(part, ensure_ascii=False) for part in (record.to_json(), sections))
    return "\t".join(parts)


def prompts_of(run: Path) -> list[dict[str, Any]]:
    """Return the roles' prompts as the run recorded them, the latest first; empty if it did not."""
    path = run / PROMPTS_FILE
    return list(StepFile(path).read())[::-1] if path.exists() else []


def run_names(runs: Sequence[Path]) -> list[str]:
    """The runs' folders by name, with the part of the path that tells them apart."""
    folders = [run.resolve() if run.is_dir() else run.resolve().parent for run in runs]
    for depth in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        # One seed says little.
        if len(set(names)) == len(names) and not any(map(str.isdigit, names)):
            return names
    raise ValueError("a run is named twice: name each run once")


def _lines(file: Path) -> int:
    with regular_file(file).open("rb") as lines:  # one without its end may be complete: read it
        return max(1, sum(line.endswith(b"\n") for line in lines))


def sample(run: Path, share: float) -> tuple[GameClass, list[GameRecord]]:
    """A fixed sample of about this share of a run's games, in order, with complete prompt
    groups.
    """
    game, records = read_run(run)
    groups = ((f"{one.step} {one.uid or number}", one) for number, one in enumerate(records))
    most = share * 2**32
    return game, [one for key, one in groups if zlib.crc32(key.encode(errors="replace")) < most]


def _coded(values: pd.Series) -> dict[str, Any]:
    words = values.map({True: "yes", False: "no"}) if values.dtype == "boolean" else values
    codes, words = pd.factorize(words, sort=True, use_na_sentinel=False)
    return {
        "words": [None if pd.isna(word) else str(word) for word in words],
        "codes": codes.tolist(),
    }


def _number(value: Any, form: str = "") -> float | None:
    return None if pd.isna(value) else float(f"{value:{form}}")


def _is_filter(name: str, words: Sequence[str | None]) -> bool:
    """Return whether a text column needs a filter; booleans follow from other columns, except the
    signal.
    """
    is_id, is_flag = name == "uid" or name.endswith("_id"), {"yes", "no"} >= set(words) - {None}
    return 1 < len(words) <= MOST_WORDS and not is_id and (name == "signal" or not is_flag)


def _by_step(run: Path) -> dict[str, Any]:
    """A run's metrics, alarms and checkpoints, if any."""
    file = run / METRICS_FILE
    frame = metrics(run) if file.is_file() and file.stat().st_size else pd.DataFrame()
    fired = {n.removeprefix(METRIC_PREFIX): frame[n] for n in frame if n.startswith(METRIC_PREFIX)}
    saved = (path.name.removeprefix("global_step_") for path in run.glob("global_step_*"))
    return {
        "steps": [int(step) for step in frame.index],
        "names": {name: [_number(value, ".5g") for value in frame[name]] for name in frame},
        "alarms": {
            int(step): [name for name, alarm in fired.items() if pd.notna(alarm[step])]
            for step in frame.index
        },
        "checkpoints": sorted(int(step) for step in saved if step.isdecimal()),
    }
