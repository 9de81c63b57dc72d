"""The start-up check of a dataset against the run: can every row be played as planned?

verl cuts or drops what does not fit and fails deep in a worker on what it does not know; this says
so before the first token. Called by the trainer when the data is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.data.rows import AGENT_NAME
from medserl_agentloop.data.writing import DIFFERS, differs_from_manifest
from medserl_agentloop.games.medical.prompting import Message, PromptProfile, load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, Role, VanillaAttacker


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
    selfplay: SelfPlayConfig,
    encoder: ChatEncoder,
    *,
    prompt_length: int,
    response_length: int,
) -> str:
    """Check every row of a dataset.

    Args:
        dataset: verl's ``RLHFDataset``.
        name: Which one, for messages.
        selfplay: The run's ``selfplay`` node.
        encoder: Tokenises the prompts as the agent loop will.
        prompt_length: verl's ``data.max_prompt_length``.
        response_length: verl's ``data.max_response_length``.

    Returns:
        One line that says what will be played and how long the longest row is.

    Raises:
        ConfigError: Names the row, what is wrong with it and what to do.
    """
    rows = dataset.dataframe
    profile = load_profile(selfplay.profile)
    agents = rows["agent_name"] if "agent_name" in rows.column_names else [None] * len(rows)
    categories: Counter[str] = Counter()
    longest_prompt = longest_response = 0
    for number, (agent, prompt, extra_info) in enumerate(zip(agents, rows["prompt"], rows["extra_info"], strict=True)):
        where = f"{name} row {number}"
        if agent != AGENT_NAME:
            raise ConfigError(
                f"{where}: agent_name is {agent!r}, expected {AGENT_NAME!r}. "
                "Write the file again with data_prep/medec_to_parquet.py."
            )
        try:
            spec = GameSpec.from_extra_info(extra_info)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if spec.task is Category.DECOY_BENIGN and selfplay.judge == "labels":
            raise ConfigError(
                f"{where}: decoy_benign games need a judge that reads the note, because selfplay.judge=labels "
                "cannot see a real error in a decoy. Take the category out of the data or set another judge."
            )
        vanilla_attacker = selfplay.vanilla_attacker.on(extra_info)
        first_role = spec.category.first_role(vanilla_attacker)
        try:
            expected = profile.messages(first_role, spec.task, spec.seed_note)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if list(prompt) != expected:
            raise ConfigError(
                f"{where}: {_why_other_prompt(list(prompt), spec, selfplay.profile, profile, vanilla_attacker)}"
            )
        prompt_tokens, response_tokens = plan_row(spec, selfplay, encoder, vanilla_attacker)
        longest_prompt = max(longest_prompt, prompt_tokens)
        longest_response = max(longest_response, response_tokens)
        categories[spec.category.value] += 1
    for key, needed, limit in (
        ("data.max_prompt_length", longest_prompt, prompt_length),
        ("data.max_response_length", longest_response, response_length),
    ):
        if needed > limit:
            raise ConfigError(
                f"{name}: its longest row needs {needed} tokens, but {key}={limit}. Set {key} to at least "
                f"{needed}, or plan shorter turns in selfplay.budget."
            )
    mix = ", ".join(f"{count} {category}" for category, count in sorted(categories.items()))
    return (
        f"{name}: plays all of its {len(rows)} rows ({mix}); longest prompt {longest_prompt} of {prompt_length} "
        f"tokens, longest planned response {longest_response} of {response_length}"
    )


def plan_row(
    spec: GameSpec,
    selfplay: SelfPlayConfig,
    encoder: ChatEncoder,
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP,
) -> tuple[int, int]:
    """Tokens of a row's first prompt, and the most its response can take as verl counts it.

    The response is the attacker's turn, the assessor's prompt with the longest note the attacker
    may write, and the assessor's turn; without an attack it is the assessor's turn alone. What an
    opponent plays takes no room.
    """
    assess = encoder.opening(Role.ASSESSOR, spec.category, spec.seed_note)
    budget = selfplay.budget
    if spec.category.first_role(vanilla_attacker) is Role.ASSESSOR:
        return (len(assess.ids), budget.assessor) if selfplay.plays(Role.ASSESSOR) else (1, 1)
    rewritten = spec.category.has_attack  # a copy is answered by the seed note itself
    if not selfplay.plays(Role.ATTACKER):
        note = budget.rewritten_note(assess.note_tokens) if rewritten else assess.note_tokens
        return len(assess.ids) - assess.note_tokens + note, budget.assessor
    attack = encoder.opening(Role.ATTACKER, spec.task, spec.seed_note)
    attacker = budget.attacker(attack.note_tokens)
    if not selfplay.plays(Role.ASSESSOR):
        return len(attack.ids), attacker
    # Every token of the attacker's turn could be note, so that is what the second prompt must hold.
    second_prompt = len(assess.ids) - assess.note_tokens + (attacker if rewritten else assess.note_tokens)
    return len(attack.ids), attacker + second_prompt + budget.assessor


def _why_other_prompt(
    prompt: list[Message], spec: GameSpec, name: str, profile: PromptProfile, vanilla_attacker: VanillaAttacker
) -> str:
    [other] = set(VanillaAttacker) - {vanilla_attacker}
    role = spec.category.first_role(other)
    if role is not spec.category.first_role(vanilla_attacker) and prompt == _rendered(profile, role, spec):
        here = vanilla_attacker.value
        return (
            f"its prompt is that of selfplay.vanilla_attacker={other.value}, and this run has {here}. Write the file "
            f"again with --vanilla-attacker {here}, or set selfplay.vanilla_attacker={other.value}."
        )
    return (
        f"its prompt is not what profile {name!r} renders for it. Write the file again with --profile {name}, "
        "or set selfplay.profile to the one it was written with."
    )


def _rendered(profile: PromptProfile, role: Role, spec: GameSpec) -> list[Message] | None:
    try:
        return profile.messages(role, spec.task, spec.seed_note)
    except ValueError:  # a profile may have no template for copies
        return None
