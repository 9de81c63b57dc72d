"""``medserl evaluate`` from its options to its files, and that a folder's very weights are what is
evaluated.
"""

import asyncio
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.conftest import run_at
from evaluation.shards import save_shards
from invoking import invoke
from note_files import SAMPLE
from peft import LoraConfig, get_peft_model
from scoring.builders import write_reference
from serving import MODEL, ChatServer, Status, completion
from support import assessment_text, extra_info
from typer.testing import Result
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

from medserl_agentloop.backends import cpu_sampling
from medserl_agentloop.backends.role_adapters import ADAPTERS_FOLDER
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Message, Prompt, Reply, Turn
from medserl_agentloop.evaluation.local_models import (
    facts_of,
    find_weights,
    load_model,
    load_player,
)
from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.paths import resource
from medserl_agentloop.scoring.notes import ReferenceNote, read_submission
from medserl_agentloop.testing import tiny_model, tiny_tokenizer

CASES = 8
TOKENIZER = tiny_tokenizer()


def cases() -> Iterator[ReferenceNote]:
    """Eight cases, an error note and its clean twin each; blanks at both ends, as in the published
    files.
    """
    for n in range(CASES):
        first, last = f"Patient {n} came in with a cough.", "He may go home."
        wrong, right = (
            f"He was given {drug} {n} mg for it." for drug in ("warfarin", "amoxicillin")
        )
        with_error, clean = ({0: first, 1: middle, 2: last} for middle in (wrong, right))
        text = f"{first} {wrong} {last} \n"
        yield ReferenceNote(f"toy-val-{2 * n}", text, True, "pharmacotherapy", 1, right, with_error)
        yield ReferenceNote(
            f"toy-val-{2 * n + 1}", f" {first} {right} {last}", False, sentences=clean
        )


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
    return said.replace(
        "correction: Culture grew candida.",
        f"correction: He was given amoxicillin {dose} mg for it.",
    )


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
    found = json.loads((tmp_path / "results.json").read_text())
    assert (
        measures(found)["flag_accuracy"]
        == measures(found)["sentence_accuracy"]
        == measures(found)["f1"]
        == 1.0
    )
    reference = read_reference([notes])
    assert found["reference"]["sha256"] == reference.sha256
    assert found["model"] == {
        "name": MODEL,
        "server": f"{server.url}/v1",
        "answers_as": ["toy-4b-2026"],
    }
    assert found["prompts"]["profile"] == "medserl" and len(found["prompts"]["sha256"]) == 64
    assert found["sampling"] == {"temperature": 0.0, "samples": 1, "max_tokens": 1024, "seed": 0}
    assert {"python", "verl", "medserl-agentloop"} <= found["versions"].keys()
    predictions, problems = read_submission(
        tmp_path / "submission.txt", [note.text_id for note in reference.notes]
    )
    assert not problems and len(predictions) == 2 * CASES
    assert predictions["toy-val-4"].correction == "He was given amoxicillin 2 mg for it."
    answers = lines(tmp_path / "answers.jsonl")
    assert [answer["text_id"] for answer in answers] == [note.text_id for note in reference.notes]
    first = {
        "verdict": "harmful",
        "sentence": "He was given warfarin 0 mg for it.",
        "sentence_id": 1,
        "sample": 0,
    }
    first |= {
        "correction": "He was given amoxicillin 0 mg for it.",
        "violations": [],
        "tokens": 12,
        "truncated": False,
    }
    assert answers[0].items() >= first.items()


