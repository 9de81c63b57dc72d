"""Putting right text that is UTF-8 read as cp1252 (``â€“`` for a dash). Off by default.

Called by ``intake.py`` on every field alike. The published numbers were made on the raw text.
"""

from __future__ import annotations

import re


def _as_misread(byte: int) -> str:
    try:
        return bytes([byte]).decode("cp1252")
    except UnicodeDecodeError:  # five bytes have no cp1252 character; readers pass them as controls
        return chr(byte)


_BYTE_OF = {_as_misread(byte): byte for byte in range(0x80, 0x100)}


def _class(first: int, last: int) -> str:
    return "[" + "".join(re.escape(_as_misread(byte)) for byte in range(first, last + 1)) + "]"


_NEXT = _class(0x80, 0xBF)
# Only a lead byte with all of its continuation bytes is a span, so a genuine µ, ³ or é stays.
_SPAN = re.compile(f"{_class(0xC2, 0xDF)}{_NEXT}|{_class(0xE0, 0xEF)}{_NEXT}{{2}}|{_class(0xF0, 0xF4)}{_NEXT}{{3}}")


def repair_encoding(text: str) -> str:
    """``text`` with every span that is misread UTF-8 replaced by the character that was meant."""
    return _SPAN.sub(_meant, text)


def _meant(span: re.Match[str]) -> str:
    try:
        return bytes(_BYTE_OF[character] for character in span[0]).decode("utf-8")
    except UnicodeDecodeError:  # an overlong form or a surrogate: not misread UTF-8
        return span[0]
