"""The page of a run, or of several: one HTML file that needs neither network nor library. ``medserl report``.

The file holds one block of columns, which lists, filters and plots need, and the games themselves in chunks, which
the browser unpacks when a game of theirs is opened. page.js draws it, with text nodes only; the page's policy allows
this one script and nothing else, whatever a model wrote.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Template
from rich.console import Console
from rich.progress import track

from medserl_agentloop.core.alarms import METRIC_PREFIX
from medserl_agentloop.core.interaction import Message, Prompt
from medserl_agentloop.core.step_file import PROMPTS_FILE, StepFile
from medserl_agentloop.games.medical.prompting import load_profile, template_name
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.paths import PACKAGE, replacing
from medserl_agentloop.report import games, games_file, games_frame, metrics, read_run

MOST_GAMES = 20_000
"""More games than this are drawn as a sample: a browser holds about so many texts."""
CHUNK = 250

_NUMBERS = ("step", "session", "changed_words", "attacker_tokens", "assessor_tokens")
_WORDS = ("uid", "category", "outcome", "invalid", "intended", "judged", "verdict", "error_type", "vignette_id")


def write_page(runs: Sequence[Path], output: Path, console: Console) -> int:
    """Write the page of these runs (``selfplay.records``, or games files), and return how many games it holds.

    These are all, or a sample of whole prompt groups above :data:`MOST_GAMES`. A ValueError names the file
    and the line that are wrong.
    """
    names = run_names(runs)
    played = sum(_lines(games_file(run)) for run in runs)
    shown = [sample(run, min(1.0, MOST_GAMES / played)) for run in runs]
    records = [(name, game) for name, sampled in zip(names, shown, strict=True) for game in sampled]
    frame = pd.concat([games_frame(sampled) for sampled in shown if sampled], ignore_index=True)
    columns = {
        "played": played,
        "games": len(records),
        "chunk": CHUNK,
        "first": _telling(frame),
        # The runs in their order on the command line, and not by name: page.js draws and labels them by place.
        "columns": _columns(frame) | {"run": {"words": names, "codes": [names.index(name) for name, _ in records]}},
        "rewards": [name for name in frame.columns if name.startswith("reward/")],
        **_by_step(runs, names),
    }
    blocks = [("columns", _packed(json.dumps(columns, separators=(",", ":"), allow_nan=False)))]
    prompts = {name: prompts_of(run) for name, run in zip(names, runs, strict=True)}
    starts = range(0, len(records), CHUNK)
    for number, start in enumerate(track(starts, "packing the games", console=console, transient=True)):
        lines = [_line(game, prompts[name]) for name, game in records[start : start + CHUNK]]
        blocks.append((f"chunk{number}", _packed("\n".join(lines))))
    with replacing(output) as file:
        file.write(_render(blocks).encode("utf-8"))
    return len(records)


def _render(blocks: Sequence[tuple[str, str]]) -> str:
    """The page around these blocks of data; its content security policy allows its own script and style only."""
    script, style, html = (
        (PACKAGE / "report" / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html")
    )
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    allowed = "script-src 'sha256-{}'; style-src 'sha256-{}'".format(*hashes)
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page: str = Template(html, autoescape=True).render(policy=policy, script=script, style=style, blocks=blocks)
    return page


def _packed(text: str) -> str:
    # A model may write half of a surrogate pair, which UTF-8 cannot hold; in JSON, its escape can stand for it.
    return base64.b64encode(gzip.compress(text.encode("utf-8", errors="backslashreplace"), 6, mtime=0)).decode("ascii")


def _line(game: MedicalRecord, prompts: Prompts) -> str:
    """The record and, after a tab, what each role read. JSON text itself holds no tab."""
    return json.dumps(game.to_json(), ensure_ascii=False) + "\t" + json.dumps(reads(game, prompts), ensure_ascii=False)


Prompts = list[dict[str, Any]]


def prompts_of(run: Path) -> Prompts:
    """What the run's roles read, as the run wrote it down, the latest first; nothing where it did not."""
    path = run / PROMPTS_FILE
    return list(StepFile(path).read())[::-1] if path.exists() else []


def reads(game: MedicalRecord, prompts: Prompts) -> dict[str, Any]:
    """The messages that each role literally read."""
    turns = ((Role.ATTACKER, game.attack, game.spec.seed_note), (Role.ASSESSOR, game.assessment, game.presented_note))
    read = {role.value: _messages(game, prompts, role, note) for role, turn, note in turns if turn and note is not None}
    return {role: messages for role, messages in read.items() if messages}


def _messages(game: MedicalRecord, prompts: Prompts, role: Role, note: str) -> list[Message]:
    key = (role.value, template_name(role, game.spec.task))
    for row in prompts:
        if (row.get("role"), row.get("template")) == key and row["step"] <= game.step:
            return Prompt(tuple(row["messages"]), {"note": note}).filled(str)
    try:  # an older run, or games of `medserl play`: as the profile is now
        return load_profile(game.profile).messages(role, game.spec.task, note)
    except ValueError:  # a user's own folder, which is not here
        return []


def run_names(runs: Sequence[Path]) -> list[str]:
    """The runs' folders by name, with the part of the path that tells them apart."""
    folders = [run.resolve() if run.is_dir() else run.resolve().parent for run in runs]
    for depth in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names) and not any(name.isdigit() for name in names):  # a seed alone says little
            return names
    raise ValueError("a run is named twice: name each run once")


