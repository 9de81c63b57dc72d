"""Input files on their way to a reader: hashed, checked as UTF-8, their rows counted and claimed.

``reader.py`` makes a ``SourceFile`` and an ``Intake`` for each input and hands both to the format's reader.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from medserl_agentloop.data.fields import MedecFormatError, RowPlace


@dataclass(frozen=True)
class SourceFile:
    """An input file: its name, the hash of its bytes and its text."""

    name: str
    sha256: str
    text: str

    def lines(self, newline: str) -> Iterator[str]:
        """The file's lines with their line ends; ``newline`` as in ``open``: ``""`` or ``"\\n"``."""
        return iter(io.StringIO(self.text, newline=newline))


def read_source(path: Path) -> SourceFile:
    """Read a file and make sure that it is UTF-8.

    Raises:
        MedecFormatError: It cannot be opened, is empty, or is in another encoding.
    """
    try:
        content = path.read_bytes()
        # Surrogates pass here so that the row they stand in can be named; usable_text refuses them.
        text = content.decode("utf-8", errors="surrogatepass").removeprefix("\ufeff")
    except OSError as error:
        raise MedecFormatError(
            f"{path}: cannot be read ({error.strerror or error}); give the path of a MEDEC file."
        ) from error
    except UnicodeDecodeError as error:
        raise MedecFormatError(
            f"{path}: byte {error.start} (0x{content[error.start]:02x}) is not UTF-8; "
            "save the file as UTF-8 and try again."
        ) from error
    if not content.strip():
        raise MedecFormatError(f"{path}: the file is empty; give a MEDEC file with at least one row.")
    return SourceFile(path.name, hashlib.sha256(content).hexdigest(), text)


@dataclass
class Intake:
    """What a format's reader tells about the rows of one input.

    Attributes:
        claims: The row of every text id in all inputs so far.
        repair: Whether misread UTF-8 is put right.
        records: Rows with content.
        dropped_empty: Records without any content.
        repaired: Rows in which a misread character was put right.
        joined: OpenRLHF rows whose case was found.
        not_joined: Text ids of OpenRLHF rows whose note is in no ``--join`` file, and why.
    """

    claims: dict[str, RowPlace]
    repair: bool = False
    records: int = 0
    dropped_empty: int = 0
    repaired: int = 0
    joined: int = 0
    not_joined: list[tuple[str, str]] = field(default_factory=list)

    def claim(self, place: RowPlace) -> None:
        """Count a row with content.

        Raises:
            MedecFormatError: Another row has its id.
        """
        self.records += 1
        first = self.claims.setdefault(place.text_id, place)
        if first is not place:
            raise MedecFormatError(
                f"{place}: this text id is already that of {first.file}, row {first.row}; "
                "give every row its own id, and do not pass the same notes twice."
            )

    def text_of(self, cells: Mapping[str, str], columns: Iterable[str]) -> dict[str, str]:
        """The cells, with misread UTF-8 in ``columns`` put right where that was asked for."""
        if not self.repair:
            return dict(cells)
        repaired = {name: repair_encoding(value) if name in columns else value for name, value in cells.items()}
        self.repaired += repaired != cells
        return repaired


def _as_misread(byte: int) -> str:
    try:
        return bytes([byte]).decode("cp1252")
    except UnicodeDecodeError:  # five bytes have no cp1252 character; readers pass them as controls
        return chr(byte)


def _class(first: int, last: int) -> str:
    return "[" + "".join(re.escape(_as_misread(byte)) for byte in range(first, last + 1)) + "]"


_BYTE_OF = {_as_misread(byte): byte for byte in range(0x80, 0x100)}
_NEXT = _class(0x80, 0xBF)
# Only a lead byte with all of its continuation bytes is a span, so a genuine µ, ³ or é stays.
_SPAN = re.compile(f"{_class(0xC2, 0xDF)}{_NEXT}|{_class(0xE0, 0xEF)}{_NEXT}{{2}}|{_class(0xF0, 0xF4)}{_NEXT}{{3}}")


def repair_encoding(text: str) -> str:
    """``text`` with every span of UTF-8 that was read as cp1252 (``â€“`` for a dash) put right."""
    return _SPAN.sub(_meant, text)


def _meant(span: re.Match[str]) -> str:
    try:
        return bytes(_BYTE_OF[character] for character in span[0]).decode("utf-8")
    except UnicodeDecodeError:  # an overlong form or a surrogate: not misread UTF-8
        return span[0]
