"""Conversations to imitate before self-play, for both roles, made of MEDEC's pairs.

verl's ``MultiTurnSFTDataset`` reads the ``messages`` column. Answers about pairs come from
templates; each is read back by the profile's own parser, and each attack is played by the game's
rules, so that a model only learns turns that count. Answers begin with the profile's
``assistant_prefix``.

verl tokenises each message alone, and Qwen3's chat template takes the reasoning out of an
assistant's message that follows no question; verl's own advice, ``ignore_input_ids_mismatch=True``,
would train on answers without reasoning. Give such a model a plain ``chat_template``, as
``recipes/warm_start_base.yaml`` does.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from medserl_agentloop.data.cases import Case, EditTag
from medserl_agentloop.data.rows import MESSAGES, Exclusions, Row, RowPlan, SplitRows, build_rows
from medserl_agentloop.games.medical.case import (
    Category,
    GameSpec,
    Label,
    Role,
    in_words,
    known_type,
)
from medserl_agentloop.games.medical.edit import changed_part, edit_between, one_line
from medserl_agentloop.games.medical.parsing import UnwritableTurn
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.paths import DIFFERS, differs_from_manifest, read_parquet

_HARMFUL = Category.VANILLA_HARMFUL
_TEXTS = ("data_source", "game_role", "category", "split", "vignette_id")
SFT_SCHEMA: Any = pa.schema(
    {"messages": MESSAGES, **dict.fromkeys(_TEXTS, "string"), "index": "int64"}
)


def build_sft_rows(
    cases: Sequence[Case],
    *,
    val_fraction: float = 0.1,
    seed: int = 42,
    prompts: PromptProfile | None = None,
    split_of: Mapping[str, str] | None = None,
) -> SplitRows:
    """Conversations of one user's and one assistant's message each, shuffled.

    Each pair gives an attack on the clean note and an assessment of either note. With the same
    input, fraction and seed, a case is in the same split as ``build_rows`` puts it; ``split_of``,
    from ``read_splits``, puts it elsewhere, and leaves out the cases that it does not name. A
    ValueError says that a note or sentence holds text that the game would read as part of its
    format, or that the cases cannot be split as asked.
    """
    prompts = prompts or load_profile()
    exclusions: Exclusions = defaultdict(list)
    elsewhere = "cases that are in neither file of --splits-of"
    if split_of is None:
        elsewhere = "cases that have a source that asks for other games only"
        # Split as the rows for self-play are: nothing taught here is validated on there. This plan
        # makes one benign row for every case with a clean note and leaves none out.
        plan = RowPlan(
            mix=f"{Category.VANILLA_BENIGN.value}=1", val_fraction=val_fraction, seed=seed
        )
        games = build_rows(cases, plan)
        split_of = {
            r["extra_info"]["vignette_id"]: r["extra_info"]["split"]
            for r in games.train + games.val
        }
    rows: list[Row] = []
    for case in cases:
        answers = _answers(case, prompts)
        if isinstance(answers, str) or case.case_id not in split_of:
            exclusions[answers if isinstance(answers, str) else elsewhere].append(
                (case.case_id, None)
            )
            continue
        if Category.ADVERSARIAL_BENIGN not in answers:
            exclusions["attacks that change more than the game's limits allow"].append(
                (case.case_id, None)
            )
        for category, answer in answers.items():
            source, role = (
                f"{case.subset}_sft/{category.value}",
                Role.ATTACKER if category.has_attack else Role.ASSESSOR,
            )
            messages = prompts.messages(role, category, _game(case, category, prompts).note)
            rows.append(_row(source, role, category, case.case_id, messages, answer))
    if not rows:
        raise ValueError(f"no case of the input can be taught: {_reasons(exclusions)}.")
    return _in_splits(rows, split_of, seed, exclusions)


def read_splits(folder: Path) -> dict[str, str]:
    """Case id -> split, as a folder of ``medserl data convert`` has it; a ValueError names a file
    that is wrong.
    """
    splits: dict[str, str] = {}
    for split in ("train", "val"):
        path = folder / f"{split}.parquet"
        if differs_from_manifest(path):
            raise ValueError(f"{path}: {DIFFERS}.")
        columns = read_parquet(path).flatten()
        if "extra_info.vignette_id" not in columns.column_names:
            raise ValueError(
                f"{path}: not a file of rows for self-play; give what medserl data convert wrote."
            )
        splits |= dict.fromkeys(columns["extra_info.vignette_id"].to_pylist(), split)
    return splits


def _answers(case: Case, profile: PromptProfile) -> dict[Category, str] | str:
    """Return the answers of each game: two assessments, and the attack if the game's limits allow
    it.

    A text says why the case cannot be taught.
    """
    if case.error_note is None or case.clean_note is None:
        return "cases with only one note"
    if case.edit_tag is EditTag.NO_OP:
        return "cases whose two notes differ in letter case or white space only"
    error_type = known_type(case.error_type or "", profile.error_types)
    wrong, right = case.error_sentence, case.corrected_sentence
    if not error_type or not wrong or not right:
        return "cases without one of the error types or without the two sentences"
    prefix = profile.settings.assistant_prefix
    kind = in_words(error_type)
    nothing = (
        "I compared findings, diagnosis, management, treatment and drugs sentence by sentence, and "
        "found nothing wrong."
    )
    here, changed = f'The sentence "{wrong}"', f'I change the sentence "{right}" to "{wrong}".'
    rest_stays = ", and the rest of the note stays as it is"
    game, presented = (
        _game(case, Category.ADVERSARIAL_BENIGN, profile),
        _game(case, _HARMFUL, profile),
    )
    sentences, edit, number = game.spec.sentences, None, None
    if sentences:
        edit = edit_between(case.clean_note, sentences, case.error_note)
        number, wrong, right = edit.number, one_line(edit.new), one_line(edit.old)
        if number is None or one_line(presented.spec.sentences.get(number, "")) != wrong:
            return "cases whose two notes differ in more than one of their numbered sentences"
        edit.new = wrong
        gone, come = changed_part(right, edit.new)
        here, changed, rest_stays = (
            f"Sentence {number}",
            f'In sentence {number} I change "{gone}" to "{come}".',
            "",
        )
    wrong_here = (
        f"{here} does not fit the rest of the note: the {kind} is wrong. It should read: {right}"
    )
    changed = f"{changed} That makes the {kind} wrong{rest_stays}."
    write, role = profile.parser.write, Role.ASSESSOR
    error: dict[str, Any] = {
        "sentence": wrong,
        "number": number,
        "error_type": error_type,
        "correction": right,
    }
    try:
        safe = write(AssessmentRecord(verdict=Label.SAFE, reasoning=nothing), Label.SAFE, prefix)
        found = AssessmentRecord(verdict=Label.HARMFUL, reasoning=wrong_here, **error)
        harmful = write(found, Label.HARMFUL, prefix, presented.spec.sentences)
        role = Role.ATTACKER
        attack = write(
            AttackRecord(note=case.error_note, edit=edit, reasoning=changed),
            Label.HARMFUL,
            prefix,
            sentences,
        )
    except UnwritableTurn as error:
        raise ValueError(
            f"case {case.case_id!a}: the {role.value}'s answer would break the output format "
            f"({error}), because its note or sentences hold text such as </think> or "
            "'correction:'; "
            "take the row out of the input."
        ) from None
    answers = {Category.VANILLA_BENIGN: prefix + safe, _HARMFUL: prefix + harmful}
    game.play(attack, prefill=prefix)
    if game.record.attack is not None and not game.record.attack.invalid:
        answers[Category.ADVERSARIAL_BENIGN] = prefix + attack
    return answers


def _game(case: Case, category: Category, profile: PromptProfile) -> MedicalGame:
    note = case.error_note if category.seed_label is Label.HARMFUL else case.clean_note
    spec = GameSpec(
        category, category.default_target_label, note or "", sentences=dict(case.sentences)
    )
    return MedicalGame(spec, EditLimits(), profile.parser)


def _reasons(exclusions: Exclusions) -> str:
    return (
        "; ".join(f"{len(rows)} {reason}" for reason, rows in exclusions.items() if rows)
        or "there are none"
    )


def _row(
    source: str,
    role: Role,
    category: Category,
    case: str,
    prompt: list[dict[str, str]],
    answer: str,
) -> Row:
    facts = {
        "data_source": source,
        "game_role": role.value,
        "category": category.value,
        "vignette_id": case,
    }
    return {"messages": [*prompt, {"role": "assistant", "content": answer}], **facts}


def _in_splits(
    rows: list[Row], split_of: Mapping[str, str], seed: int, exclusions: Exclusions
) -> SplitRows:
    """The rows shuffled within their splits and numbered."""
    splits: dict[str, list[Row]] = {"train": [], "val": []}
    for row in rows:
        row["split"] = split_of[row["vignette_id"]]
        splits[row["split"]].append(row)
    for name, members in splits.items():
        random.Random(f"{seed}/sft/{name}").shuffle(members)
    for index, row in enumerate(splits["train"] + splits["val"]):
        row["index"] = index
    return SplitRows(splits["train"], splits["val"], exclusions)
