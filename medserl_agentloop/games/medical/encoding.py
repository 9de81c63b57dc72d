"""The prompts of a profile in tokens, and how many of them the game on a row of a data set may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medserl_agentloop.core.encoding import ChatEncoder, EncodedPrompt
from medserl_agentloop.core.interaction import Message
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Category, GameSpec, Role, VanillaAttacker

if TYPE_CHECKING:
    from medserl_agentloop.games.medical.config import MedicalConfig


class ProfileEncoder(ChatEncoder):
    """The encoder of the core, told role, category and note."""

    def __init__(self, tokenizer: Any, profile: PromptProfile, template_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(tokenizer, template_kwargs)
        self.profile = profile

    def of(self, role: Role, category: Category, note: str) -> EncodedPrompt:
        """The prompt that opens a context of ``role``'s own.

        Raises:
            ValueError: The template does not show the note exactly once, or the chat template refuses the messages.
        """
        return self.opening(self.profile.turn(role, category, note))

    def stop_of(self, role: Role) -> dict[str, list[Any]]:
        """Sampling parameters that end ``role``'s turn where the profile says so."""
        return self.stop(self.profile.settings.stop.get(role, []))


def why_other_prompt(
    prompt: list[Message], spec: GameSpec, name: str, profile: PromptProfile, here: VanillaAttacker
) -> str:
    """Why a row's prompt is not what the profile called ``name`` renders for it, and what to do."""
    [other] = set(VanillaAttacker) - {here}
    try:
        other_prompt = profile.messages(spec.category.first_role(other), spec.task, spec.seed_note)
    except ValueError:  # a profile may have no template for copies
        other_prompt = []
    if prompt == other_prompt:
        return (
            f"its prompt is that of selfplay.vanilla_attacker={other.value}, and this run has {here.value}. Write the "
            f"file again with --vanilla-attacker {here.value}, or set selfplay.vanilla_attacker={other.value}."
        )
    return (
        f"its prompt is not what profile {name!r} renders for it. Write the file again with --profile {name}, "
        "or set selfplay.profile to the one it was written with."
    )


def plan_row(
    spec: GameSpec,
    selfplay: MedicalConfig,
    encoder: ProfileEncoder,
    vanilla_attacker: VanillaAttacker = VanillaAttacker.SKIP,
) -> tuple[int, int]:
    """Tokens of a row's first prompt, and the most its response can take as verl counts it.

    The response is the attacker's turn, the assessor's prompt with the longest note the attacker
    may write, and the assessor's turn; without an attack it is the assessor's turn alone. What an
    opponent plays takes no room.
    """
    assess = encoder.of(Role.ASSESSOR, spec.category, spec.seed_note)
    budget = selfplay.budget
    if spec.category.first_role(vanilla_attacker) is Role.ASSESSOR:
        return (len(assess.ids), budget.assessor) if selfplay.plays(Role.ASSESSOR) else (1, 1)
    rewritten = spec.category.has_attack  # a copy is answered by the seed note itself
    if not selfplay.plays(Role.ATTACKER):
        note = budget.rewritten_note(assess.data_tokens) if rewritten else assess.data_tokens
        return len(assess.ids) - assess.data_tokens + note, budget.assessor
    attack = encoder.of(Role.ATTACKER, spec.task, spec.seed_note)
    attacker = budget.attacker(attack.data_tokens)
    if not selfplay.plays(Role.ASSESSOR):
        return len(attack.ids), attacker
    # Every token of the attacker's turn could be note, so that is what the second prompt must hold.
    second_prompt = len(assess.ids) - assess.data_tokens + (attacker if rewritten else assess.data_tokens)
    return len(attack.ids), attacker + second_prompt + budget.assessor
