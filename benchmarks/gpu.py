"""A game and verl's own GRPO on one GPU, on equal tokens: ``python benchmarks/gpu.py --output FOLDER``.

It needs no download: it writes a model with random weights, and rows. It starts ``verl.trainer.main_ppo`` four times:

- the game of ``gpu_game.py``, with the project's recipes, until its checkpoint is written; then it is killed (SIGKILL),
- the same command again, which must go on at the next step,
- verl's own single-turn GRPO with the same settings, on as many sequences, prompt tokens and generated tokens,
- the certificate alone, with positions that do not restart: a negative control, which must be refused.

Every turn is as long as its budget, so that tokens are equal. The folder gets ``gpu.json``, ``gpu.md`` (the table) and
the logs. Exits with 1 where a run failed or a claim does not hold. ``--size tiny --engine embedded`` needs no GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import httpx
import psutil
import torch
import typer
import yaml
from gpu_game import Relay, write_model, write_rows
from rich.console import Console
from rich.table import Table
from run import machine

FOLDER = Path(__file__).resolve().parent
REPEATS = 4  # rollout.n
LR = 1e-4  # moves weights by more than bf16 rounds them, so that a push that is left out shows

SAMPLED_EVERY_S = 0.5
PHASES = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("save_checkpoint", "update_weights"),
)
"""A step of verl's in its order, by the names of its timings."""
COLUMNS = ["figure", "self-play", "verl's GRPO", "ratio", "how it was measured"]
Size, Engine = Literal["qwen3_4b", "tiny"], Literal["sglang", "vllm", "embedded"]


# -- a run -------------------------------------------------------------------------------------------------------------


def recipes(size: Size, engine: Engine, gib: float) -> list[str]:
    """The recipes for a model on a card with so much memory; ValueError for what cannot run."""
    if size == "tiny":
        if engine == "vllm":
            raise ValueError("--size tiny runs on the CPU: take --engine embedded or sglang")
        return ["quickstart" if engine == "embedded" else "quickstart_sglang"]
    if engine == "embedded" or not gib:
        raise ValueError("--size qwen3_4b needs a GPU that nvidia-smi shows, and --engine sglang or vllm")
    return ["qwen3_4b", *["gpu_80g"] * (gib < 90), *["gpu_141g"] * (gib > 130), *["vllm"] * (engine == "vllm")]


def overrides(output: Path, names: Sequence[str], engine: Engine, games: int, prompt: int, turn: int) -> dict[str, Any]:
    """Overrides of verl's command for the game and for single turns. Of a game, ``prompt`` and ``turn`` come twice."""
    served, rows = engine != "embedded", games // REPEATS

    def of(data: str, max_prompt: int, max_response: int, *more: str) -> list[str]:
        values = {
            "data.train_files": output / f"{data}.parquet",
            "data.val_files": output / f"{data}.parquet",
            "data.train_batch_size": rows,
            "data.max_prompt_length": max_prompt,
            "data.max_response_length": max_response,
            "actor_rollout_ref.model.path": output / "model",
            "actor_rollout_ref.actor.ppo_mini_batch_size": rows,
            "actor_rollout_ref.actor.optim.lr": LR,
            "actor_rollout_ref.rollout.n": REPEATS,
            # No end of turn: the first is for vLLM, the second for the others; verl would put the tokenizer's there.
            "actor_rollout_ref.rollout.ignore_eos": True,
            "++actor_rollout_ref.model.override_config.eos_token_id": "null",
            # verl writes the servers' addresses there.
            "actor_rollout_ref.rollout.prometheus.enable": served,
            "actor_rollout_ref.rollout.prometheus.file": output / "servers.yml",
            "actor_rollout_ref.rollout.disable_log_stats": not served,
            "trainer.logger": "[console,file]",
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.total_epochs": 1000,
            "trainer.default_local_dir": output / data,
            "hydra.run.dir": output / "hydra",
        }
        return [f"+recipes=[{','.join(names)}]", *(f"{key}={value}" for key, value in values.items()), *more]

    stock = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": "null",
        "reward.reward_manager.source": "register",
        "reward.reward_manager.name": "naive",
        "reward.custom_reward_function.path": FOLDER / "gpu_game.py",
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler.path": "null",
        "trainer.v1.sampler.custom_sampler.name": "null",
    }
    stock_overrides = [f"{key}={value}" for key, value in stock.items()]
    return {
        "relay": of("relay", prompt, prompt + 2 * turn, "selfplay.game=gpu_game:Relay", "selfplay.mix=null"),
        "single": of("single", 2 * prompt, 2 * turn, *stock_overrides, "~hydra.callbacks.medserl"),
    }


