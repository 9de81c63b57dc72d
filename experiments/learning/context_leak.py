"""Measure the worth of the leak of ``selfplay.context=shared`` to a model: the same games in both
contexts.

Run by hand: ``python -m experiments.learning.context_leak --data data/own_notes/train.parquet``.
Each game is played in its own contexts; then the assessor assesses again with the attacker's turn,
the very same tokens, in front of it. So the two accuracies differ by the context and by nothing
else. Games without an attack have one turn, hence the same in both contexts, and are left out.

A model can only use a leak that it has learned to use: one that was trained in isolated contexts
gains nothing.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

from experiments.learning.results import mean_interval
from medserl_agentloop.backends.cpu_rollout import CpuRolloutServer
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.medical.case import Category
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.testing import build_agent_loop, compose_run

CONTEXTS = ("isolated", "shared")


class Replay:
    """A server client that answers a prompt it has seen as it did the first time.

    The attacker's prompt is the same in both contexts, so both get the same attack.
    """

    def __init__(self, server: CpuRolloutServer) -> None:
        self._server = server
        self._answers: dict[tuple[int, ...], TokenOutput] = {}

    async def generate(self, **request: Any) -> TokenOutput:
        prompt = tuple(request["prompt_ids"])
        if prompt not in self._answers:
            self._answers[prompt] = await self._server.generate(**request)
        return self._answers[prompt]


async def play(
    rows: list[dict[str, Any]], run: DictConfig, temperature: float
) -> dict[str, list[MedicalRecord]]:
    """The games of all rows in both contexts, in the order of the rows."""
    path = run.actor_rollout_ref.model.path
    server = CpuRolloutServer(run.actor_rollout_ref.rollout, run.actor_rollout_ref.model)
    await server.update_weights(
        AutoModelForCausalLM.from_pretrained(path).float().state_dict(), global_steps=0
    )
    client, tokenizer = Replay(server), AutoTokenizer.from_pretrained(path)
    games = {}
    for context in CONTEXTS:
        OmegaConf.update(run, "selfplay.context", context)
        here = run.copy()  # the agent loop reads a config once
        outputs = await asyncio.gather(
            *(
                build_agent_loop(client, tokenizer, here).run(
                    {"temperature": temperature}, extra_info=r
                )
                for r in rows
            )
        )
        games[context] = [
            MedicalRecord.model_validate(output.extra_fields[RECORD_KEY]) for output in outputs
        ]
    return games


def numbers(game: MedicalRecord) -> tuple[float, float]:
    """Return whether the verdict is right, and whether it is readable."""
    verdict = game.assessment.verdict if game.assessment else None
    return float(verdict is game.spec.target_label), float(verdict is not None)


def print_result(console: Console, games: dict[str, list[MedicalRecord]]) -> None:
    table = Table(title="Assessor on the same attacks: mean over games [95 % interval]")
    for column in ("category", "measure", "games", *CONTEXTS, "shared - isolated"):
        table.add_column(column)
    pairs = [
        pair
        for pair in zip(*(games[c] for c in CONTEXTS), strict=True)
        if all(g.assessment for g in pair)
    ]
    for category in dict.fromkeys(isolated.category for isolated, _ in pairs):
        scores = np.array(
            [[numbers(g) for g in pair] for pair in pairs if pair[0].category is category]
        )
        right, readable = scores[..., 0], scores[..., 1]  # (games, contexts)
        both = readable.all(axis=1)
        measures = {
            "readable": readable,
            "right": right,
            "right, where both are readable": right[both],
        }
        for measure, values in measures.items():
            if len(values) > 1:
                each = [
                    mean_interval(v.tolist())
                    for v in (values[:, 0], values[:, 1], values[:, 1] - values[:, 0])
                ]
                shown = [f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" for mean, low, high in each]
                table.add_row(category.value, measure, str(len(values)), *shown)
    console.print(table)
    console.print(f"{len(pairs)} of {len(games['isolated'])} attacks were valid and are counted")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="parquet file written by medec_to_parquet.py"
    )
    parser.add_argument(
        "--recipe", default="own_notes", help="prompts, budgets and, by default, the model"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        help="Hugging Face folders, all counted together, e.g. one of each seed",
    )
    parser.add_argument(
        "--rows", type=int, help="at most so many rows with an attack; default: all"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    facts = pq.read_table(options.data, columns=["extra_info"]).to_pydict()["extra_info"]
    rows = [row for row in facts if Category(row["category"]).has_attack][: options.rows]
    games: dict[str, list[MedicalRecord]] = {context: [] for context in CONTEXTS}
    for model in options.model or [None]:
        run = compose_run(f"+recipes={options.recipe}")
        if model:
            run.actor_rollout_ref.model.path = model
        for context, played in asyncio.run(play(rows, run, options.temperature)).items():
            games[context] += played
    print_result(Console(width=150), games)


if __name__ == "__main__":
    main()
