"""The ``medserl evaluate`` command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from medserl_agentloop.evaluation.answering import Assessor, Question, Sampling
    from medserl_agentloop.games.medical.prompting import PromptProfile
    from medserl_agentloop.play.driver import Reply
    from medserl_agentloop.play.endpoint import EndpointOptions

_WORTH_THREADS = 20_000_000
"""Parameters from which on threads speed a model up. Below, they wait for each other, on a busy machine for long."""


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder (Hugging Face, LoRA adapter, a run of verl's or one of its checkpoints), played on the CPU; "
            "or the address of an OpenAI-compatible server, e.g. http://localhost:30000."
        ),
    ],
    notes: Annotated[list[Path], typer.Option(help="MEDEC's CSV; may be repeated.")],
    output: Annotated[Path, typer.Option(help="Folder for submission, answers and results.")] = Path("evaluation"),
    served: Annotated[Optional[str], typer.Option("--model", help="Name of the model that a server serves.")] = None,  # noqa: UP045
    profile: Annotated[str, typer.Option(help="Prompt profile: a folder of prompts/, or a path.")] = "medserl",
    template: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Argument of the chat template, e.g. enable_thinking=false; may be repeated."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per note, of which the majority counts.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the samples and of the bootstrap.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, or notes in a batch.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 300.0,
    tries: Annotated[int, typer.Option(min=1, help="Requests for one answer of a server.")] = 4,
    api_key_env: Annotated[Optional[str], typer.Option(help="Environment variable with the API key.")] = None,  # noqa: UP045
    twins: Annotated[bool, typer.Option("--twins", help="Also ask about both notes of each case.")] = False,
    shortcuts: Annotated[
        bool, typer.Option("--shortcuts", help="Also ask about the notes with changes that are no medicine.")
    ] = False,
    train: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(help="MEDEC's training CSV, or a .jsonl file of pairs, for two of the floors; may be repeated."),
    ] = None,
    neural: Annotated[bool, typer.Option("--neural", help="Compute BERTScore and BLEURT too.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Score although notes have no answer; they count as wrong.")
    ] = False,
    i_have_the_uw_agreement: Annotated[
        bool,
        typer.Option("--i-have-the-uw-agreement", help="Send MEDEC-UW notes too; you have signed its agreement."),
    ] = False,
) -> None:
    """Ask a model about every note of a MEDEC set, score its answers and write them down.

    An evaluation that was stopped goes on where it was when it is started again with the same --output. Choose models,
    prompts and settings on the validation set; the test set is for one final run.
    """
    from omegaconf import OmegaConf
    from rich.console import Console

    from medserl_agentloop.evaluation import evaluate as evaluation
    from medserl_agentloop.evaluation.answering import Sampling
    from medserl_agentloop.evaluation.robustness import read_twins, robustness_tables
    from medserl_agentloop.games.medical.prompting import load_profile
    from medserl_agentloop.play.endpoint import EndpointOptions
    from medserl_agentloop.scoring.corrections import NEURAL_SCORERS, SCORERS
    from medserl_agentloop.scoring.reference import read_reference
    from medserl_agentloop.scoring.report import tables
    from medserl_agentloop.scoring.yardsticks import read_training

    console = Console()
    sampling = Sampling(temperature=temperature, samples=samples, max_tokens=max_tokens, seed=seed)
    try:
        if samples > 1 and temperature == 0:
            raise ValueError(f"--samples {samples} needs a --temperature above 0; at 0 all of them are equal")
        reference = read_reference(notes)
        uw = sum(note.subset == "medec_uw" for note in reference.notes)
        if uw and not i_have_the_uw_agreement:
            raise ValueError(
                f"the notes include {uw} of MEDEC-UW, which may be used only under a signed agreement; if you have "
                "signed it, and it allows this model to read them, add --i-have-the-uw-agreement"
            )
        sets = evaluation.note_sets(reference, read_twins(notes) if twins else [], shortcuts=shortcuts)
        training = read_training(train, reference.notes) if train else None
        prompts = load_profile(profile)
        template_kwargs: Any = OmegaConf.to_container(OmegaConf.from_dotlist(template or []))
        if model.startswith(("http://", "https://")):
            options = EndpointOptions(
                url=model,
                model=_served_name(served),
                api_key_env=api_key_env,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                timeout_s=timeout,
                retries=tries - 1,
                concurrency=concurrency,
                template_kwargs=template_kwargs,
            )
            assessor, facts = _served(options, prompts)
        elif served is not None:
            raise ValueError(f"--model names the model of a server, and {model} is no address of one")
        else:
            assessor, facts = _local(Path(model), prompts, template_kwargs, sampling, concurrency)
        output.mkdir(parents=True, exist_ok=True)
        questions = evaluation.questions(sets, samples)
        replies, failed = _answers(assessor, questions, sampling, output / evaluation.CACHE, console)
        if failed and not allow_missing:
            reason = next(iter(failed.values()))
            raise ValueError(
                f"{len(failed)} of {len(set(questions))} requests got no answer (the first: {reason}). Start again "
                "with the same --output, and only these are asked; or let the notes count as wrong with --allow-missing"
            )
        answered = {
            name: evaluation.read_answers(asked, replies, samples, prompts.parser) for name, asked in sets.items()
        }
        conclusion = evaluation.conclude(
            facts["name"], reference, answered, training, NEURAL_SCORERS if neural else SCORERS, seed
        )
        settings = {
            "model": facts,
            "prompts": evaluation.prompt_facts(prompts) | {"chat_template": template_kwargs},
            "sampling": asdict(sampling),
            "requests_without_answer": len(failed),
        }
        evaluation.write(output, answered, conclusion, settings)
    except (ValueError, OSError) as error:
        typer.echo(f"medserl: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"medserl: stopped; the answers so far are in {output}, and the same command goes on", err=True)
        raise typer.Exit(130) from None
    console.print(tables(conclusion.report))
    console.print(robustness_tables(conclusion.twins, conclusion.shortcuts))
    typer.echo(f"{output}: {evaluation.SUBMISSION}, {evaluation.ANSWERS}, {evaluation.RESULTS}")


def _answers(
    assessor: Assessor, questions: Sequence[Question], sampling: Sampling, cache: Path, console: Console
) -> tuple[dict[Question, Reply], dict[Question, str]]:
    """Ask under a progress bar."""
    import asyncio

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from medserl_agentloop.evaluation.answering import AnswerCache, ask

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("answers"), *columns, console=console) as progress:
        bar = progress.add_task("", total=len(set(questions)))
        return asyncio.run(ask(assessor, questions, sampling, AnswerCache(cache), lambda: progress.advance(bar)))


def _served_name(name: str | None) -> str:
    if name is None:
        raise ValueError("a server needs --model, the name of the model it serves")
    return name


def _served(options: EndpointOptions, prompts: PromptProfile) -> tuple[Assessor, dict[str, Any]]:
    import asyncio
    from contextlib import aclosing

    from medserl_agentloop.evaluation.answering import ServedAssessor
    from medserl_agentloop.play.endpoint import EndpointPlayer

    player = EndpointPlayer(options, prompts)

    async def check() -> None:
        async with aclosing(player):
            await player.check()

    asyncio.run(check())
    return ServedAssessor(player), {"name": player.name, "server": player.url}


def _local(
    folder: Path, prompts: PromptProfile, template_kwargs: dict[str, Any], sampling: Sampling, batch: int
) -> tuple[Assessor, dict[str, Any]]:
    import torch
    import transformers

    from medserl_agentloop.evaluation.local_models import LocalAssessor, base_of, find_weights, fingerprint, load_model
    from medserl_agentloop.evaluation.tournament import Player
    from medserl_agentloop.games.medical.prompting import ProfileEncoder

    if not folder.is_dir():
        raise ValueError(f"{folder} is neither a folder nor an address that begins with http:// or https://")
    # Bars and advice of no use to who evaluates.
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    weights = find_weights(folder)
    sha256 = fingerprint(weights)
    loaded, tokenizer = load_model(weights)
    if loaded.num_parameters() < _WORTH_THREADS:
        torch.set_num_threads(1)
    player = Player(str(folder), loaded, tokenizer, ProfileEncoder(tokenizer, prompts, template_kwargs))
    facts = {"name": player.name, "checkpoint": str(weights.relative_to(folder)), "sha256": sha256}
    if base := base_of(weights):
        facts["base"] = base
    return LocalAssessor(player, sha256, sampling, batch), facts
