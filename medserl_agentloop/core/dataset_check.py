"""The start-up check of a dataset against the run: can every row be played as planned?

verl cuts or drops what does not fit and fails deep in a worker on what it does not know; this says
so before the first token. Called by the trainer when the data is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import AGENT_NAME, Interaction
from medserl_agentloop.core.manifest import DIFFERS, differs_from_manifest


def check_files(files: str | Sequence[str]) -> None:
    """Refuse files of two different conversions, which a killed one may leave side by side.

    Args:
        files: verl's ``data.train_files`` or ``data.val_files``.

    Raises:
        ConfigError: A file is not the one its manifest speaks of.
    """
    for file in [files] if isinstance(files, str) else files:
        if differs_from_manifest(Path(file)):
            raise ConfigError(f"{file}: {DIFFERS}.")


def check_dataset(
    dataset: Any,
    name: str,
    interaction: Interaction[Any, Any],
    encoder: ChatEncoder,
    *,
    prompt_length: int,
    response_length: int,
) -> str:
    """Check every row of a dataset.

    Args:
        dataset: verl's ``RLHFDataset``.
        name: Which one, for messages.
        interaction: The run's game.
        encoder: Tokenises the prompts as the agent loop will.
        prompt_length: verl's ``data.max_prompt_length``.
        response_length: verl's ``data.max_response_length``.

    Returns:
        One line that says what will be played and how long the longest row is.

    Raises:
        ConfigError: Names the row, what is wrong with it and what to do.
    """
    rows = dataset.dataframe
    agents = rows["agent_name"] if "agent_name" in rows.column_names else [None] * len(rows)
    kinds: Counter[str] = Counter()
    longest_prompt = longest_response = 0
    for number, (agent, prompt, facts) in enumerate(zip(agents, rows["prompt"], rows["extra_info"], strict=True)):
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
        kinds[interaction.kind(facts)] += 1
    for key, needed, limit in (
        ("data.max_prompt_length", longest_prompt, prompt_length),
        ("data.max_response_length", longest_response, response_length),
    ):
        if needed > limit:
            raise ConfigError(
                f"{name}: its longest row needs {needed} tokens, but {key}={limit}. Set {key} to at least "
                f"{needed}, or plan shorter turns."
            )
    mix = ", ".join(f"{count} {kind}".strip() for kind, count in sorted(kinds.items()))
    return (
        f"{name}: plays all of its {len(rows)} rows ({mix}); longest prompt {longest_prompt} of {prompt_length} "
        f"tokens, longest planned response {longest_response} of {response_length}"
    )
