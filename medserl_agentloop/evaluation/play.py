"""Games outside of a run: their players, rows, settings and files, and ``medserl play``.

Tournament and evaluation get their models here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress

from medserl_agentloop.core.chat import TEMPLATE_KWARGS, ServedModel
from medserl_agentloop.core.client import CHAT_PATH, ServerOptions
from medserl_agentloop.core.config import SelfPlayConfig, game_class, key_values, selfplay_config
from medserl_agentloop.core.interaction import (
    Interaction,
    Message,
    NoReplyError,
    Reply,
    Turn,
    play_game,
)
from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, StepFile
from medserl_agentloop.evaluation.readiness import Replies, can_play, lengths_table
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
"""A model that can take any role: behind a server, or on this machine.

Its ``name`` goes into the records.
"""

MODEL_HELP = (
    "A folder (Hugging Face, LoRA adapter, a run of verl's or one of its checkpoints), played on "
    "the CPU; or the address of an OpenAI-compatible server, e.g. http://localhost:30000."
)
# Options that several commands have.
Served = Annotated[
    str | None, typer.Option("--model", help="Name of the model that a server serves.")
]
Data = Annotated[
    Path | None, typer.Option(help="Parquet file of games; else the run's data.val_files.")
]
Profile = Annotated[str | None, typer.Option(help="Prompt profile; else the run's, or medserl.")]
JudgeName = Annotated[str | None, typer.Option("--judge", help="Who judges; else as in the run.")]
AtOnce = Annotated[
    int, typer.Option("--concurrency", min=1, help="Requests in flight, or turns in a batch.")
]
Retries = Annotated[int, typer.Option(min=0, help="Further requests for a lost answer.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")]
KeyVariable = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable with the API key.")
]
ExtraBody = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE in all requests to a server; max_tokens=null takes one out."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")
]


def play(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    data: Data = None,
    served: Served = None,
    games: Annotated[int, typer.Option(min=1, help="Rows to play, drawn by the seed.")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="Games on each row.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="New file for the games; else play/ in the run's folder.")
    ] = None,
    profile: Profile = None,
    judge: JudgeName = None,
    concurrency: AtOnce = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one turn.")] = 4096,
    seed: Annotated[int, typer.Option(help="Draws the rows and seeds every turn.")] = 0,
    timeout: Timeout = 300.0,
    retries: Retries = 3,
    api_key_env: KeyVariable = None,
    extra_body: ExtraBody = None,
    settings: Settings = None,
) -> None:
    """Let a model play games, score and write them, and say whether it can play.

    A checkpoint of a run takes the game, profile, judge and reward of its run. For any other model,
    name a judge.
    """
    console = Console()
    with errors_in_one_line(stopped="the games finished so far are in the file named above"):
        output = output or Path(f"{output_of('play', model, served)}.jsonl")
        if output.exists():
            raise ValueError(f"{output} exists already; name a new file with --output")
        run = run_config(model)
        named = {"profile": profile, "judge": judge}
        interaction, started = start_games(
            run, SelfPlayConfig, named, settings, data, games, seed, samples
        )
        asking = {
            "api_key_env": api_key_env,
            "timeout_s": timeout,
            "retries": retries,
            "concurrency": concurrency,
        }
        player = model_at(model, served, template_of(run), extra_body=extra_body, **asking)
        # The game does not know how long its texts are for this model, so the option says the
        # turns' budget.
        budgets = dict.fromkeys(interaction.roles, max_tokens)
        players = dict.fromkeys(interaction.roles, player)
        drawn: Any = {"temperature": temperature, "seed": seed, "concurrency": concurrency}
        say(console, f"games: {output}")
        file, void, replies = StepFile(output), Counter[str](), Replies(list)
        with Progress(console=console) as progress:
            bar = progress.add_task("games", total=len(started))

            def done(number: int, record: Any) -> None:
                # each row again and again
                record.uid, record.session = str(number % games), number // games
                record.context, record.step = "isolated", 0
                file.append([record.to_json()])
                void.update([record.void] if record.void is not None else [])
                progress.update(bar, advance=1, description=f"games, {void.total()} void")

            records = asyncio.run(
                play_games(
                    interaction,
                    started,
                    players,
                    budgets=budgets,
                    done=done,
                    heard=replies,
                    **drawn,
                )
            )
    metrics, taken = (
        interaction.metrics(records),
        {r: turns for r, turns in replies.items() if turns},
    )
    values = [(name, f"{value:.4g}") for name, value in metrics.items()]
    console.print(table("role metrics", ["metric", "value"], values))
    console.print(lengths_table(taken, max_tokens))
    for line in (
        *interaction.view.notices(metrics),
        *(f"void: {n} x {reason}" for reason, n in void.most_common()),
        *can_play(metrics, taken, max_tokens),
    ):
        say(console, line)
    if void.total() == len(records):
        raise typer.Exit(1)


# --- the run that a model is of ---


def run_of(model: str | Path) -> Path | None:
    """The run that a folder is, or is a checkpoint of; None for other models."""
    folder = Path(model)
    steps = [part for part in (folder, *folder.parents) if part.name.startswith("global_step_")]
    if steps:
        return steps[0].parent
    return folder if any((folder / name).is_file() for name in (CONFIG_FILE, LATEST)) else None


def run_config(model: str | Path) -> dict[str, Any]:
    """The config that the run of a model has left in its folder; empty if there is none."""
    run = run_of(model)
    if run is None or not (run / CONFIG_FILE).is_file():
        return {}
    config: Any = OmegaConf.to_container(OmegaConf.load(run / CONFIG_FILE), resolve=True)
    return dict(config)


def template_of(run: Mapping[str, Any]) -> dict[str, Any]:
    return dict(run.get("data", {}).get("apply_chat_template_kwargs") or {})


def output_of(command: str, model: str, served: str | None) -> Path:
    """Return a command's default output:

    ``RUN/command/global_step_N``, or ``command/NAME`` for a model of no run.
    """
    if (run := run_of(model)) is None:
        return Path(command, Path(served or model).name)
    from medserl_agentloop.evaluation.local_models import find_weights  # loads verl

    return Path(run, command, *find_weights(Path(model)).relative_to(run).parts[:1])


# --- players and rows ---


async def all_of(
    ask: Callable[[Any], Awaitable[Any]], items: Sequence[Any], at_once: int, what: str
) -> list[Any]:
    """The answers about all items, at most so many asked for at once, with a bar that counts them
    as ``what``.
    """
    places = asyncio.Semaphore(at_once)
    progress = Progress(console=Console(stderr=True), transient=True)

    async def one(item: Any) -> Any:
        async with places:
            answer = await ask(item)
        progress.advance(bar)
        return answer

    with progress:
        bar = progress.add_task(what, total=len(items))
        return await asyncio.gather(*map(one, items))


def model_at(
    place: str, served: str | None, template_kwargs: Mapping[str, Any], **options: Any
) -> Model:
    """The model in a folder, or the one that the server at ``place`` (with ``/v1`` or not) calls
    ``served``.

    For commands: a model on the CPU sets the threads of the process.
    """
    fields = options.pop("extra_body", None) or []  # KEY=VALUE each
    if place.startswith(("http://", "https://")):
        if served is None:
            raise ValueError("a server needs --model, the name of the model it serves")
        base = place.strip().rstrip("/")
        base = base if "/" in base.partition("://")[2] else f"{base}/v1"
        template = {TEMPLATE_KWARGS: dict(template_kwargs)} if template_kwargs else {}
        extra: Any = OmegaConf.to_container(
            OmegaConf.merge(template, key_values("--extra-body", fields))
        )
        return ServedModel(
            ServerOptions(url=base, model=served, extra_body=extra, **options).client(CHAT_PATH)
        )
    if served is not None or fields:
        raise ValueError(
            "--model and --extra-body are for a server, whose address begins with http:// or "
            "https://"
        )
    from medserl_agentloop.evaluation.local_models import load_for_command  # loads verl

    return load_for_command(place, template_kwargs)


def start_games(
    run: Mapping[str, Any],
    kind: type[SelfPlayConfig],
    named: Mapping[str, str | None],
    settings: Sequence[str] | None,
    data: Path | None,
    count: int,
    seed: int,
    samples: int = 1,
) -> tuple[Any, list[Any]]:
    """The interaction of a run's config, changed by options, and ``samples`` games on each of
    ``count`` rows.

    A ValueError says what is wrong.
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
    drawn = random.Random(seed).sample(range(len(rows)), len(rows))[:count]
    for row in rows.take(drawn).to_pylist() * samples:
        try:
            games.append(interaction.new_game(row.get("extra_info") or {}))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    if isinstance(config, MedicalConfig):
        build_judge(config)
        decoys = sum(game.record.spec.task is Category.DECOY_BENIGN for game in games)
        if decoys and config.judge == "labels":
            raise ValueError(
                f"{decoys} of the games are decoy_benign, and --judge labels cannot see a real "
                "error in a decoy: use another judge, or data without the category"
            )
    return interaction, games


