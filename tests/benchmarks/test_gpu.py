"""The benchmark of a game beside verl's own GRPO: a real run of the game on the CPU, and what
starts on a GPU.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
import typer
from gpu_game import model_config
from gpu_run import Ran, run
from real_runs import environment
from typer.testing import CliRunner

from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.testing.tiny import compose_run

STEPS, GAMES, NOTE, TURN = 2, 8, 40, 16
SMALL: dict[str, Any] = {"output": None, "size": "tiny", "engine": "embedded", "part": None}
SMALL |= {"steps": STEPS, "games": GAMES, "note": NOTE, "turn": TURN}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_benchmark_runs_and_kills_a_game_and_fills_every_table_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other parts are not run: they leave what is read of them, most of it made from what the
    game left.
    """
    folder = tmp_path / "out"
    ran = dict[str, Ran]()

    def part(output: Path, name: str, command: list[str], **options: Any) -> Ran:
        if name == "game":
            ran[name] = run(output, name, command, **options)
            return ran[name]
        if name in ("certified", "control"):
            holds = name == "certified"
            measure = {
                "claim": "isolation",
                "of": "actor",
                "value": 1.5 - holds,
                "limit": 1.0,
                "holds": holds,
            }
            (folder / name).mkdir()
            (folder / name / "certificate.json").write_text(json.dumps({"measures": [measure]}))
            return Ran(output / f"{name}.log", code=int(not holds))
        ended = replace(ran["game"], code=0)
        if name == "single":
            return ended
        file = folder / "relay" / "games.jsonl"
        lines = file.read_text().splitlines()
        more = [json.dumps(json.loads(line) | {"step": STEPS + 1}) for line in lines[-GAMES:]]
        file.write_text("\n".join([*lines, *more]))
        return replace(ended, steps=[ended.steps[-1] | {"training/global_step": STEPS + 1}])

    monkeypatch.setattr(gpu, "run", part)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    program = typer.Typer()
    program.command()(gpu.main)
    given = {key: value for key, value in (SMALL | {"output": folder}).items() if value is not None}
    options = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    done = CliRunner().invoke(program, [*options, "algorithm.adv_estimator=role_grpo"])
    assert done.exit_code == 0, done.output
    results = json.loads((folder / "gpu.json").read_text())
    rows = {figure["what"]: figure for figure in results["figures"]}
    assert results["failed"] == [] and all(figure["holds"] for figure in rows.values())

    prompt = results["settings"]["tokens of a prompt"]
    for what, tokens in (
        ("tokens in a step", 2 * GAMES * (prompt + TURN)),
        ("of these generated", 2 * GAMES * TURN),
    ):
        assert rows[what]["selfplay"] == tokens
    for what in (
        "without checkpoint",
        "of gen",
        "of old_log_prob",
        "of update_actor",
        "of update_weights",
    ):
        assert rows[f"seconds {'of a step, ' if what[0] == 'w' else ''}{what}"]["selfplay"] > 0
    assert (
        rows["MFU"]["selfplay"] == "none"
        and rows["prompt tokens from the prefix cache"]["grpo"] is None
    )
    assert rows["peak GiB of the trainer"]["grpo"] > 0.1
    assert rows["rollout against actor, last step"]["selfplay"] < 1e-4

    games = [
        json.loads(line) for line in (folder / "relay" / "games.jsonl").read_text().splitlines()
    ]
    assert [game["step"] for game in games] == [
        step for step in range(1, STEPS + 2) for _ in range(GAMES)
    ]
    assert all(
        len(game["said"]) == 2 and game["read"].startswith(game["said"][0][:8].rstrip())
        for game in games
    )
    assert len({game["rewards"]["attacker"]["e"] for game in games}) > 2
    assert rows["games with a second turn"]["selfplay"] == f"{len(games)} of {len(games)}"
    assert (
        rows["resume after SIGKILL"]["selfplay"]
        == f"killed after step {STEPS}, went on at step {STEPS + 1}: exact"
    )
    isolation = rows["isolation of contexts"]["selfplay"]
    assert isolation.startswith("fp32, sdpa: ") and isolation.endswith(": holds")
    assert rows["its negative control"]["selfplay"].endswith("refused")

    said, _, *table = (folder / "gpu.md").read_text().splitlines()
    assert said.startswith("Measured on ") and "recipes own_notes" in said
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {what}" for what in rows]


