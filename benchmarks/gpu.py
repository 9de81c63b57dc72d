"""A game and verl's own GRPO on one GPU, on equal tokens: ``python benchmarks/gpu.py --output
FOLDER``.

It needs no download: it writes a model with random weights, and rows. It starts
``verl.trainer.main_ppo`` five times:

- the certificate of the game alone, and the same with positions that do not restart: a negative
  control, which must be refused,
- the game of ``gpu_game.py``, with the project's recipes, until its checkpoint is written; then it
  is killed (SIGKILL),
- the same command again, which must go on at the next step,
- verl's own single-turn GRPO with the same settings, on as many sequences, prompt tokens and
  generated tokens.

``--part`` makes one of these alone, and the table of all parts so far; ``resume`` needs the folder
of ``game``. Every turn is as long as its budget, so that tokens are equal. ``--engine none`` has
parts of its own (``gpu_none.py``). Exits with 1 where a run failed or a claim does not hold.
``--size tiny --engine embedded`` needs no GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

# loads the plugin, without which SGLang's environment for CPUs has no models
import verl  # noqa: F401
from gpu_game import Relay, write_model, write_rows
from gpu_run import FOLDER, MAIN_PPO, PHASES, SAMPLED_EVERY_S, Ran, cards, machine, run
from omegaconf import OmegaConf

REPEATS = 4  # rollout.n
LR = 1e-4  # moves weights by more than bf16 rounds them, so that a push that is left out shows

Size, Engine = (
    Literal["qwen3_4b", "qwen3_0_6b", "tiny"],
    Literal["sglang", "embedded", "none"],
)
PARTS = {
    "certificate": ("certified", "control"),
    "game": ("game",),
    "resume": ("resumed",),
    "grpo": ("single",),
}
ENGINE_PARTS = ("isolation", "phases", "loss")
WORLD_OF_ONE = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
WORLD_OF_ONE |= {
    "WG_BACKEND": "ray",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # as verl's controller sets it
Part = Literal["certificate", "game", "resume", "grpo", "isolation", "phases", "loss"]


def recipes(size: Size, engine: Engine, gib: float) -> list[str]:
    """The recipes for a model on a card with so much memory; ValueError for what cannot run."""
    if size == "tiny":
        return ["own_notes", *["sglang_cpu"] * (engine == "sglang")]
    if engine == "embedded" or not gib:
        raise ValueError(
            f"--size {size} needs a GPU that nvidia-smi shows, and --engine sglang or none"
        )
    card, safe = ["gpu_80g"] * (gib < 90), ["first_run"] * (engine == "sglang")
    return [size, *card * (size == "qwen3_4b"), *safe]


def overrides(
    output: Path, names: Sequence[str], engine: Engine, games: int, prompt: int, turn: int
) -> dict[str, list[str]]:
    """Overrides of verl's command for the game and for single turns.

    A game has two prompts and two turns.
    """
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
            # verl's SGLang server keeps a token of it free, by which the longest answers would be
            # shorter.
            f"{rollout}.max_model_len": 2 * (prompt + turn) + 16,
            # No end of turn; verl would put the tokenizer's there.
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

    game = {
        "selfplay.game": "gpu_game:Relay",
        "selfplay.reuse_log_probs": False,
    }  # as much work as single turns
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
    """One row of the table: numbers or words, None where nothing was measured; ``how`` says by
    whom, or why not.
    """

    what: str
    selfplay: float | str | None
    grpo: float | str | None
    how: str
    holds: bool = True

    @property
    def cells(self) -> list[str]:
        """The row as it is shown, with the ratio of its numbers."""
        values = (self.selfplay, self.grpo)
        shown = [
            "not measured" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in values
        ]
        a, b = (x if isinstance(x, (int, float)) else 0.0 for x in values)
        return [self.what, *shown, f"{a / b:.2f}" if a and b else "", self.how]


def measured(
    ran: Ran, sequences: int, generated: float | None, gpu: bool
) -> dict[str, tuple[Any, str]]:
    """Return the cost and yield of a run's step, and how they were measured, by row of the
    table."""
    step, tokens = ran.number("timing_s/step"), ran.number("perf/total_num_tokens")
    seconds = step and step - (ran.number("timing_s/save_checkpoint") or 0.0)
    steps, by = "verl, median of the steps after the first", "by seconds of a step"
    first, last = (ran.at(step, "training/rollout_probs_diff_mean") for step in (0, -1))
    used = f"{'the card' if gpu else 'resident memory of all processes'}, every {SAMPLED_EVERY_S} s"
    peak = f"verl: {'peak of torch' if gpu else 'resident memory of its process'}"
    phases = {phase: (ran.number(f"timing_s/{phase}"), steps) for phase in PHASES}
    phases["gen"] = (
        phases["gen"][0],
        "verl; its own buffer looks for answers every 2 s, self-play's every 0.1 s",
    )
    return {
        "sequences in a step": (sequences, "as set"),
        "tokens in a step": (tokens, steps),
        "of these generated": (generated, steps),
        "seconds of a step, without checkpoint": (seconds, steps),
        **{f"seconds of {phase}": taken for phase, taken in phases.items()},
        "sequences a second": (seconds and sequences / seconds, by),
        "tokens a second": (seconds and tokens and tokens / seconds, by),
        "MFU": (
            ran.number("perf/mfu/actor") if gpu else "none",
            "verl: update of the actor; none on a CPU",
        ),
        "peak GiB in use": (max(ran.used_gib, default=None), used),
        "peak GiB of the trainer": (ran.at(-1, "actor/perf/max_memory_allocated_gb"), peak),
        "prompt tokens from the prefix cache": (
            ran.cache and ran.cache[0] / ran.cache[1],
            "counters of the servers",
        ),
        "rollout against actor, step 1": (first, "verl: difference of probabilities, mean"),
        "rollout against actor, last step": (last, "verl: difference of probabilities, mean"),
    }


def speed(game: Ran, single: Ran, sequences: int, gpu: bool) -> Iterator[Figure]:
    """The rows of both runs. Phases that neither of them has are left out."""
    trained = [game.number(f"selfplay/{role}/trained_tokens") or 0.0 for role in Relay.roles]
    answered = single.number("response_length/mean")
    others = measured(single, sequences, answered and answered * sequences, gpu)
    for what, (value, how) in measured(game, sequences, sum(trained) or None, gpu).items():
        if value or others[what][0] or not what.endswith(PHASES):
            yield Figure(what, value, others[what][0], how)


@dataclass(frozen=True)
class Proofs:
    """Proofs read from the folders of the runs. Each returns a text to show, and whether it
    holds."""

    output: Path
    runs: Mapping[str, Ran]
    sequences: int

    def figures(self) -> Iterator[Figure]:
        """All of them; what a run did not leave is not measured."""
        pushed = "log-probs of rollout and actor; the checkpoint's final norm"
        for what, name, proof, how in (
            ("games with a second turn", "game", self.second_turns, "games.jsonl"),
            (
                "resume after SIGKILL",
                "resumed",
                self.resume,
                "verl's steps; games.jsonl holds every game once",
            ),
            ("weights pushed to the rollout", "resumed", self.push, pushed),
            (
                "isolation of contexts",
                "certified",
                self.isolation,
                "certificate of the run, in its precision",
            ),
            (
                "its negative control",
                "control",
                self.negative_control,
                "certificate where positions do not restart",
            ),
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
        return (
            f"killed after step {last}, went on at step {step}: "
            f"{'exact' if exact else 'NOT exact'}",
            exact,
        )

    def push(self) -> tuple[str, bool]:
        name, game = "selfplay/log_prob_gap/first_context", self.runs["game"]
        last, first, final = (
            len(game.steps),
            game.steps[0][name],
            self.runs["resumed"].steps[-1][name],
        )
        [file] = (self.output / "relay" / f"global_step_{last}" / "actor").glob("model_*_rank_0.pt")
        weights = torch.load(file, map_location="cpu", mmap=True, weights_only=False)[
            "model.norm.weight"
        ]
        moved = float((weights.to_local() - 1).abs().max())  # they begin as ones
        value = (
            f"apart by {first:.2g} in step 1 and {final:.2g} in step {last + 1}; weights moved by "
            f"{moved:.2g}"
        )
        return value, moved > 0 and final < 3 * max(first, 1e-5)

    def isolation(self) -> tuple[str, bool]:
        value, holds = self._certificate("certified")
        run = OmegaConf.load(self.output / "hydra" / ".hydra" / "config.yaml").actor_rollout_ref
        precision = (run.actor.fsdp_config.get("mixed_precision") or {}).get(
            "param_dtype", "bf16"
        )  # verl's default
        attention = run.model.override_config.get(
            "attn_implementation", "flash_attention_2"
        )  # verl's default
        return f"{precision}, {attention}: {value}", holds

    def negative_control(self) -> tuple[str, bool]:
        value, holds = self._certificate("control")
        return value, not holds and self.runs["control"].code != 0

    def _games(self) -> list[dict[str, Any]]:
        lines = (self.output / "relay" / "games.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def _certificate(self, name: str) -> tuple[str, bool]:
        measures = json.loads(
            (self.output / name / "certificate.json").read_text(encoding="utf-8")
        )["measures"]
        [measure] = [m for m in measures if (m["claim"], m["of"]) == ("isolation", "actor")]
        holds = bool(measure["holds"])
        return (
            f"{measure['value']:.2g} (limit {measure['limit']:g}): "
            f"{'holds' if holds else 'refused'}",
            holds,
        )


def main(
    output: Annotated[
        Path, typer.Option(help="New folder for the model, logs, a checkpoint and the figures.")
    ],
    size: Annotated[
        Size, typer.Option(help="A Qwen3 on a GPU, or the quickstart's player on the CPU.")
    ] = "qwen3_4b",
    engine: Annotated[
        Engine,
        typer.Option(
            help="The rollout; embedded is Transformers on the CPU, none measures training."
        ),
    ] = "sglang",
    steps: Annotated[
        int, typer.Option(min=2, help="Steps of the game and of GRPO; the first one warms up.")
    ] = 4,
    games: Annotated[
        int, typer.Option(min=2 * REPEATS, help=f"Games of a step, {REPEATS} of each row.")
    ] = 64,
    note: Annotated[int, typer.Option(min=8, help="Tokens of a note.")] = 190,
    turn: Annotated[int, typer.Option(min=4, help="Tokens of a turn.")] = 1024,
    part: Annotated[
        Part | None, typer.Option(help="One part alone, in the folder of those before it.")
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="More overrides of verl's config, for all runs.")
    ] = None,
) -> None:
    """Measure a game and verl's own GRPO on equal tokens, on random weights; write gpu.json and
    gpu.md.
    """
    output, gpus, failed = output.resolve(), cards(), list[str]()
    try:
        names = recipes(size, engine, float(gpus[0]["memory.total"]) / 1024 if gpus else 0.0)
        if games % REPEATS:
            raise ValueError(f"--games {games} is no multiple of {REPEATS}")
        if part and (part in PARTS) == (engine == "none"):
            raise ValueError(
                f"--part {part} is none of {', '.join(ENGINE_PARTS if engine == 'none' else PARTS)}"
            )
        output.mkdir(parents=True, exist_ok=part is not None)
    except (ValueError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    print(f"{output}: writing a model with random weights, and rows")
    if not (output / "model").exists():
        write_model(size, output / "model")
    chosen: dict[str, Any] = {"size": size, "engine": engine, "recipes": "+".join(names)}

    def make(
        name: str,
        command: Sequence[str],
        good: Callable[[Ran], bool] = lambda ran: not ran.code,
        **options: Any,
    ) -> Ran:
        print(f"{name}: {output / name}.log")
        started = time.monotonic()
        ran = run(output, name, [*command, *(more or ())], gpu=size != "tiny", **options)
        print(f"{name} took {time.monotonic() - started:.0f} s")
        if not good(ran):
            tail = ran.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            ended = (
                f"{name} ended with exit code {ran.code} after {len(ran.steps)} steps. {ran.log} "
                "ends with"
            )
            failed.append("\n".join([ended, *tail]))
            print(failed[-1])
        return ran

    if engine == "none":
        for name in [part] if part else ENGINE_PARTS:
            command = [str(FOLDER / "gpu_none.py"), name, str(output), ",".join(names)]
            make(
                name, [*command, f"actor_rollout_ref.model.path={output / 'model'}"], **WORLD_OF_ONE
            )
        kept = [output / f"{name}.json" for name in ENGINE_PARTS]
        figures = [
            Figure(*row)
            for file in kept
            if file.exists()
            for row in json.loads(file.read_text(encoding="utf-8"))
        ]
        columns = [
            "figure",
            "measured",
            "limit or plan",
            "ratio",
            "how it was measured, or compared",
        ]
    else:
        prompt = write_rows(output, games, note, turn)
        chosen |= {
            "games": games,
            "steps": steps,
            "tokens of a prompt": prompt,
            "tokens of a turn": turn,
        }
        commands, runs = overrides(output, names, engine, games, prompt, turn), dict[str, Ran]()

        def play(name: str, command: str, last: int, *changes: str, **options: Any) -> None:
            kept = output / f"{name}.ran.json"
            if part is None or name in PARTS[part]:
                steps = f"trainer.total_training_steps={last}"
                runs[name] = make(name, [*MAIN_PPO, *commands[command], steps, *changes], **options)
                kept.write_text(json.dumps(asdict(runs[name]), default=str), encoding="utf-8")
            elif kept.exists():
                runs[name] = Ran(**json.loads(kept.read_text(encoding="utf-8")))

        save, no_save = f"trainer.save_freq={steps}", "trainer.save_freq=-1"
        for name, module in (
            ("certified", ""),
            ("control", "broken_roles"),
        ):  # tests/training: positions do not restart
            only = ("selfplay.certify=only", f"trainer.default_local_dir={output}/{name}")
            written = output / name / "certificate.json"
            play(
                name,
                "relay",
                steps,
                *only,
                good=lambda _, it=written: it.exists(),
                VERL_USE_EXTERNAL_MODULES=module,
            )
        play(
            "game",
            "relay",
            steps + 1,
            save,
            good=lambda ran: len(ran.steps) == steps,
            kill_after=steps,
        )
        play("resumed", "relay", steps + 1, no_save)
        play("single", "single", steps, no_save)
        game, single = (runs.get(name, Ran(output / f"{name}.log")) for name in ("game", "single"))
        figures = [
            *speed(game, single, games, size != "tiny"),
            *Proofs(output, runs, games).figures(),
        ]
        columns = ["figure", "self-play", "verl's GRPO", "ratio", "how it was measured"]

    broken = [
        f"{figure.what}: {figure.selfplay or figure.how}" for figure in figures if not figure.holds
    ]
    failed += broken
    facts = machine()
    facts["cards"] = [
        f"{card['name']}, {card['memory.total']} MiB, driver {card['driver_version']}"
        for card in gpus
    ]
    rows = [asdict(figure) for figure in figures]
    results = {"machine": facts, "settings": chosen, "figures": rows, "failed": failed}
    (output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    where = facts["cards"][0] if gpus else f"{facts['cores']} CPU cores"
    said = f"Measured on {where}; verl {facts['verl']}, torch {facts['torch']}; "
    said += f"{', '.join(f'{key} {value}' for key, value in chosen.items())}."
    cells = [columns, ["---"] * len(columns), *(figure.cells for figure in figures)]
    text = "\n".join([said, "", *(f"| {' | '.join(row)} |" for row in cells)])
    (output / "gpu.md").write_text(text + "\n", encoding="utf-8")
    print(text, *broken, sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
