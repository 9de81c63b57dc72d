"""MEDEC data in any known format -> vignettes, with an account of every row.

Called by the ``medserl data`` commands, scoring and evaluation. A new file format is a function from ``SourceFile`` and
``Intake`` to vignettes, called in ``_open``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from medserl_agentloop.data.hf_dataset import is_dataset, read_dataset
from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace, read_source
from medserl_agentloop.data.official_csv import read_official_csv
from medserl_agentloop.data.pair_jsonl import (
    NoteJoin,
    is_openrlhf,
    note_join,
    read_openrlhf_jsonl,
    read_pair_jsonl,
)
from medserl_agentloop.data.vignettes import EditTag, Vignette


@dataclass(frozen=True)
class ReadReport:
    """What became of one file's records.

    ``records == dropped_empty + pairs + twins + clean_only + error_only``: nothing else is lost. OpenRLHF
    files are the exception: up to four of their rows are about one case.

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
        sha256: Hash of the file; of the rows where the input is a data set.
        joined: OpenRLHF rows whose case was found in a ``--join`` file.
        not_joined: Id of each OpenRLHF row whose case was not found, and why.
        repaired: Rows in which misread UTF-8 was put right.
        uw_rows: Rows of MEDEC-UW.
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
    sha256: str
    joined: int
    not_joined: tuple[tuple[str, str], ...]
    repaired: int
    uw_rows: int

    @property
    def cases(self) -> int:
        """Number of vignettes."""
        return self.pairs + self.clean_only + self.error_only


@dataclass(frozen=True)
class ReadResult:
    """The vignettes of all files in file order, and one report per file."""

    vignettes: list[Vignette]
    reports: tuple[ReadReport, ...]


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        join: Files in which the cases of OpenRLHF rows are looked up.
        repair_encoding: Put right UTF-8 that was read as cp1252, in every field alike.
    """

    join: tuple[Path, ...] = ()
    repair_encoding: bool = False


def read_files(paths: Iterable[Path | str], options: ReadOptions | None = None) -> ReadResult:
    """Read every input and make sure that no row occurs in two of them.

    Raises:
        MedecFormatError: A file cannot be read or is not right; the message is a sentence.
    """
    options = options or ReadOptions()
    joined = _join(options) if options.join else None
    claims: dict[str, RowPlace] = {}
    vignettes: dict[str, Vignette] = {}
    reports: list[ReadReport] = []
    for path in paths:
        intake = Intake(claims, options.repair_encoding)
        name, sha256, stream = _open(path, intake, joined)
        found = []
        for vignette in stream:
            if vignettes.setdefault(vignette.vignette_id, vignette) is not vignette:
                raise MedecFormatError(f"vignette {vignette.vignette_id!r} occurs twice in the input; give it once.")
            found.append(vignette)
        reports.append(_report(name, sha256, intake, found))
    if not vignettes:
        raise MedecFormatError("the input has no notes: give a MEDEC file with at least one row.")
    return ReadResult(list(vignettes.values()), tuple(reports))


def refuse_uw(rows: int, agreed: bool) -> None:
    """Raise MedecFormatError if there are rows of MEDEC-UW and the user has not signed its agreement."""
    if rows and not agreed:
        raise MedecFormatError(
            f"the input has {rows} MEDEC-UW rows, which may be used only under a signed agreement; "
            "if you have signed it, add --i-have-the-uw-agreement."
        )


def _join(options: ReadOptions) -> NoteJoin:
    if rows_of_a_game := [path for path in options.join if path.suffix == ".jsonl" and is_openrlhf(read_source(path))]:
        raise MedecFormatError(
            f"{rows_of_a_game[0]}: an OpenRLHF file has no error types to join with; "
            "give --join MEDEC's CSV or a .jsonl file of pairs."
        )
    return note_join(read_files(options.join, ReadOptions(repair_encoding=options.repair_encoding)).vignettes)


def _open(path: Path | str, intake: Intake, join: NoteJoin | None) -> tuple[str, str, Iterator[Vignette]]:
    """Name, hash and vignettes of an input."""
    if is_dataset(path):
        return read_dataset(path, intake)
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; give a .csv file in MEDEC's "
            "nine columns, a .jsonl file of pairs or of OpenRLHF rows, or a data set as a folder or as hf:NAME."
        )
    source = read_source(path)
    if suffix == ".csv":
        vignettes = read_official_csv(source, intake)
    elif is_openrlhf(source):
        vignettes = read_openrlhf_jsonl(source, intake, join)
    else:
        vignettes = read_pair_jsonl(source, intake)
    return source.name, source.sha256, vignettes


def _report(file: str, sha256: str, intake: Intake, found: list[Vignette]) -> ReadReport:
    pairs = [v for v in found if v.error_note is not None and v.clean_note is not None]
    wrong = [v for v in found if v.error_note is not None]
    types = Counter(v.error_type.value if v.error_type else "unknown" for v in wrong)
    listed = [(v.error_sentence_id, {s.id for s in v.sentences}) for v in wrong if v.sentences]
    return ReadReport(
        file=file,
        records=intake.records + intake.dropped_empty,
        dropped_empty=intake.dropped_empty,
        pairs=len(pairs),
        pairs_by_twin=sum(v.clean_text_id != v.error_text_id for v in pairs),
        twins=sum(v.twin_text_id is not None for v in found),
        clean_only=len(found) - len(wrong),
        error_only=len(wrong) - len(pairs),
        no_op_edits=sum(v.edit_tag is EditTag.NO_OP for v in found),
        non_local_edits=sum(v.edit_tag is EditTag.NON_LOCAL for v in found),
        unlisted_error_sentences=sum(number not in ids for number, ids in listed),
        error_types=dict(sorted(types.items())),
        sha256=sha256,
        joined=intake.joined,
        not_joined=tuple(intake.not_joined),
        repaired=intake.repaired,
        uw_rows=sum(len(v.text_ids) for v in found if v.subset == "medec_uw"),
    )
