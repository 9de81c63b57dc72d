"""Real runs of verl's own entry point: one that is not killed and validates its end, and one that
is and goes on.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from invoking import invoke
from medec.builders import run as in_this_process
from note_files import SAMPLE
from real_runs import AGREEMENT, GAMES_PER_STEP, Run, environment
from transformers import AutoModelForCausalLM

from medserl_agentloop.core.step_file import GAMES_FILE, STATE_FILE
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import read_games
from medserl_agentloop.paths import resource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLED_AFTER, LAST, ROWS, NOTES = 2, 4, 16, 20
WEIGHTS = f"run/global_step_{LAST}/actor/model_world_size_1_rank_0.pt"
VALIDATION = (
    f"trainer.test_freq={LAST}",
    "trainer.validation_data_dir=dump",
    "trainer.logger=[console,file]",
    *(f"actor_rollout_ref.rollout.val_kwargs.{of}" for of in ("temperature=0", "do_sample=False")),
)


@pytest.fixture(scope="module")
def folder(data: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for two steps, so that a kill comes at the end of an epoch, and some of the sample notes
    to validate on.
    """
    folder: Path = tmp_path_factory.mktemp("main_ppo")
    pq.write_table(
        pq.read_table(data[0].partition("=")[2]).slice(0, ROWS), folder / "train.parquet"
    )
    with SAMPLE.open(newline="") as file, (folder / "notes.csv").open("w", newline="") as notes:
        csv.writer(notes).writerows(list(csv.reader(file))[: 1 + NOTES])
    files = ("--input", folder / "notes.csv", "--output", folder / "val.parquet")
    done = in_this_process("medec_to_parquet", *files)
    assert done.exit_code == 0, done.output
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    return folder


def start(folder: Path, name: str) -> Run:
    files = (f"data.{of}_files={folder}/{of}.parquet" for of in ("train", "val"))
    overrides = (
        "algorithm.adv_estimator=role_rae",
        # Its counts are state as the baselines are; with these constants they move at once.
        "selfplay.reward=experiments.rewards:Optimism",
        "+selfplay.reward_terms.alive_rate=1",
        "+selfplay.reward_terms.patience=1",
        "trainer.total_epochs=3",
        f"trainer.total_training_steps={LAST}",
    )
    reuse = "selfplay.reuse_log_probs=true"
    env = environment(VERL_FILE_LOGGER_PATH=str(folder / name / "logged.jsonl"))
    return Run(folder / name, *files, *overrides, reuse, *VALIDATION, env=env)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Run:
    """A run to its end; beside it the folder ``killed``, as a SIGKILL in the midst of it would
    leave its own.
    """
    whole = start(folder, "whole")
    whole.copy_after_step(KILLED_AFTER, folder / "killed")
    whole.wait()
    return whole


def test_killed_run_resumes_as_if_never_killed_with_every_step_once(
    folder: Path, whole: Run
) -> None:
    with (folder / "killed" / "run" / GAMES_FILE).open(
        "a"
    ) as games:  # a kill between writing games and checkpointing
        games.write(json.dumps({"step": LAST + 1}) + "\n" + '{"step": ')
    killed = start(folder, "killed")
    reached = killed.reached
    killed.wait()

    assert KILLED_AFTER <= reached < LAST
    assert any(
        line.startswith(f"resuming after step {reached} of {LAST}: ") for line in killed.lines()
    )
    assert any(f"plays all of its {ROWS} rows" in line for line in killed.lines())
    assert sum(line.startswith("judge labels: no judge reads") for line in killed.lines()) == 1
    for run in (whole, killed):
        assert run.steps_of_games() == dict.fromkeys(range(1, LAST + 1), GAMES_PER_STEP)
        assert [m["step"] for m in run.metrics] == list(range(1, LAST + 1))
        for step in run.metrics:
            assert step["actor/grad_norm"] > 0
            assert step["training/rollout_probs_diff_max"] < AGREEMENT
            assert step["selfplay/context_leak"] < 1 and "actor/entropy" not in step  # reused
            assert step["selfplay/assessor/parse_rate"] >= 0.5
            assert step["selfplay/judge/unread_rate"] > 0.5
    rewards: dict[Role, set[float | None]] = {
        role: {g.reward(role) for g in read_games(killed.folder / "run" / GAMES_FILE)}
        for role in Role
    }
    assert all(len(values - {None}) > 1 for values in rewards.values())

    baselines = [
        [{k: v for k, v in step.items() if "/baseline/" in k} for step in run.metrics]
        for run in (whole, killed)
    ]
    for of_whole, of_killed in zip(*baselines, strict=True):
        assert of_whole and of_killed == pytest.approx(of_whole, abs=1e-6)
    state_file = Path("run", f"global_step_{LAST}", STATE_FILE)
    expected, found = (json.loads((run.folder / state_file).read_text()) for run in (whole, killed))
    for role in Role:
        assert found["baselines"][role.value] == pytest.approx(
            expected["baselines"][role.value], abs=1e-6
        )
    # Of training alone: the validation at the end is not in it.
    assert found["counts"] == expected["counts"]
    assert 0 < sum(found["counts"]["shown"].values()) <= LAST * GAMES_PER_STEP
    paid = [
        game.rewards.get(Role.ATTACKER, {})
        for game in read_games(killed.folder / "run" / GAMES_FILE)
    ]
    assert len({parts["optimism"] for parts in paid if "optimism" in parts}) > 2
    assert found["alarms"]["streaks"] == expected["alarms"]["streaks"]

    played = {name: games_played(folder / name) for name in ("whole", "killed")}
    assert played["killed"] == played["whole"]
    rows = [{text_id for text_id, _, _ in games} for games in played["whole"].values()]
    assert (
        rows[0] | rows[1] == rows[2] | rows[3] and len(rows[0] | rows[1]) == ROWS
    )  # each row once in an epoch
    weights = {
        name: torch.load(folder / name / WEIGHTS, weights_only=False)
        for name in ("whole", "killed")
    }
    # by the four steps; float32 rounds by 1e-7, in the order in which the games of a step were over
    moved = 1e-3
    for name, tensor in weights["whole"].items():
        assert (
            weights["killed"][name].to_local() - tensor.to_local()
        ).abs().max() < moved / 1000, name


