"""A game and verl's own GRPO on one GPU, on equal tokens: ``python benchmarks/gpu.py --output FOLDER``.

It needs no download: it writes a model with random weights, and rows. It starts ``verl.trainer.main_ppo`` five times:

- the certificate of the game alone, and the same with positions that do not restart: a negative control, which must be
  refused,
- the game of ``gpu_game.py``, with the project's recipes, until its checkpoint is written; then it is killed (SIGKILL),
- the same command again, which must go on at the next step,
- verl's own single-turn GRPO with the same settings, on as many sequences, prompt tokens and generated tokens.

``--part`` makes one of these alone, and the table of all parts so far; ``resume`` needs the folder of ``game``.

Every turn is as long as its budget, so that tokens are equal. The folder gets ``gpu.json``, ``gpu.md`` (the table) and
the logs. Exits with 1 where a run failed or a claim does not hold. ``--size tiny --engine embedded`` needs no GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
import verl  # noqa: F401  # loads the plugin, without which SGLang's environment for CPUs has no models
from gpu_game import Relay, write_model, write_rows
from gpu_run import FOLDER, PHASES, SAMPLED_EVERY_S, Ran, cards, machine, run
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

REPEATS = 4  # rollout.n
LR = 1e-4  # moves weights by more than bf16 rounds them, so that a push that is left out shows

COLUMNS = ["figure", "self-play", "verl's GRPO", "ratio", "how it was measured"]
Size, Engine = Literal["qwen3_4b", "tiny"], Literal["sglang", "vllm", "embedded"]
PARTS = {"certificate": ("certified", "control"), "game": ("game",), "resume": ("resumed",), "grpo": ("single",)}
Part = Literal["certificate", "game", "resume", "grpo"]


def recipes(size: Size, engine: Engine, gib: float) -> list[str]:
    """The recipes for a model on a card with so much memory; ValueError for what cannot run."""
    if size == "tiny":
        if engine == "vllm":
            raise ValueError("--size tiny runs on the CPU: take --engine embedded or sglang")
        return ["own_notes", *["sglang_cpu"] * (engine == "sglang")]
    if engine == "embedded" or not gib:
        raise ValueError("--size qwen3_4b needs a GPU that nvidia-smi shows, and --engine sglang or vllm")
    return ["qwen3_4b", *["gpu_80g"] * (gib < 90), *["gpu_141g"] * (gib > 130), *["vllm"] * (engine == "vllm")]


def overrides(
    output: Path, names: Sequence[str], engine: Engine, games: int, prompt: int, turn: int
) -> dict[str, list[str]]:
    """Overrides of verl's command for the game and for single turns. A game has two prompts and two turns."""
    actor, rollout, rows = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", games // REPEATS

    def of(name: str, max_prompt: int, max_response: int, own: Mapping[str, Any]) -> list[str]:
        values = {
            "+recipes": f"[{','.join(names)}]",
            "data.train_files": output / f"{name}.parquet",
            "data.val_files": output / f"{name}.parquet",
            "data.train_batch_size": rows,
            "data.max_prompt_length": max_prompt,
            "data.max_response_length": max_response,
            "actor_rollout_ref.model.path": output / "model",
            f"{actor}.ppo_mini_batch_size": rows,
            f"{actor}.optim.lr": LR,
            f"{rollout}.n": REPEATS,
            # verl's SGLang server keeps a token of it free, by which the longest answers would be shorter.
            f"{rollout}.max_model_len": 2 * (prompt + turn) + 16,
            # No end of turn: the first is for vLLM, the second for the others; verl would put the tokenizer's there.
            f"{rollout}.ignore_eos": True,
            "++actor_rollout_ref.model.override_config.eos_token_id": "null",
            # verl writes the servers' addresses there.
            f"{rollout}.prometheus.enable": engine != "embedded",
            f"{rollout}.prometheus.file": output / "servers.yml",
            f"{rollout}.disable_log_stats": engine == "embedded",
            "trainer.logger": "[console,file]",
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.total_epochs": 1000,
            "trainer.default_local_dir": output / name,
            "hydra.run.dir": output / "hydra",
        }
        return [f"{key}={value}" for key, value in {**values, **own}.items()]

    game = {"selfplay.game": "gpu_game:Relay"}
    single = {
        "algorithm.adv_estimator": "grpo",
        f"{rollout}.agent.agent_loop_config_path": "null",
        "reward.reward_manager.source": "register",
        "reward.reward_manager.name": "naive",
        "reward.custom_reward_function.path": FOLDER / "gpu_game.py",
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler.path": "null",
        "trainer.v1.sampler.custom_sampler.name": "null",
    }
    return {
        "relay": of("relay", prompt, prompt + 2 * turn, game),
        "single": [*of("single", 2 * prompt, 2 * turn, single), "~hydra.callbacks.medserl"],
    }