def test_part_that_dies_is_named_with_its_log_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(output: Path, name: str, command: list[str], **options: Any) -> Ran:
        (output / f"{name}.log").write_text(f"the cause of {name}\n")
        return Ran(output / f"{name}.log", code=7)

    monkeypatch.setattr(gpu, "run", dies)
    with pytest.raises(SystemExit) as end:
        gpu.main(**SMALL | {"output": tmp_path / "out"}, more=None)
    assert end.value.code
    results, printed = (
        json.loads((tmp_path / "out" / "gpu.json").read_text()),
        capsys.readouterr().out,
    )
    for name in ("certified", "control", "game", "resumed", "single"):
        [said] = [line for line in results["failed"] if f"{name} ended with exit code 7" in line]
        assert f"the cause of {name}" in said and f"the cause of {name}" in printed
    assert all(figure["selfplay"] in (None, "none", GAMES) for figure in results["figures"])
    assert "not measured" in (tmp_path / "out" / "gpu.md").read_text()


def test_a_part_runs_alone_and_the_table_has_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def ends(output: Path, name: str, command: list[str], **options: Any) -> Ran:
        started.append(name)
        return Ran(output / f"{name}.log", steps=[{"timing_s/step": 1.0}] * STEPS)

    monkeypatch.setattr(gpu, "run", ends)
    measured: list[list[str]] = []
    for part in ("game", "grpo"):
        with pytest.raises(SystemExit):
            gpu.main(**SMALL | {"output": tmp_path / "out", "part": part}, more=None)
        table = (tmp_path / "out" / "gpu.md").read_text().splitlines()
        [row] = [line for line in table if line.startswith("| seconds of a step")]
        measured.append([cell.strip() for cell in row.split("|")[2:4]])
    assert started == ["game", "single"] and measured == [["1", "not measured"], ["1", "1"]]
    [row] = [line for line in table if line.startswith("| isolation of contexts")]
    assert "this part has not run yet" in row


@pytest.mark.parametrize(
    ("engine", "cards", "names"),
    [
        ("sglang", [79.6], ["qwen3_4b", "gpu_80g", "first_run"]),
        ("sglang", [95.6, 140.4], ["qwen3_4b", "first_run"]),
    ],
)
def test_the_recipes_for_a_card_compose_and_pass_the_checks_of_a_run(
    engine: Any, cards: list[float], names: list[str]
) -> None:
    assert all(gpu.recipes("qwen3_4b", engine, gib) == names for gib in cards)
    commands = gpu.overrides(Path("/out"), names, engine, games=64, prompt=210, turn=1024)
    run = compose_run(*(each for each in commands["relay"] if not each.startswith("hydra.")))
    assert check_run(run).game == "gpu_game:Relay"
    rollout = run.actor_rollout_ref.rollout
    assert rollout.name == engine and rollout.prometheus.enable and rollout.ignore_eos
    stock = compose_run(*(each for each in commands["single"] if "hydra." not in each))
    assert (
        stock.algorithm.adv_estimator == "grpo"
        and stock.trainer.v1.sampler.custom_sampler.path is None
    )
    for of in (run, stock):
        assert (
            of.data.max_prompt_length + of.data.max_response_length
            <= of.actor_rollout_ref.rollout.max_model_len
        )


def test_without_a_gpu_and_on_the_wrong_engine_it_says_what_to_write() -> None:
    for size, engine, gib in (
        ("qwen3_4b", "sglang", 0.0),
        ("qwen3_4b", "embedded", 96.0),
    ):
        with pytest.raises(ValueError, match="--engine"):
            gpu.recipes(size, engine, gib)  # type: ignore[arg-type]
    with pytest.raises(typer.BadParameter, match="multiple of 4"):
        gpu.main(**SMALL | {"output": Path("/nowhere"), "games": 9})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "parameters"), [("qwen3_4b", 4_022_468_096), ("qwen3_0_6b", 596_049_920)]
)
def test_the_random_model_is_as_large_as_the_published_one(size: str, parameters: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(size))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


@pytest.mark.slow
@pytest.mark.long
def test_the_engine_alone_is_measured_without_a_rollout(tmp_path: Path) -> None:
    """``gpu_none.py``, part by part: the table keeps those before."""
    for part, rows in (
        ("isolation", ("isolation", "control: no restart")),
        ("loss", ("loop over rows", "chunks")),
    ):
        with pytest.raises(SystemExit) as end:
            gpu.main(
                **SMALL | {"output": tmp_path / "out", "engine": "none", "part": part}, more=None
            )
        table = (tmp_path / "out" / "gpu.md").read_text()
        assert not end.value.code and all(row in table for row in rows), table
    assert "isolation, bf16, sdpa, positions restart | 0 " in table
    with pytest.raises(typer.BadParameter, match="isolation, phases"):
        gpu.main(
            **SMALL | {"output": tmp_path / "out", "engine": "none", "part": "game"}, more=None
        )