def cards() -> list[dict[str, str]]:
    """Name, driver and memory (MiB) of each GPU, as ``nvidia-smi`` says; empty without one."""
    names = ("name", "driver_version", "memory.total", "memory.used")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [dict(zip(names, line.split(", "), strict=True)) for line in printed.splitlines()]


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; in a container, nobody may fetch the exit codes of those that do not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def used_gib(family: set[psutil.Process], gpu: bool) -> float:
    """Memory in use on the fullest GPU, or the resident memory of a run's processes."""
    if gpu:
        return max(float(card["memory.used"]) for card in cards()) / 1024
    used = 0
    for process in family:
        with suppress(psutil.NoSuchProcess):
            used += process.memory_info().rss
    return used / 2**30


def prefix_cache(file: Path) -> tuple[float, float] | None:
    """Prompt tokens that came out of the prefix cache, and all of them, by the counters of the run's servers."""
    names = {"sglang:cached_tokens_total": 0, "vllm:prefix_cache_hits_total": 0}
    names |= {"sglang:prompt_tokens_total": 1, "vllm:prefix_cache_queries_total": 1}
    counted = [0.0, 0.0]
    try:
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["scrape_configs"]:
            for server in (address for config in job.get("static_configs", ()) for address in config["targets"]):
                for line in httpx.get(f"http://{server}/metrics", timeout=5).text.splitlines():
                    if (name := line.partition("{")[0]) in names:
                        counted[names[name]] += float(line.rpartition(" ")[2])
    except (OSError, TypeError, httpx.HTTPError):  # no server yet, or none any more
        return None
    return (counted[0], counted[1]) if counted[1] else None


@dataclass
class Ran:
    """A run that is over: verl's metrics by step, when each ended, and what was sampled beside it."""

    log: Path
    code: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    used_gib: list[tuple[float, float]] = field(default_factory=list)
    cache: tuple[float, float] | None = None

    def number(self, name: str) -> float | None:
        """The median of a metric over all steps but the first; None if verl did not report it."""
        found = [step[name] for step in self.steps[1:] if name in step]
        return float(median(found)) if found else None

    def at(self, step: int, name: str) -> float | None:
        """A metric of one step, by its place in the list."""
        return self.steps[step].get(name) if self.steps else None

    def peak(self, phase: str) -> float | None:
        """The most memory that was sampled in a phase, in GiB. Phases lie before the end of a step, by their timings."""
        found = []
        for end, step in zip(self.ends, self.steps, strict=True):
            for name in reversed(PHASES):
                start = end - step.get(f"timing_s/{name}", 0.0)
                found += [used for when, used in self.used_gib if name == phase and start <= when < end]
                end = start
        return max(found, default=None)


