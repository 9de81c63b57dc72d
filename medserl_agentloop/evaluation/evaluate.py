"""``medserl evaluate``: ask a model about notes, and turn its answers into predictions, scores and
files.

The prompt, the reading of an answer and the scores are those of verl's validation, so both give the
same numbers. Twins and shortcuts show whether a model judges medicine, or something that goes with
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking
from medserl_agentloop.core.config import key_values
from medserl_agentloop.core.interaction import NoReplyError, Reply
from medserl_agentloop.core.step_file import CONFIG_FILE, StepFile, lock_folder
from medserl_agentloop.data.cases import MEDEC_UW, near_duplicates, with_numbers
from medserl_agentloop.data.cli import UwAgreement
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import refuse_uw
from medserl_agentloop.evaluation import play, score
from medserl_agentloop.evaluation.play import (
    MODEL_HELP,
    Model,
    model_at,
    output_of,
    run_config,
    run_of,
    template_of,
)
from medserl_agentloop.games.medical.case import ERROR_TYPES, Category, Role
from medserl_agentloop.games.medical.edit import number_sentences, one_line, split_sentences
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.scoring.metrics import compare, grade, mean_interval, wilson_interval
from medserl_agentloop.scoring.notes import (
    UNREADABLE,
    Prediction,
    ReferenceNote,
    majority,
    write_submission,
)
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS
from medserl_agentloop.terminal import errors_in_one_line, say

SUBMISSION, ANSWERS, RESULTS, CACHE = (
    "submission.txt",
    "answers.jsonl",
    "results.json",
    "cache.jsonl",
)
PUBLISHED, TWINS = "as published", "twins"
_ANY_CATEGORY = Category.VANILLA_BENIGN  # the assessor's prompt does not depend on it
_PACKAGES = ("medserl-agentloop", "verl", "torch", "transformers")
_READ = ("verdict", "sentence", "error_type", "correction", "violations")
_TWINS = {
    "both_right": (True, False),
    "both_called_wrong": (True, True),
    "both_called_right": (False, False),
    "swapped": (False, True),
}
"""By name, whether the error note and its correction are called wrong."""

Question = tuple[str, int]  # a note to assess; of several samples, which one


def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    notes: Annotated[list[Path], typer.Option(help="MEDEC's CSV; may be repeated.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder; else one for the checkpoint beside its run.")
    ] = None,
    served: Annotated[
        str | None, typer.Option("--model", help="Name of the model that a server serves.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Prompt profile; else that of the run, or medserl.")
    ] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="For the chat template: enable_thinking=false.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Answers per note, of which the majority counts.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests in flight, or notes in a batch.")
    ] = 32,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one request may take.")
    ] = 300.0,
    tries: Annotated[int, typer.Option(min=1, help="Requests for one answer of a server.")] = 4,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key.")
    ] = None,
    extra_body: play.ExtraBody = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Put earlier answers aside, and ask for all again.")
    ] = False,
    twins: Annotated[
        bool, typer.Option("--twins", help="Also ask about both notes of each case.")
    ] = False,
    shortcuts: Annotated[
        bool, typer.Option("--shortcuts", help="Also ask about changes of no medicine.")
    ] = False,
    except_overlap_with: Annotated[
        list[Path] | None,
        typer.Option(help="Notes trained on: what is not nearly one of them is scored once more."),
    ] = None,
    train: score.Train = None,
    neural: score.Neural = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Notes without an answer are wrong.")
    ] = False,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Ask a model about every note of a MEDEC set, score its answers and write them down.

    An evaluation that was stopped goes on where it was when it is started again with the same
    --output. Choose models, prompts and settings on the validation set; the test set is for one
    final run.
    """
    console = Console()
    sampling = {
        "temperature": temperature,
        "samples": samples,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    with errors_in_one_line(
        stopped="the same command, without --fresh, goes on after the answers so far"
    ):
        if samples > 1 and temperature == 0:
            raise ValueError(
                f"--samples {samples} needs a --temperature above 0; at 0 all of them are equal"
            )
        reference = score.read_reference(notes)
        refuse_uw(sum(note.subset == MEDEC_UW for note in reference.notes), i_have_the_uw_agreement)
        sets = {PUBLISHED: list(reference.notes)} | (
            {TWINS: score.read_twins(notes)} if twins else {}
        )
        for name, change in SHORTCUTS.items() if shortcuts else ():
            sets[name] = [replace(note, text=change(note)) for note in reference.notes]
        training = score.read_training(train, reference.notes) if train else ([], 0)
        known = read_files(except_overlap_with).cases if except_overlap_with else []
        trained_on = [(case.case_id, text) for case in known for text in case.notes]
        published = [(note.text_id, note.text) for note in reference.notes]
        near = {name for name, *_ in near_duplicates(published, trained_on)}
        others = tuple(note for note in reference.notes if note.text_id not in near)
        run = run_config(model)
        game = run.get("selfplay", {})
        trained_with = game.get("profile")
        prompts = load_profile(
            profile or trained_with or "medserl", tuple(game.get("error_types", ERROR_TYPES))
        )
        template_kwargs = template_of(run) | key_values("--template", template or [])
        asking = {
            "api_key_env": api_key_env,
            "timeout_s": timeout,
            "retries": tries - 1,
            "concurrency": concurrency,
        }
        if Path(model).is_dir():
            from medserl_agentloop.evaluation.local_models import facts_of  # loads verl
        player = model_at(model, served, template_kwargs, extra_body=extra_body, **asking)
        output = output or output_of("evaluation", model, served) / "+".join(
            path.stem for path in notes
        )
        source = "" if profile or not trained_with else f" (of {run_of(model)}/{CONFIG_FILE})"
        say(console, f"prompt profile: {prompts.folder.name}{source}")
        if isinstance(player, ServedModel):
            facts = {"name": player.name, "server": player.url, **blocking(player.check())}
        else:
            player.batch, facts = concurrency, facts_of(Path(model))
        identity = [facts.get("sha256", facts), template_kwargs, *(extra_body or ())]
        questions = [
            (prompts.shown(note.text, note.sentences), sample)
            for asked in sets.values()
            for note in asked
            for sample in range(samples)
        ]
        with lock_folder(output, wait_s=0):
            cache = StepFile(output / CACHE)
            cache.cut_after(-1 if fresh else 0)  # a killed process left a line half-written
            replies, failed = asyncio.run(
                ask(player, identity, prompts, questions, sampling, cache, console)
            )
        if failed and not allow_missing:
            raise ValueError(
                f"{len(failed)} of {len(set(questions))} requests got no answer (the first: "
                f"{next(iter(failed.values()))}). Start again with the same --output, and only "
                "these are asked; "
                "or let the notes count as wrong with --allow-missing"
            )
        predictions, lines = read_answers(sets, replies, samples, prompts)
        # The notes are in none of the files; answers may quote them.
        (output / ANSWERS).write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
        if not any(
            one is not None and one.parsed for of_set in predictions.values() for one in of_set
        ):
            cut = (
                f"{sum(line['truncated'] for line in lines)} are cut off by --max-tokens "
                f"{max_tokens}"
            )
            raise ValueError(
                f"no score: none of {len(lines)} answers can be read, {cut}. See {output / ANSWERS}"
            )
        answered = {
            name: [one for one in of_set if one is not None] for name, of_set in predictions.items()
        }
        scorers = NEURAL_SCORERS if neural else SCORERS
        grades = {
            name: [grade(reference.notes, answered[name], scorers)]
            for name in sets
            if name != TWINS
        }
        moved = {
            name: compare(grades[name], grades[PUBLISHED]) for name in SHORTCUTS if name in grades
        }
        messages = prompts.messages(Role.ASSESSOR, _ANY_CATEGORY, "{{ note }}")
        prompt = json.dumps([messages, prompts.settings.model_dump(mode="json")], sort_keys=True)
        results = score.report_on(reference, {facts["name"]: grades[PUBLISHED]}, *training) | {
            "model": facts
            | {"answers_as": sorted({reply.model for reply in replies.values()} - {""})},
            "prompts": {
                "profile": prompts.folder.name,
                "sha256": hashlib.sha256(prompt.encode()).hexdigest(),
                "chat_template": template_kwargs,
            },
            "sampling": sampling,
            "extra_body": extra_body or [],
            "requests_without_answer": len(failed),
            "versions": {"python": platform.python_version()}
            | {
                package.name: package.version
                for package in distributions()
                if package.name in _PACKAGES
            },
            "twins": score_twins(predictions[TWINS]) if twins else None,
            "shortcuts": {name: {"differences": by_measure} for name, by_measure in moved.items()},
        }
        if near and others:
            rest = replace(reference, notes=others)
            graded = [grade(rest.notes, answered[PUBLISHED], scorers)]
            results["without_overlap"] = score.report_on(rest, {facts["name"]: graded}, *training)
        write_submission(output / SUBMISSION, answered[PUBLISHED])
        (output / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(score.tables(results))
    if except_overlap_with:
        without = "without them:" if others else "none is left to score apart"
        say(
            console,
            f"{len(near)} of {len(reference.notes)} notes are nearly one that was trained on; "
            f"{without}",
        )
        if others:
            console.print(score.tables(results.get("without_overlap", results)))
    say(console, f"{output}: {SUBMISSION}, {ANSWERS}, {RESULTS}")


async def ask(
    model: Model,
    identity: Any,
    profile: PromptProfile,
    questions: Sequence[Question],
    sampling: Mapping[str, Any],
    cache: StepFile,
    console: Console,
) -> tuple[dict[Question, Reply], dict[Question, str]]:
    """Answers by question, known ones from the cache, and why others have none.

    ``identity`` is part of its keys.
    """
    known = {line["key"]: line for line in cache.read()} if cache.path.exists() else {}
    asked = list(dict.fromkeys(questions))
    turns = [profile.turn(Role.ASSESSOR, _ANY_CATEGORY, note) for note, _ in asked]
    keys, temperature = [], sampling["temperature"]
    for (_, sample), turn in zip(asked, turns, strict=True):
        drawn = [temperature, sampling["seed"], sample] if temperature else []
        request = [
            identity,
            turn.prompt.filled(),
            turn.prefix,
            turn.stop,
            sampling["max_tokens"],
            drawn,
        ]
        keys.append(hashlib.sha256(json.dumps(request).encode()).hexdigest())
    found = {
        question: known[key] for question, key in zip(asked, keys, strict=True) if key in known
    }
    for line in found.values():
        line["reply"].pop("weights", None)  # which answers of an earlier checkout have
    replies = {question: Reply(**line["reply"]) for question, line in found.items()}
    if made := sorted(line.get("made", "at an unknown time") for line in found.values()):
        say(
            console,
            f"{len(made)} of {len(asked)} answers were made {made[0]} to {made[-1]}; --fresh asks "
            "again",
        )
    failed: dict[Question, str] = {}
    options = {
        "budget": sampling["max_tokens"],
        "temperature": temperature,
        "seed": sampling["seed"],
    }

    async def one(number: int) -> None:
        try:
            reply = await model.sample(
                turns[number], turns[number].prompt.filled(), number=number, **options
            )
        except NoReplyError as reason:
            failed[asked[number]] = str(reason)
        else:
            replies[asked[number]] = reply
            made = f"{datetime.now(UTC):%F %H:%M UTC}"
            cache.append([{"step": 0, "key": keys[number], "made": made, "reply": asdict(reply)}])

    left = [number for number, question in enumerate(asked) if question not in replies]
    await play.all_of(one, left, len(left), "answers")  # the model says how many it takes at once
    return replies, failed


def score_twins(given: Sequence[Prediction | None]) -> dict[str, Any]:
    """Score the notes of ``read_twins``, with intervals; ``bias`` is the share called wrong less
    one half.
    """
    cases = list(zip(given[::2], given[1::2], strict=True))
    read = [
        (a.flag, b.flag)
        for a, b in cases
        if a is not None and b is not None and a.parsed and b.parsed
    ]
    bias = [(wrong + right) / 2 - 0.5 for wrong, right in read]
    counts = {name: read.count(flags) for name, flags in _TWINS.items()} | {
        "unreadable": len(cases) - len(read)
    }
    shares = {
        name: (count / len(cases), *wilson_interval(count, len(cases)))
        for name, count in counts.items()
    }
    return {"cases": len(cases), **shares, "bias": mean_interval(bias) if len(bias) > 1 else None}


def _last_moved(note: ReferenceNote) -> str:
    """The last sentence in another place, drawn for the note."""
    *others, last = _sentences(note)
    others.insert(random.Random(note.text_id).randrange(len(others) or 1), last)
    return " ".join(others)


def _sentences(note: ReferenceNote) -> list[str]:
    """MEDEC's own sentences, where they are listed."""
    return [
        line for text in note.sentences.values() if (line := one_line(text))
    ] or split_sentences(note.text)


SHORTCUTS: Mapping[str, Callable[[ReferenceNote], str]] = {
    "white space normalised": lambda note: one_line(note.text),
    "sentences numbered from 0": lambda note: with_numbers(_sentences(note)),
    "sentences renumbered": lambda note: with_numbers(
        _sentences(note), random.Random(note.text_id).randrange(2, 100)
    ),
    "last sentence moved": _last_moved,
}
"""By name, the same note with something changed that has nothing to do with medicine."""


def read_answers(
    sets: Mapping[str, Sequence[ReferenceNote]],
    replies: Mapping[Question, Reply],
    samples: int,
    profile: PromptProfile,
) -> tuple[dict[str, list[Prediction | None]], list[dict[str, Any]]]:
    """Return the majority answer on each note by set, None without any; and a line on each
    answer."""
    predictions: dict[str, list[Prediction | None]] = {}
    lines = []
    for name, note in ((name, note) for name, notes in sets.items() for note in notes):
        votes, shown = [], profile.shown(note.text, note.sentences)
        given = [number_sentences(note.text, note.sentences)] if profile.parser.numbered else []
        for sample in range(samples):
            if (reply := replies.get((shown, sample))) is None:
                continue
            read = profile.parser.assessment(reply.text, reply.prefill, *given)
            answer = (read.verdict or UNREADABLE, read.sentence, read.correction, read.number)
            votes.append(Prediction.of_answer(note, *answer))
            line = {
                "notes": name,
                "text_id": note.text_id,
                "sample": sample,
                "response": reply.text,
            }
            line |= {"tokens": reply.tokens, "truncated": reply.truncated}
            line |= {key: getattr(read, key) for key in _READ}
            lines.append({**line, "sentence_id": votes[-1].sentence_id})
        predictions.setdefault(name, []).append(majority(votes) if votes else None)
    return predictions, lines
