"""``medserl play``; models and games outside of a run, for tournaments and evaluation as well."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import typer
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress
from typer import Argument, Option

from medserl_agentloop.core.chat import TEMPLATE_KWARGS, ServedModel
from medserl_agentloop.core.client import CHAT_PATH, ServerOptions
from medserl_agentloop.core.config import SelfPlayConfig, game_class, key_values, selfplay_config
from medserl_agentloop.core.encoding import Message
from medserl_agentloop.core.interaction import Interaction, NoReplyError, Reply, Turn, play_game
from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, StepFile
from medserl_agentloop.games.medical.case import Category, GameSpec, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.judges import build_judge
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import read_parquet
from medserl_agentloop.terminal import errors_in_one_line, say, table

if TYPE_CHECKING:
    from medserl_agentloop.evaluation.local_models import LocalModel

Model: TypeAlias = "ServedModel | LocalModel"
"""A model that takes any role, behind a server or on this machine; records have its ``name``."""

LEAST_PARSED, LEAST_VALID, MOST_CUT, MOST_SILENT = 0.9, 0.5, 0.02, 0.8
"""Shares that a model needs at the start of a run (docs/evaluation.md). No run has confirmed it."""

REQUESTS: dict[str, Any] = {"timeout_s": 600.0, "retries": 3}
"""Limits of a request. Reasoning on a busy server takes minutes."""

MODEL_HELP = (
    "A folder (Hugging Face, LoRA adapter, a verl run or one of its checkpoints), played on the "
    "CPU; or the address of an OpenAI-compatible server, e.g. http://localhost:30000."
)
# Options that several commands have.
Served = Annotated[str | None, Option("--model", help="Name of the model that a server serves.")]
Data = Annotated[Path | None, Option(help="Games in parquet; by default the run's data.val_files.")]
Profile = Annotated[str | None, Option(help="Prompt profile; by default the run's, or medserl.")]
JudgeName = Annotated[str | None, Option("--judge", help="Judge; by default the run's.")]
AtOnce = Annotated[
    int, Option("--concurrency", min=1, help="Requests in flight; turns in a batch.")
]
KeyVariable = Annotated[
    str | None, Option("--api-key-env", help="Environment variable with the API key.")
]
ExtraBody = Annotated[
    list[str] | None, Option(help="KEY=VALUE in all requests; max_tokens=null removes one.")
]
Settings = Annotated[
    list[str] | None, Option("--set", help="A key of the selfplay node: KEY=VALUE.")
]


def play(
    model: Annotated[str, Argument(help=MODEL_HELP)],
    data: Data = None,
    served: Served = None,
    games: Annotated[int, Option(min=1, help="Rows to play, drawn at random.")] = 20,
    samples: Annotated[int, Option(min=1, help="Games on each row.")] = 1,
    output: Annotated[Path | None, Option(help="New file; by default in the run's play/.")] = None,
    profile: Profile = None,
    judge: JudgeName = None,
    concurrency: AtOnce = 16,
    temperature: Annotated[float, Option(min=0.0, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens per turn.")] = 4096,
    api_key_env: KeyVariable = None,
    extra_body: ExtraBody = None,
    settings: Settings = None,
) -> None:
    """Let a model play games, score and save them, and say whether it can play.

    A checkpoint uses the game, profile, judge and reward of its run. For any other model, name a
    judge.
    """
    console = Console()
    with errors_in_one_line(stopped="the games finished so far are in the file named above"):
        output = output or Path(f"{output_of('play', model, served)}.jsonl")
        if output.exists():
            raise ValueError(f"{output} exists already; name a new file with --output")
        run, named = run_config(model), {"profile": profile, "judge": judge}
        interaction, started = start_games(
            run, SelfPlayConfig, named, settings, data, games, samples
        )
        asking = {"api_key_env": api_key_env, "concurrency": concurrency}
        player = model_at(model, served, template_of(run), extra_body=extra_body, **asking)
        say(console, f"games: {output}")
        file, void = StepFile(output), Counter[str]()
        with Progress(console=console) as progress:
            bar = progress.add_task("games", total=len(started))

            def done(number: int, record: Any) -> None:
                record.uid, record.session = str(number % games), number // games  # row by row
                record.context, record.step = "isolated", 0
                file.append([record.to_json()])
                void.update([record.void] if record.void is not None else [])
                progress.update(bar, advance=1, description=f"games, {void.total()} void")

            # The game does not know how long its texts are for this model.
            budgets = dict.fromkeys(interaction.roles, max_tokens)
            options: dict[str, Any] = {"temperature": temperature, "concurrency": concurrency}
            everyone = dict.fromkeys(interaction.roles, player)
            playing = play_games(
                interaction, started, everyone, budgets=budgets, done=done, **options
            )
            records = asyncio.run(playing)
    metrics = interaction.metrics(records)
    taken = [turn for record in records for turn in record.turns]
    by_role = {role: [turn for turn in taken if turn.role == role] for role in interaction.roles}
    turns = {role: of_role for role, of_role in by_role.items() if of_role}
    values = [(name, f"{value:.4g}") for name, value in metrics.items()]
    console.print(table("role metrics", ["metric", "value"], values))
    console.print(lengths_table(turns, max_tokens))
    for line in (
        *interaction.view.notices(metrics),
        *(f"void: {n} x {reason}" for reason, n in void.most_common()),
        *can_play(metrics, turns, max_tokens),
    ):
        say(console, line)
    if void.total() == len(records):
        raise typer.Exit(1)


# --- can this model play? ---

Turns: TypeAlias = Mapping[str, Sequence[Any]]
"""Turns by role; each has ``tokens`` and ``truncated``."""


def lengths_table(turns: Turns, most: int) -> Any:
    """Count each role's truncated turns, measure lengths, and suggest a budget."""
    rows = []
    for role, taken in turns.items():
        lengths = [f"{_longest(taken, percent):,}" for percent in (50, 95, 99)]
        budget = suggested_budget(taken)
        suggested = f"more than {most:,}" if budget is None else f"{budget:,}"
        if not any(turn.tokens for turn in taken):
            lengths, suggested = ["not counted"] * 3, "-"
        rows.append((role, len(taken), f"{100 * _cut(taken):.1f} %", *lengths, suggested))
    columns = ["role", "turns", "cut", "tokens, 50 %", "95 %", "99 %", "budget"]
    return table("lengths of turns", columns, rows)


