"""The rows of a run: which of them an epoch plays, and whether each can be played as planned.

verl 0.9.1 builds its own sampler and asks nobody, so the shares of ``selfplay.mix`` are made where its dataset is: the
rows of an epoch are chosen from those of the file. They are chosen once, by ``data.seed``; verl shuffles and resumes
them as it does any other rows. verl cuts or drops rows that do not fit and fails deep in a worker on what it does not
know; the checks say so before the first token. Called by the trainer when the data is loaded.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import AGENT_NAME, Interaction
from medserl_agentloop.paths import DIFFERS, differs_from_manifest


def mixed_rows(kinds: Sequence[str], mix: Mapping[str, float], seed: int) -> list[int]:
    """Rows of an epoch that is as long as the file and has the shares of ``mix``, from the kind of each row.

    Where a kind has fewer rows than its share, they are used in turn; where it has more, the seed
    chooses. The kinds are interleaved, so that not only the epoch but any stretch of it has these
    shares, to within a row for each kind: so does a batch of a run with ``data.shuffle=False``.

    Raises:
        ConfigError: Every share is 0, or a kind has a share and no rows.
    """
    if not any(mix.values()):
        raise ConfigError("selfplay.mix: every share is 0; give the kinds to play a share, or leave it null")
    shares = {kind: Fraction(share) for kind, share in mix.items() if share}
    rows = {kind: [n for n, k in enumerate(kinds) if k == kind] for kind in shares}
    missing = [kind for kind, members in rows.items() if not members]
    if missing:
        raise ConfigError(
            f"selfplay.mix has a share for {', '.join(missing)}, of which data.train_files has no row (it has "
            f"{_counted(filter(None, kinds))}). Write the file with these kinds in --mix, or take them out of "
            "selfplay.mix."
        )
    for kind, members in rows.items():
        random.Random(f"{seed}/{kind}").shuffle(members)
    total = sum(shares.values())
    taken = dict.fromkeys(shares, 0)
    chosen = []
    for place in range(1, len(kinds) + 1):
        # The kind that is furthest behind its share up to here.
        behind = max(shares, key=lambda kind: place * shares[kind] / total - taken[kind])
        chosen.append(rows[behind][taken[behind] % len(rows[behind])])
        taken[behind] += 1
    return chosen


def apply_mix(
    dataset: Any, mix: Mapping[str, float], kind_of: Callable[[Mapping[str, Any]], str], *, seed: int
) -> None:
    """Give verl's ``RLHFDataset`` the rows of an epoch with the shares of ``mix``, and say so.

    The number of rows stays, so that what verl has planned by it (steps, learning rate) stays true.
    """
    kinds = [kind_of(facts) for facts in dataset.dataframe["extra_info"]]
    # A config may hold members of an enum; a kind is its value.
    shares = {str(getattr(kind, "value", kind)): share for kind, share in mix.items()}
    chosen = mixed_rows(kinds, shares, seed)
    dataset.dataframe = dataset.dataframe.select(chosen)
    print(
        f"[medserl] selfplay.mix: an epoch of {len(chosen)} rows holds {_counted(kinds[row] for row in chosen)}; "
        f"{len(kinds) - len(set(chosen))} rows of the file are left out of it",
        flush=True,
    )


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
        kinds.append(interaction.kind(facts))
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
