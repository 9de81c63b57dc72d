"""Official MEDEC sets -> rows for validation during training: every note once, its text untouched.

Called by ``data_prep/medec_eval_to_parquet.py``. Published figures are computed on the text as it
was published, so unlike in training rows nothing is stripped, repaired or left out here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medserl_agentloop.game.types import EVAL_SPLIT, Category, Role
from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import MedecFormatError, RowPlace
from medserl_agentloop.medec.reader import read_files
from medserl_agentloop.medec.rows import ABILITY, AGENT_NAME, Row
from medserl_agentloop.medec.vignettes import PairSource, subset_of, tag_edit
from medserl_agentloop.prompting import PromptProfile, load_profile

# Far above the indices of training files, so that both can be used in one run.
FIRST_INDEX = 1_000_000_000


@dataclass(frozen=True)
class EvalRows:
    """The rows in the order of the files, how many records without any content were dropped, each file's hash."""

    rows: list[Row]
    dropped_empty: int
    sha256: dict[str, str]


def build_eval_rows(
    paths: Sequence[Path], *, profile: str = "medserl", first_index: int = FIRST_INDEX, split: str = EVAL_SPLIT
) -> EvalRows:
    """One assessor turn for every row of MEDEC's CSV files.

    Args:
        paths: CSV files in MEDEC's nine columns.
        profile: Prompt profile of the assessor.
        first_index: Index of the first row.
        split: Value of ``extra_info.split``.

    Raises:
        MedecFormatError: A file is not a right MEDEC CSV; names file, row and column.
        ValueError: The profile does not exist.
    """
    prompts = load_profile(profile)
    for path in paths:
        if path.suffix.lower() != ".csv":
            raise MedecFormatError(f"{path}: evaluation rows are made from MEDEC's .csv files; give such a file.")
    # The reader refuses whatever is wrong and knows which rows are one case, but it cleans the text.
    read = read_files(paths)
    case_of = {text_id: vignette.vignette_id for vignette in read.vignettes for text_id in vignette.text_ids}
    rows: list[Row] = []
    for path, report in zip(paths, read.reports, strict=True):
        for place, cells in _records(path):
            index = first_index + len(rows)
            rows.append(_row(place, cells, case_of[place.text_id], report.sha256, index, split, prompts))
    return EvalRows(
        rows,
        sum(report.dropped_empty for report in read.reports),
        {report.file: report.sha256 for report in read.reports},
    )


def _records(path: Path) -> Iterator[tuple[RowPlace, dict[str, str]]]:
    """Every record with content, its cells exactly as the CSV parser gives them.

    The reader has been through the file, so it is known to be right.
    """
    with path.open(encoding="utf-8", errors="surrogatepass", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = [name.removeprefix("\ufeff").strip() for name in next(reader)]
        for number, values in enumerate(reader, start=1):
            if any(value.strip() for value in values):
                cells = dict(zip(header, values, strict=True))
                yield RowPlace(path.name, number, cells["Text ID"].strip()), cells


def _row(
    place: RowPlace,
    cells: dict[str, str],
    vignette_id: str,
    sha256: str,
    index: int,
    split: str,
    profile: PromptProfile,
) -> Row:
    def raw(column: str) -> str | None:
        return None if fields.optional_text(place, column, cells[column]) is None else cells[column]

    harmful = fields.error_flag(place, "Error Flag", cells["Error Flag"])
    category = Category.VANILLA_HARMFUL if harmful else Category.VANILLA_BENIGN
    note, corrected = cells["Text"], raw("Corrected Text")
    error_note, clean_note = (note, corrected) if harmful else (None, note)
    error_type = fields.error_type(place, "Error Type", cells["Error Type"])
    sentences = fields.numbered_sentences(fields.optional_text(place, "Sentences", cells["Sentences"]))
    label = category.seed_label.value
    subset = subset_of(place.text_id)
    extra_info: dict[str, Any] = {
        "index": index,
        "split": split,
        "subset": subset,
        "text_id": place.text_id,
        "vignette_id": vignette_id,
        "category": category.value,
        "target_label": label,
        "seed_note": note,
        "error_note": error_note,
        "clean_note": clean_note,
        "error_type": error_type.value if error_type else None,
        "error_sentence": raw("Error Sentence"),
        "corrected_sentence": raw("Corrected Sentence"),
        "error_sentence_id": fields.sentence_number(place, "Error Sentence ID", cells["Error Sentence ID"]),
        "sentences": [{"id": s.id, "text": s.text} for s in sentences],
        "pair_source": (PairSource.IN_ROW if error_note and clean_note else PairSource.UNPAIRED).value,
        "edit_tag": tag_edit(error_note, clean_note, raw("Error Sentence"), raw("Corrected Sentence")).value,
        "source_sha256": sha256,
    }
    return {
        "data_source": f"{subset}_eval/{category.value}",
        "agent_name": AGENT_NAME,
        "prompt": profile.messages(Role.ASSESSOR, category, note),
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": extra_info,
    }
