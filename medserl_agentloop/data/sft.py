"""MEDEC pairs -> conversations to imitate before self-play, for both roles of a prompt profile.

Called by ``medserl data sft``; verl's ``MultiTurnSFTDataset`` reads the ``messages`` column.
Every answer is read back by the profile's own parser, and every attack played by the game's rules,
before it is written: a model can only learn turns that count. An answer begins with the profile's
``assistant_prefix``, which self-play puts into the prompt.

verl tokenises each message alone, and Qwen3's chat template takes the reasoning out of an assistant's
message that follows no question; verl's own advice, ``ignore_input_ids_mismatch=True``, would train on answers
without reasoning. Give such a model a plain ``data.apply_chat_template_kwargs.chat_template`` for the warm start,
as ``recipes/warm_start_base.yaml`` does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.compute as pc  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.core.manifest import DIFFERS, differs_from_manifest
from medserl_agentloop.data.rows import RowPlan, build_rows
from medserl_agentloop.data.vignettes import EditTag, Vignette
from medserl_agentloop.data.writing import MESSAGES, columns
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.parsing import UnwritableTurn
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.rules import EditLimits, Game
from medserl_agentloop.games.medical.types import Category, ErrorType, GameSpec, Label, Role

Row = dict[str, Any]  # one parquet row, as SFT_SCHEMA declares it

SFT_SCHEMA: Any = pa.schema(
    columns(messages=MESSAGES, data_source=str, game_role=str, category=str, split=str, vignette_id=str, index=int)
)


@dataclass(frozen=True)
class SftRows:
    """The conversations of both splits, and reason -> number of vignettes (or attacks) left out."""

    train: list[Row]
    val: list[Row]
    left_out: dict[str, int]


def build_sft_rows(
    vignettes: Sequence[Vignette],
    *,
    val_fraction: float = 0.1,
    seed: int = 42,
    profile: str = "medserl",
    split_of: Mapping[str, str] | None = None,
) -> SftRows:
    """Conversations of one user's and one assistant's message each, shuffled.

    Each pair gives an attack on the clean note and an assessment of either note. With the same
    input, fraction and seed, a case is in the same split as ``build_rows`` puts it; ``split_of``, from
    ``read_splits``, puts it elsewhere, and leaves out the cases that it does not name.

    Raises:
        ValueError: A note or sentence holds text that the game would read as part of its format; the vignettes
            cannot be split as asked; the profile does not exist.
    """
    prompts = load_profile(profile)
    reasons = [_why_not(vignette) for vignette in vignettes]
    left_out = Counter(filter(None, reasons))
    cases = [vignette for vignette, reason in zip(vignettes, reasons, strict=True) if not reason]
    if not cases:
        raise ValueError("the input has no pair of an error note and its clean note; give MEDEC rows with both.")
    why = "vignettes that are in neither file of --splits-of"
    if split_of is None:
        why = "vignettes that have a source that asks for other games only"
        # Split as the rows for self-play are: nothing taught here is validated on there. This plan makes one
        # benign row for every vignette with a clean note and leaves none out.
        plan = RowPlan({Category.VANILLA_BENIGN: 1}, val_fraction=val_fraction, seed=seed, profile=profile)
        games = build_rows(vignettes, plan)
        split_of = {r["extra_info"]["vignette_id"]: r["extra_info"]["split"] for r in games.train + games.val}
    rows: dict[str, list[Row]] = {"train": [], "val": []}
    for case in cases:
        split = split_of.get(case.vignette_id)
        if split is None:
            left_out[why] += 1
            continue
        answers = _answers(case, prompts)
        if Category.ADVERSARIAL_BENIGN not in answers:
            left_out["attacks that change more than the game's limits allow"] += 1
        rows[split] += [_row(case, category, answer, split, prompts) for category, answer in answers.items()]
    if not rows["train"] and not rows["val"]:
        raise ValueError("no case of the input is in the given splits; give the input that they were made from.")
    for name, members in rows.items():
        random.Random(f"{seed}/sft/{name}").shuffle(members)
    for index, row in enumerate(rows["train"] + rows["val"]):
        row["index"] = index
    return SftRows(rows["train"], rows["val"], dict(left_out))


def read_splits(folder: Path) -> dict[str, str]:
    """Vignette id -> ``train`` or ``val``, as the files of a ``medec_to_parquet.py`` folder have it.

    Raises:
        ValueError: A file is missing, is not such a file, or is from another run than the manifest.
    """
    found: dict[str, str] = {}
    for split in ("train", "val"):
        path = folder / f"{split}.parquet"
        if differs_from_manifest(path):
            raise ValueError(f"{path}: {DIFFERS}.")
        try:
            column = pq.read_table(path, columns=["extra_info"])["extra_info"]
            ids = pc.struct_field(column, "vignette_id").to_pylist()
        except (OSError, KeyError, pa.ArrowException) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"{path}: no splits can be read from it ({reason}); give a folder written by medec_to_parquet.py."
            ) from error
        found |= dict.fromkeys(ids, split)
    return found


def _why_not(vignette: Vignette) -> str:
    """Why the vignette cannot be taught; empty if it can."""
    v = vignette
    if v.error_note is None or v.clean_note is None:
        return "vignettes with only one note"
    if v.edit_tag is EditTag.NO_OP:
        return "vignettes whose two notes differ in letter case or white space only"
    if v.error_type is None or not v.error_sentence or not v.corrected_sentence:
        return "vignettes without an error type or without the two sentences"
    if one_line(v.error_sentence) not in one_line(v.error_note):
        return "vignettes whose error sentence is not in the error note"
    return ""


def _answers(case: Vignette, profile: PromptProfile) -> dict[Category, str]:
    """What is answered in each game: two assessments, and the attack if the game's limits allow it."""
    error_type, wrong, right = case.error_type, case.error_sentence, case.corrected_sentence
    assert error_type and wrong and right and case.error_note and case.clean_note  # see _why_not
    prefix = profile.settings.assistant_prefix
    kind = "causal organism" if error_type is ErrorType.CAUSAL_ORGANISM else error_type.value
    nothing = (
        "I compared findings, diagnosis, management, treatment and drugs sentence by sentence, and found nothing wrong."
    )
    found = f'The sentence "{wrong}" does not fit the rest of the note: the {kind} is wrong. It should read: {right}'
    changed = (
        f'I change the sentence "{right}" to "{wrong}". '
        f"That makes the {kind} wrong, and the rest of the note stays as it is."
    )
    write, role = profile.parser.write_assessment, Role.ASSESSOR
    try:
        safe = write(nothing, Label.SAFE, prefill=prefix)
        harmful = write(found, Label.HARMFUL, wrong, error_type, right, prefill=prefix)
        role = Role.ATTACKER
        attack = profile.parser.write_attack(changed, case.error_note, label=Label.HARMFUL, prefill=prefix)
    except UnwritableTurn as error:
        raise ValueError(
            f"vignette {case.vignette_id!a}: the {role.value}'s answer would break the output format "
            f"({error}), because its note or sentences hold text such as </think> or 'correction:'; "
            "take the row out of the input."
        ) from None
    answers = {Category.VANILLA_BENIGN: prefix + safe, Category.VANILLA_HARMFUL: prefix + harmful}
    spec = GameSpec(
        category=Category.ADVERSARIAL_BENIGN,
        target_label=Label.HARMFUL,
        seed_note=case.clean_note,
        error_note=case.error_note,
        clean_note=case.clean_note,
        error_type=error_type,
        error_sentence=wrong,
        corrected_sentence=right,
        vignette_id=case.vignette_id,
    )
    game = Game(spec, EditLimits(), profile.parser)
    game.play(attack, prefill=prefix)
    if game.record.attack is not None and not game.record.attack.invalid:
        answers[Category.ADVERSARIAL_BENIGN] = prefix + attack
    return answers


def _row(case: Vignette, category: Category, answer: str, split: str, profile: PromptProfile) -> Row:
    role = category.first_role()
    note = case.error_note if category.seed_label is Label.HARMFUL else case.clean_note
    return {
        "messages": [*profile.messages(role, category, note or ""), {"role": "assistant", "content": answer}],
        "data_source": f"{case.subset}_sft/{category.value}",
        "game_role": role.value,
        "category": category.value,
        "split": split,
        "vignette_id": case.vignette_id,
    }