def suggested_budget(turns: Sequence[Any]) -> int | None:
    """A tenth more than the 99th percentile of turns; None if too many were truncated."""
    return None if _cut(turns) > MOST_CUT else 64 * math.ceil(1.1 * _longest(turns, 99) / 64)


def can_play(metrics: Mapping[str, float], turns: Turns, most: int) -> Iterator[str]:
    """Say what to fix before you pay for a run, if anything."""
    found = []
    for role, taken in turns.items():
        if (cut := _cut(taken)) > MOST_CUT:
            found.append(
                f"a larger budget first: {100 * cut:.0f} % of the {role}'s turns were cut at "
                f"{most:,} tokens. Play again with a larger --max-tokens, or without the model's "
                f"reasoning (--extra-body {TEMPLATE_KWARGS}.enable_thinking=false)"
            )
        for rate, least, words in (
            ("parse_rate", LEAST_PARSED, "can be read"),
            ("valid_rate", LEAST_VALID, "are valid"),
        ):
            if (share := metrics.get(f"selfplay/{role}/{rate}", 1.0)) < least:
                found.append(
                    f"a warm start first: {100 * share:.0f} % of the {role}'s turns {words}, and a "
                    f"run needs {100 * least:.0f} %"
                )
        if (share := metrics.get(f"selfplay/{role}/no_signal_rate", 0.0)) > MOST_SILENT:
            found.append(
                f"other rows first: in {100 * share:.0f} % of its groups the {role} earns the same "
                "in each game, and learns nothing"
            )
    yield from found
    if turns and not found:
        yield "this model can play: its turns are complete, readable and valid often enough"


def _cut(turns: Sequence[Any]) -> float:
    return float(sum(turn.truncated for turn in turns) / len(turns))