@pytest.mark.parametrize("profile", ["medserl", "classic", "brief", "edits"])
def test_a_server_reads_the_tokens_of_validation(
    server: ChatServer, notes: Path, tmp_path: Path, profile: str
) -> None:
    evaluate(
        server.url, notes, tmp_path, "--model", MODEL, "--profile", profile
    )  # whatever is read in the answers
    encoder, prompts = ChatEncoder(TOKENIZER), load_profile(profile)
    published = read_reference([notes]).notes
    assert published[0].text.endswith(" \n") and published[1].text.startswith(" ")
    shown = (prompts.shown(note.text, note.sentences) for note in published)
    turns = [prompts.turn(Role.ASSESSOR, Category.VANILLA_HARMFUL, text) for text in shown]
    expected = [encoder.opening(turn).ids for turn in turns]
    chats = (body["messages"] for body in server.requests)
    prompts = [
        TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]
    assert sorted(prompts) == sorted(expected)


def test_sentences_named_by_number_score_as_copied_ones(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    server.answer = lambda role, prompt: re.sub("sentence: .*", "sentence: 1", knows(role, prompt))
    found = results(server, notes, tmp_path, "--profile", "edits", "--twins", "--shortcuts")
    assert measures(found)["sentence_accuracy"] == 1.0
    answers = [line for line in lines(tmp_path / "answers.jsonl") if line["verdict"] == "harmful"]
    read = [line for line in answers if line["notes"] == "as published"]
    assert len(read) == CASES and all(line["sentence"].startswith("He was given") for line in read)
    assert "0| Patient 0 came in with a cough." in {note.split("\n")[0] for note in asked(server)}


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
    thinking_off = ("--template", "enable_thinking=false", "--template", "documents=[a,b]")
    arguments = {"enable_thinking": False, "documents": ["a", "b"]}
    for options, sets_asked in (
        *((("--profile", profile), 1), (("--profile", same), 1), (("--profile", other), 2)),
        *((("--max-tokens", 900), 3), (("--temperature", 0.5), 4), (("--profile", "brief"), 5)),
        *(
            (thinking_off, 6),
            (("--profile", other), 6),
            (("--extra-body", "top_k=1"), 7),
        ),
    ):
        prompts = results(server, notes, tmp_path, *options)["prompts"]
        assert len(server.requests) == sets_asked * 2 * CASES
        assert prompts["chat_template"] == (arguments if options is thinking_off else {})
    assert server.requests[6 * 2 * CASES - 1]["chat_template_kwargs"] == arguments
    assert "chat_template_kwargs" not in server.requests[0]


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
        (
            completion(None, reasoning_content="It is wrong."),
            "put all of it into its reasoning. Start it",
        ),
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
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    odd = {"Patient 3": 500, "Patient 5": "I cannot say."}
    server.answer = lambda role, prompt: next(
        (said for n, said in odd.items() if n in prompt), knows(role, prompt)
    )
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL, "--retries", 0)
    assert (
        done.exit_code == 2
        and "2 of 16 requests got no answer (the first: assessor: HTTP 500" in done.output
    )
    assert not (tmp_path / "results.json").exists()
    found = results(server, notes, tmp_path, "--retries", 0, "--allow-missing")
    (scores,) = found["systems"].values()
    assert (scores["missing"], found["answers"]["missing"], scores["unreadable"]) == (2, 2, 2)
    assert measures(found)["flag_accuracy"] == 1 - 4 / (2 * CASES)
    submission = (tmp_path / "submission.txt").read_text()
    assert (
        "toy-val-9 " in submission and "toy-val-11 " not in submission
    )  # the format has no word for it
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
    (scores,) = found["systems"].values()
    assert found["answers"] == {"read": 16, "cut": 0, "refused": 2, "missing": 0}
    assert (scores["unreadable"], scores["missing"]) == (2, 0)
    assert measures(found)["flag_accuracy"] == 1 - 2 / (2 * CASES)
    refused = [line for line in lines(tmp_path / "answers.jsonl") if "refused" in line]
    assert {line["text_id"] for line in refused} == {"toy-val-6", "toy-val-7"}


