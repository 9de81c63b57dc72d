"""Official MEDEC sets -> rows for validation during training: every note once, its text untouched.

Called by ``medserl data eval`` and by scoring. Published figures are computed on the text as it
was published, so unlike in training rows nothing is stripped, repaired or left out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medserl_agentloop.data.intake import MedecFormatError, RowPlace, read_source
from medserl_agentloop.data.official_csv import csv_records, vignette_of_row
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import Row, game_row
from medserl_agentloop.data.vignettes import Vignette
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import EVAL_SPLIT, Category, Role

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
    for path in paths:
        source = read_source(path)
        for place, cells in csv_records(source):
            if cells:
                published = _as_published(place, cells, source.sha256)
                category = Category.VANILLA_BENIGN if published.error_note is None else Category.VANILLA_HARMFUL
                row = game_row(
                    published, category, Role.ASSESSOR, cells["Text"], split, first_index + len(rows), prompts
                )
                row["data_source"] = f"{published.subset}_eval/{category.value}"
                row["extra_info"]["vignette_id"] = case_of[published.vignette_id]
                rows.append(row)
    return EvalRows(
        rows,
        sum(report.dropped_empty for report in read.reports),
        {report.file: report.sha256 for report in read.reports},
    )


def _as_published(place: RowPlace, cells: Mapping[str, str], sha256: str) -> Vignette:
    """The row as a case of its own, with its texts exactly as they stand in the file."""
    cleaned = vignette_of_row(place, cells, sha256)

    def raw(text: str | None, column: str) -> str | None:
        return None if text is None else cells[column]

    return replace(
        cleaned,
        error_note=raw(cleaned.error_note, "Text"),
        clean_note=raw(cleaned.clean_note, "Text" if cleaned.error_note is None else "Corrected Text"),
        error_sentence=raw(cleaned.error_sentence, "Error Sentence"),
        corrected_sentence=raw(cleaned.corrected_sentence, "Corrected Sentence"),
    )