@dataclass(frozen=True)
class Figure:
    """One row of the table: numbers or words, None where nothing was measured; ``how`` says by whom, or why not."""

    what: str
    selfplay: float | str | None
    grpo: float | str | None
    how: str
    holds: bool = True

    @property
    def cells(self) -> list[str]:
        """The row as it is shown, with the ratio of its numbers."""
        values = (self.selfplay, self.grpo)
        shown = ["not measured" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in values]
        a, b = (x if isinstance(x, (int, float)) else 0.0 for x in values)
        return [self.what, *shown, f"{a / b:.2f}" if a and b else "", self.how]


def speed(game: Ran, single: Ran, sequences: int, gpu: bool) -> Iterator[Figure]:
    """What a step takes and gives, in both runs."""

    def both(what: str, of: Callable[[Ran], float | str | None], how: str) -> Figure:
        return Figure(what, of(game), of(single), how)

    def seconds(ran: Ran) -> float | None:
        step = ran.number("timing_s/step")
        return step and step - (ran.number("timing_s/save_checkpoint") or 0.0)

    def tokens(ran: Ran) -> float | None:
        return ran.number("perf/total_num_tokens")

    def per_second(ran: Ran, amount: float | None) -> float | None:
        taken = seconds(ran)
        return amount / taken if amount and taken else None

    steps = "verl, median of the steps after the first"
    trained = [game.number(f"selfplay/{role}/trained_tokens") or 0.0 for role in Relay.roles]
    answered = single.number("response_length/mean")
    yield Figure("sequences in a step", sequences, sequences, "as set")
    yield both("tokens in a step", tokens, steps)
    yield Figure("of these generated", sum(trained) or None, answered and answered * sequences, steps)
    yield both("seconds of a step, without checkpoint", seconds, steps)
    notes = {
        "gen": "verl; its own buffer looks for answers every 2 s, self-play's every 0.1 s",
        "save_checkpoint": "verl; the run of GRPO saves none",
    }
    for phase in PHASES:
        if game.number(f"timing_s/{phase}") or single.number(f"timing_s/{phase}"):
            seconds_of = f"seconds of {phase}"
            yield both(seconds_of, lambda ran, name=phase: ran.number(f"timing_s/{name}"), notes.get(phase, steps))
    yield both("sequences a second", lambda ran: per_second(ran, sequences), "sequences by seconds of a step")
    yield both("tokens a second", lambda ran: per_second(ran, tokens(ran)), "tokens by seconds of a step")
    how = "verl: update of the actor" if gpu else "verl's peak rate of a CPU is a constant"
    yield both("MFU", lambda ran: ran.number("perf/mfu/actor") if gpu else "none", how)
    sampled = "the card" if gpu else "resident memory of all processes"
    sampled += f", every {SAMPLED_EVERY_S} s; none may meet a short phase"
    for phase in PHASES:
        if game.peak(phase) or single.peak(phase):
            yield both(f"peak GiB in {phase}", lambda ran, name=phase: ran.peak(name), sampled)
    name, how = "actor/perf/max_memory_allocated_gb", "torch's peak" if gpu else "resident memory of its process"
    yield both("peak GiB of the trainer", lambda ran: ran.at(-1, name), f"verl: {how}")
    how = "counters of the servers" if game.cache or single.cache else "the rollout has no counter of it"
    yield both("prompt tokens from the prefix cache", lambda ran: ran.cache and ran.cache[0] / ran.cache[1], how)
    name, how = "training/rollout_probs_diff_mean", "verl: difference of probabilities, mean"
    yield both("rollout against actor, step 1", lambda ran: ran.at(0, name), how)
    yield both("rollout against actor, last step", lambda ran: ran.at(-1, name), how)