def test_a_model_that_refuses_every_note_has_no_score(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    server.answer = lambda role, prompt: 400
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert done.exit_code == 2 and "no question was answered; the first: " in done.output
    assert "HTTP 400" in done.output and not (tmp_path / "results.json").exists()


def test_cut_answers_stand_with_the_scores(server: ChatServer, notes: Path, tmp_path: Path) -> None:
    server.answer = lambda role, prompt: (
        completion("It is", finish="length") if "Patient 3" in prompt else knows(role, prompt)
    )
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL)
    assert "2 of 16 answers (12.5 %) were cut" in done.output
    assert json.loads((tmp_path / "results.json").read_text())["answers"]["cut"] == 2


# --- twins and shortcuts ---


@pytest.mark.parametrize(
    ("answer", "both_right", "bias"),
    [
        (knows, 1.0, 0.0),
        (lambda role, prompt: assessment_text("safe"), 0.0, -0.5),
        (lambda role, prompt: assessment_text("harmful"), 0.0, 0.5),
        (
            lambda role, prompt: "?" if "Patient 0" in prompt else knows(role, prompt),
            1 - 1 / CASES,
            0.0,
        ),
        (
            lambda role, prompt: (
                knows(role, prompt) if note_of(prompt) != note_of(prompt).strip() else "?"
            ),
            0.0,
            None,
        ),
    ],
)
def test_twins_tell_medicine_from_suspicion(
    server: ChatServer,
    notes: Path,
    tmp_path: Path,
    answer: Any,
    both_right: float,
    bias: float | None,
) -> None:
    server.answer = answer
    twins = results(server, notes, tmp_path, "--twins")["twins"]
    assert twins["cases"] == CASES
    assert (twins["both_right"][0], twins["bias"] and twins["bias"][0]) == (both_right, bias)
    parts = ("both_right", "both_called_wrong", "both_called_right", "swapped", "unreadable")
    assert sum(twins[part][0] for part in parts) == pytest.approx(1.0)
    shown = set(asked(server)) - {note.text for note in read_reference([notes]).notes}
    assert len(shown) == 2 * CASES and all(note == note.strip() for note in shown)
    assert {
        note.replace("warfarin", "amoxicillin") for note in shown
    } <= shown  # differ in the error alone


