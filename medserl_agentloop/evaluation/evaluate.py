"""``medserl evaluate``: ask a model about notes, and turn its answers into predictions, scores and
files.

The prompt, the reading of an answer and the scores are those of verl's validation, so both give the
same numbers. Twins and shortcuts show whether a model judges medicine, or something that goes with
it.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from medserl_agentloop.core import identity
from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking
from medserl_agentloop.core.config import key_values
from medserl_agentloop.core.interaction import NoReplyError, Reply
from medserl_agentloop.core.step_file import CONFIG_FILE, StepFile, lock_folder
from medserl_agentloop.data.cases import MEDEC_UW, with_numbers
from medserl_agentloop.data.cli import UwAgreement
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
    Reference,
    ReferenceNote,
    majority,
    write_submission,
)
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS
from medserl_agentloop.terminal import errors_in_one_line, say

SUBMISSION, ANSWERS, RESULTS = "submission.txt", "answers.jsonl", "results.json"
CACHE = "cache.jsonl"
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


@dataclass
class Answers:
    """Counts of answers by what became of each question."""

    replies: dict[Question, Reply] = field(default_factory=dict)
    refused: dict[Question, str] = field(default_factory=dict)  # why the server does not answer it
    missing: dict[Question, str] = field(default_factory=dict)  # why there is no answer yet

    @property
    def reasons(self) -> list[str]:
        return [*self.refused.values(), *self.missing.values()]


def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    notes: Annotated[list[Path], typer.Option(help="MEDEC's CSV; may be repeated.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder; else one for the checkpoint in its run's.")
    ] = None,
    served: play.Served = None,
    profile: play.Profile = None,
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
    concurrency: play.AtOnce = 32,
    timeout: play.Timeout = 300.0,
    retries: play.Retries = 3,
    api_key_env: play.KeyVariable = None,
    extra_body: play.ExtraBody = None,
    twins: Annotated[
        bool, typer.Option("--twins", help="Also ask about both notes of each case.")
    ] = False,
    shortcuts: Annotated[
        bool, typer.Option("--shortcuts", help="Also ask about changes of no medicine.")
    ] = False,
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
    with errors_in_one_line(stopped="the same command goes on after the answers so far"):
        if samples > 1 and temperature == 0:
            raise ValueError(
                f"--samples {samples} needs a --temperature above 0; at 0 all of them are equal"
            )
        reference = score.read_reference(notes)
        refuse_uw(sum(note.subset == MEDEC_UW for note in reference.notes), i_have_the_uw_agreement)
        sets = _sets(reference, score.read_twins(notes) if twins else [], shortcuts)
        training = score.read_training(train, reference.notes) if train else ([], 0)
        run = run_config(model)
        game = run.get("selfplay", {})
        prompts = load_profile(
            profile or game.get("profile") or "medserl",
            tuple(game.get("error_types", ERROR_TYPES)),
        )
        template_kwargs = template_of(run) | key_values("--template", template or [])
        asking = {
            "api_key_env": api_key_env,
            "timeout_s": timeout,
            "retries": retries,
            "concurrency": concurrency,
        }
        player = model_at(model, served, template_kwargs, extra_body=extra_body, **asking)
        name = "+".join(path.stem for path in notes)
        output = output or output_of("evaluation", model, served) / name
        source = f" (of {run_of(model)}/{CONFIG_FILE})" if game.get("profile") else ""
        say(console, f"prompt profile: {prompts.folder.name}{'' if profile else source}")
        facts = _facts(player, model, concurrency)
        asked_of = [facts.get("sha256", facts), template_kwargs, *(extra_body or ())]
        questions = [
            (prompts.shown(note.text, note.sentences), sample)
            for of_set in sets.values()
            for note in of_set
            for sample in range(samples)
        ]
        with lock_folder(output, wait_s=0):
            cache = StepFile(output / CACHE)
            cache.cut_after(0)  # a killed process left a line half-written
            given = asyncio.run(ask(player, asked_of, prompts, questions, sampling, cache, console))
            if given.missing and not allow_missing:
                raise ValueError(
                    f"{len(given.missing)} of {len(set(questions))} requests got no answer (the "
                    f"first: {next(iter(given.missing.values()))}). Start again with the same "
                    "--output, and only these are asked; or let the notes count as wrong with "
                    "--allow-missing"
                )
            predictions, lines = read_answers(sets, given, samples, prompts)
            # The notes are in none of the files; answers may quote them.
            (output / ANSWERS).write_text(
                "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
            )
            cut = sum(line.get("truncated", False) for line in lines)
            _refuse_unreadable(predictions, given, output, f"{cut} are cut at {max_tokens} tokens")
            report = _score(reference, sets, predictions, facts, training, neural)
            results = report | {
                "model": facts
                | {"answers_as": sorted({r.model for r in given.replies.values()} - {""})},
                "prompts": _identity_of(prompts, template_kwargs),
                "sampling": sampling,
                "extra_body": extra_body or [],
                "answers": {
                    "read": len(lines),
                    "cut": cut,
                    "refused": len(given.refused),
                    "missing": len(given.missing),
                },
                "versions": _versions(),
            }
            answered = [one for one in predictions[PUBLISHED] if one is not None]
            write_submission(output / SUBMISSION, answered)
            (output / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(score.tables(results))
    say(
        console,
        f"{cut} of {len(lines)} answers ({cut / len(lines):.1%}) were cut at --max-tokens "
        f"{max_tokens}; a cut answer is mostly unreadable, and counts as wrong".replace("%", " %"),
    )
    if given.refused:
        say(
            console,
            f"{len(given.refused)} of {len(lines)} answers were refused by the server, and count "
            f"as unreadable; the first: {next(iter(given.refused.values()))}",
        )
    say(console, f"{output}: {SUBMISSION}, {ANSWERS}, {RESULTS}")


def _sets(
    reference: Reference, twins: list[ReferenceNote], shortcuts: bool
) -> dict[str, list[ReferenceNote]]:
    """The notes to ask about, by the name of their set."""
    sets = {PUBLISHED: list(reference.notes)} | ({TWINS: twins} if twins else {})
    for name, change in SHORTCUTS.items() if shortcuts else ():
        sets[name] = [replace(note, text=change(note)) for note in reference.notes]
    return sets


def _facts(player: Model, model: str, concurrency: int) -> dict[str, Any]:
    """Return the known facts about the model; a server is asked, so that it is there."""
    if isinstance(player, ServedModel):
        return {"name": player.name, "server": player.url, **blocking(player.check())}
    from medserl_agentloop.evaluation.local_models import facts_of  # loads verl

    player.batch = concurrency
    return facts_of(Path(model))


def _identity_of(prompts: PromptProfile, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    messages = prompts.messages(Role.ASSESSOR, _ANY_CATEGORY, "{{ note }}")
    return {
        "profile": prompts.folder.name,
        "sha256": identity.of_values(messages, prompts.settings.model_dump(mode="json")),
        "chat_template": dict(template_kwargs),
    }


def _versions() -> dict[str, str]:
    installed = {one.name: one.version for one in distributions() if one.name in _PACKAGES}
    return {"python": platform.python_version()} | installed


async def ask(
    model: Model,
    asked_of: Any,
    profile: PromptProfile,
    questions: Sequence[Question],
    sampling: Mapping[str, Any],
    cache: StepFile,
    console: Console,
) -> Answers:
    """Answers by question, known ones from the cache; ``asked_of`` is part of its keys."""
    known = {line["key"]: line for line in cache.read()} if cache.path.exists() else {}
    asked = list(dict.fromkeys(questions))
    turns = [profile.turn(Role.ASSESSOR, _ANY_CATEGORY, note) for note, _ in asked]
    keys, temperature = [], sampling["temperature"]
    for (_, sample), turn in zip(asked, turns, strict=True):
        drawn = [temperature, sampling["seed"], sample] if temperature else []
        words = [turn.prompt.filled(), turn.prefix, turn.stop]
        keys.append(identity.of_values(asked_of, words, sampling["max_tokens"], drawn))
    found = {question: known[k] for question, k in zip(asked, keys, strict=True) if k in known}
    given = Answers({question: Reply(**line["reply"]) for question, line in found.items()})
    if made := sorted(line["made"] for line in found.values()):
        say(
            console,
            f"{len(made)} of {len(asked)} answers were made {made[0]} to {made[-1]}; another "
            "--output asks again",
        )
    options = {
        "budget": sampling["max_tokens"],
        "temperature": temperature,
        "seed": sampling["seed"],
    }

    async def one(number: int) -> None:
        question, turn = asked[number], turns[number]
        try:
            reply = await model.sample(turn, turn.prompt.filled(), number=number, **options)
        except NoReplyError as reason:
            (given.refused if reason.refused else given.missing)[question] = str(reason)
        else:
            given.replies[question] = reply
            made = f"{datetime.now(UTC):%F %H:%M UTC}"
            cache.append([{"step": 0, "key": keys[number], "made": made, "reply": asdict(reply)}])

    left = [number for number, question in enumerate(asked) if question not in given.replies]
    await play.all_of(one, left, len(left), "answers")  # the model says how many it takes at once
    return given


def read_answers(
    sets: Mapping[str, Sequence[ReferenceNote]],
    given: Answers,
    samples: int,
    profile: PromptProfile,
) -> tuple[dict[str, list[Prediction | None]], list[dict[str, Any]]]:
    """Return the majority answer on each note by set, None without any; and a line on each answer.

    A note that the server refuses has an unreadable answer.
    """
    predictions: dict[str, list[Prediction | None]] = {}
    lines = []
    for name, note in ((name, note) for name, notes in sets.items() for note in notes):
        votes, shown = [], profile.shown(note.text, note.sentences)
        numbered = [number_sentences(note.text, note.sentences)] if profile.parser.numbered else []
        for sample in range(samples):
            line: dict[str, Any] = {"notes": name, "text_id": note.text_id, "sample": sample}
            if (why := given.refused.get((shown, sample))) is not None:
                votes.append(Prediction(note.text_id, parsed=False))
                lines.append(line | {"refused": why})
            elif (reply := given.replies.get((shown, sample))) is not None:
                read = profile.parser.assessment(reply.text, reply.prefill, *numbered)
                answer = (read.verdict or UNREADABLE, read.sentence, read.correction, read.number)
                votes.append(Prediction.of_answer(note, *answer))
                line |= {"response": reply.text, "tokens": reply.tokens}
                line |= {"truncated": reply.truncated, **{key: getattr(read, key) for key in _READ}}
                lines.append(line | {"sentence_id": votes[-1].sentence_id})
        predictions.setdefault(name, []).append(majority(votes) if votes else None)
    return predictions, lines


def _refuse_unreadable(
    predictions: Mapping[str, Sequence[Prediction | None]], given: Answers, output: Path, cut: str
) -> None:
    """Raise a ValueError if no answer can be read."""
    if any(one is not None and one.parsed for of_set in predictions.values() for one in of_set):
        return
    if not given.replies:
        raise ValueError(f"no score: no question was answered; the first: {given.reasons[0]}")
    raise ValueError(
        f"no score: none of {len(given.replies)} answers can be read, {cut}. See {output / ANSWERS}"
    )


def _score(
    reference: Reference,
    sets: Mapping[str, Sequence[ReferenceNote]],
    predictions: Mapping[str, Sequence[Prediction | None]],
    facts: Mapping[str, Any],
    training: tuple[list[ReferenceNote], int],
    neural: bool,
) -> dict[str, Any]:
    """The scores of the notes as published, and what twins and shortcuts show."""
    scorers = NEURAL_SCORERS if neural else SCORERS
    grades = {
        name: [grade(reference.notes, [p for p in predictions[name] if p is not None], scorers)]
        for name in sets
        if name != TWINS
    }
    moved = {name: compare(grades[name], grades[PUBLISHED]) for name in SHORTCUTS if name in grades}
    return score.report_on(reference, {facts["name"]: grades[PUBLISHED]}, *training) | {
        "twins": score_twins(predictions[TWINS]) if TWINS in sets else None,
        "shortcuts": {name: {"differences": by_measure} for name, by_measure in moved.items()},
    }


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
    counts = {name: read.count(flags) for name, flags in _TWINS.items()}
    counts["unreadable"] = len(cases) - len(read)
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
    listed = [line for text in note.sentences.values() if (line := one_line(text))]
    return listed or split_sentences(note.text)


SHORTCUTS: Mapping[str, Callable[[ReferenceNote], str]] = {
    "white space normalised": lambda note: one_line(note.text),
    "sentences numbered from 0": lambda note: with_numbers(_sentences(note)),
    "sentences renumbered": lambda note: with_numbers(
        _sentences(note), random.Random(note.text_id).randrange(2, 100)
    ),
    "last sentence moved": _last_moved,
}
"""By name, the same note with something changed that has nothing to do with medicine."""
