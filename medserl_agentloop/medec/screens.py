"""What keeps a vignette out of the files although it could serve: near-duplicates, overlong prompts.

``data_prep/medec_to_parquet.py`` makes the screens that its options ask for; ``survey.py`` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from medserl_agentloop.game.types import Category, VanillaAttacker
from medserl_agentloop.medec.near_duplicates import NearDuplicateIndex
from medserl_agentloop.medec.vignettes import Vignette
from medserl_agentloop.rollout.encoding import ChatEncoder

OVERLONG = "overlong prompt"
NEAR_DUPLICATE = "near-duplicate of a case to stay clear of"


@dataclass(frozen=True)
class Bar:
    """A vignette may not serve ``categories``: None keeps it out altogether, () only notes it."""

    reason: str
    detail: str
    categories: tuple[Category, ...] | None = None


class Screen(Protocol):
    """Looks at one vignette at a time."""

    def bars(self, vignette: Vignette) -> Iterator[Bar]:
        """What the vignette may not serve."""


class NearDuplicates:
    """Keeps out every case one of whose notes is a near-duplicate of a note of ``others``."""

    def __init__(self, others: Sequence[Vignette]) -> None:
        # One number per note; its vignette is found again through this list.
        self._notes = [(number, at) for number, other in enumerate(others) for at in range(len(other.notes))]
        self._others = others
        self._index = NearDuplicateIndex((note for other in others for note in other.notes), self._note)

    def _note(self, number: int) -> str:
        vignette, at = self._notes[number]
        return self._others[vignette].notes[at]

    def bars(self, vignette: Vignette) -> Iterator[Bar]:
        """One bar where the case is a near-duplicate; its detail names the other case."""
        matches = [match for note in vignette.notes if (match := self._index.find(note))]
        if matches:
            best = max(matches, key=lambda match: match.similarity)
            other = self._others[self._notes[best.number][0]].vignette_id
            yield Bar(NEAR_DUPLICATE, f"{other} (4-gram Jaccard {best.similarity:.2f})")


class PromptLength:
    """Notes, and bars if ``exclude``, what has a first prompt of more than ``limit`` tokens, template included."""

    def __init__(
        self,
        limit: int,
        exclude: bool,
        encoder: ChatEncoder,
        categories: Sequence[Category],
        vanilla_attacker: VanillaAttacker,
        seed_note: Callable[[Vignette, Category], str | None],
    ) -> None:
        self._limit = limit
        self._exclude = exclude
        self._encoder = encoder
        self._vanilla_attacker = vanilla_attacker
        self._categories = categories
        self._seed_note = seed_note

    def bars(self, vignette: Vignette) -> Iterator[Bar]:
        """One bar per category that is too long; its detail says how long."""
        for category in self._categories:
            note = self._seed_note(vignette, category)
            if note is None:
                continue
            role = category.first_role(self._vanilla_attacker)
            length = len(self._encoder.opening(role, category, note).ids)
            if length > self._limit:
                yield Bar(
                    OVERLONG,
                    f"{category.value}: {length} tokens, limit {self._limit}",
                    (category,) if self._exclude else (),
                )


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model.

    Raises:
        ValueError: It cannot be loaded or has no chat template.
    """
    # Imported here: it takes seconds, and only --max-prompt-tokens needs it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library's errors have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"tokenizer {path}: cannot be loaded ({reason}); give --tokenizer the folder or name of the model to train."
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer {path}: it has no chat template; give --tokenizer that of an instruct model.")
    return tokenizer
