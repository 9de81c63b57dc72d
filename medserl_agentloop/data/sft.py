"""Conversations to imitate before self-play, for both roles, made from self-play rows.

verl's ``MultiTurnSFTDataset`` reads the ``messages`` column. Answers about pairs come from
templates; each is read back by the profile's own parser, and each attack is played by the game's
rules, so that a model only learns turns that count. Answers begin with the profile's
``assistant_prefix``.

verl tokenizes each message alone, and Qwen3's chat template drops the reasoning of an assistant
message without a question; verl's own advice, ``ignore_input_ids_mismatch=True``, would train on
answers without reasoning. Give such a model a plain ``chat_template``, as
``recipes/warm_start_base.yaml`` does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.rows import MESSAGES, Row
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role, in_words
from medserl_agentloop.games.medical.edit import changed_part, edit_between, one_line
from medserl_agentloop.games.medical.parsing import UnwritableTurn
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.paths import DIFFERS, differs_from_manifest, read_parquet

_SAFE, _HARMFUL = Category.VANILLA_BENIGN, Category.VANILLA_HARMFUL
_ATTACK = Category.ADVERSARIAL_BENIGN
_TEXTS = ("data_source", "game_role", "category", "split", "vignette_id")
SFT_SCHEMA: Any = pa.schema(
    {"messages": MESSAGES, **dict.fromkeys(_TEXTS, "string"), "index": "int64"}
)
_NOTHING = (
    "I compared findings, diagnosis, management, treatment and drugs sentence by sentence, and "
    "found nothing wrong."
)


def build_sft_rows(
    folder: Path, prompts: PromptProfile
) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """Shuffled conversations by split, each a user and an assistant message, and how many cases
    were left out and why.

    ``folder`` has the rows of ``medserl data convert``. Each pair of notes gives an attack on the
    clean one and an assessment of each. Raises ValueError for a wrong file, or for a case whose
    texts the game would read as part of its format.
    """
    left_out = Counter[str]()
    made: dict[str, list[Row]] = {"train": [], "val": []}
    for split, rows in made.items():
        for facts in _cases(folder / f"{split}.parquet"):
            case = GameSpec.from_extra_info(facts, prompts.error_types)
            answers = _answers(case, prompts, no_op=facts["edit_tag"] == EditTag.NO_OP.value)
            if isinstance(answers, str):
                left_out[answers] += 1
                continue
            if _ATTACK not in answers:
                left_out["attacks that change more than the game's limits allow"] += 1
            for category, answer in answers.items():
                role = Role.ATTACKER if category.has_attack else Role.ASSESSOR
                prompt = prompts.messages(role, category, _game(case, category, prompts).note)
                rows.append(
                    {
                        "messages": [*prompt, {"role": "assistant", "content": answer}],
                        "data_source": f"{facts['subset']}_sft/{category.value}",
                        "game_role": role.value,
                        "category": category.value,
                        "split": split,
                        "vignette_id": case.vignette_id,
                    }
                )
        random.Random(f"sft/{split}").shuffle(rows)
    if not any(made.values()):
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise ValueError(f"no case of the input can be taught: {why or 'there are none'}.")
    for index, row in enumerate(made["train"] + made["val"]):
        row["index"] = index
    return made, left_out


def _cases(path: Path) -> Iterator[Mapping[str, Any]]:
    """The facts of each case in a file, once."""
    if differs_from_manifest(path):
        raise ValueError(f"{path}: {DIFFERS}.")
    table = read_parquet(path)
    if "extra_info" not in table.column_names:
        raise ValueError(f"{path}: no rows of self-play; give what medserl data convert wrote.")
    rows = table["extra_info"].to_pylist()
    yield from {facts["vignette_id"]: facts for facts in rows}.values()


def _answers(case: GameSpec, profile: PromptProfile, no_op: bool) -> dict[Category, str] | str:
    """The answers of each game: two assessments, and the attack if the game's limits allow it.

    A string says why the case cannot be taught.
    """
    if case.error_note is None or case.clean_note is None:
        return "cases with only one note"
    if no_op:
        return "cases whose two notes differ in letter case or white space only"
    wrong, right = case.error_sentence, case.corrected_sentence
    if not case.error_type or not wrong or not right:
        return "cases without one of the error types or without the two sentences"
    prefix, kind = profile.settings.assistant_prefix, in_words(case.error_type)
    game, presented = _game(case, _ATTACK, profile), _game(case, _HARMFUL, profile)
    sentences, edit, number = game.spec.sentences, None, None
    if not sentences:
        here = f'The sentence "{wrong}"'
        changed = (
            f'I change the sentence "{right}" to "{wrong}". That makes the {kind} wrong, and the '
            "rest of the note stays as it is."
        )
    else:
        edit = edit_between(case.clean_note, sentences, case.error_note)
        number, wrong, right = edit.number, one_line(edit.new), one_line(edit.old)
        if number is None or one_line(presented.spec.sentences.get(number, "")) != wrong:
            return "cases whose two notes differ in more than one of their numbered sentences"
        edit.new = wrong
        gone, come = changed_part(right, edit.new)
        here = f"Sentence {number}"
        changed = (
            f'In sentence {number} I change "{gone}" to "{come}". That makes the {kind} wrong.'
        )
    nothing = AssessmentRecord(verdict=Label.SAFE, reasoning=_NOTHING)
    error = AssessmentRecord(
        verdict=Label.HARMFUL,
        reasoning=f"{here} does not fit the rest of the note: the {kind} is wrong. It should read: "
        f"{right}",
        sentence=wrong,
        number=number,
        error_type=case.error_type,
        correction=right,
    )
    injection = AttackRecord(note=case.error_note, edit=edit, reasoning=changed)
    write, role = profile.parser.write, Role.ASSESSOR
    try:
        safe = write(nothing, Label.SAFE, prefix)
        harmful = write(error, Label.HARMFUL, prefix, presented.spec.sentences)
        role = Role.ATTACKER
        attack = write(injection, Label.HARMFUL, prefix, sentences)
    except UnwritableTurn as why:
        raise ValueError(
            f"case {case.vignette_id!a}: the {role.value}'s answer would break the output format "
            f"({why}), because its note or sentences hold text such as </think> or 'correction:'; "
            "take the row out of the input."
        ) from None
    answers = {_SAFE: prefix + safe, _HARMFUL: prefix + harmful}
    game.play(attack, prefill=prefix)
    if game.record.attack is not None and not game.record.attack.invalid:
        answers[_ATTACK] = prefix + attack
    return answers


def _game(case: GameSpec, category: Category, profile: PromptProfile) -> MedicalGame:
    note = case.error_note if category.seed_label is Label.HARMFUL else case.clean_note
    spec = GameSpec(
        category, category.default_target_label, note or "", sentences=dict(case.sentences)
    )
    return MedicalGame(spec, EditLimits(), profile.parser)