@dataclass
class _Seat:
    """A model that takes the turns of a role in one game.

    ``known`` are turns by the game's number; every turn is put into ``heard``.
    """

    name: str
    model: Model
    drawn: dict[str, Any]
    known: dict[int, Reply | NoReplyError] | None
    heard: list[Reply]

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        number = self.drawn["number"]
        answer = None if self.known is None else self.known.get(number)
        if answer is None:
            try:
                answer = await self.model.sample(turn, messages, **self.drawn)
            except NoReplyError as reason:
                answer = reason
            if self.known is not None:
                self.known[number] = answer
        if isinstance(answer, NoReplyError):
            raise answer
        self.heard.append(answer)
        return answer


async def play_games(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    players: Mapping[str, Model],
    *,
    budgets: Mapping[str, int],
    temperature: float,
    seed: int,
    concurrency: int = 64,
    known: Mapping[str, dict[int, Reply | NoReplyError]] | None = None,
    heard: Replies | None = None,
    done: Callable[[int, Any], None] = lambda number, record: None,
) -> list[Any]:
    """Play and score games, so many at once, and return their records; ``done`` gets each as soon
    as it is scored.

    ``budgets`` are the most tokens of a turn, by role. A game's random numbers follow ``seed`` and
    its number alone. ``known`` holds turns by role and number, from games against others; those
    that it lacks are played and put there. All turns are put into ``heard``.
    """
    places, turns = asyncio.Semaphore(concurrency), Replies(list) if heard is None else heard

    async def one(number: int, game: Any) -> Any:
        async with places:
            drawn = {"number": number, "temperature": temperature, "seed": seed}
            seats = {
                role: _Seat(
                    model.name,
                    model,
                    {**drawn, "budget": budgets[role]},
                    (known or {}).get(role),
                    turns[role],
                )
                for role, model in players.items()
            }
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
    attacks: dict[int, Reply | NoReplyError] | None = None,
    **options: Any,
) -> list[MedicalRecord]:
    """A game per spec, as :func:`play_games` does it; ``attacks`` are those against another
    assessor.
    """
    interaction = MedicalGameInteraction(config)
    games = [interaction.start(spec) for spec in specs]
    players = {Role.ATTACKER.value: attacker, Role.ASSESSOR.value: assessor}
    known = {} if attacks is None else {Role.ATTACKER.value: attacks}
    if budgets is None:
        longest = max(attacker.count(spec.seed_note) for spec in specs)
        budgets = {
            Role.ATTACKER.value: config.budget.attacker(longest),
            Role.ASSESSOR.value: config.budget.assessor,
        }
    records = await play_games(interaction, games, players, budgets=budgets, known=known, **options)
    names = {role: model.name for role, model in players.items()}
    # Who never got a turn is named too: an invalid attack belongs to its pairing.
    for record in records:
        record.players = (
            dict(names) if record.category.has_attack else {Role.ASSESSOR.value: assessor.name}
        )
    return records