@dataclass(frozen=True)
class Proofs:
    """What must hold, read from the folders of the runs. Each gives what to show, and whether it holds."""

    output: Path
    runs: Mapping[str, Ran]
    sequences: int

    def figures(self) -> Iterator[Figure]:
        """All of them; what a run did not leave is not measured."""
        pushed = "log-probs of rollout and actor; the checkpoint's final norm"
        for what, name, proof, how in (
            ("games with a second turn", "game", self.second_turns, "games.jsonl"),
            ("resume after SIGKILL", "resumed", self.resume, "verl's steps; games.jsonl holds every game once"),
            ("weights pushed to the rollout", "resumed", self.push, pushed),
            ("isolation of contexts", "certified", self.isolation, "certificate of the run, in its precision"),
            ("its negative control", "control", self.negative_control, "certificate where positions do not restart"),
        ):
            if name not in self.runs:
                yield Figure(what, None, "", "this part has not run yet")
                continue
            try:
                value, holds = proof()
            except (OSError, KeyError, IndexError, ValueError) as error:
                value, holds, how = None, False, f"{type(error).__name__}: see the logs"
            yield Figure(what, value, "", how, holds)

    def second_turns(self) -> tuple[str, bool]:
        played = [len(game["said"]) == 2 and game["void"] is None for game in self._games()]
        return f"{sum(played)} of {len(played)}", all(played)

    def resume(self) -> tuple[str, bool]:
        last, games = len(self.runs["game"].steps), Counter(game["step"] for game in self._games())
        [step] = [int(step["training/global_step"]) for step in self.runs["resumed"].steps]
        exact = step == last + 1 and games == dict.fromkeys(range(1, last + 2), self.sequences)
        return f"killed after step {last}, went on at step {step}: {'exact' if exact else 'NOT exact'}", exact

    def push(self) -> tuple[str, bool]:
        name, game = "selfplay/log_prob_gap/first_context", self.runs["game"]
        last, first, final = len(game.steps), game.steps[0][name], self.runs["resumed"].steps[-1][name]
        [file] = (self.output / "relay" / f"global_step_{last}" / "actor").glob("model_*_rank_0.pt")
        weights = torch.load(file, map_location="cpu", mmap=True, weights_only=False)["model.norm.weight"]
        moved = float((weights.to_local() - 1).abs().max())  # they begin as ones
        value = f"apart by {first:.2g} in step 1 and {final:.2g} in step {last + 1}; weights moved by {moved:.2g}"
        return value, moved > 0 and final < 3 * max(first, 1e-5)

    def isolation(self) -> tuple[str, bool]:
        value, holds = self._certificate("certified")
        run = OmegaConf.load(self.output / "hydra" / ".hydra" / "config.yaml").actor_rollout_ref
        precision = (run.actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")  # verl's default
        attention = run.model.override_config.get("attn_implementation", "flash_attention_2")  # verl's default
        return f"{precision}, {attention}: {value}", holds

    def negative_control(self) -> tuple[str, bool]:
        value, holds = self._certificate("control")
        return value, not holds and self.runs["control"].code != 0

    def _games(self) -> list[dict[str, Any]]:
        lines = (self.output / "relay" / "games.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def _certificate(self, name: str) -> tuple[str, bool]:
        measures = json.loads((self.output / name / "certificate.json").read_text(encoding="utf-8"))["measures"]
        [measure] = [m for m in measures if (m["claim"], m["of"]) == ("isolation", "actor")]
        holds = bool(measure["holds"])
        return f"{measure['value']:.2g} (limit {measure['limit']:g}): {'holds' if holds else 'refused'}", holds


def main(
    output: Annotated[Path, typer.Option(help="New folder for the model, logs, a checkpoint and the figures.")],
    size: Annotated[Size, typer.Option(help="qwen3_4b on a GPU, or the quickstart's player on the CPU.")] = "qwen3_4b",
    engine: Annotated[Engine, typer.Option(help="The rollout; embedded is Transformers on the CPU.")] = "sglang",
    steps: Annotated[int, typer.Option(min=2, help="Steps of the game and of GRPO; the first one warms up.")] = 4,
    games: Annotated[int, typer.Option(min=2 * REPEATS, help=f"Games of a step, {REPEATS} of each row.")] = 64,
    note: Annotated[int, typer.Option(min=8, help="Tokens of a note.")] = 190,
    turn: Annotated[int, typer.Option(min=4, help="Tokens of a turn.")] = 1024,
    part: Annotated[Part | None, typer.Option(help="One part alone, in the folder of those before it.")] = None,
    more: Annotated[list[str] | None, typer.Argument(help="More overrides of verl's config, for all runs.")] = None,
) -> None:
    """Measure a game and verl's own GRPO on equal tokens, on random weights; write gpu.json and gpu.md."""
    output, gpus, console, failed = output.resolve(), cards(), Console(), list[str]()
    try:
        names = recipes(size, engine, float(gpus[0]["memory.total"]) / 1024 if gpus else 0.0)
        if games % REPEATS:
            raise ValueError(f"--games {games} is no multiple of {REPEATS}")
        output.mkdir(parents=True, exist_ok=part is not None)
    except (ValueError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(f"{output}: writing a model with random weights, and rows")
    if not (output / "model").exists():
        write_model(size, output / "model")
    prompt = write_rows(output, games, note, turn)
    commands, gpu = overrides(output, names, engine, games, prompt, turn), size == "qwen3_4b"

    runs: dict[str, Ran] = {}

    def play(name: str, command: str, last: int, good: Callable[[Ran], bool], *changes: str, **options: Any) -> None:
        kept = output / f"{name}.ran.json"
        if part is not None and name not in PARTS[part]:
            if kept.exists():
                runs[name] = Ran(**json.loads(kept.read_text(encoding="utf-8")))
            return
        console.print(f"{name}: verl's main_ppo, {output / name}.log")
        steps = f"trainer.total_training_steps={last}"
        runs[name] = ran = run(output, name, [*commands[command], steps, *(more or ()), *changes], gpu=gpu, **options)
        kept.write_text(json.dumps(asdict(ran), default=str), encoding="utf-8")
        if not good(ran):
            tail = ran.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            ended = f"{name} ended with exit code {ran.code} after {len(ran.steps)} steps. {ran.log} ends with"
            failed.append("\n".join([ended, *tail]))
            console.print(failed[-1], style="red", markup=False, highlight=False)

    def whole(ran: Ran) -> bool:
        return ran.code == 0

    save, no_save = f"trainer.save_freq={steps}", "trainer.save_freq=-1"
    for name, module in (("certified", ""), ("control", "broken_roles")):  # of tests/training: positions do not restart
        play(
            name, "relay", steps, lambda _, name=name: (output / name / "certificate.json").exists(),
            "selfplay.certify=only", f"trainer.default_local_dir={output}/{name}", VERL_USE_EXTERNAL_MODULES=module,
        )  # fmt: skip
    play("game", "relay", steps + 1, lambda ran: len(ran.steps) == steps, save, kill_after=steps)
    play("resumed", "relay", steps + 1, whole, no_save)
    play("single", "single", steps, whole, no_save)

    game, single = (runs.get(name, Ran(output / f"{name}.log")) for name in ("game", "single"))
    figures = [*speed(game, single, games, gpu), *Proofs(output, runs, games).figures()]
    broken = [f"{figure.what}: {figure.selfplay or figure.how}" for figure in figures if not figure.holds]
    failed += broken
    facts = machine()
    facts["cards"] = [f"{card['name']}, {card['memory.total']} MiB, driver {card['driver_version']}" for card in gpus]
    chosen = {"size": size, "engine": engine, "recipes": "+".join(names), "games": games, "steps": steps}
    chosen |= {"tokens of a prompt": prompt, "tokens of a turn": turn}
    results = {
        "machine": facts,
        "settings": chosen,
        "figures": [asdict(figure) for figure in figures],
        "failed": failed,
    }
    (output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    where = facts["cards"][0] if gpus else f"{facts['cores']} CPU cores"
    said = f"Measured on {where}; verl {facts['verl']}, torch {facts['torch']}; "
    said += f"{', '.join(f'{key} {value}' for key, value in chosen.items())}."
    rows, table = [COLUMNS, ["---"] * len(COLUMNS), *(figure.cells for figure in figures)], Table(*COLUMNS, title=said)
    lines = [said, "", *(f"| {' | '.join(row)} |" for row in rows)]
    (output / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for row in rows[2:]:
        table.add_row(*row)
    console.print(table)
    for sentence in broken:
        console.print(sentence, style="red", markup=False, highlight=False)
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
