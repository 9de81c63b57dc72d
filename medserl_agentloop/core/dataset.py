"""Whether each row of a run can be played as planned. Called by the trainer when the data is loaded.

verl cuts or drops rows that do not fit and fails deep in a worker on what it does not know; the checks say so before
the first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import AGENT_NAME, Interaction
from medserl_agentloop.paths import DIFFERS, differs_from_manifest


def _counted(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count} {kind}".strip() for kind, count in sorted(Counter(kinds).items()))


def check_files(files: str | Sequence[str]) -> None:
    """Refuse data files of two different conversions, which a killed one may leave side by side."""
    for file in [files] if isinstance(files, str) else files:
        if differs_from_manifest(Path(file)):
            raise ConfigError(f"{file}: {DIFFERS}.")


def check_dataset(
    dataset: Any,
    name: str,
    interaction: Interaction[Any, Any],
    encoder: ChatEncoder,
    data: Any,
    most: int | None = None,
) -> str:
    """Check every row of verl's ``RLHFDataset``, which messages call ``name``; or ``most`` with the longest facts.

    Returns one line that says what will be played and how long the longest row is, by the limits of verl's ``data``.

    Raises:
        ConfigError: Names the row, what is wrong with it and what to do.
    """
    rows = dataset.dataframe
    agents = rows["agent_name"] if "agent_name" in rows.column_names else [None] * len(rows)
    kinds: list[str] = []
    longest_prompt = longest_response = 0
    everything = list(enumerate(zip(agents, rows["prompt"], rows["extra_info"], strict=True)))
    if most is not None:
        everything = sorted(nlargest(most, everything, key=lambda row: len(str(row[1][2]))), key=itemgetter(0))
    for number, (agent, prompt, facts) in everything:
        where = f"{name} row {number}"
        if agent != AGENT_NAME:
            raise ConfigError(
                f"{where}: agent_name is {agent!r}, expected {AGENT_NAME!r}. "
                "Write the file again with data_prep/medec_to_parquet.py."
            )
        try:
            prompt_tokens, response_tokens = interaction.plan(facts, list(prompt), encoder)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        longest_prompt = max(longest_prompt, prompt_tokens)
        longest_response = max(longest_response, response_tokens)
        kinds.append(interaction.new_game(facts).record.kind)
    for key, needed in (("max_prompt_length", longest_prompt), ("max_response_length", longest_response)):
        if needed > data[key]:
            raise ConfigError(
                f"{name}: its longest row needs {needed} tokens, but data.{key}={data[key]}. Set data.{key} to at "
                f"least {needed}, or plan shorter turns."
            )
    return (
        f"{name}: plays all of its {len(rows)} rows ({_counted(kinds)}); longest prompt {longest_prompt} of "
        f"{data.max_prompt_length} tokens, longest planned response {longest_response} of {data.max_response_length}"
    )
