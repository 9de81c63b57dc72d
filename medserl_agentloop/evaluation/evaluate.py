"""``medserl evaluate``: asks a model about notes and scores its answers.

Prompt, parsing and scores are the same as in verl's validation, so both give the same numbers.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from medserl_agentloop.core.chat import ServedModel
from medserl_agentloop.core.client import blocking
from medserl_agentloop.core.interaction import NoReplyError, Reply
from medserl_agentloop.core.step_file import CONFIG_FILE, StepFile, lock_folder
from medserl_agentloop.data.cases import MEDEC_UW
from medserl_agentloop.data.cli import UwAgreement
from medserl_agentloop.data.rows import refuse_uw
from medserl_agentloop.evaluation import play, score
from medserl_agentloop.games.medical.case import ERROR_TYPES, Category, Role
from medserl_agentloop.games.medical.edit import number_sentences
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.paths import hash_of_values
from medserl_agentloop.scoring.notes import (
    UNREADABLE,
    Prediction,
    ReferenceNote,
    majority,
    write_submission,
)
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS, grade
from medserl_agentloop.terminal import errors_in_one_line, say

SUBMISSION, ANSWERS, RESULTS = "submission.txt", "answers.jsonl", "results.json"
CACHE = "cache.jsonl"
_ANY_CATEGORY = Category.VANILLA_BENIGN  # the assessor's prompt does not depend on it
_PACKAGES = ("medserl-agentloop", "verl", "torch", "transformers")
_READ = ("verdict", "sentence", "error_type", "correction", "violations")

Question = tuple[str, int]  # a note to assess; of several samples, which one


@dataclass
class Answers:
    """The reply to each question, or why there is none."""

    replies: dict[Question, Reply] = field(default_factory=dict)
    refused: dict[Question, str] = field(default_factory=dict)  # by the server, for good
    missing: dict[Question, str] = field(default_factory=dict)  # may be there next time


def evaluate(
    model: Annotated[str, Argument(help=play.MODEL_HELP)],
    notes: Annotated[list[Path], Option(help="MEDEC's CSV; may be repeated.")],
    output: Annotated[Path | None, Option(help="Folder; else one in the run's.")] = None,
    served: play.Served = None,
    profile: play.Profile = None,
    samples: Annotated[int, Option(min=1, help="Answers per note; the majority counts.")] = 1,
    temperature: Annotated[float, Option(min=0.0, help="Temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens per answer.")] = 1024,
    concurrency: play.AtOnce = 32,
    api_key_env: play.KeyVariable = None,
    extra_body: play.ExtraBody = None,
    neural: score.Neural = False,
    allow_missing: Annotated[
        bool, Option("--allow-missing", help="Notes without an answer are wrong.")
    ] = False,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Ask a model about every note of a MEDEC set, score its answers and write them down.

    The same command with the same --output continues a stopped evaluation. Choose models, prompts
    and settings on the validation set; the test set is for one final run.
    """
    console = Console()
    sampling = {"temperature": temperature, "samples": samples, "max_tokens": max_tokens, "seed": 0}
    with errors_in_one_line(stopped="the same command continues after the answers so far"):
        if samples > 1 and temperature == 0:
            raise ValueError(
                f"--samples {samples} needs a --temperature above 0; at 0 all samples are equal"
            )
        reference = score.read_reference(notes)
        refuse_uw(sum(note.subset == MEDEC_UW for note in reference.notes), i_have_the_uw_agreement)
        run = play.run_config(model)
        game, template = run.get("selfplay", {}), play.template_of(run)
        types = tuple(game.get("error_types", ERROR_TYPES))
        prompts = load_profile(profile or game.get("profile") or "medserl", types)
        asking = {"api_key_env": api_key_env, "concurrency": concurrency}
        player = play.model_at(model, served, template, extra_body=extra_body, **asking)
        if output is None:
            of_notes = "+".join(path.stem for path in notes)
            output = play.output_of("evaluation", model, served) / of_notes
        own = (
            f" (of {play.run_of(model)}/{CONFIG_FILE})" if not profile and "profile" in game else ""
        )
        say(console, f"prompt profile: {prompts.folder.name}{own}")
        facts = _facts(player, model, concurrency)
        asked_of = [facts.get("sha256", facts), template, *(extra_body or ())]
        questions = [
            (prompts.shown(note.text, note.sentences), sample)
            for note in reference.notes
            for sample in range(samples)
        ]
        with lock_folder(output, wait_s=0):
            cache = StepFile(output / CACHE)
            cache.cut_after(0)  # a killed process left a line half-written
            given = asyncio.run(ask(player, asked_of, prompts, questions, sampling, cache, console))
            if given.missing and not allow_missing:
                raise ValueError(
                    f"{len(given.missing)} of {len(set(questions))} requests got no answer (the "
                    f"first: {next(iter(given.missing.values()))}). Run it again with the same "
                    "--output to ask only these, or count them as wrong with --allow-missing"
                )
            predictions, lines = read_answers(reference.notes, given, samples, prompts)
            # No file holds the notes; answers may quote them.
            written = "".join(json.dumps(line) + "\n" for line in lines)
            (output / ANSWERS).write_text(written, encoding="utf-8")
            cut = sum(line.get("truncated", False) for line in lines)
            if not given.replies:
                reasons = [*given.refused.values(), *given.missing.values()]
                raise ValueError(f"no score: no question was answered; the first: {reasons[0]}")
            if not any(one.parsed for one in predictions):
                raise ValueError(
                    f"no score: none of {len(given.replies)} answers can be read, {cut} were cut "
                    f"at {max_tokens} tokens. See {output / ANSWERS}"
                )
            counts = {"read": len(lines), "cut": cut}
            counts |= {"refused": len(given.refused), "missing": len(given.missing)}
            grades = grade(reference.notes, predictions, NEURAL_SCORERS if neural else SCORERS)
            answers_as = sorted({reply.model for reply in given.replies.values()} - {""})
            results = score.report_on(reference, {facts["name"]: [grades]}) | {
                "model": facts | {"answers_as": answers_as},
                "prompts": _identity_of(prompts, template),
                "sampling": sampling,
                "extra_body": extra_body or [],
                "answers": counts,
                "versions": _versions(),
            }
            write_submission(output / SUBMISSION, predictions)
            (output / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(score.tables(results))
    share = f"{cut} of {len(lines)} answers ({100 * cut / len(lines):.1f} %) were cut"
    say(console, f"{share} at --max-tokens {max_tokens}; most cut answers count as wrong")
    if given.refused:
        refused = f"{len(given.refused)} of {len(lines)} answers were refused by the server"
        first = next(iter(given.refused.values()))
        say(console, f"{refused}, and count as unreadable; the first: {first}")
    say(console, f"{output}: {SUBMISSION}, {ANSWERS}, {RESULTS}")


def _facts(player: play.Model, model: str, concurrency: int) -> dict[str, Any]:
    """Known facts about the model; also checks that a server answers."""
    if isinstance(player, ServedModel):
        return {"name": player.name, "server": player.url, **blocking(player.check())}
    from medserl_agentloop.evaluation.local_models import facts_of  # loads verl

    player.sampler.most = concurrency
    return facts_of(Path(model))


def _identity_of(prompts: PromptProfile, template: Mapping[str, Any]) -> dict[str, Any]:
    messages = prompts.messages(Role.ASSESSOR, _ANY_CATEGORY, "{{ note }}")
    return {
        "profile": prompts.folder.name,
        "sha256": hash_of_values(messages, prompts.settings.model_dump(mode="json")),
        "chat_template": dict(template),
    }


def _versions() -> dict[str, str]:
    installed = {one.name: one.version for one in distributions() if one.name in _PACKAGES}
    return {"python": platform.python_version()} | installed


async def ask(
    model: play.Model,
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
    budget, temperature, seed = (sampling[n] for n in ("max_tokens", "temperature", "seed"))
    drawn_by = {"budget": budget, "temperature": temperature, "seed": seed}
    keys = []
    for (_, sample), turn in zip(asked, turns, strict=True):
        drawn = [temperature, seed, sample] if temperature else []
        words = [turn.prompt.filled(), turn.prefix, turn.stop]
        keys.append(hash_of_values(asked_of, words, budget, drawn))
    found = {question: known[k] for question, k in zip(asked, keys, strict=True) if k in known}
    given = Answers({question: Reply(**line["reply"]) for question, line in found.items()})
    if made := sorted(line["made"] for line in found.values()):
        from_cache = f"{len(made)} of {len(asked)} answers were made {made[0]} to {made[-1]}"
        say(console, f"{from_cache}; another --output asks again")

    async def one(number: int) -> None:
        question, turn = asked[number], turns[number]
        try:
            reply = await model.sample(turn, turn.prompt.filled(), number=number, **drawn_by)
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
    notes: Sequence[ReferenceNote], given: Answers, samples: int, profile: PromptProfile
) -> tuple[list[Prediction], list[dict[str, Any]]]:
    """The majority answer on each note that has one, and a line on each answer.

    A note that the server refuses gets an unreadable answer.
    """
    predictions, lines = [], []
    for note in notes:
        votes, shown = [], profile.shown(note.text, note.sentences)
        numbered = [number_sentences(note.text, note.sentences)] if profile.parser.numbered else []
        for sample in range(samples):
            line: dict[str, Any] = {"text_id": note.text_id, "sample": sample}
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
        predictions += [majority(votes)] if votes else []
    return predictions, lines
