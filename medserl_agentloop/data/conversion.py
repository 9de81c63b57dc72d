"""Cases -> a folder with ``train.parquet``, ``val.parquet`` and ``manifest.json``, and what is kept out of it.

Called by ``medserl data convert``, which reads the command line and prints the summary. A screen keeps a case out
although it could serve: because it is nearly the same as another, or because its prompt is too long.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medserl_agentloop.core.manifest import MANIFEST, sha256_of
from medserl_agentloop.data.allocation import AllocationError
from medserl_agentloop.data.intake import MedecFormatError
from medserl_agentloop.data.reader import ReadResult
from medserl_agentloop.data.rows import Bar, GameRows, Row, RowPlan, Screen, build_rows, seed_note
from medserl_agentloop.data.vignettes import Vignette
from medserl_agentloop.data.writing import all_or_none, write_manifest, write_parquet
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Label

OVERLONG = "overlong prompt"
NEAR_DUPLICATE = "near-duplicate of a case to stay clear of"
THRESHOLD = 0.5  # Jaccard similarity of the two sets of 4-grams
_WORDS_PER_GRAM = 4
_NAMED_IN_A_MESSAGE = 10
Watch = Callable[[Iterable[Any], str, int | None], Iterable[Any]]  # stream, what it is, length if known


@dataclass(frozen=True)
class CrossSplitPair:
    """A training case and a validation case with a note of theirs nearly the same."""

    train: str
    val: str
    similarity: float


@dataclass(frozen=True)
class Prepared:
    """The input, the rows that are not yet written, and training and validation cases that are nearly the same."""

    read: ReadResult
    games: GameRows
    near_duplicates: list[CrossSplitPair]


def prepare(
    read: ReadResult, plan: RowPlan, screens: Sequence[Screen], exclude_overlong: bool, watch: Watch
) -> Prepared:
    """Screen the vignettes, make the rows and compare the splits.

    Raises:
        ValueError: The package's own errors, each a sentence; overlong prompts unless ``exclude_overlong``.
    """
    games = build_rows(watch(read.vignettes, "looking at cases", len(read.vignettes)), plan, screens)
    overlong = games.exclusions.get(OVERLONG, [])
    if overlong and not exclude_overlong:
        named = ", ".join(f"{text_id} ({detail})" for text_id, detail in overlong[:_NAMED_IN_A_MESSAGE])
        more = f" and {len(overlong) - _NAMED_IN_A_MESSAGE} more" if len(overlong) > _NAMED_IN_A_MESSAGE else ""
        raise AllocationError(
            f"{len(overlong)} prompts are overlong: {named}{more}; "
            "raise --max-prompt-tokens, or leave them out with --on-overlong exclude."
        )
    return Prepared(read, games, list(_across_splits(read.vignettes, games)))


def write(prepared: Prepared, folder: Path, command: str, options: dict[str, Any]) -> None:
    """Write all three files into ``folder``, or none.

    Raises:
        ValueError: They cannot be written, or a prompt lacks its note.
    """
    games = prepared.games
    for row in (*games.train, *games.val):
        # A profile that forgets the note would train on nothing.
        if row["extra_info"]["seed_note"] not in row["prompt"][-1]["content"]:
            raise MedecFormatError(
                f"the prompt of {row['extra_info']['text_id']} does not contain its note; "
                "write {{ note }} in every template of the profile."
            )
    with all_or_none(folder) as place:
        outputs = {}
        for split, rows in (("train", games.train), ("val", games.val)):
            path = place / f"{split}.parquet"
            write_parquet(rows, path)
            outputs[path.name] = {"rows": len(rows), "labels": labels(games, split), "sha256": sha256_of(path)}
        account = {
            "sources": [asdict(source) for source in prepared.read.reports],
            "outputs": outputs,
            "splits": {name: asdict(report) for name, report in games.reports.items()},
            "near_duplicates_across_splits": [asdict(pair) for pair in prepared.near_duplicates],
        }
        write_manifest(place / MANIFEST, command, options, account, games.exclusions)


def labels(games: GameRows, split: str) -> dict[str, int]:
    """Rows of a split by the label of the note that is presented."""
    rows = games.reports[split].rows.items()
    return {label.value: sum(n for category, n in rows if category.default_target_label is label) for label in Label}


def _across_splits(vignettes: list[Vignette], games: GameRows) -> Iterator[CrossSplitPair]:
    """Compares one note per case: its correct one, or its error note where that is all there is."""

    def used(rows: list[Row]) -> list[tuple[str, str]]:
        ids = {row["extra_info"]["vignette_id"] for row in rows}
        return [(v.vignette_id, v.clean_note or v.error_note or "") for v in vignettes if v.vignette_id in ids]

    val = used(games.val)
    index = NearDuplicateIndex(note for _, note in val)
    for name, note in used(games.train):
        if match := index.find(note):
            yield CrossSplitPair(name, val[match.number][0], round(match.similarity, 3))


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


def prompt_length(limit: int, exclude: bool, tokenizer: str | None, plan: RowPlan) -> Screen:
    """Notes, and bars if ``exclude``, what has a first prompt of more than ``limit`` tokens, template included.

    Raises:
        ValueError: The tokenizer cannot be loaded, or has no chat template.
    """
    encoder = ProfileEncoder(_load_tokenizer(tokenizer), load_profile(plan.profile))

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


def _load_tokenizer(path: str | None) -> Any:
    # Imported here: it takes seconds, and only --max-prompt-tokens needs it.
    from transformers import AutoTokenizer

    if path is None:
        raise AllocationError("--max-prompt-tokens needs --tokenizer: the name or folder of the model to train.")
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
