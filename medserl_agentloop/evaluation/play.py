"""Games outside of a run: their rows and players, a match of two, and ``medserl play`` against a served model.

Tournament, probe and evaluation get their models here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import pyarrow.parquet as pq
import typer
from pyarrow import ArrowException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from medserl_agentloop.command_line import errors_in_one_line, plain, say
from medserl_agentloop.core.chat import PATH, TEMPLATE_KWARGS, ServedModel
from medserl_agentloop.core.client import ServerOptions
from medserl_agentloop.core.config import SelfPlayConfig, game_class, selfplay_config
from medserl_agentloop.core.interaction import Interaction, NoReplyError, Reply, Turn, play_game, play_in_step
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.judges import build_judge
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Category, GameSpec, Role

if TYPE_CHECKING:
    from medserl_agentloop.evaluation.local_models import LocalModel

Model: TypeAlias = "ServedModel | LocalModel"
"""A model that can take either role: behind a server, or on this machine. Its ``name`` goes into the records."""


def play(
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible server, e.g. http://localhost:30000.")],
    model: Annotated[str, typer.Option(help="Name of the model it serves.")],
    data: Annotated[Path, typer.Option(help="Parquet file of games (data_prep/medec_to_parquet.py).")],
    games: Annotated[int, typer.Option(min=1, help="Rows to play, drawn by the seed.")] = 20,
    output: Annotated[Path, typer.Option(help="New file for the game records.")] = Path("games.jsonl"),
    game: Annotated[str, typer.Option(help="The game: medical, kuhn_poker, or package.module:Class.")] = "medical",
    profile: Annotated[str | None, typer.Option(help="Prompt profile by name or path; else medserl.")] = None,
    judge: Annotated[str | None, typer.Option(help="Who says whether a rewritten note is wrong; else labels.")] = None,
    reward: Annotated[str | None, typer.Option(help="Reward scheme, or package.module:function; else medserl.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Games in progress at once.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one turn.")] = 4096,
    seed: Annotated[int, typer.Option(help="Draws the rows, and seeds the sampling of every turn.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 300.0,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")] = None,
) -> None:
    """Play games against a served model, judge and score them, and write their records."""
    console = Console()
    named = {"game": game, "profile": profile, "judge": judge, "reward": reward}
    given = {key: name for key, name in named.items() if name is not None}
    with errors_in_one_line(stopped=f"the games finished so far are in {output}"):
        if output.exists():
            raise ValueError(f"{output} exists already; name a new file with --output")
        config: Any = selfplay_config(SelfPlayConfig, given, settings or [])
        interaction: Interaction[Any, Any] = game_class(config.game)(config)
        started = draw_games(interaction, data, games, seed)
        if isinstance(config, MedicalConfig):
            check_judge(config, started)
        options = server_options(endpoint, model, api_key_env=api_key_env, timeout_s=timeout, concurrency=concurrency)
        # Without a tokenizer no game knows how long its texts are, so the option says the turns' budget.
        served = ServedModel(options.client(PATH), seed=seed, max_tokens=max_tokens, temperature=temperature)
        records = asyncio.run(_play(interaction, started, served, concurrency, StepFile(output), console))
    table = Table("metric", "value", title="role metrics")
    metrics = interaction.metrics(records)
    for name, value in metrics.items():
        table.add_row(plain(name), f"{value:.4g}")  # components have names of a user's own
    console.print(table)
    void = Counter(record.void for record in records if record.void is not None)
    for line in (*interaction.remarks(metrics), *(f"void: {n} x {reason}" for reason, n in void.most_common())):
        say(console, line)
    say(console, f"games: {output}")
    if void.total() == len(records):
        raise typer.Exit(1)


def server_options(url: str, model: str, **options: Any) -> ServerOptions:
    """How a server is asked; ``url`` is the base of its API, and ``/v1`` is added where it has no path."""
    base = url.strip().rstrip("/")
    base = base if "/" in base.partition("://")[2] else f"{base}/v1"
    return ServerOptions(url=base, model=model, **options)


def model_at(
    place: str, served: str | None, prompts: PromptProfile, template_kwargs: dict[str, Any], **options: Any
) -> Model:
    """The model in a folder, or the one that the server at ``place`` calls ``served``, asked by these options."""
    if place.startswith(("http://", "https://")):
        if served is None:
            raise ValueError("a server needs --model, the name of the model it serves")
        extra = {TEMPLATE_KWARGS: template_kwargs} if template_kwargs else {}
        return ServedModel(server_options(place, served, extra_body=extra, **options).client(PATH))
    if served is not None:
        raise ValueError("--model names the model of a server, whose address begins with http:// or https://")
    from medserl_agentloop.evaluation.local_models import load_player  # loads verl

    return load_player(place, prompts, template_kwargs)


def check_judge(config: MedicalConfig, games: Sequence[Any]) -> None:
    """ValueError if the judge lacks an option that it needs, or cannot judge these games."""
    build_judge(config)
    decoys = sum(game.record.spec.task is Category.DECOY_BENIGN for game in games)
    if decoys and config.judge == "labels":
        raise ValueError(
            f"{decoys} of the games are decoy_benign, and --judge labels cannot see a real error in a decoy: "
            "use another judge, or data without the category"
        )


def draw_games(interaction: Interaction[Any, Any], file: Path, count: int, seed: int) -> list[Any]:
    """Start a game on each of ``count`` different rows; the same seed draws the same ones in the same order.

    A ValueError says what is wrong with the file.
    """
    try:
        columns = [name for name in ("extra_info", "prompt") if name in pq.read_schema(file).names]
        if "extra_info" not in columns:
            raise ValueError(f"{file} has no column extra_info; write it with data_prep/medec_to_parquet.py")
        rows = pq.read_table(file, columns=columns)
    except (OSError, ArrowException) as error:
        raise ValueError(f"{file} cannot be read as a parquet file of games: {' '.join(str(error).split())}") from None
    if len(rows) < count:
        raise ValueError(f"{file} holds {len(rows)} rows; --games can be at most that")
    games: list[Any] = []
    for number in random.Random(seed).sample(range(len(rows)), len(rows))[:count]:
        (row,) = rows.slice(number, 1).to_pylist()
        try:
            games.append(interaction.new_game(row["extra_info"] or {}))
            if row.get("prompt") and isinstance(interaction, MedicalGameInteraction):
                interaction.check_prompt(row["extra_info"], row["prompt"])
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return games


async def play_match(
    attacker: Model,
    assessor: Model,
    specs: Sequence[GameSpec],
    config: MedicalConfig,
    *,
    temperature: float,
    budgets: Mapping[Role, int] | None = None,
    seed: int,
    attacks: dict[int, Reply | NoReplyError] | None = None,
) -> list[MedicalRecord]:
    """Play, judge and score one game per spec, with the profile, judge, scheme and rules of ``config``.

    ``budgets`` are the most tokens of each role's turn; those of ``config`` if not given. Each game has random numbers
    of its own, whatever batch it is in, which follow ``seed``. ``attacks`` holds the attacker's turns, by the number of
    the game, that were played against another assessor; turns that are not in it are played and put there.
    """
    interaction = MedicalGameInteraction(config)
    games = [interaction.new_game(asdict(spec)) for spec in specs]
    known = {} if attacks is None else attacks
    if budgets is None:
        longest = max(attacker.count(spec.seed_note) for spec in specs)
        budgets = {Role.ATTACKER: config.budget.attacker(longest), Role.ASSESSOR: config.budget.assessor}

    async def answer(name: str, turns: Mapping[int, Turn]) -> list[Reply | NoReplyError]:
        role = Role(name)
        model, given = (attacker, known) if role is Role.ATTACKER else (assessor, {})
        new = {number: turn for number, turn in turns.items() if number not in given}
        async with aclosing(model.answers(new, budget=budgets[role], temperature=temperature, seed=seed)) as answers:
            async for number, reply in answers:
                given[number] = reply
        return [given[number] for number in turns]

    await play_in_step(interaction, games, answer)
    await asyncio.gather(*(interaction.score(game.record) for game in games))
    for game in games:  # who never got a turn is named too: an invalid attack belongs to its pairing
        names = {Role.ATTACKER.value: attacker.name, Role.ASSESSOR.value: assessor.name}
        game.record.players = names if game.record.category.has_attack else {Role.ASSESSOR.value: assessor.name}
    return [game.record for game in games]


async def _play(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    served: ServedModel,
    concurrency: int,
    output: StepFile,
    console: Console,
) -> list[GameRecord]:
    """Play and score all games; each record is written as soon as its game is scored."""
    columns = ("games", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console)
    bar = progress.add_task("", total=len(games))
    players = dict.fromkeys(interaction.roles, served)
    places = asyncio.Semaphore(concurrency)
    void = 0

    async def one(number: int, game: Any) -> GameRecord:
        nonlocal void
        record: Any = game.record
        async with places:
            await play_game(interaction, game, players)
            await interaction.score(record)
        record.context, record.uid, record.step = "isolated", f"play-{number}", 0
        output.append([record.to_json()])
        void += record.void is not None
        progress.update(bar, advance=1, description=f"{void} void" if void else "")
        return cast(GameRecord, record)

    await served.check()
    with progress:
        tasks = [asyncio.create_task(one(number, game)) for number, game in enumerate(games)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # of one that failed, or of Ctrl-C: the others must not go on
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
