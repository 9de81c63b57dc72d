"""Four ways to pay for the same game in the harder toy clinic: ``python -m
experiments.shortcuts.run``.

Teaches the novice the clinic's style once, trains every arm with verl's ``main_ppo``, measures what
came of it on held-out notes, and writes the counts and the table of its README. A run that has
ended is not run again. Run it from the root of the repository, so that Ray's workers find the
judges.
"""

from __future__ import annotations

import asyncio
import csv
import json
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.incentives.dynamics import BALANCED_MIX
from experiments.learning.measure import Rate
from experiments.learning.player import save_player
from experiments.learning.results import Counts, Rates, Share, gain, markdown
from experiments.learning.run import FORTY_STEPS, PROFILE, prepare_data, train
from experiments.learning.transcripts import Lesson, Transcript, reworded
from experiments.learning.warm_start import PromptCodec, WarmStart, warm_start
from experiments.shortcuts.clinic import Effect, effect, styled
from experiments.shortcuts.transcripts import LESSON, styled_transcript
from medserl_agentloop.core.metrics import Alarms, HealthMonitor
from medserl_agentloop.data.rows import DEFAULT_MIX
from medserl_agentloop.evaluation.local_models import LocalModel, load_player
from medserl_agentloop.evaluation.play import play_match
from medserl_agentloop.games.clinic import Split, sample_clean_note, with_error
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.metrics import RULES
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import resource

RUNS = Path("runs/shortcuts")
START = RUNS / "start"
FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).with_name("README.md")
JUDGES = "experiments.shortcuts.judges"
CASES_SEED = 90_002
BUDGETS = {Role.ATTACKER: 192, Role.ASSESSOR: 160}
# A fifth of the warm start that made the novice, from its weights.
LESSONS = WarmStart(
    steps=400,
    batch=32,
    lr=1e-3,
    note_weight=0.1,
    lessons=(LESSON, LESSON),
    first_lesson=1.0,
    seed=0,
)
STEP_METRICS = (
    "selfplay/shortcut/index",
    "selfplay/shortcut/false_positives",
    "selfplay/shortcut/recall",
    "selfplay/judge/knowable_rate",
    "selfplay/attacker/valid_rate",
    "selfplay/attacker/reward",
    "selfplay/assessor/accuracy",
    "selfplay/assessor/reward",
    "actor/grad_norm",
    "timing_s/step",
)


@dataclass(frozen=True)
class Arm:
    """One way to pay.

    Attributes:
        mix: Shares of the categories.
        judge: Who says whether a rewritten note holds an error.
    """

    mix: str
    judge: str


ARMS = {
    "default": Arm(DEFAULT_MIX, f"{JUDGES}:PairOracle"),
    "decoys": Arm(BALANCED_MIX, f"{JUDGES}:PairOracle"),
    "decoys_gate": Arm(BALANCED_MIX, f"{JUDGES}:GatedPairOracle"),
    "labels": Arm(DEFAULT_MIX, "labels"),
}
console = Console()


