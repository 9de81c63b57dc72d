"""Check parquet files of games before training on them, as verl will read them.

Run from the command line: ``python data_prep/verify_parquet.py --help``. The exit code is 0 if every
check holds, 1 if one fails, 2 if a file, the tokenizer or the profile cannot be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from installed import or_say_how_to_install

with or_say_how_to_install():
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    from medserl_agentloop.data.verify import Report, count_rows, verify_files
    from medserl_agentloop.data.verify_rows import Check
    from medserl_agentloop.games.medical.types import VanillaAttacker
    from medserl_agentloop.paths import resource

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    files: Annotated[list[Path], typer.Argument(help="Parquet files that are used together.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder of the model's tokenizer; default: the tiny player's, if it is installed."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="The run's data.max_prompt_length; default: lengths are only shown.")
    ] = None,
    profile: Annotated[str, typer.Option(help="Prompt profile the files were written with.")] = "medserl",
    vanilla_attacker: Annotated[
        VanillaAttacker, typer.Option(help="What the files were written with.")
    ] = VanillaAttacker.SKIP,
) -> None:
    """Check that files can be trained on: opened by verl, every row complete, playable and free of leaks."""
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            total = count_rows(files)
            task = progress.add_task("checking rows", total=total)
            report = verify_files(
                files,
                _tokenizer(tokenizer),
                profile=profile,
                vanilla_attacker=vanilla_attacker,
                max_prompt_tokens=max_prompt_tokens,
                on_row=lambda: progress.advance(task),
            )
    except ValueError as error:
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    _print_report(report)
    raise typer.Exit(0 if report.ok else 1)


def _tokenizer(path: str | None) -> Any:
    from verl.utils import hf_tokenizer

    try:
        return hf_tokenizer(path or str(resource("assets/tiny_player")))
    except FileNotFoundError:
        raise ValueError("the tiny player is not installed; give the model's tokenizer with --tokenizer.") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: no tokenizer can be loaded from it ({error}); give a folder with tokenizer.json."
        ) from error


def _print_report(report: Report) -> None:
    console = Console()
    for problem in report.problems:
        # Text and no wrapping: brackets in a note are no markup, and a message can be searched for.
        console.print(Text(f"{'warning' if problem.warning else 'failed'}: {problem}"), soft_wrap=True)
    shown = sum(1 for problem in report.problems if not problem.warning)
    if hidden := sum(report.failures.values()) - shown:
        console.print(Text(f"and {hidden} more failures of the same kinds"))
    table = Table(title="Files", title_justify="left")
    for heading in ("file", "rows", "harmful", "safe", "longest prompt, tokens"):
        table.add_column(heading, justify="left" if heading == "file" else "right", overflow="fold")
    for file in report.files:
        counts = (file.rows, file.labels["harmful"], file.labels["safe"], file.longest_prompt)
        table.add_row(Text(file.file), *map(str, counts))
    console.print(table)
    table = Table(title="Checks", title_justify="left")
    table.add_column("check")
    table.add_column("result")
    for check in Check:
        failures, warnings = report.failures[check], report.warnings[check]
        words = [f"failed: {failures}"] if failures else []
        words += [f"warnings: {warnings}"] if warnings else []
        table.add_row(Text(check.value), ", ".join(words) or "holds")
    console.print(table)


if __name__ == "__main__":
    app()
