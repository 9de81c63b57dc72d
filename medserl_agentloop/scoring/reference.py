"""The notes that predictions are scored on: MEDEC's own CSV, text as published.

Called by ``medserl score`` and ``medserl evaluate``. The rows of verl's validation hold the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.types import ErrorType, Label


@dataclass(frozen=True)
class ReferenceNote:
    """One note and what is true of it.

    Attributes:
        text_id: Its id in the CSV.
        text: The note, as published.
        flag: Whether it has an error.
        error_type: Type of the error, where known.
        sentence_id: Number of the wrong sentence; -1 where there is none.
        correction: The wrong sentence put right, where known.
        sentences: The sentences by MEDEC's numbers.
        case: Id of the case; a note with an error and its clean twin share it.
        subset: ``medec_ms`` or ``medec_uw``.
    """

    text_id: str
    text: str
    flag: bool
    error_type: ErrorType | None = None
    sentence_id: int = -1
    correction: str | None = None
    sentences: tuple[Sentence, ...] = ()
    case: str = ""
    subset: str = ""

    @property
    def last_sentence(self) -> Sentence:
        """The sentence with the largest number; number 0 without text where no sentences are listed."""
        return max(self.sentences, key=lambda sentence: sentence.id, default=Sentence(0, ""))

    @property
    def error_position(self) -> str | None:
        """Where the wrong sentence stands: ``first``, ``middle`` or ``last``; None without an error or a list."""
        if not self.flag or not self.sentences:
            return None
        if self.sentence_id >= self.last_sentence.id:
            return "last"
        return "first" if self.sentence_id <= min(sentence.id for sentence in self.sentences) else "middle"

    @classmethod
    def from_extra_info(cls, extra_info: Mapping[str, Any]) -> ReferenceNote:
        """The note of an evaluation row (``data/rows.py``)."""
        error_type = extra_info["error_type"]
        return cls(
            text_id=extra_info["text_id"],
            text=extra_info["seed_note"],
            flag=extra_info["target_label"] == Label.HARMFUL.value,
            error_type=ErrorType(error_type) if error_type else None,
            sentence_id=int(extra_info["error_sentence_id"]),
            correction=extra_info["corrected_sentence"],
            sentences=tuple(Sentence(s["id"], s["text"]) for s in extra_info["sentences"]),
            case=extra_info["vignette_id"],
            subset=extra_info["subset"],
        )


@dataclass(frozen=True)
class Reference:
    """The notes of one or more files.

    Attributes:
        notes: In the order of the files.
        dropped_empty: Records without any content; they count nowhere.
        sha256: Hash of each file, by its name.
    """

    notes: tuple[ReferenceNote, ...]
    dropped_empty: int
    sha256: dict[str, str]


def read_reference(paths: Sequence[Path]) -> Reference:
    """Every note of MEDEC's CSV files.

    Raises:
        MedecFormatError: A file is not a right MEDEC CSV; names file, row and column.
    """
    rows, read = build_eval_rows(paths)
    notes = tuple(ReferenceNote.from_extra_info(row["extra_info"]) for row in rows)
    dropped = sum(report.dropped_empty for report in read.reports)
    return Reference(notes, dropped, {report.file: report.sha256 for report in read.reports})