def _longest(turns: Sequence[Any], percent: int) -> int:
    """The smallest length that this percentage of turns does not exceed."""
    return int(np.percentile([turn.tokens for turn in turns], percent, method="inverted_cdf"))


# --- the run that a model belongs to ---


def run_of(model: str | Path) -> Path | None:
    """The run of a folder or checkpoint; None for other models."""
    folder = Path(model)
    steps = [part for part in (folder, *folder.parents) if part.name.startswith("global_step_")]
    if steps:
        return steps[0].parent
    return folder if any((folder / name).is_file() for name in (CONFIG_FILE, LATEST)) else None


def run_config(model: str | Path) -> dict[str, Any]:
    """The config in a model's run folder; empty if there is none."""
    run = run_of(model)
    if run is None or not (run / CONFIG_FILE).is_file():
        return {}
    config: Any = OmegaConf.to_container(OmegaConf.load(run / CONFIG_FILE), resolve=True)
    return dict(config)


def template_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template in a run's config."""
    return dict(run.get("data", {}).get("apply_chat_template_kwargs") or {})


def output_of(command: str, model: str, served: str | None) -> Path:
    """A command's default output: ``RUN/command/global_step_N``; without a run ``command/NAME``."""
    if (run := run_of(model)) is None:
        return Path(command, Path(served or model).name)
    from medserl_agentloop.evaluation.local_models import find_weights  # loads verl

    return Path(run, command, *find_weights(Path(model)).relative_to(run).parts[:1])


# --- players and rows ---


async def all_of(
    ask: Callable[[Any], Awaitable[Any]], items: Sequence[Any], at_once: int, what: str
) -> list[Any]:
    """The answers for all items, with limited concurrency and a progress bar."""
    places = asyncio.Semaphore(at_once)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=len(items))

        async def one(item: Any) -> Any:
            async with places:
                answer = await ask(item)
            progress.advance(bar)
            return answer

        return await asyncio.gather(*map(one, items))


def model_at(
    place: str,
    served: str | None,
    template_kwargs: Mapping[str, Any],
    *,
    extra_body: Sequence[str] | None = None,
    **options: Any,
) -> Model:
    """The model in a folder, or the one that the server at ``place`` (with ``/v1`` or not) calls
    ``served``. For commands only: a model on the CPU sets the process's threads.
    """
    if place.startswith(("http://", "https://")):
        if served is None:
            raise ValueError("a server needs --model, the name of the model it serves")
        base = place.strip().rstrip("/")
        base = base if "/" in base.partition("://")[2] else f"{base}/v1"
        template = {TEMPLATE_KWARGS: dict(template_kwargs)} if template_kwargs else {}
        added = key_values("--extra-body", extra_body or [])
        extra: Any = OmegaConf.to_container(OmegaConf.merge(template, added))
        server = ServerOptions(url=base, model=served, extra_body=extra, **REQUESTS | options)
        return ServedModel(server.client(CHAT_PATH))
    if served is not None or extra_body:
        raise ValueError("--model and --extra-body are for a server, at http:// or https://")
    from medserl_agentloop.evaluation.local_models import load_for_command  # loads verl

    return load_for_command(place, template_kwargs)


