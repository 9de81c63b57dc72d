"""``medserl tournament``: games between frozen players. Success against a live opponent says
little: both move.

An attack is valid if it keeps the rules and the judge says that the note became what the row asks
for. An error is found if the verdict on it is "harmful"; an unreadable verdict has not found it.
Void games count nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking, without_credentials
from medserl_agentloop.core.interaction import NoReplyError, Reply
from medserl_agentloop.core.step_file import GAMES_FILE, StepFile, lock_folder
from medserl_agentloop.evaluation import play
from medserl_agentloop.evaluation.play import (
    Model,
    model_at,
    play_match,
    run_config,
    run_of,
    start_games,
    template_of,
)
from medserl_agentloop.games.medical.case import GameSpec, Label, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.records import MedicalRecord, read_games
from medserl_agentloop.scoring.metrics import wilson_interval
from medserl_agentloop.terminal import errors_in_one_line, say, table

if TYPE_CHECKING:
    import pandas as pd

RESULTS = "tournament.json"
TABLE = "tournament.csv"
_BY = ["attacker", "assessor"]
SIGNIFICANT = 0.05


class _Entry(NamedTuple):
    """A player as named on the command line."""

    name: str  # for tables and records
    place: str  # its folder, or the address of its server
    served: str | None = None  # name of the model that a server serves
    line: str = (
        ""  # the run that it is a checkpoint of; others are one line in the order they are given in
    )


_Match = tuple[_Entry | None, _Entry, dict[int, GameSpec]]
"""Games of a pairing, by the number of their row; nobody attacks notes that stay untouched."""


def named(text: str) -> tuple[str, str]:
    """The name and the place in NAME=PLAYER; the name may be missing."""
    name, _, place = ("", "", text) if Path(text).exists() else text.rpartition("=")
    return name, place


def entries(text: str, ends: bool = False) -> list[_Entry]:
    """The players that an argument of the command means, oldest first, or the two ``ends`` of a
    run.

    A ValueError if there is no such folder.
    """
    name, place = named(text)
    served, at, address = place.partition("@http")
    if at:
        return [_Entry(name or served, f"http{address}", served)]
    folder = Path(place)
    if not folder.is_dir():
        raise ValueError(
            f"{without_credentials(place)} is neither a folder nor a served MODEL@http://host:port"
        )
    name = name or folder.resolve().name
    # verl deletes old checkpoints' weights and leaves what it did not write.
    steps = {
        int(actor.parent.name.rpartition("_")[2]): actor.parent
        for actor in folder.glob("global_step_*/actor")
    }
    if not steps:
        return [_Entry(name, place)]
    start = run_config(folder).get("actor_rollout_ref", {}).get("model", {}).get("path", "")
    first = [_Entry(f"{name}/0", start, line=name)] if start and Path(start).is_dir() else []
    line = first + [_Entry(f"{name}/{step}", str(steps[step]), line=name) for step in sorted(steps)]
    return [line[0], line[-1]] if ends and len(line) > 1 else line


def tournament(
    players: Annotated[
        list[str] | None,
        typer.Argument(
            help="Players of both roles: a model's folder, a checkpoint of verl's, a run (all its "
            "checkpoints and what "
            "it started from), or MODEL@http://host:port; NAME=PLAYER names one."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder; else tournament/ beside the first run."),
    ] = None,
    attackers: Annotated[
        list[str] | None, typer.Option("--attacker", help="A player of this role alone.")
    ] = None,
    assessors: Annotated[
        list[str] | None, typer.Option("--assessor", help="A player of this role alone.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Parquet file of games; else the run's data.val_files.")
    ] = None,
    ends: Annotated[
        bool, typer.Option("--ends", help="Of a run only its start and its last checkpoint.")
    ] = False,
    games: Annotated[
        int, typer.Option(min=1, help="Rows to draw, those to attack and untouched ones.")
    ] = 100,
    seed: Annotated[
        int, typer.Option(help="Draws the rows, and seeds the sampling of every turn.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature of all players.")
    ] = 1.0,
    profile: Annotated[
        str | None, typer.Option(help="Prompt profile; else that of the run, or medserl.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Who judges; as in the run, if not given.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at a server.")] = 16,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one request may take.")
    ] = 300.0,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' API key.")
    ] = None,
    extra_body: Annotated[list[str] | None, play.EXTRA_BODY] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")
    ] = None,
) -> None:
    """Let attackers and assessors play each other on the same notes, and report who finds whose
    errors.

    A tournament that was stopped goes on where it was when it is started again with the same
    options.
    """
    console = Console()
    groups = (players or [], attackers or [], assessors or [])
    with errors_in_one_line(stopped="the same command goes on after the pairings so far"):
        both, attacking, assessing = (
            [entry for text in group for entry in entries(text, ends)] for group in groups
        )
        everyone = both + attacking + assessing
        attacking, assessing = both + attacking, both + assessing
        if not attacking or not assessing:
            raise ValueError("name at least one player, or an --attacker and an --assessor")
        ((name, count),) = Counter(entry.name for entry in everyone).most_common(1)
        if count > 1:
            raise ValueError(f"{count} players are called {name}: name one of them, NEWNAME=PLAYER")
        places = [named(text)[1] for group in groups for text in group]
        run = next(filter(None, map(run_config, places)), {})
        output = output or next(filter(None, map(run_of, places)), Path()) / "tournament"
        # Untouched notes are nobody's attack, and a second assessment of a note is no second game.
        settings = [*(settings or []), "assessments=1"]
        named_by = {"profile": profile, "judge": judge}
        interaction, started = start_games(
            run, MedicalConfig, named_by, settings, data, games, seed
        )
        rows = [game.record.spec for game in started]
        asking = {"api_key_env": api_key_env, "timeout_s": timeout, "concurrency": concurrency}
        asked = {
            "players": {e.name: _identity(e, asking, extra_body) for e in everyone},
            "attackers": [entry.name for entry in attacking],
            "assessors": [entry.name for entry in assessing],
            "rows": hashlib.sha256(
                json.dumps([asdict(spec) for spec in rows]).encode()
            ).hexdigest(),
            "temperature": temperature,
            "seed": seed,
            "template": template_of(run),
            "extra_body": extra_body or None,
            "selfplay": interaction.config.model_dump(mode="json"),
        }
        attacked = {number: spec for number, spec in enumerate(rows) if spec.category.has_attack}
        untouched = {
            number: spec for number, spec in enumerate(rows) if not spec.category.has_attack
        }
        errors = sum(spec.target_label is Label.HARMFUL for spec in attacked.values())
        if not errors:
            raise ValueError(
                "none of the rows asks for an error; take other --data, or more --games"
            )
        matches: list[_Match] = [
            (attacker, assessor, attacked) for attacker, assessor in product(attacking, assessing)
        ]
        matches += [(None, assessor, untouched) for assessor in assessing if untouched]
        say(
            console,
            f"{sum(len(specs) for *_, specs in matches)} games: {errors} attacks that are to put "
            "an error in and "
            f"{len(attacked) - errors} rewordings in each of {len(attacking)} x {len(assessing)} "
            "pairings, "
            f"{len(untouched)} untouched notes for each assessor",
        )
        with lock_folder(output, wait_s=0):
            before = (
                json.loads(results.read_text("utf-8"))
                if (results := output / RESULTS).exists()
                else {}
            )
            before = before.get("settings", asked)
            if differ := ", ".join(key for key in asked if before.get(key) != asked[key]):
                raise ValueError(
                    f"{output} holds a tournament with other settings ({differ}): use another "
                    "folder (-o)"
                )
            results.write_text(json.dumps({"settings": asked}, indent=1), encoding="utf-8")
            asyncio.run(
                _play(
                    matches,
                    asked,
                    interaction.config,
                    asking,
                    StepFile(output / GAMES_FILE),
                    console,
                )
            )
        _conclude(output, asked, everyone, console)


def _identity(entry: _Entry, asking: Mapping[str, Any], extra_body: list[str] | None) -> Any:
    """A player's weights, as far as its folder or its server tells: a tournament does not go on
    with others.
    """
    if entry.served is None:
        from medserl_agentloop.evaluation.local_models import find_weights, fingerprint

        return fingerprint(find_weights(Path(entry.place)))
    model = model_at(entry.place, entry.served, {}, extra_body=extra_body, **asking)
    assert isinstance(model, ServedModel)
    return {"name": model.name, "server": model.url, **blocking(model.check())}


async def _play(
    matches: Sequence[_Match],
    asked: Mapping[str, Any],
    config: MedicalConfig,
    asking: Mapping[str, Any],
    file: StepFile,
    console: Console,
) -> None:
    """Play the matches that the file does not hold whole; a match is written when all of it is
    played.
    """

    @lru_cache(maxsize=2)  # large models do not all fit into memory
    def model_of(entry: _Entry) -> Model:
        fields = asked["extra_body"] if entry.served else None
        model = model_at(entry.place, entry.served, asked["template"], extra_body=fields, **asking)
        model.name = entry.name
        return model

    file.cut_after(len(matches))  # a killed process left a line half-written
    played = Counter(line["step"] for line in file.read()) if file.path.exists() else Counter[int]()
    done = [
        *(played[number] == len(specs) for number, (*_, specs) in enumerate(matches)),
        False,
    ].index(False)
    file.cut_after(done - 1)
    drawn = {"temperature": asked["temperature"], "seed": asked["seed"]}
    attacks: dict[_Entry | None, dict[int, Reply | NoReplyError]] = defaultdict(dict)
    for number, match in track(
        [*enumerate(matches)][done:], "pairings", console=console, transient=True
    ):
        attacker, assessor, specs = match
        players = model_of(attacker or assessor), model_of(assessor)
        records = await play_match(
            *players, [*specs.values()], config, attacks=attacks[attacker], **drawn
        )
        for record, row in zip(records, specs, strict=True):
            record.context, record.uid, record.step = "isolated", str(row), number
        file.append(record.to_json() for record in records)


def _conclude(
    output: Path, asked: dict[str, Any], everyone: Sequence[_Entry], console: Console
) -> None:
    records = list(read_games(output / GAMES_FILE))
    void = [record.void for record in records if record.is_void]
    if len(void) == len(records):
        raise ValueError(f"all games are void, the first because of: {void[0]}")
    results = shares(records)
    lines = [
        [e.name for e in everyone if e.line == line]
        for line in dict.fromkeys(e.line for e in everyone)
    ]
    of_lines = [result for line in lines if (result := newest(results, line))]
    results.to_csv(output / TABLE, index=False)
    numbers = {"void": len(void), "shares": results.to_dict("records"), "newest": of_lines}
    (output / RESULTS).write_text(
        json.dumps({"settings": asked, **numbers}, indent=1), encoding="utf-8"
    )
    console.print(*tables(results, [entry.name for entry in everyone]))
    for result in of_lines:
        forgotten = [
            f"it has forgotten {lost['attacker']}, which wins {lost['success']:.0%} of its games "
            "and won "
            f"{lost['before']:.0%} against {lost['earlier']} (p {lost['p']:.2g})"
            for lost in result["forgotten"]
        ] or [f"nothing forgotten in {result['comparisons']} comparisons"]
        worst = (
            f"newest assessor {result['assessor']}: its worst attacker is "
            f"{result['worst attacker']}"
        )
        say(console, "; ".join([worst, *forgotten]))
    if void:
        say(console, f"void: {len(void)} of {len(records)} games, the first because of: {void[0]}")
    say(console, f"{output}: {GAMES_FILE}, {RESULTS}, {TABLE}")


def shares(games: Sequence[MedicalRecord]) -> pd.DataFrame:
    """Counted shares, a row each, with Wilson's 95 % interval; ``attacker`` or ``assessor`` is
    empty for all of them.

    ``detection``: of the valid attacks that put an error in, found. ``success``: of all that were
    to put one in, valid and not found. ``valid``, ``valid decoys`` count an attack once, against
    the first assessor. ``false alarms`` are correct notes called wrong, ``untouched`` or validly
    reworded (``decoys``); ``errors found, untouched`` the data's.
    """
    import pandas as pd  # not at the top: half a second of every command

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
    attacked = facts[facts.attacker != ""]
    errors, decoys, untouched = (
        attacked[attacked.harmful],
        attacked[~attacked.harmful],
        facts[facts.attacker == ""],
    )
    once = ["attacker", "game"]
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
    intervals = [
        wilson_interval(hits, games)
        for hits, games in zip(results["hits"], results["games"], strict=True)
    ]
    results[["low", "high"]] = pd.DataFrame(intervals, columns=["low", "high"], dtype=float)
    columns = ["measure", *_BY, "hits", "games", "share", "low", "high"]
    return (
        results.reindex(columns=columns)
        .fillna({role: "" for role in _BY})
        .astype({"hits": int, "share": float})
    )


def _is_as_asked(game: MedicalRecord) -> bool:
    """Return whether the judge says that the note became what the row asks for."""
    judged = game.judgement
    return (
        judged is not None
        and judged.label is game.spec.target_label
        and judged.realistic is not False
    )


def newest(results: pd.DataFrame, line: Sequence[str]) -> dict[str, Any] | None:
    """The newest assessor of a line, oldest first: its worst attacker, and what it has forgotten;
    None if it is alone.

    An older attacker is forgotten if its success is higher than against an earlier assessor of the
    line: Fisher's exact test, one-sided, p times the number of comparisons below
    :data:`SIGNIFICANT`.
    """
    from scipy.stats import fisher_exact

    success = results[results.measure == "success"].set_index(_BY)
    assessors = [name for name in line if name in success.index.get_level_values("assessor")]
    if len(assessors) < 2:
        return None
    last, tested = assessors[-1], []
    for attacker, earlier in product(line[: line.index(last)], assessors[:-1]):
        if {(attacker, last), (attacker, earlier)} <= {*success.index}:
            now, before = success.loc[(attacker, last)], success.loc[(attacker, earlier)]
            counts = [[one.hits, one.games - one.hits] for one in (now, before)]
            p = float(fisher_exact(counts, alternative="greater").pvalue)
            test = {
                "attacker": attacker,
                "earlier": earlier,
                "success": now.share,
                "before": before.share,
                "p": p,
            }
            tested.append(test)
    worst = success.xs(last, level="assessor").share.idxmax()
    forgotten = [
        test | {"p": p} for test in tested if (p := min(1.0, test["p"] * len(tested))) < SIGNIFICANT
    ]
    return {
        "assessor": last,
        "worst attacker": worst,
        "comparisons": len(tested),
        "forgotten": forgotten,
    }


def tables(results: pd.DataFrame, players: Sequence[str]) -> Iterator[Table]:
    """The matrices and a line for each player, shares in % with their intervals."""
    shown = results.assign(
        cell=[
            f"{100 * row.share:.0f} [{100 * row.low:.0f}, {100 * row.high:.0f}]"
            for row in results.itertuples()
        ]
    )
    of_assessors = ["errors found, untouched", "false alarms, untouched", "false alarms, decoys"]
    for title, rows, columns, measures in (
        ("valid errors found, %", "attacker", "assessor", ["detection"]),
        ("attacks that are valid and not found, %", "attacker", "assessor", ["success"]),
        ("attackers, %", "attacker", "measure", ["valid", "valid decoys"]),
        ("assessors, %", "assessor", "measure", of_assessors),
    ):
        cells = (
            shown[shown.measure.isin(measures)]
            .pivot(index=rows, columns=columns, values="cell")
            .fillna("")
        )
        cells = cells.loc[[name for name in players if name in cells.index]]
        cells = cells[[name for name in (*players, *measures) if name in cells]]
        yield table(title, [f"{rows} \\ {columns}", *cells], list(cells.itertuples()))