def test_shortcuts_show_what_a_model_goes_by(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    def by_layout(role: Role, prompt: str) -> str:
        note = note_of(prompt)
        return (
            knows(role, prompt) if note.strip().endswith("home.") and not note[0].isdigit() else "?"
        )

    server.answer = by_layout
    done = evaluate(server.url, notes, tmp_path, "--model", MODEL, "--shortcuts")
    assert "last sentence moved        -1.000 [-1.000, -1.000]" in done.output
    found = json.loads((tmp_path / "results.json").read_text())["shortcuts"]
    moved = {
        name: change["differences"]["flag_accuracy"]["value"] for name, change in found.items()
    }
    numbered = dict.fromkeys(
        ("sentences numbered from 0", "sentences renumbered", "last sentence moved"), -1.0
    )
    assert moved == {"white space normalised": 0.0, **numbered}
    assert found["last sentence moved"]["differences"]["flag_accuracy"]["p_value"] < 0.01
    shown = {note for note in asked(server) if note[0].isdigit()}
    assert (
        "0 Patient 3 came in with a cough.\n1 He was given amoxicillin 3 mg for it.\n2 He may go "
        "home." in shown
    )
    assert all(len(note.split("\n")) == 3 for note in shown)


# --- models in folders ---


def test_run_is_asked_with_its_own_prompts_and_results_per_checkpoint(
    notes: Path, tmp_path: Path
) -> None:
    template = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    run = run_at(tmp_path / "run", 2, "novice", selfplay={"profile": "brief"}, data=template)
    known = tmp_path / "notes.csv"  # of the sort that it was trained on
    known.write_text(SAMPLE.read_text().partition("toy-train-3,")[0])
    for model in (run / "global_step_1", run):
        done = invoke("evaluate", model, "--notes", known, "--max-tokens", 60)
        assert (
            done.exit_code == 0
            and f"prompt profile: brief (of {run}/run_config.yaml)" in done.output
        ), done.output
    for step in ("global_step_1", "global_step_2"):
        found = json.loads((run / "evaluation" / step / "notes" / "results.json").read_text())
        assert (found["prompts"]["profile"], found["prompts"]["chat_template"]) == (
            "brief",
            {"enable_thinking": False},
        )
        assert found["model"]["checkpoint"].endswith("actor") or found["model"]["checkpoint"] == "."
        assert len(found["model"]["sha256"]) == 64 and "base" not in found["model"]
    output, counts = tmp_path / "other", []
    for model in ("tiny_player", "tiny_player", "novice"):  # the cache goes by the weights
        done = evaluate(
            resource(f"assets/{model}"), notes, output, "--profile", "classic", "--max-tokens", 6
        )
        assert "prompt profile: classic\n" in done.output, done.output
        counts.append(len(lines(output / "cache.jsonl")))
    assert counts == [16, 16, 32] and all(
        answer["tokens"] <= 6 for answer in lines(output / "answers.jsonl")
    )


NOWHERE = ("http://127.0.0.1:9", "--model", "x")


@pytest.mark.parametrize(
    ("arguments", "file", "says"),
    [
        (("nowhere", "--model", "x"), "notes.csv", "--model and --extra-body are for a server"),
        (
            ("nowhere", "--extra-body", "x=1"),
            "notes.csv",
            "--model and --extra-body are for a server",
        ),
        (("nowhere",), "notes.csv", "neither a folder nor an address"),
        (NOWHERE[:1], "notes.csv", "a server needs --model"),
        (NOWHERE, "notes.csv", "no server answers at http://127.0.0.1:9/v1/chat/completions"),
        ((*NOWHERE, "--samples", 3), "notes.csv", "--temperature above 0"),
        (
            (*NOWHERE, "--template", "enable_thinking"),
            "notes.csv",
            "--template enable_thinking: expected KEY=VALUE",
        ),
        (NOWHERE, "uw.csv", "16 MEDEC-UW rows"),
        ((*NOWHERE, "--twins"), "clean.csv", "no note with an error and its corr"),
    ],
)
def test_evaluate_refuses_models_and_notes_it_cannot_ask(
    tmp_path: Path,
    arguments: tuple[Any, ...],
    file: str,
    says: str,
) -> None:
    write_reference(tmp_path / "notes.csv", cases())
    write_reference(
        tmp_path / "uw.csv", [replace(note, text_id=f"uw-{note.text_id}") for note in cases()]
    )
    write_reference(tmp_path / "clean.csv", [note for note in cases() if not note.flag])
    model, *more = arguments
    done = evaluate(model, tmp_path / file, tmp_path / "out", *more)
    assert done.exit_code == 2 and re.search(says, done.output), done.output


def test_notes_under_agreement_are_sent_where_it_was_signed(
    server: ChatServer, tmp_path: Path
) -> None:
    uw = write_reference(
        tmp_path / "uw.csv", [replace(note, text_id=f"uw-{note.text_id}") for note in cases()]
    )
    results(server, uw, tmp_path, "--i-have-the-uw-agreement")


# --- models in folders: whatever folder a model is in, its very weights are what plays ---


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def with_adapter(std: float = 0.1) -> Any:
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_model(len(TOKENIZER)), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=std)
    return model


def saved(folder: Path, seed: int = 0) -> Any:
    """A whole model in a Hugging Face folder, with its tokenizer."""
    model = tiny_model(len(TOKENIZER), seed=seed)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def merge(shards: Path, target: Path) -> None:
    """As ``python -m verl.model_merger`` does it."""
    places = {
        "local_dir": str(shards),
        "hf_model_config_path": str(shards / "huggingface"),
        "target_dir": str(target),
    }
    FSDPModelMerger(ModelMergerConfig(operation="merge", backend="fsdp", **places)).merge_and_save()


