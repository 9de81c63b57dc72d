"""``medserl tournament`` and ``progress``: frozen players meet each other on the same notes.

Success against a live opponent says little, because both roles change. An attack is valid if it
follows the rules and the judge confirms that the note became what the row asks for. An error is
found if the verdict is "harmful"; an unreadable verdict does not find it. Void games are ignored.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer import Argument, Option

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking, without_credentials
from medserl_agentloop.core.step_file import GAMES_FILE, StepFile, lock_folder
from medserl_agentloop.evaluation import play
from medserl_agentloop.games.medical.case import GameSpec, Label, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.records import MedicalRecord, read_games
from medserl_agentloop.paths import hash_of_values
from medserl_agentloop.scoring.metrics import share_difference, wilson_interval
from medserl_agentloop.terminal import errors_in_one_line, say, table

if TYPE_CHECKING:
    import pandas as pd

RESULTS, TABLE = "tournament.json", "tournament.csv"
_BY = ["attacker", "assessor"]
_OF_ASSESSORS = ["errors found, untouched", "false alarms, untouched", "false alarms, decoys"]
_IN_WORDS = {"detection": "errors found in attacks", "success": "attacks that succeed"}


class Entry(NamedTuple):
    """A player as named on the command line."""

    name: str  # for tables and records; RUN/STEP of a run's checkpoint
    place: str  # its folder, or the address of its server
    served: str | None = None  # name of the model that a server serves


class _Match(NamedTuple):
    """Games of a pairing, by the number of their row; untouched notes have no attacker."""

    attacker: Entry | None
    assessor: Entry
    specs: dict[int, GameSpec]


class SkillChange(NamedTuple):
    """Compare a run's last player with its first on the same notes."""

    measure: str
    before: tuple[int, int]  # hits, games
    after: tuple[int, int]
    difference: tuple[float, float, float]  # after minus before, and its 95 % interval

    def __str__(self) -> str:
        first, last = (f"{100 * hits / games:.0f}" for hits, games in (self.before, self.after))
        value, low, high = (100 * number for number in self.difference)
        more_is_better = not self.measure.startswith("false alarms")
        better = "better" if (value > 0) is more_is_better else "worse"
        moved = f"{better} by {abs(value):.0f} points, {low:+.0f} to {high:+.0f}"
        shown = moved if low > 0 or high < 0 else "no difference shown"
        return f"{_IN_WORDS.get(self.measure, self.measure)} {first} → {last} % ({shown})"


def entries(text: str) -> list[Entry]:
    """The players that an argument means, a run's oldest first; ValueError if there are none."""
    name, _, place = ("", "", text) if Path(text).exists() else text.rpartition("=")
    served, at, address = place.partition("@http")
    if at:
        return [Entry(name or served, f"http{address}", served)]
    folder = Path(place)
    if not folder.is_dir():
        raise ValueError(
            f"{without_credentials(place)} is neither a folder nor a served MODEL@http://host:port"
        )
    name = name or folder.resolve().name
    # verl deletes old checkpoints' weights and leaves what it did not write.
    actors = folder.glob("global_step_*/actor")
    steps = {int(actor.parent.name.rpartition("_")[2]): actor.parent for actor in actors}
    if not steps:
        return [Entry(name, place)]
    start = play.run_config(folder).get("actor_rollout_ref", {}).get("model", {}).get("path", "")
    first = [Entry(f"{name}/0", start)] if start and Path(start).is_dir() else []
    return first + [Entry(f"{name}/{step}", str(steps[step])) for step in sorted(steps)]


def progress(
    run: Annotated[Path, Argument(help="Folder of a run that has saved a checkpoint.")],
    data: play.Data = None,
    games: Annotated[int, Option(min=1, help="Rows to draw.")] = 200,
) -> None:
    """Let a run's first and last player meet, and say what was gained.

    It is medserl tournament between the two, with the results in RUN/progress/STEP.
    """
    with errors_in_one_line():
        if len(found := entries(str(run))) < 2:
            raise ValueError(f"{run} lacks a checkpoint, or the folder of its starting model")
    first, last = found[0], found[-1]
    output = run / "progress" / last.name.rpartition("/")[2]
    ends = [f"{name}={place}" for name, place, _ in (first, last)]
    tournament(ends, output, data=data, games=games)


