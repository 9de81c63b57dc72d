"""``medserl probe``: can this model play, and with which settings? A few hundred games, no training.

Every note is played several times, because a group estimator learns from what differs between answers to one note.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console

from medserl_agentloop.command_line import errors_in_one_line, say
from medserl_agentloop.evaluation.play import (
    MODEL_HELP,
    metrics_table,
    model_at,
    new_file,
    play_match,
    run_config,
    start_games,
    template_of,
    written,
)
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import BELIEVES_THE_ROW, MedicalRecord
from medserl_agentloop.games.medical.types import Role


def probe(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    data: Annotated[Path, typer.Option(help="Parquet file of games (medserl data convert).")],
    served: Annotated[str | None, typer.Option("--model", help="Name of the model that the server serves.")] = None,
    notes: Annotated[int, typer.Option(min=2, help="Rows to play, drawn by the seed.")] = 32,
    samples: Annotated[int, typer.Option(min=2, help="Games on each row.")] = 8,
    profile: Annotated[str | None, typer.Option(help="Prompt profile; else that of the run, or medserl.")] = None,
    judge: Annotated[str | None, typer.Option(help="Who judges; as in the run, or labels, if not given.")] = None,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Games in progress at once.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 300.0,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the rows, and seeds the sampling of every turn.")] = 0,
    output: Annotated[Path | None, typer.Option(help="New file for the games; else probe/ beside the run.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")] = None,
) -> None:
    """Play every note several times without training, and say which settings follow."""
    console = Console()
    with errors_in_one_line(stopped="the games finished so far are in the file named above"):
        output, run = new_file(output, "probe", model, served), run_config(model)
        named = {"profile": profile, "judge": judge}
        interaction, games = start_games(run, MedicalConfig, named, settings, data, notes, seed)
        asking = {"api_key_env": api_key_env, "timeout_s": timeout, "concurrency": concurrency}
        player = model_at(model, served, template_of(run), **asking)
        rows = [game.record.spec for game in games] * samples
        drawn: Any = {"temperature": temperature, "seed": seed, "concurrency": concurrency}
        with written(output, len(rows), notes, console) as done:
            records = asyncio.run(play_match(player, player, rows, interaction.config, done=done, **drawn))
    measured = role_metrics(records) | note_shares(records)
    console.print(metrics_table(measured))
    for reason, override in settings_that_follow(measured, interaction.config):
        say(console, f"- {reason}" + (f"\n    {override}" if override else ""))


def note_shares(games: Sequence[MedicalRecord]) -> dict[str, float]:
    """How much of what happens the note decides, ``selfplay/probe/…``.

    ``<role>/note_share`` is the share of the variance of the role's reward that lies between notes: the intraclass
    correlation of a one-way analysis of variance. ``agreement`` is the share of untouched notes on which all readable
    verdicts are the same.
    """
    import pandas as pd  # slow

    measures: dict[str, float] = {}
    for role in Role:
        rewards = pd.Series([game.reward(role.value) for game in games], [game.uid for game in games], dtype=float)
        if (share := _between(rewards.dropna())) is not None:
            measures[f"selfplay/probe/{role.value}/note_share"] = share
    verdicts: dict[str, list[Any]] = defaultdict(list)
    for game in (each for played in games for each in played.by_assessment):
        if not game.category.has_attack and game.assessment is not None and game.assessment.verdict is not None:
            verdicts[game.uid].append(game.assessment.verdict)
    if compared := [given for given in verdicts.values() if len(given) > 1]:
        measures["selfplay/probe/agreement"] = fmean(len(set(given)) == 1 for given in compared)
    return measures


def _between(rewards: Any) -> float | None:
    """Intraclass correlation by index, 0 to 1; None where there is no variance or nothing to compare."""
    groups = rewards.groupby(level=0).agg(["size", "mean", "var"]).dropna()  # one game alone has no variance
    sizes, total, count = groups["size"], groups["size"].sum(), len(groups)
    if count < 2:
        return None
    mean = (sizes * groups["mean"]).sum() / total
    between = (sizes * (groups["mean"] - mean) ** 2).sum() / (count - 1)
    within = ((sizes - 1) * groups["var"]).sum() / (total - count)
    spread = between + ((total - (sizes**2).sum() / total) / (count - 1) - 1) * within
    return max(0.0, float((between - within) / spread)) if spread else None


def settings_that_follow(measured: dict[str, float], config: MedicalConfig) -> Iterator[tuple[str, str]]:
    """Reasons, and what to write; empty where it is no key. From :func:`role_metrics` and :func:`note_shares`.

    An estimator is named only where its baseline can be measured: with turns that can be read, attacks that are valid
    and rewards that differ.
    """
    cannot_learn = False
    for role, key in ((Role.ATTACKER, "budget.attacker_reasoning"), (Role.ASSESSOR, "budget.assessor")):
        own = f"selfplay/{role.value}/"
        cut, read = measured.get(own + "truncation_rate", 0.0), measured.get(own + "parse_rate", 1.0)
        if cut > 0.3:
            yield (
                f"{cut:.0%} of the {role.value}'s turns are cut off: switch the model's thinking off",
                "+data.apply_chat_template_kwargs.enable_thinking=False",
            )
        elif cut > 0.02:
            now = config.budget.assessor if role is Role.ASSESSOR else config.budget.attacker_reasoning
            yield f"{cut:.0%} of the {role.value}'s turns are cut off", f"selfplay.{key}={2 * now}"
        if read + cut < 0.9:
            reason = f"{read:.0%} of the {role.value}'s turns can be read, of 90 %: warm start first"
            yield f"{reason} (docs/warm_start.md)", ""
        cannot_learn |= read < 0.9
    valid = measured.get("selfplay/attacker/valid_rate", 1.0)
    if valid < 0.5:
        reasons = {n.rpartition("/")[2]: v for n, v in measured.items() if n.startswith("selfplay/attacker/invalid/")}
        most = max(reasons, key=lambda name: reasons[name], default="")
        yield f"{valid:.0%} of the attacks are valid, most others are {most}: warm start the attacker first", ""
    quiet = measured.get("selfplay/assessor/no_signal_rate", 0.0)
    if quiet > 0.8 and not cannot_learn:
        yield f"in {quiet:.0%} of the groups all assessments earn the same: no estimator learns from these notes", ""
    share = measured.get("selfplay/probe/assessor/note_share")
    if share is not None and not cannot_learn and valid >= 0.5 and quiet <= 0.8:
        reason = f"the note decides {share:.0%} of the variance of the assessor's reward: a baseline per "
        if share > 0.5:
            yield reason + "note", "algorithm.adv_estimator=role_grpo actor_rollout_ref.rollout.n=8"
        else:
            yield reason + "role and kind", "algorithm.adv_estimator=role_rae"
    believes = config.judge == BELIEVES_THE_ROW
    if believes:
        yield "the judge reads no note: choose one that reads, and measure it (docs/judges.md)", "selfplay.judge=llm"
    knowable = measured.get("selfplay/judge/knowable_rate")
    if knowable is None and not believes:
        yield "nobody read the notes alone: add the blind gate", "'selfplay.blind={readings: 3, needed: 2}'"
    elif knowable is not None and knowable < 0.8:
        yield f"the reader finds {knowable:.0%} of the injected errors, of 80 %: measure it before you train", ""
