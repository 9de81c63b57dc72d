"""The ``medserl judge`` command."""

from __future__ import annotations

import logging
import os
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from medserl_agentloop.command_line import errors_in_one_line, say
from medserl_agentloop.core.config import selfplay_config
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.evaluation.judge_calibration import (
    Answer,
    calibrate_reader,
    known_edits,
    known_notes,
    reader_table,
    report_table,
)
from medserl_agentloop.evaluation.judge_calibration import calibrate as measure
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import Judge, LabelJudge
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.report import write_report

app = typer.Typer(no_args_is_help=True, help="Serve a judge, or measure how good one is.")


@app.command()
def serve(
    backend: Annotated[Literal["labels", "llm"], typer.Option(help="Labels of the categories, or a language model.")],
    url: Annotated[str | None, typer.Option(help="llm: base of an OpenAI-compatible API, with its /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="llm: name of the model.")] = None,
    profile: Annotated[str, typer.Option(help="llm: prompt profile that words the question.")] = "medserl",
    settings: Annotated[list[str] | None, typer.Option("--set", help="llm: a key of selfplay.judge_server.")] = None,
    shape: Annotated[Literal["labels", "bare"], typer.Option(help="Answers bare, or under score_key.")] = "bare",
    host: Annotated[str, typer.Option(help="Address to listen on; others than this need --token-env.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8001,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with a key that all requests must bring.")
    ] = None,
) -> None:
    """Offer POST /judge and GET /health until interrupted.

    Untouched notes get the label of their category, whatever the backend.
    """
    import uvicorn

    from medserl_agentloop.games.medical.judges.protocol import create_app

    judge: Judge = LabelJudge()
    token = os.environ.get(token_env or "", "")
    with errors_in_one_line():
        if token_env and not token:
            raise ValueError("--token-env names an environment variable that is not set")
        if not token and not _is_loopback(host):
            raise ValueError(
                f"--host {host} lets other machines in: name an environment variable that holds a key in --token-env, "
                "and give clients the same key, in judge_server.api_key_env or as the password of the address"
            )
        if backend == "llm":
            if url is None or model is None:
                raise ValueError("--backend llm needs --url and --model")
            named = {"judge": backend, "profile": profile, "judge_server": {"url": url, "model": model}}
            config = selfplay_config(MedicalConfig, named, [f"judge_server.{setting}" for setting in settings or []])
            judge = LlmJudge.from_config(config)
    uvicorn.run(create_app(judge, shape, token), host=host, port=port, timeout_graceful_shutdown=3)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@app.command()
def calibrate(
    judge: Annotated[str, typer.Option(help="labels, http, llm, or package.module:Class.")],
    inputs: Annotated[
        list[Path], typer.Option("--input", help="MEDEC's CSV, or a .jsonl file of pairs; may be repeated.")
    ],
    output: Annotated[Path, typer.Option(help="File for the report.")] = Path("judge_report.json"),
    limit: Annotated[int, typer.Option(min=0, help="Most edits of each of the four kinds; 0 for all.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the choice of edits.")] = 0,
    profile: Annotated[str, typer.Option(help="llm: prompt profile that words the question.")] = "medserl",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")] = None,
) -> None:
    """Ask a judge about edits whose truth is known, print how often it is right, and write a report for runs.

    With --set blind.readings=3 the reader of the note alone is measured as well.
    """
    console = Console()
    failures: Counter[str] = Counter()
    # A line for each failure; they are counted here.
    logging.getLogger("medserl_agentloop.games.medical.judges").setLevel(logging.ERROR)
    columns = ("questions", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with errors_in_one_line():
        config = selfplay_config(MedicalConfig, {"judge": judge, "profile": profile}, settings or [])
        read = read_files(inputs)
        edits = known_edits(read.vignettes, limit or None, seed)
        notes = known_notes(read.vignettes, limit or None, seed) if config.blind.readings else []
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(edits) + len(notes))

            def on_answer(answer: Answer) -> None:
                progress.advance(bar)
                if answer.record.void is not None:
                    failures[answer.record.void] += 1

            sources = {source.file: source.sha256 for source in read.reports}
            report = measure(config, edits, sources=sources, limit=limit or None, seed=seed, on_answer=on_answer)
            if notes:
                blind = calibrate_reader(config, notes, lambda: progress.advance(bar))
                report = report.model_copy(update={"blind": blind})
        write_report(report, output)
    console.print(report_table(report))
    if report.blind:
        console.print(reader_table(report.blind, config))
    for reason, count in failures.most_common(5):
        say(console, f"no answer: {count} x {reason}")
    typer.echo(f"report: {output}")