def tournament(
    players: Annotated[
        list[str],
        Argument(
            help="A model's folder, a checkpoint, a run (all its checkpoints and what it started "
            "from), or MODEL@http://host:port; NAME=PLAYER names one."
        ),
    ],
    output: Annotated[
        Path | None, Option("--output", "-o", help="By default tournament/ in the first run's.")
    ] = None,
    data: play.Data = None,
    games: Annotated[int, Option(min=1, help="Rows to draw.")] = 100,
    profile: play.Profile = None,
    judge: play.JudgeName = None,
    concurrency: play.AtOnce = 16,
    api_key_env: play.KeyVariable = None,
    extra_body: play.ExtraBody = None,
    settings: play.Settings = None,
) -> None:
    """Let players meet on the same notes: who finds whose errors?

    The same command continues a stopped tournament.
    """
    console = Console()
    with errors_in_one_line(stopped="the same command continues after the pairings so far"):
        everyone = [entry for text in players for entry in entries(text)]
        ((name, count),) = Counter(entry.name for entry in everyone).most_common(1)
        if count > 1:
            raise ValueError(f"{count} players are called {name}: rename one, NEWNAME=PLAYER")
        run = next(filter(None, (play.run_config(entry.place) for entry in everyone)), {})
        folder = next(filter(None, (play.run_of(entry.place) for entry in everyone)), Path())
        output = output or folder / "tournament"
        # Untouched notes have no attacker, and assessing a note again is not a second game.
        settings = [*(settings or []), "assessments=1"]
        named = {"profile": profile, "judge": judge}
        interaction, started = play.start_games(run, MedicalConfig, named, settings, data, games)
        rows = dict(enumerate(game.record.spec for game in started))
        attacked = {number: spec for number, spec in rows.items() if spec.category.has_attack}
        untouched = {number: spec for number, spec in rows.items() if number not in attacked}
        errors = sum(spec.target_label is Label.HARMFUL for spec in attacked.values())
        if not errors:
            raise ValueError("no row asks for an error; take other --data, or more --games")
        matches = [_Match(*pair, attacked) for pair in product(everyone, everyone)]
        matches += [_Match(None, assessor, untouched) for assessor in everyone if untouched]
        say(
            console,
            f"{sum(len(match.specs) for match in matches)} games: in each of {len(everyone)} x "
            f"{len(everyone)} pairings {errors} attacks with an error and {len(attacked) - errors} "
            f"rewordings, {len(untouched)} untouched notes for each assessor",
        )
        template = play.template_of(run)
        asking = {"api_key_env": api_key_env, "concurrency": concurrency}

        @lru_cache(maxsize=2)  # large models do not all fit into memory
        def model_of(entry: Entry) -> play.Model:
            fields = extra_body if entry.served else None
            model = play.model_at(entry.place, entry.served, template, extra_body=fields, **asking)
            model.name = entry.name
            return model

        asked = {
            "players": {entry.name: _identity(entry, model_of) for entry in everyone},
            "rows": hash_of_values([asdict(spec) for spec in rows.values()]),
            "template": template,
            "extra_body": extra_body or None,
            "selfplay": interaction.config.model_dump(mode="json"),
        }
        with lock_folder(output, wait_s=0):
            results = output / RESULTS
            before = json.loads(results.read_text("utf-8")) if results.exists() else {}
            before = before.get("settings", asked)
            if differ := ", ".join(key for key in asked if before.get(key) != asked[key]):
                raise ValueError(
                    f"{output} holds a tournament with other settings ({differ}): use another -o"
                )
            results.write_text(json.dumps({"settings": asked}, indent=1), encoding="utf-8")
            file = StepFile(output / GAMES_FILE)
            asyncio.run(_play(matches, model_of, interaction.config, file, console))
        _conclude(output, asked, [entry.name for entry in everyone], console)


def _identity(entry: Entry, model_of: Callable[[Entry], play.Model]) -> Any:
    """A player's weights, as far as known: a tournament does not continue with others."""
    if entry.served is None:
        from medserl_agentloop.evaluation.local_models import facts_of  # loads verl

        return facts_of(Path(entry.place))["sha256"]
    model = model_of(entry)
    assert isinstance(model, ServedModel)
    return {"name": entry.served, "server": model.url, **blocking(model.check())}


async def _play(
    matches: Sequence[_Match],
    model_of: Callable[[Entry], play.Model],
    config: MedicalConfig,
    file: StepFile,
    console: Console,
) -> None:
    """Play the matches that are incomplete in the file; a match is written when it ends."""
    file.cut_after(len(matches))  # a killed process left a line half-written
    played = Counter(line["step"] for line in file.read()) if file.path.exists() else Counter[int]()
    whole = [played[number] == len(match.specs) for number, match in enumerate(matches)]
    done = [*whole, False].index(False)
    file.cut_after(done - 1)
    attacks: dict[Entry | None, play.Said] = defaultdict(dict)
    for number, (attacker, assessor, specs) in track(
        [*enumerate(matches)][done:], "pairings", console=console, transient=True
    ):
        pair = model_of(attacker or assessor), model_of(assessor)
        records = await play.play_match(
            *pair, [*specs.values()], config, attacks=attacks[attacker], temperature=1.0
        )
        for record, row in zip(records, specs, strict=True):
            record.context, record.uid, record.step = "isolated", str(row), number
        file.append(record.to_json() for record in records)


