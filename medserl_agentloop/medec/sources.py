"""Opening input files: hashed and checked as UTF-8 once, then read as a stream.

Called by ``reader.py``; the readers of the formats get a ``SourceFile``. No file is held in memory.
"""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from medserl_agentloop.medec.fields import MedecFormatError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """An input file's name, its hash and where it is."""

    name: str
    sha256: str
    path: Path

    def lines(self, newline: str) -> Iterator[str]:
        """The file's lines with the line ends as they stand in it.

        Args:
            newline: As in ``open``: ``""`` ends a line at CR, LF or CRLF, ``"\\n"`` at LF only.
        """
        # Surrogates pass here so that the row they stand in can be named; usable_text refuses them.
        # Not utf-8-sig: it would take the mark off with another error handler.
        with self.path.open("rb") as binary:
            if binary.read(3) != codecs.BOM_UTF8:
                binary.seek(0)
            with io.TextIOWrapper(binary, encoding="utf-8", errors="surrogatepass", newline=newline) as text:
                yield from text


def read_source(path: Path) -> SourceFile:
    """Hash a file and make sure that it is UTF-8.

    Raises:
        MedecFormatError: It cannot be opened, is empty, or is in another encoding.
    """
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogatepass")
    at, empty = 0, True
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                _decode(path, decoder, chunk, at)
                at += len(chunk)
                empty = empty and not chunk.strip()
        _decode(path, decoder, b"", at, final=True)
    except OSError as error:
        raise MedecFormatError(
            f"{path}: cannot be read ({error.strerror or error}); give the path of a MEDEC file."
        ) from error
    if empty:
        raise MedecFormatError(f"{path}: the file is empty; give a MEDEC file with at least one row.")
    return SourceFile(path.name, digest.hexdigest(), path)


def _decode(path: Path, decoder: codecs.IncrementalDecoder, chunk: bytes, at: int, final: bool = False) -> None:
    pending, _ = decoder.getstate()
    try:
        decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        byte = (pending + chunk)[error.start]
        raise MedecFormatError(
            f"{path}: byte {at - len(pending) + error.start} (0x{byte:02x}) is not UTF-8; "
            "save the file as UTF-8 and try again."
        ) from error
