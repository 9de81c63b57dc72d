"""verl's validation on MEDEC's own notes, scored by the official rules. Called by the trainer.

verl can only average numbers of single games, and F1, floors and votes are not such averages. The notes are the
evaluation rows (``data/rows.py``) of ``data.val_files``. ``medserl evaluate`` gives the same scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from medserl_agentloop.core.metrics import share
from medserl_agentloop.games.medical.parsing import ParsedAssessment
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import EVAL_SPLIT, Label, Role
from medserl_agentloop.scoring.metrics import Scores, score
from medserl_agentloop.scoring.notes import ReferenceNote, predict
from medserl_agentloop.scoring.yardsticks import COMPARED, floors, floors_above

TEXT_ID, ANSWER = "text_id", "answer"
_CORE = ("flag_accuracy", "sentence_accuracy", "f1")

Notes = Mapping[str, Mapping[str, ReferenceNote]]
"""Reference notes by data set, then by text id."""


def validation_facts(record: MedicalRecord) -> dict[str, float | str | None]:
    """One game as numbers for verl's validation metrics, and as texts for the official scores: verl leaves texts alone.

    ``acc`` is the assessor's accuracy; verl reports it as the core metric of each category.
    """
    outcome, attack, outcomes = record.outcome, record.attack, [game.outcome for game in record.by_assessment]
    assessed = record.assessment is not None and outcome is not Outcome.VOID
    answer = None
    if record.assessment is not None and record.void is None:
        said = record.assessment.model_dump(mode="json", include={"verdict", "sentence", "correction"})
        answer = json.dumps(said)
    return {
        "acc": share(bool(each.is_right) for each in outcomes) if assessed else None,
        "attacker_reward": record.reward(Role.ATTACKER),
        "assessor_reward": record.reward(Role.ASSESSOR),
        "attack_valid": None if attack is None else float(attack.invalid is None),
        "undetected": share(each is Outcome.MISSED_ERROR for each in outcomes) if attack and assessed else None,
        "void": float(outcome is Outcome.VOID),
        TEXT_ID: record.spec.text_id,
        ANSWER: answer,
    }


def official_notes(dataset: Any) -> Notes:
    """The evaluation rows of verl's ``RLHFDataset``."""
    found: dict[str, dict[str, ReferenceNote]] = {}
    for source, facts in zip(dataset.dataframe["data_source"], dataset.dataframe["extra_info"], strict=True):
        if facts.get("split") == EVAL_SPLIT:
            note = ReferenceNote.from_extra_info(facts)
            found.setdefault(_data_set(source), {})[note.text_id] = note
    return found


def official_scores(
    notes: Notes, data_sources: Sequence[str], facts: Mapping[str, Sequence[str | None]]
) -> Iterator[tuple[dict[str, float], str]]:
    """For each data set its metrics, by verl's names, and a line that says the most important ones.

    Of every game there are its row's data source and what :func:`validation_facts` gave. Games on one note are samples
    of one answer.
    """
    answers: dict[tuple[str, str | None], list[ParsedAssessment]] = {}
    for source, text_id, answer in zip(data_sources, facts[TEXT_ID], facts[ANSWER], strict=True):
        if answer is not None:
            said = json.loads(answer)
            verdict = None if said["verdict"] is None else Label(said["verdict"])
            read = ParsedAssessment(verdict, said["sentence"], None, said["correction"], "", ())
            answers.setdefault((_data_set(source), text_id), []).append(read)
    for name, by_id in notes.items():
        reference = list(by_id.values())
        predictions = [predict(n, answers[name, n.text_id]) for n in reference if (name, n.text_id) in answers]
        yield _reported(name, reference, score(reference, predictions, resamples=0))


def _reported(name: str, reference: Sequence[ReferenceNote], scores: Scores) -> tuple[dict[str, float], str]:
    found = floors(reference, None)
    values: dict[str, float | None] = {"unreadable": scores.unreadable, "missing": scores.missing}
    values |= {measure: m.value for measure, m in scores.measures.items()}
    for kind, groups in scores.groups.items():
        for group, of_group in groups.items():
            values |= {f"{kind}/{group}/{measure}": m.value for measure, m in of_group.measures.items()}
    for floor in found:
        if floor.scores:
            values |= {f"floor/{floor.name}/{measure}": floor.scores.measures[measure].value for measure in COMPARED}
    metrics = {
        f"val-{'core' if key in _CORE else 'aux'}/{name}/{metric_name(key)}": value
        for key, value in values.items()
        if value is not None
    }
    said = [f"{key} {values[key]:.3f}" for key in _CORE if values[key] is not None]
    said += [f"{key} is below {', '.join(names)}" for key, names in floors_above(scores, found).items() if names]
    return metrics, f"validation on {name}, {scores.notes} notes: {', '.join(said).replace('_', ' ')}"


def metric_name(text: str) -> str:
    """``text`` as a name that every logger takes; MLflow refuses parentheses and commas."""
    return re.sub(r"[^\w/.-]+", "_", text).strip("_")


def _data_set(data_source: str) -> str:
    return str(data_source).partition("/")[0]
