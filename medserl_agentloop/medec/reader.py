"""MEDEC data in any known format -> vignettes, with an account of every row.

Called by ``data_prep/medec_to_parquet.py``. A new file format is a function from ``SourceFile`` and
``Intake`` to vignettes and a line in ``_FORMATS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from medserl_agentloop.medec.fields import MedecFormatError
from medserl_agentloop.medec.hf_dataset import is_dataset, read_dataset
from medserl_agentloop.medec.intake import Intake
from medserl_agentloop.medec.official_csv import read_official_csv
from medserl_agentloop.medec.openrlhf_jsonl import NoteJoin, is_openrlhf, read_openrlhf_jsonl
from medserl_agentloop.medec.pair_jsonl import read_pair_jsonl
from medserl_agentloop.medec.sources import SourceFile, read_source
from medserl_agentloop.medec.store import VignetteStore
from medserl_agentloop.medec.vignettes import EditTag, Vignette

_FORMATS: dict[str, Callable[[SourceFile, Intake], Iterator[Vignette]]] = {
    ".csv": read_official_csv,
    ".jsonl": read_pair_jsonl,
}


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


@dataclass(frozen=True)
class ReadResult:
    """The vignettes of all files, in file order and kept on disk, and one report per file.

    Attributes:
        vignettes: The cases.
        reports: Account of every file.
        second_part: Number of the first vignette after the first files, where the caller counted these.
    """

    vignettes: VignetteStore
    reports: tuple[ReadReport, ...]
    second_part: int = 0


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        join: Files in which the cases of OpenRLHF rows are looked up.
        repair_encoding: Put right UTF-8 that was read as cp1252, in every field alike.
        watch: Wraps the stream of a file's vignettes, to show progress.
    """

    join: tuple[Path, ...] = ()
    repair_encoding: bool = False
    watch: Callable[[str, Iterator[Vignette]], Iterable[Vignette]] = lambda _, vignettes: vignettes


def read_files(
    paths: Iterable[Path | str], options: ReadOptions | None = None, *, first_of: int | None = None
) -> ReadResult:
    """Read every input and make sure that no row occurs in two of them.

    Args:
        paths: The inputs.
        options: How to read them.
        first_of: How many inputs come before those whose first vignette ``second_part`` names.

    Raises:
        MedecFormatError: A file cannot be read or is not right; the message is a sentence.
    """
    options = options or ReadOptions()
    store = VignetteStore()
    joined = _join(options) if options.join else None
    reports: list[ReadReport] = []
    second_part = 0
    for path in paths:
        intake = Intake(store, options.repair_encoding)
        name, sha256, vignettes = _open(path, intake, joined)
        counts: Counter[str] = Counter()
        types: Counter[str] = Counter()
        for vignette in options.watch(name, vignettes):
            store.append(vignette)
            _count(vignette, counts, types)
        reports.append(_report(name, sha256, intake, counts, types))
        second_part = len(store) if len(reports) == first_of else second_part
    if not store:
        raise MedecFormatError("the input has no notes: give a MEDEC file with at least one row.")
    return ReadResult(store, tuple(reports), second_part)


def _join(options: ReadOptions) -> NoteJoin:
    if rows_of_a_game := [path for path in options.join if path.suffix == ".jsonl" and is_openrlhf(read_source(path))]:
        raise MedecFormatError(
            f"{rows_of_a_game[0]}: an OpenRLHF file has no error types to join with; "
            "give --join MEDEC's CSV or a .jsonl file of pairs."
        )
    read = read_files(options.join, ReadOptions(repair_encoding=options.repair_encoding))
    return NoteJoin(read.vignettes)


def _open(path: Path | str, intake: Intake, join: NoteJoin | None) -> tuple[str, str, Iterator[Vignette]]:
    """Name, hash and vignettes of an input."""
    if is_dataset(path):
        return read_dataset(path, intake)
    path = Path(path)
    reader = _FORMATS.get(path.suffix.lower())
    if reader is None:
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; give a .csv file in MEDEC's "
            "nine columns, a .jsonl file of pairs or of OpenRLHF rows, or a data set as a folder or as hf:NAME."
        )
    source = read_source(path)
    if reader is read_pair_jsonl and is_openrlhf(source):
        reader = partial(read_openrlhf_jsonl, join=join)
    return source.name, source.sha256, reader(source, intake)


def _count(vignette: Vignette, counts: Counter[str], types: Counter[str]) -> None:
    has_error, has_clean = vignette.error_note is not None, vignette.clean_note is not None
    counts["pairs"] += has_error and has_clean
    counts["by_twin"] += has_error and has_clean and vignette.clean_text_id != vignette.error_text_id
    counts["twins"] += vignette.twin_text_id is not None
    counts["clean_only"] += not has_error
    counts["error_only"] += not has_clean
    counts[vignette.edit_tag.value] += 1
    counts["uw"] += len(vignette.text_ids) if vignette.subset == "medec_uw" else 0
    if has_error:
        listed = {s.id for s in vignette.sentences}
        counts["unlisted"] += bool(listed) and vignette.error_sentence_id not in listed
        types[vignette.error_type.value if vignette.error_type else "unknown"] += 1


def _report(file: str, sha256: str, intake: Intake, counts: Counter[str], types: Counter[str]) -> ReadReport:
    return ReadReport(
        file=file,
        records=intake.records + intake.dropped_empty,
        dropped_empty=intake.dropped_empty,
        pairs=counts["pairs"],
        pairs_by_twin=counts["by_twin"],
        twins=counts["twins"],
        clean_only=counts["clean_only"],
        error_only=counts["error_only"],
        no_op_edits=counts[EditTag.NO_OP.value],
        non_local_edits=counts[EditTag.NON_LOCAL.value],
        unlisted_error_sentences=counts["unlisted"],
        error_types=dict(sorted(types.items())),
        sha256=sha256,
        joined=intake.joined,
        not_joined=tuple(intake.not_joined),
        repaired=intake.repaired,
        uw_rows=counts["uw"],
    )
