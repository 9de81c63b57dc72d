"""What keeps a vignette out of the files although it could serve: near-duplicates, overlong prompts.

Called by ``conversion.py``, which makes the screens that the options ask for; ``rows.py`` applies them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from medserl_agentloop.data.rows import Bar, RowPlan, Screen, seed_note
from medserl_agentloop.data.vignettes import Vignette
from medserl_agentloop.games.medical.encoding import ProfileEncoder
from medserl_agentloop.games.medical.prompting import load_profile

OVERLONG = "overlong prompt"
NEAR_DUPLICATE = "near-duplicate of a case to stay clear of"
THRESHOLD = 0.5  # Jaccard similarity of the two sets of 4-grams
_WORDS_PER_GRAM = 4


@dataclass(frozen=True)
class Match:
    """The most similar indexed text: its number and its Jaccard similarity."""

    number: int
    similarity: float


def four_grams(text: str) -> frozenset[str]:
    """The text's runs of four words, in lower case and without punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.casefold())
    runs = range(max(1, len(words) - _WORDS_PER_GRAM + 1))
    return frozenset(" ".join(words[i : i + _WORDS_PER_GRAM]) for i in runs)


class NearDuplicateIndex:
    """Finds notes that have half of their 4-grams in common, or more. Exact: no such pair is missed."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._texts_of: defaultdict[str, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            grams = four_grams(text)
            self._sizes.append(len(grams))
            for gram in grams:
                self._texts_of[gram].append(number)

    def find(self, text: str) -> Match | None:
        """The most similar indexed text, the first of several; None if none reaches the threshold."""
        grams = four_grams(text)
        common = Counter(number for gram in grams for number in self._texts_of.get(gram, ()))
        matches = (Match(n, shared / (len(grams) + self._sizes[n] - shared)) for n, shared in common.items())
        best = max(matches, key=lambda match: (match.similarity, -match.number), default=None)
        return best if best is not None and best.similarity >= THRESHOLD else None


def near_duplicates_of(others: Sequence[Vignette]) -> Screen:
    """Keeps out every case one of whose notes is a near-duplicate of a note of ``others``."""
    notes = [(other.vignette_id, note) for other in others for note in other.notes]
    index = NearDuplicateIndex(note for _, note in notes)

    def bars(vignette: Vignette) -> Iterator[Bar]:
        matches = [match for note in vignette.notes if (match := index.find(note))]
        if matches:
            best = max(matches, key=lambda match: match.similarity)
            yield Bar(NEAR_DUPLICATE, f"{notes[best.number][0]} (4-gram Jaccard {best.similarity:.2f})")

    return bars


def prompt_length(limit: int, exclude: bool, tokenizer: Any, plan: RowPlan) -> Screen:
    """Notes, and bars if ``exclude``, what has a first prompt of more than ``limit`` tokens, template included."""
    encoder = ProfileEncoder(tokenizer, load_profile(plan.profile))

    def bars(vignette: Vignette) -> Iterator[Bar]:
        for category in plan.mix:
            note = seed_note(vignette, category)
            if note is None:
                continue
            role = category.first_role(plan.vanilla_attacker)
            length = len(encoder.of(role, category, note).ids)
            if length > limit:
                detail = f"{category.value}: {length} tokens, limit {limit}"
                yield Bar(OVERLONG, detail, (category,) if exclude else ())

    return bars


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
