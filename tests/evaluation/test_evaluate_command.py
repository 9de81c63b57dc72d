"""``medserl evaluate`` from its options to its files, with a model behind a local server and in folders."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation.conftest import MODEL, ChatServer, run_at
from invoking import invoke
from scoring.builders import write_reference
from support import assessment_text
from typer.testing import Result

from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import resource
from medserl_agentloop.scoring.notes import ReferenceNote, read_submission
from medserl_agentloop.testing.tiny import tiny_tokenizer

CASES = 8
TOKENIZER = tiny_tokenizer()


def cases() -> Iterator[ReferenceNote]:
    """Eight cases, an error note and its clean twin each; blanks at both ends, as in the published files."""
    for n in range(CASES):
        first, last = f"Patient {n} came in with a cough.", "He may go home."
        wrong, right = (f"He was given {drug} {n} mg for it." for drug in ("warfarin", "amoxicillin"))
        with_error, clean = ({0: first, 1: middle, 2: last} for middle in (wrong, right))
        text = f"{first} {wrong} {last} \n"
        yield ReferenceNote(f"toy-val-{2 * n}", text, True, "pharmacotherapy", 1, right, with_error)
        yield ReferenceNote(f"toy-val-{2 * n + 1}", f" {first} {right} {last}", False, sentences=clean)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference(tmp_path_factory.mktemp("notes") / "notes.csv", cases(), blank=1)


def note_of(prompt: str) -> str:
    return prompt.rpartition("Clinical note:\n")[2]


def knows(role: Role, prompt: str) -> str:
    note = note_of(prompt)
    if "warfarin" not in note:
        return assessment_text("safe")
    dose = note.partition("warfarin ")[2].partition(" ")[0]
    said = assessment_text("harmful", f"He was given warfarin {dose} mg for it.")
    return said.replace("correction: none", f"correction: He was given amoxicillin {dose} mg for it.")


@pytest.fixture
def server(server: ChatServer) -> ChatServer:
    server.answer = knows
    return server


def asked(server: ChatServer) -> list[str]:
    """The notes that were asked about."""
    return [note_of(body["messages"][-1]["content"]) for body in server.requests]


def evaluate(model: Any, notes: Path, output: Path, *more: Any) -> Result:
    return invoke("evaluate", model, "--notes", notes, "--output", output, *more)


def results(server: ChatServer, notes: Path, output: Path, *more: Any) -> dict[str, Any]:
    done = evaluate(server.url, notes, output, "--model", MODEL, *more)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    return found


def measures(found: dict[str, Any]) -> dict[str, float | None]:
    (scores,) = found["systems"].values()
    return {name: measure["value"] for name, measure in scores["measures"].items()}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_model_that_knows_everything_scores_so(server: ChatServer, notes: Path, tmp_path: Path) -> None:
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert "flag accuracy" in done.output and "always no error" in done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert measures(found)["flag_accuracy"] == measures(found)["sentence_accuracy"] == measures(found)["f1"] == 1.0
    reference = read_reference([notes])
    assert found["reference"]["sha256"] == reference.sha256
    assert found["model"] == {"name": MODEL, "server": f"{server.url}/v1"}
    assert found["prompts"]["profile"] == "medserl" and len(found["prompts"]["sha256"]) == 64
    assert found["sampling"] == {"temperature": 0.0, "samples": 1, "max_tokens": 1024, "seed": 0}
    assert {"python", "verl", "medserl-agentloop"} <= found["versions"].keys()
    predictions, problems = read_submission(tmp_path / "submission.txt", [note.text_id for note in reference.notes])
    assert not problems and len(predictions) == 2 * CASES
    assert predictions["toy-val-4"].correction == "He was given amoxicillin 2 mg for it."
    answers = lines(tmp_path / "answers.jsonl")
    assert [answer["text_id"] for answer in answers] == [note.text_id for note in reference.notes]
    first = {"verdict": "harmful", "sentence": "He was given warfarin 0 mg for it.", "sentence_id": 1, "sample": 0}
    first |= {"correction": "He was given amoxicillin 0 mg for it.", "violations": [], "tokens": 12, "truncated": False}
    assert answers[0].items() >= first.items()


@pytest.mark.parametrize("profile", ["medserl", "classic", "brief"])
def test_a_server_reads_the_tokens_of_validation(server: ChatServer, notes: Path, tmp_path: Path, profile: str) -> None:
    results(server, notes, tmp_path, "--profile", profile)
    encoder = ProfileEncoder(TOKENIZER, load_profile(profile))
    published = [note.text for note in read_reference([notes]).notes]
    assert published[0].endswith(" \n") and published[1].startswith(" ")
    expected = [encoder.of(Role.ASSESSOR, Category.VANILLA_HARMFUL, text).ids for text in published]
    chats = (body["messages"] for body in server.requests)
    prompts = [TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    assert sorted(prompts) == sorted(expected)


def test_the_majority_of_several_samples_counts(server: ChatServer, notes: Path, tmp_path: Path) -> None:
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


def test_only_the_same_request_is_answered_from_the_cache(server: ChatServer, notes: Path, tmp_path: Path) -> None:
    profile, same, other = (shutil.copytree(resource("prompts/medserl"), tmp_path / name) for name in "abc")
    (other / "profile.yaml").write_text("stop: {assessor: [</answer>]}")
    thinking_off = ("--template", "enable_thinking=false")
    for options, sets_asked in (
        *((("--profile", profile), 1), (("--profile", same), 1), (("--profile", other), 2)),
        *((("--max-tokens", 900), 3), (("--temperature", 0.5), 4), (("--profile", "classic"), 5)),
        *((thinking_off, 6), (("--profile", other), 6)),
    ):
        prompts = results(server, notes, tmp_path, *options)["prompts"]
        assert len(server.requests) == sets_asked * 2 * CASES
        assert prompts["chat_template"] == ({"enable_thinking": False} if options is thinking_off else {})
    assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in server.requests[0]


def test_requests_without_an_answer_cost_the_table_and_are_asked_again_and_unreadable_answers_are_wrong(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    odd = {"Patient 3": 500, "Patient 5": "I cannot say."}
    server.answer = lambda role, prompt: next((said for n, said in odd.items() if n in prompt), knows(role, prompt))
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL, "--tries", 1)
    assert done.exit_code == 2 and "2 of 16 requests got no answer (the first: assessor: HTTP 500" in done.output
    assert not (tmp_path / "results.json").exists()
    found = results(server, notes, tmp_path, "--tries", 1, "--allow-missing")
    (scores,) = found["systems"].values()
    assert (scores["missing"], found["requests_without_answer"], scores["unreadable"]) == (2, 2, 2)
    assert measures(found)["flag_accuracy"] == 1 - 4 / (2 * CASES)
    submission = (tmp_path / "submission.txt").read_text()
    assert "toy-val-9 " in submission and "toy-val-11 " not in submission  # the format has no word for it
    assert len(server.requests) == 2 * CASES + 2
    server.answer = knows
    with (tmp_path / "cache.jsonl").open("ab") as cache:
        cache.write(b'{"key": "half a li')  # as a killed process leaves it
    assert measures(results(server, notes, tmp_path))["flag_accuracy"] == 1 - 2 / (2 * CASES)
    assert len(server.requests) == 2 * CASES + 4


# --- twins and shortcuts ---


@pytest.mark.parametrize(
    ("answer", "both_right", "bias"),
    [
        (knows, 1.0, 0.0),
        (lambda role, prompt: assessment_text("safe"), 0.0, -0.5),
        (lambda role, prompt: assessment_text("harmful"), 0.0, 0.5),
        (lambda role, prompt: "?" if "Patient 0" in prompt else knows(role, prompt), 1 - 1 / CASES, 0.0),
        (lambda role, prompt: "?", 0.0, None),
    ],
)
def test_twins_tell_medicine_from_suspicion(
    server: ChatServer, notes: Path, tmp_path: Path, answer: Any, both_right: float, bias: float | None
) -> None:
    server.answer = answer
    twins = results(server, notes, tmp_path, "--twins")["twins"]
    assert twins["cases"] == CASES
    assert (twins["both_right"][0], twins["bias"] and twins["bias"][0]) == (both_right, bias)
    parts = ("both_right", "both_called_wrong", "both_called_right", "swapped", "unreadable")
    assert sum(twins[part][0] for part in parts) == pytest.approx(1.0)
    shown = set(asked(server)) - {note.text for note in read_reference([notes]).notes}
    assert len(shown) == 2 * CASES and all(note == note.strip() for note in shown)
    assert {note.replace("warfarin", "amoxicillin") for note in shown} <= shown  # differ in the error alone


def test_shortcuts_show_what_a_model_goes_by(server: ChatServer, notes: Path, tmp_path: Path) -> None:
    def by_layout(role: Role, prompt: str) -> str:
        note = note_of(prompt)
        return knows(role, prompt) if note.strip().endswith("home.") and not note[0].isdigit() else "?"

    server.answer = by_layout
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL, "--shortcuts")
    assert "last sentence moved        -1.000 [-1.000, -1.000]" in done.output
    found = json.loads((tmp_path / "results.json").read_text())["shortcuts"]
    moved = {name: change["differences"]["flag_accuracy"]["value"] for name, change in found.items()}
    numbered = dict.fromkeys(("sentences numbered from 0", "sentences renumbered", "last sentence moved"), -1.0)
    assert moved == {"white space normalised": 0.0, **numbered}
    assert found["last sentence moved"]["differences"]["flag_accuracy"]["mcnemar_p"] < 1e-4
    shown = {note for note in asked(server) if note[0].isdigit()}
    assert "0 Patient 3 came in with a cough.\n1 He was given amoxicillin 3 mg for it.\n2 He may go home." in shown
    assert all(len(note.split("\n")) == 3 for note in shown)


# --- models in folders ---


def test_a_run_is_asked_with_its_own_prompts_and_each_checkpoint_keeps_its_results(notes: Path, tmp_path: Path) -> None:
    template = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    run = run_at(tmp_path / "run", 2, selfplay={"profile": "brief"}, data=template)
    for model in (run / "global_step_1", run):
        done = invoke("evaluate", model, "--notes", notes, "--max-tokens", 6)
        assert done.exit_code == 0 and f"prompt profile: brief (of {run}/run_config.yaml)" in done.output, done.output
    for step in ("global_step_1", "global_step_2"):
        found = json.loads((run / "evaluation" / step / "notes" / "results.json").read_text())
        assert (found["prompts"]["profile"], found["prompts"]["chat_template"]) == ("brief", {"enable_thinking": False})
        assert found["model"]["checkpoint"].endswith("actor") or found["model"]["checkpoint"] == "."
        assert len(found["model"]["sha256"]) == 64 and "base" not in found["model"]
    output, counts = tmp_path / "other", []
    for model in ("tiny_player", "tiny_player", "novice"):  # the cache goes by the weights
        done = evaluate(resource(f"assets/{model}"), notes, output, "--profile", "classic", "--max-tokens", 6)
        assert "prompt profile: classic\n" in done.output, done.output
        counts.append(len(lines(output / "cache.jsonl")))
    assert counts == [16, 16, 32] and all(answer["tokens"] <= 6 for answer in lines(output / "answers.jsonl"))


NOWHERE = ("http://127.0.0.1:9", "--model", "x")


@pytest.mark.parametrize(
    ("arguments", "file", "says"),
    [
        (("nowhere", "--model", "x"), "notes.csv", "--model names the model of a server"),
        (("nowhere",), "notes.csv", "neither a folder nor an address"),
        (NOWHERE[:1], "notes.csv", "a server needs --model"),
        (NOWHERE, "notes.csv", "no server answers at http://127.0.0.1:9/v1/models"),
        ((*NOWHERE, "--samples", 3), "notes.csv", "--temperature above 0"),
        (NOWHERE, "uw.csv", "16 of MEDEC-UW"),
        ((*NOWHERE, "--twins"), "clean.csv", "no note with an error and its corr"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, arguments: tuple[Any, ...], file: str, says: str) -> None:
    write_reference(tmp_path / "notes.csv", cases())
    write_reference(tmp_path / "uw.csv", [replace(note, text_id=f"uw-{note.text_id}") for note in cases()])
    write_reference(tmp_path / "clean.csv", [note for note in cases() if not note.flag])
    model, *more = arguments
    done = evaluate(model, tmp_path / file, tmp_path / "out", *more)
    assert done.exit_code == 2 and says in done.output


def test_notes_under_agreement_are_sent_where_it_was_signed(server: ChatServer, tmp_path: Path) -> None:
    uw = write_reference(tmp_path / "uw.csv", [replace(note, text_id=f"uw-{note.text_id}") for note in cases()])
    results(server, uw, tmp_path, "--i-have-the-uw-agreement")
