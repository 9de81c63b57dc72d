"""MEDEC data in any known format -> vignettes, with an account of every row.

Called by the ``medserl data`` commands, scoring and evaluation. A new file format is a function from ``SourceFile`` and
``Intake`` to vignettes, called in ``_open``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from medserl_agentloop.data.intake import Intake, MedecFormatError, ReadReport, RowPlace, read_source
from medserl_agentloop.data.official_csv import HUB, csv_records, read_dataset, read_records
from medserl_agentloop.data.pair_jsonl import NoteJoin, has_key, read_openrlhf_jsonl, read_pair_jsonl
from medserl_agentloop.data.vignettes import EditTag, Vignette
from medserl_agentloop.games.medical.edits import one_line


class ReadResult(NamedTuple):
    """The vignettes of all files in file order, and one report per file."""

    vignettes: list[Vignette]
    reports: list[ReadReport]


def read_files(paths: Iterable[Path | str], *, join: Sequence[Path] = (), repair_encoding: bool = False) -> ReadResult:
    """Read every input and make sure that no row occurs in two of them; a MedecFormatError says what is not right.

    The cases of OpenRLHF rows are looked up in the files of ``join``. With ``repair_encoding``, UTF-8 that was read as
    cp1252 is put right in every field alike.
    """
    cases = _cases_of(join, repair_encoding) if join else None
    claims: dict[str, RowPlace] = {}
    vignettes: dict[str, Vignette] = {}
    file_of: dict[str, str] = {}
    reports: list[ReadReport] = []
    for path in paths:
        intake = Intake(claims, repair_encoding)
        found = list(_open(path, intake, cases))
        file = intake.report.file
        if again := [vignette.vignette_id for vignette in found if vignette.vignette_id in vignettes]:
            raise MedecFormatError(
                f"{file}: {len(again)} of its {len(found)} cases are also in {file_of[again[0]]} (the first is "
                f"{again[0]!r}); give every case once, for training or for validation, and leave one of the files out."
            )
        vignettes |= {vignette.vignette_id: vignette for vignette in found}
        file_of |= dict.fromkeys(vignettes.keys() - file_of.keys(), file)
        _count(intake.report, found)
        reports.append(intake.report)
    if not vignettes:
        raise MedecFormatError("the input has no notes: give a MEDEC file with at least one row.")
    return ReadResult(list(vignettes.values()), reports)


def _cases_of(join: Sequence[Path], repair_encoding: bool) -> NoteJoin:
    """The cases by the text of their notes."""
    for path in join:
        if path.suffix == ".jsonl" and has_key(read_source(path), "data_type"):
            raise MedecFormatError(
                f"{path}: an OpenRLHF file with 'data_type' has no error types to join with; give --join MEDEC's CSV, "
                "a .jsonl file of pairs, or the file with 'game_category' that the OpenRLHF file was made from."
            )
    cases: dict[str, Vignette] = {}
    for vignette in read_files(join, repair_encoding=repair_encoding).vignettes:
        for note in vignette.notes:
            cases.setdefault(one_line(note), vignette)
    return cases


def _open(path: Path | str, intake: Intake, cases: NoteJoin | None) -> Iterator[Vignette]:
    """The vignettes of an input; its name and its hash go to the report."""
    if str(path).startswith(HUB) or Path(path).is_dir():
        return read_dataset(path, intake)
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; give a .csv file in MEDEC's "
            "nine columns, a .jsonl file of pairs or of OpenRLHF rows, or a data set as a folder or as hf:NAME."
        )
    source = read_source(path)
    intake.report.file, intake.report.sha256 = source.name, source.sha256
    if suffix == ".csv":
        return read_records(csv_records(source), intake)
    if has_key(source, "data_type", "game_category"):
        return read_openrlhf_jsonl(source, intake, cases)
    return read_pair_jsonl(source, intake)


def _count(report: ReadReport, found: list[Vignette]) -> None:
    wrong = [v for v in found if v.error_note is not None]
    pairs = [v for v in wrong if v.clean_note is not None]
    types = Counter(v.error_type.value if v.error_type else "unknown" for v in wrong)
    report.pairs = len(pairs)
    report.pairs_by_twin = sum(v.clean_from_twin for v in pairs)
    report.twins = sum(v.twin_text_id is not None for v in found)
    report.clean_only = len(found) - len(wrong)
    report.error_only = len(wrong) - len(pairs)
    report.no_op_edits = sum(v.edit_tag is EditTag.NO_OP for v in found)
    report.non_local_edits = sum(v.edit_tag is EditTag.NON_LOCAL for v in found)
    report.unlisted_error_sentences = sum(
        v.error_sentence_id not in {sentence.id for sentence in v.sentences} for v in wrong if v.sentences
    )
    report.error_types = dict(sorted(types.items()))
    report.uw_rows = sum(len(v.text_ids) for v in found if v.subset == "medec_uw")