def _lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def sample(run: Path, share: float) -> list[MedicalRecord]:
    """At most this share of a run's games, prompt groups whole, in their order; always the same ones."""
    if share == 1:
        return list(read_run(run))
    groups = list(Counter((game.step, game.uid) for game in read_run(run)).items())
    random.Random(0).shuffle(groups)
    most = share * sum(size for _, size in groups)
    sizes = accumulate(size for _, size in groups)
    kept = {group for (group, _), size in zip(groups, sizes, strict=True) if size <= most}
    return [game for game in read_run(run) if (game.step, game.uid) in kept]


def _telling(frame: pd.DataFrame) -> int:
    """The latest game that fooled the assessor, else the latest that did not, else the last."""
    attacked = frame[frame["changed_words"].gt(0).fillna(False)]
    caught, missed = (attacked.index[attacked["outcome"] == name] for name in ("correct_detection", "missed_error"))
    return int([len(frame) - 1, *caught, *missed][-1])


def _columns(frame: pd.DataFrame) -> dict[str, Any]:
    values = [*_NUMBERS, "right", *(name for name in frame.columns if "reward" in name)]
    numbers = {name: {"values": [None if pd.isna(x) else round(float(x), 4) for x in frame[name]]} for name in values}
    words = {name: _coded(frame[name]) for name in _WORDS}
    signal = frame["signal"].map({True: "yes", False: "no"})
    return numbers | words | {"signal": _coded(signal), "has_signal": {"values": [int(x) for x in frame["signal"]]}}


def _coded(values: pd.Series) -> dict[str, Any]:
    codes, words = pd.factorize(values, sort=True, use_na_sentinel=False)
    return {"words": [None if pd.isna(word) else str(word) for word in words], "codes": codes.tolist()}


def _by_step(runs: Sequence[Path], names: list[str]) -> dict[str, Any]:
    """Metrics, alarms and checkpoints of each run that has them."""
    numbers, alarms, checkpoints = {}, {}, {}
    for name, run in zip(names, runs, strict=True):
        try:
            frame = metrics(run)
        except ValueError:
            frame = pd.DataFrame()
        kept = {n: [None if pd.isna(x) else float(f"{x:.5g}") for x in frame[n]] for n in frame.columns}
        numbers[name] = {"steps": [int(step) for step in frame.index], "names": kept}
        fired = frame[[n for n in frame.columns if n.startswith(METRIC_PREFIX)]].dropna(how="all")
        alarms[name] = {
            int(step): [n.removeprefix(METRIC_PREFIX) for n in row.dropna().index] for step, row in fired.iterrows()
        }
        saved = [re.fullmatch(r"global_step_(\d+)", path.name) for path in (run.iterdir() if run.is_dir() else ())]
        checkpoints[name] = sorted(int(match[1]) for match in saved if match)
    return {"metrics": numbers, "alarms": alarms, "checkpoints": checkpoints}


BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#d9722e", "#3a9150", "#8a8a8a"
STYLE: Any = {  # matplotlib's names of settings are literal types
    "svg.hashsalt": "medserl",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
"""matplotlib's settings for every picture of the project."""

_COLOURS = {
    Outcome.VOID: "#d0d0d0",
    Outcome.INVALID_ATTACK: GREY,
    Outcome.UNREADABLE: GREEN,
    Outcome.CORRECT_DETECTION: BLUE,
    Outcome.MISSED_ERROR: ORANGE,
    Outcome.CORRECT_REJECTION: "#8fb4d6",
    Outcome.FALSE_POSITIVE: "#f0c09a",
}


def write_figures(run: Path, folder: Path, name: str) -> list[Path]:
    """Draw rewards, accuracy, valid attacks and outcome shares by step, all from the games; return the two files."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--figures needs matplotlib: pip install matplotlib") from None
    every = games(run)
    played = every[every["outcome"] != Outcome.VOID.value]
    assessed = played[played["outcome"] != Outcome.INVALID_ATTACK.value]
    attacked = played[played["attacker_tokens"].notna()]
    panels = {
        "Reward": [("attacker", played["attacker_reward"], ORANGE), ("assessor", played["assessor_reward"], BLUE)],
        "Assessor: accuracy": [("accuracy", assessed["right"].fillna(False), BLUE)],
        "Attacker: valid attacks": [("valid", attacked["invalid"].isna(), ORANGE)],
    }
    shares_of = pd.crosstab(every["step"], every["outcome"], normalize="index")
    shares_of = shares_of.reindex(columns=[outcome.value for outcome in _COLOURS], fill_value=0)
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        *curves, shares = figure.subplots(2, 2, sharex=True).flat
        for axes, (title, lines) in zip(curves, panels.items(), strict=True):
            axes.set_title(title)
            for label, values, colour in lines:
                means = values.astype("Float64").groupby(every["step"]).mean().dropna()
                axes.plot(means.index, means, ".-", color=colour, label=label)
            if len(lines) > 1:
                axes.legend()
            else:
                axes.set_ylim(0, 1.03)
        labels = [outcome.value.replace("_", " ") for outcome in _COLOURS]
        shares.stackplot(shares_of.index, shares_of.to_numpy().T, labels=labels, colors=list(_COLOURS.values()))
        shares.set_title("Outcomes")
        shares.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
        for axes in (curves[-1], shares):
            axes.set_xlabel("step")
        files = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
        figure.savefig(files[0], metadata={"Date": None})
        figure.savefig(files[1], dpi=200)
    return files