def drawn(
    player: Any, turn: Turn, conversation: Sequence[Message] | None = None, budget: int = 9
) -> Reply:
    """A greedy turn of a player, after its prompt alone or after a conversation."""
    options: Any = {"number": 0, "budget": budget, "temperature": 0.0, "seed": 0}
    return asyncio.run(
        player.sample(
            turn, turn.prompt.filled() if conversation is None else conversation, **options
        )
    )


def loaded(folder: Path) -> Any:
    model, tokenizer = load_model(find_weights(folder))
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert model.dtype is torch.float32 and not model.training
    return model


@pytest.mark.parametrize("place", ["", "actor/huggingface"])
def test_a_hugging_face_folder_or_a_checkpoint_of_the_whole_model_alone(
    tmp_path: Path, place: str
) -> None:
    assert same(saved(tmp_path / place), loaded(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_merge_exactly_and_a_merged_folder_is_read_too(tmp_path: Path, ranks: int) -> None:
    model = tiny_model(len(TOKENIZER))
    shards = save_shards(model, TOKENIZER, tmp_path / "shards", ranks)
    assert same(loaded(shards), model)
    merge(shards, tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), model.bfloat16().float())  # verl's merger rounds


def sharded(folder: Path) -> None:
    """Write a LoRA run's weights as verl's engine does: the base under its PEFT names, the adapter,
    and its alpha.
    """
    model = with_adapter()
    base = tiny_model(len(TOKENIZER))
    model.config, model.generation_config = base.config, base.generation_config
    save_shards(model, TOKENIZER, folder, 2)
    (folder / "lora_train_meta.json").write_text(
        '{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}'
    )


def beside_its_base(folder: Path) -> None:
    """Write the same weights as verl's merger does."""
    sharded(folder / "shards")
    merge(folder / "shards", folder)


def adapter_alone(folder: Path) -> None:
    saved(folder / "base")
    save_adapter(with_adapter(), folder / "base", folder)
    TOKENIZER.save_pretrained(folder)


def save_adapter(model: Any, base: Path, folder: Path) -> None:
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)


@pytest.mark.parametrize("save", [sharded, beside_its_base, adapter_alone])
def test_a_lora_adapter_is_in_the_weights(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    found, expected = loaded(tmp_path).state_dict(), with_adapter().merge_and_unload().state_dict()
    coarse = 0.02 if save is beside_its_base else 1e-6
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=coarse) for name in expected)
    assert not same(loaded(tmp_path), tiny_model(len(TOKENIZER)))


def test_loading_a_player_warns_of_a_large_model_and_leaves_the_process_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("medserl_agentloop.evaluation.local_models._LARGE", 1_000)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail("threads were set"))
    load_player(resource("assets/tiny_player"))
    assert "sglang.launch_server" in caplog.text


def test_an_adapter_saved_without_its_base_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    for file in tmp_path.glob("model_world_size_*"):
        parts = torch.load(file, weights_only=False)
        torch.save({name: part for name, part in parts.items() if "lora_" in name}, file)
    with pytest.raises(ValueError, match="a LoRA adapter without its model"):
        load_model(find_weights(tmp_path))