def _conclude(output: Path, asked: dict[str, Any], names: Sequence[str], console: Console) -> None:
    records = list(read_games(output / GAMES_FILE))
    void = [record.void for record in records if record.is_void]
    if len(void) == len(records):
        raise ValueError(f"all games are void, the first because of: {void[0]}")
    results = shares(records)
    runs = defaultdict[str, list[str]](list)
    for name in names:
        runs[name.rpartition("/")[0]].append(name)  # RUN/STEP
    gained = {run: changes(results, of[0], of[-1]) for run, of in runs.items() if run}
    results.to_csv(output / TABLE, index=False)
    numbers = {
        "settings": asked,
        "void": len(void),
        "shares": results.to_dict("records"),
        "changes": {run: [change._asdict() for change in found] for run, found in gained.items()},
    }
    (output / RESULTS).write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    console.print(*tables(results, names))
    if void:
        say(console, f"void: {len(void)} of {len(records)} games, the first because of: {void[0]}")
    say(console, f"{output}: {GAMES_FILE}, {RESULTS}, {TABLE}")
    for run, found in gained.items():
        if found:
            say(console, f"{run}, first against last: {'; '.join(map(str, found))}")


# --- the group-by ---


def shares(games: Sequence[MedicalRecord]) -> pd.DataFrame:
    """Shares with Wilson's 95 % intervals, a row each; an empty ``attacker`` or ``assessor`` means
    all (docs/evaluation.md has the measures).
    """
    import pandas as pd  # not at the top: it costs every command half a second

    facts = pd.DataFrame(
        {
            "attacker": game.players.get(Role.ATTACKER.value, ""),
            "assessor": game.players.get(Role.ASSESSOR.value, ""),
            "game": game.uid,
            "harmful": game.spec.target_label is Label.HARMFUL,
            "valid": game.attack is not None and game.attack.invalid is None and _is_as_asked(game),
            "detected": game.assessment is not None and game.assessment.verdict is Label.HARMFUL,
        }
        for game in games
        if not game.is_void
    )
    attacked, untouched = facts[facts.attacker != ""], facts[facts.attacker == ""]
    errors, decoys = attacked[attacked.harmful], attacked[~attacked.harmful]
    once = ["attacker", "game"]  # an attack, against any assessor
    counted = [
        ("detection", errors[errors.valid], "detected", _BY),
        ("success", errors.assign(won=errors.valid & ~errors.detected), "won", _BY),
        ("valid", errors.drop_duplicates(once), "valid", ["attacker"]),
        ("valid decoys", decoys.drop_duplicates(once), "valid", ["attacker"]),
        ("false alarms, untouched", untouched[~untouched.harmful], "detected", ["assessor"]),
        ("false alarms, decoys", decoys[decoys.valid], "detected", ["assessor"]),
        ("errors found, untouched", untouched[untouched.harmful], "detected", ["assessor"]),
    ]
    results = pd.concat(
        of.groupby(by)[column]
        .agg(hits="sum", games="size", share="mean")
        .reset_index()
        .assign(measure=measure)
        for measure, of, column, by in counted
    ).reset_index(drop=True)
    intervals = [wilson_interval(row.hits, row.games) for row in results.itertuples()]
    results[["low", "high"]] = pd.DataFrame(intervals, columns=["low", "high"], dtype=float)
    columns = ["measure", *_BY, "hits", "games", "share", "low", "high"]
    whole = results.reindex(columns=columns).fillna({role: "" for role in _BY})
    return whole.astype({"hits": int, "share": float})


def _is_as_asked(game: MedicalRecord) -> bool:
    """Return whether the judge confirms that the note became what the row asks for."""
    judged, wanted = game.judgement, game.spec.target_label
    return judged is not None and judged.label is wanted and judged.realistic is not False


def changes(results: pd.DataFrame, first: str, last: str) -> list[SkillChange]:
    """What assessor and attacker gained, from the table of shares.

    Both players attack; an attacker's success counts against both.
    """
    found: list[SkillChange] = []
    roles = dict.fromkeys((*_OF_ASSESSORS, "detection"), "assessor") | {"success": "attacker"}
    for measure, role in roles.items() if first != last else ():
        (other,) = set(_BY) - {role}
        rows = results[(results.measure == measure) & results[other].isin(["", first, last])]
        sums = rows.groupby(role)[["hits", "games"]].sum()
        if {first, last} <= {*sums.index}:
            before, after = ((int(hits), int(n)) for hits, n in sums.loc[[first, last]].to_numpy())
            found.append(SkillChange(measure, before, after, share_difference(before, after)))
    return found


def tables(results: pd.DataFrame, players: Sequence[str]) -> Iterator[Table]:
    """The matrices and a line for each player, shares in % with their intervals."""
    percent = (100 * results[["share", "low", "high"]]).round(0).astype(int).astype(str)
    shown = results.assign(cell=percent.share + " [" + percent.low + ", " + percent.high + "]")
    for title, rows, columns, measures in (
        ("valid errors found, %", "attacker", "assessor", ["detection"]),
        ("valid attacks that were not found, %", "attacker", "assessor", ["success"]),
        ("attackers, %", "attacker", "measure", ["valid", "valid decoys"]),
        ("assessors, %", "assessor", "measure", _OF_ASSESSORS),
    ):
        of_measures = shown[shown.measure.isin(measures)]
        cells = of_measures.pivot(index=rows, columns=columns, values="cell").fillna("")
        cells = cells.loc[[name for name in players if name in cells.index]]
        cells = cells[[name for name in (*players, *measures) if name in cells]]
        yield table(title, [f"{rows} \\ {columns}", *cells], list(cells.itertuples()))