def games_played(folder: Path) -> dict[int, list[tuple[str, str, str]]]:
    """By step, the row, the note and the rewards of each game."""
    played: dict[int, list[tuple[str, str, str]]] = {}
    for game in read_games(folder / "run" / GAMES_FILE):
        played.setdefault(game.step, []).append(
            (str(game.spec.text_id), str(game.presented_note), json.dumps(game.rewards))
        )
    return {step: sorted(games) for step, games in sorted(played.items())}


def test_final_validation_of_a_run_equals_evaluate_on_its_last_checkpoint(
    folder: Path, whole: Run
) -> None:
    answers, results = evaluated(whole.folder / "run" / f"global_step_{LAST}", folder)
    (dump,) = (whole.folder / "dump").iterdir()
    dumped = {line["text_id"]: line for line in map(json.loads, dump.read_text().splitlines())}
    assert len(answers) == NOTES
    # verl decodes without special tokens, and the tiny player's end-of-turn token leaves nothing
    # behind.
    assert {text_id: line["output"] for text_id, line in dumped.items()} == {
        text_id: answer["response"] for text_id, answer in answers.items()
    }
    logged = json.loads((whole.folder / "logged.jsonl").read_text().splitlines()[-1])["data"]
    (scores,) = results["systems"].values()
    measures = {
        name: measure["value"]
        for name, measure in scores["measures"].items()
        if measure["value"] is not None
    }
    assert {"flag_accuracy", "sentence_accuracy", "f1", "recall", "rouge_1"} <= measures.keys()
    official = {
        name.rpartition("toy_eval/")[2]: value
        for name, value in logged.items()
        if "toy_eval/" in name
    }
    assert {name: official[name] for name in measures} == measures
    assert whole.metrics[-1]["val-core/toy_eval/f1"] == official["f1"]
    line = f"validation on toy_eval, {NOTES} notes: flag accuracy {measures['flag_accuracy']:.3f}"
    assert any(said.startswith(line) for said in whole.lines())

    untrained, _ = evaluated(resource("assets") / "tiny_player", folder)
    assert any(
        untrained[text_id]["response"] != answer["response"] for text_id, answer in answers.items()
    )


def test_the_exported_best_checkpoint_answers_as_the_run_does(folder: Path, whole: Run) -> None:
    checkpoint, exported = whole.folder / "run" / f"global_step_{LAST}", folder / "exported"
    done = invoke("export", whole.folder / "run", "--step", "best", "--output", exported)
    assert done.exit_code == 0, done.output
    assert f"step {LAST} (newest, best" in done.output
    weights = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    trained = torch.load(whole.folder / WEIGHTS, weights_only=False)
    for name, weight in weights.items():
        assert torch.equal(weight, trained[name].to_local()), name
    ours, theirs = (evaluated(model, folder)[0] for model in (exported, checkpoint))
    assert len(ours) == NOTES
    assert [each["response"] for each in ours.values()] == [
        each["response"] for each in theirs.values()
    ]


def evaluated(model: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The answers by text id, and the results."""
    output = folder / f"evaluation-{model.name}"
    done = invoke(
        "evaluate", model, "--notes", folder / "notes.csv", "--output", output, "--max-tokens", 512
    )
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    return {answer["text_id"]: answer for answer in answers}, json.loads(
        (output / "results.json").read_text()
    )