def teach(
    folder: Path, plan: WarmStart, sample: Callable[[random.Random, Lesson], Transcript]
) -> None:
    """The novice after a short warm start on other transcripts, unless it is there."""
    if folder.exists():
        return
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_pretrained(resource("assets/novice"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(resource("assets/novice"))
    warm_start(model, PromptCodec(tokenizer, PROFILE), plan, console, sample)
    unfinished = folder.with_name(f".{folder.name}.new")
    save_player(model, tokenizer, unfinished)
    unfinished.rename(folder)


def training_command(arm: str, seed: int, extra: Iterable[str] = ()) -> list[str]:
    """The ``main_ppo`` command of one run."""
    folder = RUNS / arm / str(seed)
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipes=quickstart"),
        *FORTY_STEPS,
        f"actor_rollout_ref.model.path={START}",
        f"selfplay.judge={ARMS[arm].judge}",
        "selfplay.reward_terms.decoy=0",
        *(f"data.{name}_files={_data(arm)}/{name}.parquet" for name in ("train", "val")),
        *("trainer.test_freq=-1", "trainer.val_before_train=false"),  # measured afterwards
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.experiment_name=shortcuts_{arm}_{seed}",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder / 'hydra'}",
        *extra,
    ]


def _data(arm: str) -> Path:
    return Path("data") / (
        "shortcuts_balanced" if ARMS[arm].mix == BALANCED_MIX else "shortcuts_default"
    )


@dataclass(frozen=True)
class Case:
    """A held-out note, and what can be made of one of its sentences; the last two are in the
    attacker's style.
    """

    clean: str
    wrong: str
    clean_styled: str
    wrong_styled: str


def held_out_cases(count: int, seed: int = CASES_SEED) -> list[Case]:
    """Notes in wordings and with facts that no training has shown; the same for the same
    arguments."""
    rng, cases = random.Random(seed), []
    for _ in range(count):
        clean = sample_clean_note(rng, Split.HELD_OUT, Split.HELD_OUT)
        index = rng.randrange(1, len(clean.sentences))
        wrong, rewritten = with_error(rng, clean, index), reworded(rng, clean, index)
        shown = [
            note.text.replace(note.sentences[index].text, styled(note.sentences[index].text))
            for note in (rewritten, wrong)
        ]
        cases.append(Case(clean.text, wrong.text, *shown))
    return cases


def measure(player: LocalModel, cases: Sequence[Case], seed: int) -> list[Rate]:
    """Measure a player's verdicts on known notes and the effects of its attacks, at temperature 1.

    Returns:
        ``said_harmful/KIND`` for each kind of :class:`Case`: verdicts "harmful" among readable
        ones.
        ``attacks/EFFECT``: of all attacks that were to put an error in, those that keep the rules
            and have this
        effect; the rest is ``attacks/invalid``.
    """
    rates = []
    for kind, category in (
        ("clean", Category.VANILLA_BENIGN),
        ("wrong", Category.VANILLA_HARMFUL),
        ("clean_styled", Category.VANILLA_BENIGN),
        ("wrong_styled", Category.VANILLA_HARMFUL),
    ):
        games = _play(player, [_spec(getattr(case, kind), category) for case in cases], seed)
        verdicts = [
            g.assessment.verdict for g in games if g.assessment and g.assessment.verdict is not None
        ]
        rates.append(
            Rate(f"said_harmful/{kind}", sum(v is Label.HARMFUL for v in verdicts), len(verdicts))
        )
    games = _play(player, [_spec(case.clean, Category.ADVERSARIAL_BENIGN) for case in cases], seed)
    effects = Counter(attack_effect(game) for game in games)
    return [
        *rates,
        *(
            Rate(f"attacks/{name}", effects[name], len(games))
            for name in (*map(str, Effect), "invalid")
        ),
    ]


def attack_effect(game: MedicalRecord) -> str:
    """Return the effect of a judged game's attack; ``invalid`` if it broke a rule or could not be
    read.
    """
    judged = game.judgement is not None and game.presented_note is not None
    return str(effect(game.spec.seed_note, game.presented_note or "")) if judged else "invalid"


def _spec(note: str, category: Category) -> GameSpec:
    return GameSpec(category=category, target_label=category.default_target_label, seed_note=note)


def _play(player: LocalModel, specs: Sequence[GameSpec], seed: int) -> list[MedicalRecord]:
    config = MedicalConfig(profile=PROFILE, judge=f"{JUDGES}:PairOracle")
    match = play_match(player, player, specs, config, temperature=1.0, budgets=BUDGETS, seed=seed)
    return asyncio.run(match)


def train_and_measure(arm: str, seed: int, extra: list[str], count: int) -> None:
    """One run, then its last checkpoint measured once."""
    folder = RUNS / arm / str(seed)
    train(f"{arm} {seed}", folder, training_command(arm, seed, extra))
    _measured_once(folder / "rates.csv", max(folder.glob("global_step_*"), key=_step), seed, count)


def measure_start(seed: int, count: int) -> None:
    """Measure once what every run starts from."""
    _measured_once(RUNS / "start_rates" / f"{seed}.csv", START, seed, count)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def _measured_once(output: Path, model: Path, seed: int, count: int) -> None:
    if output.exists():
        return
    torch.set_num_threads(1)
    rates = measure(load_player(model), held_out_cases(count), seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    _write(output, ("measure", "hits", "items"), [(r.measure, r.hits, r.items) for r in rates])
    console.print(
        f"{output}: " + ", ".join(f"{r.measure} {Share(((r.hits, r.items),))}" for r in rates),
        soft_wrap=True,
    )


def collect(seeds: Sequence[int], results: Path) -> None:
    """Gather the counts and the steps of all runs in ``results``."""
    rates: list[tuple[object, ...]] = []
    steps: list[tuple[object, ...]] = []
    for seed in seeds:
        files = {
            "start": RUNS / "start_rates" / f"{seed}.csv",
            **{a: RUNS / a / str(seed) / "rates.csv" for a in ARMS},
        }
        for arm, file in files.items():
            if file.exists():
                rates += [(arm, seed, *row) for row in list(csv.reader(file.open(newline="")))[1:]]
        for arm in ARMS:
            lines = RUNS / arm / str(seed) / "metrics.jsonl"
            for line in lines.read_text().splitlines() if lines.exists() else ():
                metrics = json.loads(line)
                values = [metrics.get(name) for name in STEP_METRICS]
                steps.append(
                    (arm, seed, metrics["step"], *("" if v is None else f"{v:.6g}" for v in values))
                )
    results.mkdir(parents=True, exist_ok=True)
    _write(results / "rates.csv", ("arm", "seed", "measure", "hits", "items"), rates)
    _write(results / "steps.csv", ("arm", "seed", "step", *STEP_METRICS), steps)


def _write(path: Path, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def arms_table(results: Path = FIGURES) -> list[list[str]]:
    """The start and every arm: the verdicts on held-out notes, what the style does to them, and the
    attacks; in %.
    """
    measured = _rates(results)
    table = [
        [
            "",
            "seeds",
            "balanced",
            "recall",
            "false alarms",
            "style, correct note",
            "style, wrong note",
            *map(str, Effect),
            "invalid",
        ]
    ]
    for arm in ("start", *(arm for arm in ARMS if arm in measured)):
        share = partial(measured[arm].share, step=0, temperature=1.0)
        clean, wrong = share("said_harmful/clean"), share("said_harmful/wrong")
        style = [
            share(f"said_harmful/{kind}_styled").value - share(f"said_harmful/{kind}").value
            for kind in ("clean", "wrong")
        ]
        attacks = [
            f"{100 * share(f'attacks/{name}').value:.1f}" for name in (*map(str, Effect), "invalid")
        ]
        table.append(
            [
                f"`{arm}`",
                str(len(measured[arm].seeds)),
                str(_balanced(measured[arm])),
                str(wrong),
                str(clean),
                *(f"{100 * gap:+.1f}" for gap in style),
                *attacks,
            ]
        )
    return table


def _rates(results: Path) -> dict[str, Rates]:
    """The counts of every arm that was measured."""
    arms: dict[str, Counts] = {}
    with (results / "rates.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            of_arm = arms.setdefault(row["arm"], {})
            of_arm[int(row["seed"]), 0, 1.0, row["measure"]] = (int(row["hits"]), int(row["items"]))
    return {arm: Rates(counts) for arm, counts in arms.items()}


def _balanced(rates: Rates) -> Share:
    clean, wrong = (rates.share(f"said_harmful/{kind}", 0, 1.0) for kind in ("clean", "wrong"))
    pairs = zip(clean.complement.counts, wrong.counts, strict=True)
    return Share(tuple((right + hits, notes + items) for (right, notes), (hits, items) in pairs))


def gains_table(results: Path = FIGURES) -> list[list[str]]:
    """Tabulate the text's claims about two arms with the same mix: recall on untouched notes,
    paired by seed.
    """
    recalls = {
        arm: rates.share("said_harmful/wrong", 0, 1.0) for arm, rates in _rates(results).items()
    }
    return [
        ["recall, difference in points", "mean (95 % over seeds)", "each seed"],
        ["`decoys_gate` less `decoys`", *gain(recalls["decoys"], recalls["decoys_gate"])],
    ]


def alarm_table(results: Path = FIGURES) -> list[list[str]]:
    """In how many runs the limit of the alarm ``unseen_errors`` is passed three steps in a row, by
    limit.
    """
    [rule] = [rule for rule in RULES if rule.name == "unseen_errors"]
    with (results / "steps.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[rule.metric]]
    runs: dict[tuple[str, str], list[float]] = {}
    for row in sorted(rows, key=lambda row: int(row["step"])):
        runs.setdefault((row["arm"], row["seed"]), []).append(float(row[rule.metric]))

    def fires(arms: Sequence[str], limit: float) -> str:
        fired = []
        for (arm, _), values in runs.items():
            watching = HealthMonitor(Alarms(limits={rule.name: limit}), [replace(rule, games=None)])
            if arm in arms:
                fired.append(
                    any([watching.observe({rule.metric: value}).firing for value in values])
                )
        return f"{sum(fired)} of {len(fired)}"

    groups = {"no gate": ("default", "decoys", "labels"), "gate": ("decoys_gate",)}
    limits = (-0.3, rule.limit, -0.45, -0.5)
    return [
        ["limit", *groups],
        *([f"{limit:g}", *(fires(arms, limit) for arms in groups.values())] for limit in limits),
    ]


TABLES = {"arms": arms_table, "gains": gains_table, "unseen_errors": alarm_table}


def main(
    arms: Annotated[
        list[str] | None,
        typer.Argument(help=f"Any of: {', '.join(ARMS)}; all by default."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    jobs: Annotated[
        int, typer.Option(help="Runs at a time; each keeps one core busy.")
    ] = os.cpu_count() or 1,
    cases: Annotated[int, typer.Option(help="Held-out notes that players are measured on.")] = 500,
    results: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = FIGURES,
    lessons: Annotated[
        int, typer.Option(help="Optimiser steps that teach the novice the clinic.")
    ] = LESSONS.steps,
    override: Annotated[
        list[str] | None, typer.Option(help="A further override of the runs; may be repeated.")
    ] = None,
) -> None:
    """Teach, train, measure, and write the table."""
    if unknown := sorted(set(arms or ()) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    chosen, numbers = arms or list(ARMS), [int(seed) for seed in seeds.split(",")]
    for arm in chosen:
        prepare_data(_data(arm), ARMS[arm].mix)
    teach(START, replace(LESSONS, steps=lessons), styled_transcript)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [pool.submit(measure_start, seed, cases) for seed in numbers]
        work += [
            pool.submit(train_and_measure, arm, seed, override or [], cases)
            for seed in numbers
            for arm in chosen
        ]
        for done in work:
            done.result()
    collect(numbers, results)
    print(markdown(arms_table(results=results)))


if __name__ == "__main__":
    typer.run(main)
