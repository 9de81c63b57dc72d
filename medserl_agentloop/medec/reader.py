"""MEDEC files in any known format -> vignettes, with an account of every row.

Called by ``data_prep/medec_to_parquet.py``. A new format is a function from ``SourceFile`` to
``Parsed`` and a line in ``_FORMATS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import MedecFormatError, Parsed, RowPlace, SourceFile
from medserl_agentloop.medec.official_csv import read_official_csv
from medserl_agentloop.medec.pair_jsonl import read_pair_jsonl
from medserl_agentloop.medec.vignettes import EditTag, Vignette

_FORMATS: dict[str, Callable[[SourceFile], Parsed]] = {
    ".csv": read_official_csv,
    ".jsonl": read_pair_jsonl,
}


@dataclass(frozen=True)
class ReadReport:
    """What became of one file's records.

    ``records == dropped_empty + pairs + twins + clean_only + error_only``: nothing else is lost.

    Attributes:
        file: Name of the file.
        records: Records after the header, empty ones included.
        dropped_empty: Records without any content.
        pairs: Vignettes with both notes, of which ``pairs_by_twin`` have the clean one from a twin.
        pairs_by_twin: Pairs whose error row has no corrected text, so that the twin's text stands in.
        twins: Clean rows recognised as the same case as an error row.
        clean_only: Vignettes that have only a clean note.
        error_only: Vignettes that have only an error note.
        no_op_edits: Pairs whose notes differ in letter case or white space only.
        non_local_edits: Pairs that differ in more than one sentence in its place.
        unlisted_error_sentences: Error rows whose sentence number is not in their sentence list.
        error_types: Vignettes with an error note, by error type (``unknown`` where none is given).
    """

    file: str
    records: int
    dropped_empty: int
    pairs: int
    pairs_by_twin: int
    twins: int
    clean_only: int
    error_only: int
    no_op_edits: int
    non_local_edits: int
    unlisted_error_sentences: int
    error_types: dict[str, int]


@dataclass(frozen=True)
class ReadResult:
    """The vignettes of all files, in file order, and one report per file."""

    vignettes: tuple[Vignette, ...]
    reports: tuple[ReadReport, ...]


def read_files(paths: Iterable[Path]) -> ReadResult:
    """Read every file and make sure that no row occurs in two of them.

    Raises:
        MedecFormatError: A file cannot be read or is not right; the message is a sentence.
    """
    vignettes: list[Vignette] = []
    reports: list[ReadReport] = []
    places: list[RowPlace] = []
    for path in paths:
        parsed = _parse(Path(path))
        vignettes += parsed.vignettes
        places += parsed.places
        reports.append(_report(Path(path).name, parsed))
    if not vignettes:
        raise MedecFormatError("the input has no notes: give a MEDEC file with at least one row.")
    fields.require_unique(places)
    return ReadResult(tuple(vignettes), tuple(reports))


def _parse(path: Path) -> Parsed:
    reader = _FORMATS.get(path.suffix.lower())
    if reader is None:
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; "
            "give a .csv file in MEDEC's nine columns or a .jsonl file of pairs."
        )
    return reader(fields.read_source(path))


def _report(file: str, parsed: Parsed) -> ReadReport:
    vignettes = parsed.vignettes
    paired = [v for v in vignettes if v.error_note is not None and v.clean_note is not None]
    with_error = [v for v in vignettes if v.error_note is not None]
    tags = Counter(v.edit_tag for v in vignettes)
    types = Counter(v.error_type.value if v.error_type else "unknown" for v in with_error)
    return ReadReport(
        file=file,
        records=len(parsed.places) + parsed.dropped_empty,
        dropped_empty=parsed.dropped_empty,
        pairs=len(paired),
        pairs_by_twin=sum(v.clean_text_id != v.error_text_id for v in paired),
        twins=sum(v.twin_text_id is not None for v in vignettes),
        clean_only=sum(v.error_note is None for v in vignettes),
        error_only=sum(v.clean_note is None for v in vignettes),
        no_op_edits=tags[EditTag.NO_OP],
        non_local_edits=tags[EditTag.NON_LOCAL],
        unlisted_error_sentences=sum(
            bool(v.sentences) and v.error_sentence_id not in {s.id for s in v.sentences} for v in with_error
        ),
        error_types=dict(sorted(types.items())),
    )
