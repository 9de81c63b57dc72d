"""The commands that score on MEDEC: ``medserl score`` submission files, ``medserl evaluate`` a model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf
from rich.console import Console

from medserl_agentloop.command_line import errors_in_one_line, visible
from medserl_agentloop.core.served_model import ServedModel
from medserl_agentloop.core.step_file import lock_folder
from medserl_agentloop.evaluation import evaluate as evaluation
from medserl_agentloop.evaluation.medec import read_reference, read_training, read_twins
from medserl_agentloop.evaluation.play import model_at
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.paths import sha256_of
from medserl_agentloop.scoring.metrics import Grades, grade
from medserl_agentloop.scoring.notes import read_submission
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS, official_scores
from medserl_agentloop.scoring.report import as_json, published_script, report_on, tables

_SHOWN_PROBLEMS = 20

_Train = Annotated[
    list[Path] | None,
    typer.Option(help="MEDEC's training CSV, or a .jsonl file of pairs, for two of the floors; may be repeated."),
]
_Neural = Annotated[bool, typer.Option("--neural", help="Compute BERTScore and BLEURT too; their models take some GB.")]


def score(
    predictions: Annotated[
        list[Path],
        typer.Argument(help="Submission files. A folder counts as one system whose .txt files are its seeds."),
    ],
    reference: Annotated[list[Path], typer.Option(help="MEDEC's CSV with the answers; may be repeated.")],
    train: _Train = None,
    pool: Annotated[bool, typer.Option("--pool", help="The files are seeds of one system.")] = False,
    neural: _Neural = False,
    official_bugs: Annotated[bool, typer.Option("--official-bugs", help="Also print the published script's.")] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Draws of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap's draws.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for all results, as JSON.")] = None,
) -> None:
    """Score submissions on MEDEC, with intervals, floors to beat and published results.

    Several systems are compared with the first one on the same notes. Choose models, prompts and settings on the
    validation set; the test set is for one final run.
    """
    scorers = NEURAL_SCORERS if neural else SCORERS
    files: dict[str, dict[str, Any]] = {}
    official: dict[str, dict[str, float | None] | str] = {}
    with errors_in_one_line():
        if official_bugs and len(reference) > 1:
            raise ValueError("--official-bugs reads one --reference, as the published script does; give one.")
        notes = read_reference(reference)
        training = read_training(train, notes.notes) if train else ([], 0)
        grades: dict[str, list[Grades]] = {}
        for name, paths in _systems(predictions, pool).items():
            for path in paths:
                answers, problems = read_submission(path, [note.text_id for note in notes.notes])
                grades.setdefault(name, []).append(grade(notes.notes, answers.values(), scorers))
                files[str(path)] = {"system": name, "sha256": sha256_of(path), "problems": problems}
                if official_bugs:
                    try:
                        official[str(path)] = official_scores(reference[0], path, scorers)
                    except ValueError as error:
                        official[str(path)] = str(error)
        report = report_on(notes, grades, *training, resamples=resamples, seed=seed)
        if output is not None:
            results = as_json(report) | {"files": files, "published_script": official}
            output.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for file, facts in files.items():
        shown = list(facts["problems"][:_SHOWN_PROBLEMS])
        if more := len(facts["problems"]) - len(shown):
            shown.append(f"{more} more problems; --output holds all of them")
        for problem in shown:
            typer.echo(visible(f"{file}: {problem}"), err=True)
    console = Console()
    console.print(tables(report))
    for file, printed in official.items():
        console.print(published_script(file, printed))
    if output is not None:
        typer.echo(f"results: {output}")


def _systems(predictions: list[Path], pool: bool) -> dict[str, list[Path]]:
    """The files of each system, by a name for it."""
    systems: dict[str, list[Path]] = {}
    for path in predictions:
        found = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path}: the folder holds no .txt files; give submission files.")
        if str(path) in systems:
            raise ValueError(f"{path} is given twice; give each system once.")
        systems[str(path)] = found
    return {"pooled": [path for paths in systems.values() for path in paths]} if pool else systems


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
    served: Annotated[str | None, typer.Option("--model", help="Name of the model that a server serves.")] = None,
    profile: Annotated[str, typer.Option(help="Prompt profile: a folder of prompts/, or a path.")] = "medserl",
    template: Annotated[list[str] | None, typer.Option(help="For the chat template: enable_thinking=false.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per note, of which the majority counts.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the samples and of the bootstrap.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, or notes in a batch.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 300.0,
    tries: Annotated[int, typer.Option(min=1, help="Requests for one answer of a server.")] = 4,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key.")] = None,
    twins: Annotated[bool, typer.Option("--twins", help="Also ask about both notes of each case.")] = False,
    shortcuts: Annotated[
        bool, typer.Option("--shortcuts", help="Also ask about changes that are no medicine.")
    ] = False,
    train: _Train = None,
    neural: _Neural = False,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="Notes without an answer are wrong.")] = False,
    i_have_the_uw_agreement: Annotated[
        bool, typer.Option("--i-have-the-uw-agreement", help="Send MEDEC-UW notes too; you have signed its agreement.")
    ] = False,
) -> None:
    """Ask a model about every note of a MEDEC set, score its answers and write them down.

    An evaluation that was stopped goes on where it was when it is started again with the same --output. Choose models,
    prompts and settings on the validation set; the test set is for one final run.
    """
    console = Console()
    sampling = evaluation.Sampling(temperature=temperature, samples=samples, max_tokens=max_tokens, seed=seed)
    with errors_in_one_line(stopped=f"the answers so far are in {output}, and the same command goes on"):
        if samples > 1 and temperature == 0:
            raise ValueError(f"--samples {samples} needs a --temperature above 0; at 0 all of them are equal")
        reference = read_reference(notes)
        uw = sum(note.subset == "medec_uw" for note in reference.notes)
        if uw and not i_have_the_uw_agreement:
            raise ValueError(
                f"the notes include {uw} of MEDEC-UW, which may be used only under a signed agreement; if you "
                "have signed it, and it allows this model to read them, add --i-have-the-uw-agreement"
            )
        sets = evaluation.note_sets(reference, read_twins(notes) if twins else [], shortcuts)
        training = read_training(train, reference.notes) if train else ([], 0)
        prompts = load_profile(profile)
        template_kwargs: Any = OmegaConf.to_container(OmegaConf.from_dotlist(template or []))
        asking = {
            "api_key_env": api_key_env,
            "timeout_s": timeout,
            "retries": tries - 1,
            "concurrency": concurrency,
        }
        player = model_at(model, served, prompts, template_kwargs, **asking)
        if isinstance(player, ServedModel):
            facts = {"name": player.name, "server": player.url}
        else:
            from medserl_agentloop.evaluation.local_models import facts_of

            player.batch, facts = concurrency, facts_of(Path(model))
        identity = [facts.get("sha256", facts), template_kwargs]
        questions = [(note.text, sample) for asked in sets.values() for note in asked for sample in range(samples)]
        cache = output / evaluation.CACHE
        answers = evaluation.ask(player, identity, prompts, questions, sampling, cache, console)
        with lock_folder(output, wait_s=0):
            replies, failed = asyncio.run(answers)
        if failed and not allow_missing:
            raise ValueError(
                f"{len(failed)} of {len(set(questions))} requests got no answer (the first: "
                f"{next(iter(failed.values()))}). Start again with the same --output, and only these are asked; "
                "or let the notes count as wrong with --allow-missing"
            )
        answered = {
            name: evaluation.read_answers(asked, replies, samples, prompts.parser) for name, asked in sets.items()
        }
        settings = {
            "model": facts,
            "prompts": evaluation.prompt_facts(prompts) | {"chat_template": template_kwargs},
            "sampling": sampling._asdict(),
            "requests_without_answer": len(failed),
        }
        scorers = NEURAL_SCORERS if neural else SCORERS
        tables = evaluation.conclude(output, reference, answered, training, scorers, settings)
    console.print(tables)
    typer.echo(f"{output}: {evaluation.SUBMISSION}, {evaluation.ANSWERS}, {evaluation.RESULTS}")