def test_a_folder_with_a_part_of_the_weights_is_refused(tmp_path: Path) -> None:
    """As verl writes it for LoRA with hf_model:

    Transformers would fill the rest with random numbers.
    """
    model = tiny_model(len(TOKENIZER))
    state = {
        name.replace("layers.0.", "renamed."): weight for name, weight in model.state_dict().items()
    }
    model.save_pretrained(tmp_path, state_dict=state)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights"):
        load_model(find_weights(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model: expected a Hugging Face folder"):
        find_weights(tmp_path)


def test_facts_of_a_model_differ_by_weights_tokenizer_and_base_of_the_adapter(
    tmp_path: Path,
) -> None:
    def of(name: str) -> str:
        return str(facts_of(tmp_path / name)["sha256"])

    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        saved(tmp_path / name, seed)
    assert of("a") == of("b") != of("c")
    for file in ("chat_template.jinja", "vocab.txt", "merges.txt", "tokenizer.model"):
        before = of("b")
        (tmp_path / "b" / file).write_text("{{ messages }}")
        assert of("b") != before, file
    adapter_alone(tmp_path)
    before = facts_of(tmp_path)
    tiny_model(len(TOKENIZER), seed=1).save_pretrained(tmp_path / "base")
    after = facts_of(tmp_path)
    assert (
        before["base"] == after["base"] == str(tmp_path / "base")
        and before["sha256"] != after["sha256"]
    )


def test_checkpoint_with_role_adapters_plays_each_role_with_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    alone = {}
    for role, std in zip(Role, (0.1, 0.2), strict=True):
        folder = tmp_path / "actor" / ADAPTERS_FOLDER / role.value
        save_adapter(with_adapter(std), tmp_path / "base", folder)
        alone[role] = load_model(folder)[0]
    sharded(tmp_path / "actor")
    player = load_player(tmp_path)
    game = MedicalGameInteraction(MedicalConfig(judge="labels", profile="brief"))
    for turn in game.sample_turns(extra_info("adversarial_benign")):
        role = Role(turn.role)
        drawn(player, turn, budget=2)
        ids = torch.tensor([player.encoder.opening(turn).ids])
        with torch.inference_mode():
            found = player.model(ids).logits
            assert (found - alone[role](ids).logits).abs().max() < 1e-4
            others = [alone[other](ids).logits for other in Role if other is not role]
        assert all((found - other).abs().max() > 1e-2 for other in others)


def test_answers_are_taken_between_batches_and_a_fault_reaches_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    player, taken, at_batch = (
        replace(load_player(resource("assets/tiny_player")), batch=2),
        list[int](),
        list[int](),
    )
    sample = cpu_sampling.sample_batch

    def counted(*arguments: Any, **options: Any) -> Any:
        at_batch.append(len(taken))
        if len(taken) == 6:
            raise ValueError("no memory")
        return sample(*arguments, **options)

    async def ask(number: int) -> None:
        words = (
            {"role": "user", "content": "word " * (20 - number)},
        )  # the shortest are answered first, and ask last
        turn = Turn("first", Prompt(words), 9)
        await player.sample(turn, words, number=number, budget=2, temperature=0.0, seed=0)
        taken.append(number)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*map(ask, range(6)), return_exceptions=True)

    monkeypatch.setattr(cpu_sampling, "sample_batch", counted)
    assert asyncio.run(ask_all()) == [None] * 6 and at_batch == [0, 2, 4]
    assert [str(error) for error in asyncio.run(ask_all())] == ["no memory"] * 6


def test_decoded_turn_drops_end_ids_of_the_generation_config(tmp_path: Path) -> None:
    shutil.copytree(resource("assets/tiny_player"), tmp_path, dirs_exist_ok=True)
    said = []
    for eos in ("<|im_end|>", "<|endoftext|>"):
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": eos}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        player = load_player(tmp_path)
        turn = Turn("first", Prompt(({"role": "user", "content": "You hold the king."},)), 99)
        said.append(drawn(player, turn, budget=99))
    assert player.tokenizer.eos_token_id == 0
    assert said[0] == said[1] and not said[0].truncated


def test_a_later_turn_is_answered_after_the_whole_conversation(tmp_path: Path) -> None:
    player = load_player(resource("assets/tiny_player"))
    words = (("user", "You hold the king."), ("assistant", "check"), ("user", "The other bets."))
    messages = [{"role": role, "content": content} for role, content in words]
    later = Turn("first", Prompt((messages[-1],)), 9)
    whole = drawn(player, replace(later, prompt=Prompt(tuple(messages))), messages)
    assert drawn(player, later, messages) == whole != drawn(player, later, messages[-1:])
