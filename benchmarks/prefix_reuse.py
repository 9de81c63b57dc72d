"""Measure how much of the game's prompts SGLang's prefix cache serves, in private and in shared
contexts.

Plays every row's game several times, as ``rollout.n`` does, on verl's own SGLang server with an
empty cache:

    python benchmarks/prefix_reuse.py --rows data/own_notes/train.parquet

Needs the environment of ``make sglang-env``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import pyarrow.parquet as pq
import typer
import verl  # noqa: F401  # loads the plugin
from live_sglang import LiveSGLang
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from verl.utils import hf_tokenizer

from medserl_agentloop.testing import build_agent_loop, compose_run

CONTEXTS = ("isolated", "shared")


Reuse: TypeAlias = dict[str, Counter[str]]
"""By role:

``turns``, the tokens of their ``prompt``, and how many of these were ``cached`` by the engine.
"""


class CountingClient:
    """The server client of one game; counts each turn's prompt for its role."""

    def __init__(self, server: LiveSGLang, reuse: Reuse, roles: list[str]) -> None:
        self._server, self._reuse, self._roles = server, reuse, iter(roles)

    async def generate(self, request_id: str, **request: Any) -> Any:
        output = await self._server.generate(request_id, **request)
        tokens = output.extra_fields
        counts = {"turns": 1, "prompt": tokens["prompt_tokens"], "cached": tokens["cached_tokens"]}
        self._reuse[next(self._roles)].update(counts)
        return output


async def play(server: LiveSGLang, run: DictConfig, rows: list[dict[str, Any]]) -> Reuse:
    """Play the rows' games at the same time."""
    tokenizer = hf_tokenizer(run.actor_rollout_ref.model.path)
    reuse: Reuse = defaultdict(Counter)
    rollout = run.actor_rollout_ref.rollout
    sampling = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "logprobs": True,
    }
    games = []
    for row in rows:
        attacked = row["extra_info"]["category"] not in ("vanilla_harmful", "vanilla_benign")
        client = CountingClient(
            server, reuse, ["attacker", "assessor"] if attacked else ["assessor"]
        )
        games.append(build_agent_loop(client, tokenizer, run).run(sampling, **row))
    await asyncio.gather(*games)
    return reuse


def main(
    rows: Annotated[Path, typer.Option(help="Parquet written by data_prep/medec_to_parquet.py.")],
    recipe: Annotated[
        str, typer.Option(help="Recipe whose rollout is measured.")
    ] = "[own_notes,sglang_cpu]",
    model: Annotated[str, typer.Option(help="Model folder; default: the recipe's.")] = "",
    games: Annotated[int, typer.Option(help="Rows to play.")] = 16,
    samples: Annotated[int, typer.Option(help="Games of each row, as rollout.n.")] = 4,
) -> None:
    """Report the cache hits of each role's prompts and the prompt tokens that were not computed
    again.
    """
    run = compose_run(f"+recipes={recipe}")
    if model:
        run.actor_rollout_ref.model.path = model
    OmegaConf.resolve(run)
    batch = [row for row in pq.read_table(rows).to_pylist()[:games] for _ in range(samples)]
    server = LiveSGLang(run)
    asyncio.run(play(server, run, batch[:1]))  # the first game builds what the others share
    table = Table(
        "context",
        "role",
        "turns",
        "prompt tokens",
        "from the cache",
        "share",
        "computed",
        "seconds",
    )
    for context in CONTEXTS:
        run.selfplay.context = context
        server.empty_prefix_cache()
        started = time.monotonic()
        reuse = asyncio.run(play(server, run, batch))
        seconds = f"{time.monotonic() - started:.1f}"
        for role, counts in [*sorted(reuse.items()), ("both", sum(reuse.values(), Counter()))]:
            turns, prompt, cached = counts["turns"], counts["prompt"], counts["cached"]
            numbers = (turns, prompt, cached, f"{cached / max(prompt, 1):.1%}", prompt - cached)
            table.add_row(context, role, *map(str, numbers), seconds if role == "both" else "")
    server.close()
    console = Console(width=120)
    console.print(f"{len(batch)} games: {games} rows of {rows}, {samples} times each; {recipe}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