def start_games(
    run: Mapping[str, Any],
    kind: type[SelfPlayConfig],
    named: Mapping[str, str | None],
    settings: Sequence[str] | None,
    data: Path | None,
    count: int,
    samples: int = 1,
) -> tuple[Any, list[Any]]:
    """The interaction of a run's config, changed by options, and ``samples`` games on each of
    ``count`` rows; a ValueError says what is wrong.
    """
    given = {key: value for key, value in named.items() if value is not None}
    config = selfplay_config(kind, run.get("selfplay", {}) | given, list(settings or []))
    interaction: Interaction[Any, Any] = game_class(config.game)(config)
    files = run.get("data", {}).get("val_files") or []
    files = [data] if data else [files] if isinstance(files, str) else files
    if len(files) != 1 or not (data or Path(files[0]).is_file()):
        held = ", ".join(files) or "none"
        raise ValueError(
            f"name the notes with --data FILE: the run's data.val_files ({held}) is not one file "
            "here"
        )
    file = Path(files[0])
    rows = read_parquet(file)
    if len(rows) < count:
        raise ValueError(f"{file} holds {len(rows)} rows; --games can be at most that")
    games: list[Any] = []
    drawn = random.Random(0).sample(range(len(rows)), len(rows))[:count]
    for row in rows.take(drawn).to_pylist() * samples:
        try:
            games.append(interaction.new_game(row.get("extra_info") or {}))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    if isinstance(config, MedicalConfig):
        build_judge(config)
        tasks = [game.record.spec.task for game in games]
        if config.judge == "labels" and (decoys := tasks.count(Category.DECOY_BENIGN)):
            raise ValueError(
                f"{decoys} of the games are decoy_benign, and --judge labels cannot see a real "
                "error in a decoy: use another judge, or data without the category"
            )
    return interaction, games


Said: TypeAlias = dict[tuple[int, int], Reply | NoReplyError]
"""Answers by the numbers of game and turn: the same attacks meet several assessors."""


@dataclass
class _Seat:
    """A model's seat in one game; it does not repeat a turn that is in ``said``."""

    name: str
    sample: Callable[..., Awaitable[Reply]]
    drawn: dict[str, Any]
    said: Said

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        asked = (self.drawn["number"], turn.number)
        if asked not in self.said:
            try:
                self.said[asked] = await self.sample(turn, messages, **self.drawn)
            except NoReplyError as reason:
                self.said[asked] = reason
        if isinstance(answer := self.said[asked], NoReplyError):
            raise answer
        return answer


async def play_games(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    players: Mapping[str, Model],
    *,
    budgets: Mapping[str, int],
    temperature: float,
    seed: int = 0,
    concurrency: int = 64,
    said: Mapping[str, Said] | None = None,
    done: Callable[[int, Any], None] = lambda number, record: None,
) -> list[Any]:
    """Play and score games concurrently and return their records; ``done`` is called with each one
    after scoring.

    ``budgets`` are the maximum tokens of a turn, by role. A game's random numbers depend only on
    ``seed`` and its number. ``said`` has answers by role, and gets the new ones of these roles.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, game: Any) -> Any:
        seats = {}
        for role, model in players.items():
            drawn: dict[str, Any] = {"number": number, "temperature": temperature, "seed": seed}
            drawn["budget"] = budgets[role]
            seats[role] = _Seat(model.name, model.sample, drawn, (said or {}).get(role, {}))
        async with places:
            await play_game(interaction, game, seats)
            await interaction.score(game.record)
        done(number, game.record)
        return game.record

    for model in {id(model): model for model in players.values()}.values():
        await model.check()
    return await asyncio.gather(*(one(number, game) for number, game in enumerate(games)))


async def play_match(
    attacker: Model,
    assessor: Model,
    specs: Sequence[GameSpec],
    config: MedicalConfig,
    *,
    budgets: Mapping[Any, int] | None = None,
    attacks: Said | None = None,
    **options: Any,
) -> list[MedicalRecord]:
    """One game per spec, by :func:`play_games`; ``attacks`` are those that met others already."""
    interaction = MedicalGameInteraction(config)
    games = [interaction.start(spec) for spec in specs]
    players = {Role.ATTACKER.value: attacker, Role.ASSESSOR.value: assessor}
    said = {} if attacks is None else {Role.ATTACKER.value: attacks}
    if budgets is None:
        longest = max(attacker.count(spec.seed_note) for spec in specs)
        budgets = {
            Role.ATTACKER.value: config.budget.attacker(longest),
            Role.ASSESSOR.value: config.budget.assessor,
        }
    records = await play_games(interaction, games, players, budgets=budgets, said=said, **options)
    for record in records:
        # Players that never got a turn are named too: an invalid attack belongs to its pairing.
        named = players if record.category.has_attack else {Role.ASSESSOR.value: assessor}
        record.players = {role: model.name for role, model in named.items()}
    return records