def run(output: Path, name: str, command: Sequence[str], *, gpu: bool, kill_after: int = 0, **env: str) -> Ran:
    """Run verl to its end, or until it has logged step ``kill_after``, which it does after the checkpoint."""
    ran, metrics, servers = Ran(output / f"{name}.log"), output / f"{name}.jsonl", output / "servers.yml"
    servers.unlink(missing_ok=True)
    modules = [FOLDER.parent, FOLDER, FOLDER.parent / "tests" / "training", os.environ.get("PYTHONPATH")]
    env |= {"PYTHONPATH": os.pathsep.join(str(folder) for folder in modules if folder), "RAY_ADDRESS": "local"}
    env |= {"VERL_FILE_LOGGER_PATH": str(metrics), **({} if gpu else {"VERL_PLATFORM": "cpu"})}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *command]
    with ran.log.open("w", encoding="utf-8") as log:
        process = psutil.Popen(
            command, cwd=output, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    family = {psutil.Process(process.pid)}
    try:
        while process.poll() is None and not 0 < kill_after <= len(ran.steps):
            time.sleep(SAMPLED_EVERY_S)
            with suppress(psutil.NoSuchProcess):
                family |= set(process.children(recursive=True))
            ran.used_gib.append((time.time(), used_gib(family, gpu)))
            ran.cache = prefix_cache(servers) or ran.cache
            lines = metrics.read_text(encoding="utf-8").split("\n")[:-1] if metrics.exists() else []
            for line in lines[len(ran.steps) :]:
                ran.steps.append(json.loads(line)["data"])
                ran.ends.append(metrics.stat().st_mtime)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        ran.code = process.wait()
        give_up = time.monotonic() + 30
        while (left := [member for member in family if alive(member)]) and time.monotonic() < give_up:
            time.sleep(0.2)
        for member in left:
            member.kill()
    return ran


# -- the table ---------------------------------------------------------------------------------------------------------


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

    verl = "verl, median of the steps after the first"
    trained = [game.number(f"selfplay/{role}/trained_tokens") or 0.0 for role in Relay.roles]
    answered = single.number("response_length/mean")
    yield Figure("sequences in a step", sequences, sequences, "as set")
    yield both("tokens in a step", tokens, verl)
    yield Figure("of these generated", sum(trained) or None, answered and answered * sequences, verl)
    yield both("seconds of a step, without checkpoint", seconds, verl)
    for phase in PHASES:
        if game.number(f"timing_s/{phase}") or single.number(f"timing_s/{phase}"):
            how = "verl; the run of GRPO saves none" if phase == "save_checkpoint" else verl
            yield both(f"seconds of {phase}", lambda ran, name=phase: ran.number(f"timing_s/{name}"), how)
    yield both("sequences a second", lambda ran: per_second(ran, sequences), "sequences by seconds of a step")
    yield both("tokens a second", lambda ran: per_second(ran, tokens(ran)), "tokens by seconds of a step")
    how = "verl: update of the actor" if gpu else "verl's peak rate of a CPU is a constant"
    yield both("MFU", lambda ran: ran.number("perf/mfu/actor") if gpu else "none", how)
    sampled = (
        f"{'the card' if gpu else 'resident memory of all processes'} every {SAMPLED_EVERY_S} s, if that met the phase"
    )
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
    game: Ran
    resumed: Ran
    control: Ran
    sequences: int

    def figures(self) -> Iterator[Figure]:
        """All of them; what a run did not leave is not measured."""
        for what, proof, how in (
            ("games with a second turn", self.second_turns, "games.jsonl"),
            ("resume after SIGKILL", self.resume, "verl's steps; games.jsonl holds every game of every step once"),
            (
                "weights pushed to the rollout",
                self.push,
                "log-probs of rollout and actor; final norm in the checkpoint",
            ),
            ("isolation of contexts", self.isolation, "certificate of the run, in its precision"),
            ("its negative control", self.negative_control, "certificate of a run whose positions do not restart"),
        ):
            try:
                said, holds = proof()
            except (OSError, KeyError, IndexError, ValueError) as error:
                said, holds, how = None, False, f"{type(error).__name__}: see the logs"
            yield Figure(what, said, "", how, holds)

    def second_turns(self) -> tuple[str, bool]:
        played = [len(game["said"]) == 2 and game["void"] is None for game in self._games()]
        return f"{sum(played)} of {len(played)}", all(played)

    def resume(self) -> tuple[str, bool]:
        last, games = len(self.game.steps), Counter(game["step"] for game in self._games())
        [step] = [int(step["training/global_step"]) for step in self.resumed.steps]
        exact = step == last + 1 and games == dict.fromkeys(range(1, last + 2), self.sequences)
        return f"killed after step {last}, went on at step {step}: {'exact' if exact else 'NOT exact'}", exact

    def push(self) -> tuple[str, bool]:
        name, last = "selfplay/log_prob_gap/first_context", len(self.game.steps)
        first, final = self.game.steps[0][name], self.resumed.steps[-1][name]
        [file] = (self.output / "relay" / f"global_step_{last}" / "actor").glob("model_*_rank_0.pt")
        weights = torch.load(file, map_location="cpu", mmap=True, weights_only=False)["model.norm.weight"]
        moved = float((weights.to_local() - 1).abs().max())  # they begin as ones
        said = f"apart by {first:.2g} in step 1 and {final:.2g} in step {last + 1}; weights moved by {moved:.2g}"
        return said, moved > 0 and final < 3 * max(first, 1e-5)

    def isolation(self) -> tuple[str, bool]:
        return self._certificate("relay")

    def negative_control(self) -> tuple[str, bool]:
        said, holds = self._certificate("control")
        return said, not holds and self.control.code != 0

    def _games(self) -> list[dict[str, Any]]:
        lines = (self.output / "relay" / "games.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def _certificate(self, name: str) -> tuple[str, bool]:
        measures = json.loads((self.output / name / "certificate.json").read_text(encoding="utf-8"))["measures"]
        [found] = [m for m in measures if (m["claim"], m["of"]) == ("isolation", "actor")]
        holds = bool(found["holds"])
        return f"{found['value']:.2g} (limit {found['limit']:g}): {'holds' if holds else 'refused'}", holds


def main(
    output: Annotated[Path, typer.Option(help="New folder for the model, logs, a checkpoint and the figures.")],
    size: Annotated[Size, typer.Option(help="qwen3_4b on a GPU, or the quickstart's player on the CPU.")] = "qwen3_4b",
    engine: Annotated[Engine, typer.Option(help="The rollout; embedded is Transformers on the CPU.")] = "sglang",
    steps: Annotated[int, typer.Option(min=2, help="Steps of the game and of GRPO; the first one warms up.")] = 4,
    games: Annotated[int, typer.Option(min=2 * REPEATS, help=f"Games of a step, {REPEATS} of each row.")] = 64,
    note: Annotated[int, typer.Option(min=8, help="Tokens of a note.")] = 190,
    turn: Annotated[int, typer.Option(min=4, help="Tokens of a turn.")] = 1024,
    more: Annotated[list[str] | None, typer.Argument(help="More overrides of verl's config, for all runs.")] = None,
) -> None:
    """Measure a game and verl's own GRPO on equal tokens, on random weights; write gpu.json and gpu.md."""
    output, found, console, failed = output.resolve(), cards(), Console(), list[str]()
    try:
        names = recipes(size, engine, float(found[0]["memory.total"]) / 1024 if found else 0.0)
        if games % REPEATS:
            raise ValueError(f"--games {games} is no multiple of {REPEATS}")
        output.mkdir(parents=True)
    except (ValueError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(f"{output}: writing a model with random weights, and rows")
    write_model(size, output / "model")
    prompt = write_rows(output, games, note, turn)
    commands, gpu = overrides(output, names, engine, games, prompt, turn), size == "qwen3_4b"

    def part(name: str, command: str, last: int, good: Callable[[Ran], bool], *changes: str, **options: Any) -> Ran:
        console.print(f"{name}: verl's main_ppo, {output / name}.log")
        steps = f"trainer.total_training_steps={last}"
        ran = run(output, name, [*commands[command], steps, *(more or ()), *changes], gpu=gpu, **options)
        if not good(ran):
            tail = ran.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            said = f"{name} ended with exit code {ran.code} after {len(ran.steps)} steps. {ran.log} ends with"
            failed.append("\n".join([said, *tail]))
        return ran

    no_save, control_folder = "trainer.save_freq=-1", f"trainer.default_local_dir={output}/control"
    game = part(
        "game", "relay", steps + 1, lambda ran: len(ran.steps) == steps, f"trainer.save_freq={steps}", kill_after=steps
    )
    resumed = part("resumed", "relay", steps + 1, lambda ran: ran.code == 0, no_save)
    single = part("single", "single", steps, lambda ran: ran.code == 0, no_save)
    control = part(
        "control", "relay", steps, lambda _: (output / "control" / "certificate.json").exists(),
        "selfplay.certify=only", control_folder, VERL_USE_EXTERNAL_MODULES="broken_roles",  # of tests/training
    )  # fmt: skip

    figures = [*speed(game, single, games, gpu), *Proofs(output, game, resumed, control, games).figures()]
    failed += [f"{figure.what}: {figure.selfplay or figure.how}" for figure in figures if not figure.holds]
    facts = machine("sglang", "vllm", "flash-attn") | {
        "cards": [f"{card['name']}, {card['memory.total']} MiB" for card in found]
    }
    facts |= {"driver": found[0]["driver_version"] if found else "none"}
    chosen = {
        "size": size,
        "engine": engine,
        "recipes": names,
        "games": games,
        "steps": steps,
        "note": note,
        "turn": turn,
    }
    results = {
        "machine": facts,
        "settings": chosen,
        "figures": [asdict(figure) for figure in figures],
        "failed": failed,
    }
    (output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    where = f"{facts['cards'][0]}, driver {facts['driver']}" if found else f"{facts['cores']} CPU cores"
    said = f"Measured on {where}: {', '.join(f'{key} {value}' for key, value in chosen.items())}; verl {facts['verl']}, torch {facts['torch']}."
    rows, table = [COLUMNS, ["---"] * len(COLUMNS), *(figure.cells for figure in figures)], Table(*COLUMNS, title=said)
    (output / "gpu.md").write_text(
        "\n".join([said, "", *(f"| {' | '.join(row)} |" for row in rows), ""]), encoding="utf-8"
    )
    for row in rows[2:]:
        table.add_row(*row)
    console.print(table)
    for sentence in failed:
        console.print(sentence, style="red", markup=False, highlight=False)
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
