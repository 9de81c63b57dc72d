"""``medserl evaluate`` from its options to its files."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation.conftest import run_at
from invoking import invoke
from note_files import SAMPLE
from scoring.builders import write_reference
from serving import MODEL, ChatServer, Status, completion
from support import assessment_text
from typer.testing import Result

from experiments.shortcuts import medec
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.paths import resource
from medserl_agentloop.scoring.notes import ReferenceNote, read_submission
from medserl_agentloop.testing import tiny_tokenizer

CASES = 8


def cases() -> Iterator[ReferenceNote]:
    """Eight cases, an error note and its clean twin each; blanks at both ends, as in the published
    files.
    """
    for n in range(CASES):
        first, last = f"Patient {n} came in with a cough.", "He may go home."
        drugs = ("warfarin", "amoxicillin")
        wrong, right = (f"He was given {drug} {n} mg for it." for drug in drugs)
        with_error, clean = ({0: first, 1: middle, 2: last} for middle in (wrong, right))
        text = f"{first} {wrong} {last} \n"
        yield ReferenceNote(f"toy-val-{2 * n}", text, True, "pharmacotherapy", 1, right, with_error)
        yield ReferenceNote(
            f"toy-val-{2 * n + 1}", f" {first} {right} {last}", False, sentences=clean
        )


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference(tmp_path_factory.mktemp("notes") / "notes.csv", cases(), blank=1)


def knows(role: Role, prompt: str) -> str:
    note = prompt.rpartition("Clinical note:\n")[2]
    if "warfarin" not in note:
        return assessment_text("safe")
    dose = note.partition("warfarin ")[2].partition(" ")[0]
    said = assessment_text("harmful", f"He was given warfarin {dose} mg for it.")
    right = f"He was given amoxicillin {dose} mg for it."
    return said.replace("correction: Culture grew candida.", f"correction: {right}")


@pytest.fixture
def server(server: ChatServer) -> ChatServer:
    server.answer = knows
    return server


def evaluate(model: Any, notes: Path, output: Path, *more: Any) -> Result:
    return invoke("evaluate", model, "--notes", notes, "--output", output, *more)


def results(server: ChatServer, notes: Path, output: Path, *more: Any) -> dict[str, Any]:
    done = evaluate(server.url, notes, output, "--model", MODEL, *more)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    return found


def scores_of(found: dict[str, Any]) -> dict[str, Any]:
    (scores,) = found["systems"].values()
    return dict(scores)


def measures(found: dict[str, Any]) -> dict[str, float | None]:
    return {name: measure["value"] for name, measure in scores_of(found)["measures"].items()}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_who_knows_all_scores_so_and_again_from_the_cache(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    server.answer = lambda role, prompt: {**completion(knows(role, prompt)), "model": "toy-4b-2026"}
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert "flag accuracy" in done.output and "always no error" in done.output
    again = evaluate(server.url, notes, tmp_path, "--model", MODEL).output
    assert "answers were made" not in done.output
    assert re.search(r"16 of 16 answers were made 20\S+ \S+ UTC to 20\S+ \S+ UTC", again)
    assert "0 of 16 answers (0.0 %) were cut at --max-tokens 1024" in done.output
    found, reference = json.loads((tmp_path / "results.json").read_text()), read_reference([notes])
    for measure in ("flag_accuracy", "sentence_accuracy", "f1"):
        assert measures(found)[measure] == 1.0
    assert found["reference"]["sha256"] == reference.sha256
    asked = {"name": MODEL, "server": f"{server.url}/v1", "answers_as": ["toy-4b-2026"]}
    assert found["model"] == asked
    assert found["prompts"]["profile"] == "medserl" and len(found["prompts"]["sha256"]) == 64
    assert found["sampling"] == {"temperature": 0.0, "samples": 1, "max_tokens": 1024, "seed": 0}
    assert {"python", "verl", "medserl-agentloop"} <= found["versions"].keys()
    ids = [note.text_id for note in reference.notes]
    predictions, problems = read_submission(tmp_path / "submission.txt", ids)
    assert not problems and len(predictions) == 2 * CASES
    assert predictions["toy-val-4"].correction == "He was given amoxicillin 2 mg for it."
    answers = lines(tmp_path / "answers.jsonl")
    assert [answer["text_id"] for answer in answers] == ids
    facts = {"verdict": "harmful", "sentence_id": 1, "sample": 0, "tokens": 12, "truncated": False}
    facts |= {"sentence": "He was given warfarin 0 mg for it.", "violations": []}
    assert answers[0].items() >= facts.items()


@pytest.mark.parametrize("profile", ["medserl", "classic", "brief", "edits"])
def test_a_server_reads_the_tokens_of_validation(
    server: ChatServer, notes: Path, tmp_path: Path, profile: str
) -> None:
    evaluate(server.url, notes, tmp_path, "--model", MODEL, "--profile", profile)
    tokenizer, prompts = tiny_tokenizer(), load_profile(profile)
    published = read_reference([notes]).notes
    assert published[0].text.endswith(" \n") and published[1].text.startswith(" ")
    shown = (prompts.shown(note.text, note.sentences) for note in published)
    turns = [prompts.turn(Role.ASSESSOR, Category.VANILLA_HARMFUL, text) for text in shown]
    chats = (body["messages"] for body in server.requests)
    asked = [tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in chats]
    expected = [ChatEncoder(tokenizer).opening(turn).ids for turn in turns]
    assert sorted(each["input_ids"] for each in asked) == sorted(expected)


def test_the_majority_of_several_samples_counts(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    def wavers(role: Role, prompt: str) -> str:
        times[prompt] += 1
        return assessment_text("safe") if times[prompt] == 2 else knows(role, prompt)

    times: Counter[str] = Counter()
    server.answer = wavers
    sampled = ("--samples", 3, "--temperature", 0.7, "--concurrency", 1)
    assert measures(results(server, notes, tmp_path, *sampled))["f1"] == 1.0
    assert len(server.requests) == 3 * 2 * CASES == len(lines(tmp_path / "answers.jsonl"))
    assert len({body["seed"] for body in server.requests}) == 3 * 2 * CASES
    assert {body["temperature"] for body in server.requests} == {0.7}


def test_only_the_same_request_is_answered_from_the_cache(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    profile, same, other = (
        shutil.copytree(resource("prompts/medserl"), tmp_path / name) for name in "abc"
    )
    (other / "profile.yaml").write_text("stop: {assessor: [</answer>]}")
    for options, sets_asked in (
        *((("--profile", profile), 1), (("--profile", same), 1), (("--profile", other), 2)),
        *((("--max-tokens", 900), 3), (("--temperature", 0.5), 4), (("--profile", "brief"), 5)),
        *((("--extra-body", "top_k=1"), 6), (("--profile", other), 6)),
    ):
        results(server, notes, tmp_path, *options)
        assert len(server.requests) == sets_asked * 2 * CASES


@pytest.mark.parametrize("field", ["model_path", "weight_version", "root"])
def test_other_weights_by_their_server_are_asked_anew(
    server: ChatServer, notes: Path, tmp_path: Path, field: str
) -> None:
    for said, requests in (("step 1", 1), ("step 2", 2), ("step 1", 2)):
        if field == "root":  # vLLM's
            server.models = {"data": [{"id": MODEL, field: said}]}
        else:
            server.info = {field: said, "is_generation": True}
        assert results(server, notes, tmp_path)["model"][field] == said
        assert len(server.requests) == requests * 2 * CASES


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("I cannot say.", "no score: none of 16 answers can be read"),
        (completion(None, reasoning_content="It is wrong."), "no question was answered; the first"),
        (400, "no question was answered; the first: assessor: HTTP 400"),
    ],
)
def test_an_evaluation_without_a_readable_answer_has_no_score(
    server: ChatServer, notes: Path, tmp_path: Path, answer: Any, said: str
) -> None:
    server.answer = lambda role, prompt: answer
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert done.exit_code == 2 and said in done.output and not (tmp_path / "results.json").exists()
    assert evaluate(server.url, notes, tmp_path, "--model", MODEL, "--allow-missing").exit_code == 2


def test_unanswered_requests_are_asked_again_and_withhold_the_table(
    server: ChatServer, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medserl_agentloop.evaluation.play.REQUESTS", {"retries": 0})
    odd = {"Patient 3": 500, "Patient 5": completion("It is", finish="length")}
    server.answer = lambda role, prompt: next(
        (said for n, said in odd.items() if n in prompt), knows(role, prompt)
    )
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert done.exit_code == 2 and not (tmp_path / "results.json").exists()
    assert "2 of 16 requests got no answer (the first: assessor: HTTP 500" in done.output
    found = results(server, notes, tmp_path, "--allow-missing")
    assert found["answers"] == {"read": 14, "cut": 2, "refused": 0, "missing": 2}
    assert scores_of(found).items() >= {"missing": 2, "unreadable": 2}.items()
    assert measures(found)["flag_accuracy"] == 1 - 4 / (2 * CASES)
    submission = (tmp_path / "submission.txt").read_text()
    assert "toy-val-9 " in submission
    assert "toy-val-11 " not in submission  # the format has no word for it
    assert len(server.requests) == 2 * CASES + 2
    server.answer = knows
    with (tmp_path / "cache.jsonl").open("ab") as cache:
        cache.write(b'{"key": "half a li')  # as a killed process leaves it
    assert measures(results(server, notes, tmp_path))["flag_accuracy"] == 1 - 2 / (2 * CASES)
    assert len(server.requests) == 2 * CASES + 4


@pytest.mark.parametrize(
    "refusal",
    [
        Status(400, {"error": {"message": "filtered by the policy", "code": "content_filter"}}),
        completion(None, refusal="I cannot help with that."),
        completion(""),
    ],
)
def test_a_refused_note_is_an_unreadable_answer_and_the_others_are_scored(
    server: ChatServer, notes: Path, tmp_path: Path, refusal: Any
) -> None:
    server.answer = lambda role, prompt: refusal if "Patient 3" in prompt else knows(role, prompt)
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert done.exit_code == 0 and "2 of 16 answers were refused by the server" in done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["answers"] == {"read": 16, "cut": 0, "refused": 2, "missing": 0}
    assert scores_of(found).items() >= {"missing": 0, "unreadable": 2}.items()
    assert measures(found)["flag_accuracy"] == 1 - 2 / (2 * CASES)
    refused = [line for line in lines(tmp_path / "answers.jsonl") if "refused" in line]
    assert {line["text_id"] for line in refused} == {"toy-val-6", "toy-val-7"}


def test_the_variants_of_the_shortcut_study_are_files_to_ask_about(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    medec.write(notes, tmp_path)
    found = results(server, tmp_path / "twins.csv", tmp_path / "out")
    assert measures(found)["f1"] == 1.0 and found["reference"]["notes"] == 2 * CASES
    shares = medec.pair_shares(tmp_path / "twins.csv", tmp_path / "out" / "submission.txt")
    assert shares.pop("both right") == (CASES, CASES) and not any(n for n, _ in shares.values())
    files = {name: [tmp_path / f"{name}.csv"] for name in medec.VARIANTS}
    texts = {name: read_reference(file).notes[0].text for name, file in files.items()}
    assert texts["white_space"].endswith("He may go home.")
    assert texts["numbered"].startswith("0 Patient 0 came in with a cough.\n1 He was given")
    assert not texts["last_moved"].endswith("He may go home.")


def test_run_is_asked_with_its_own_prompts_and_results_per_checkpoint(
    notes: Path, tmp_path: Path
) -> None:
    template = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    run = run_at(tmp_path / "run", 2, "novice", selfplay={"profile": "brief"}, data=template)
    known = tmp_path / "notes.csv"  # of the sort that it was trained on
    known.write_text(SAMPLE.read_text().partition("toy-train-3,")[0])
    for model in (run / "global_step_1", run):
        done = invoke("evaluate", model, "--notes", known, "--max-tokens", 60)
        assert done.exit_code == 0, done.output
        assert f"prompt profile: brief (of {run}/run_config.yaml)" in done.output
    for step in ("global_step_1", "global_step_2"):
        found = json.loads((run / "evaluation" / step / "notes" / "results.json").read_text())
        prompts = found["prompts"]
        assert prompts["profile"] == "brief"
        assert prompts["chat_template"] == {"enable_thinking": False}
        assert found["model"]["checkpoint"].endswith("actor") or found["model"]["checkpoint"] == "."
        assert len(found["model"]["sha256"]) == 64 and "base" not in found["model"]
    output, counts = tmp_path / "other", []
    for model in ("tiny_player", "tiny_player", "novice"):  # the cache goes by the weights
        asked = ("--profile", "classic", "--max-tokens", 6)
        done = evaluate(resource(f"assets/{model}"), notes, output, *asked)
        assert "prompt profile: classic\n" in done.output, done.output
        counts.append(len(lines(output / "cache.jsonl")))
    assert counts == [16, 16, 32]
    assert all(answer["tokens"] <= 6 for answer in lines(output / "answers.jsonl"))


NOWHERE = ("http://127.0.0.1:9", "--model", "x")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "neither a folder nor an address"),
        (NOWHERE[:1], "a server needs --model"),
        ((*NOWHERE, "--samples", 3), "--temperature above 0"),
    ],
)
def test_evaluate_refuses_what_it_cannot_ask(
    notes: Path, tmp_path: Path, arguments: tuple[Any, ...], says: str
) -> None:
    model, *more = arguments
    done = evaluate(model, notes, tmp_path / "out", *more)
    assert done.exit_code == 2 and says in done.output, done.output


def test_notes_under_agreement_are_sent_where_it_was_signed(
    server: ChatServer, tmp_path: Path
) -> None:
    under_agreement = [replace(note, text_id=f"uw-{note.text_id}") for note in cases()]
    uw = write_reference(tmp_path / "uw.csv", under_agreement)
    refused = evaluate(*NOWHERE[:1], uw, tmp_path, *NOWHERE[1:])
    assert refused.exit_code == 2 and "16 MEDEC-UW rows" in refused.output
    results(server, uw, tmp_path, "--i-have-the-uw-agreement")
