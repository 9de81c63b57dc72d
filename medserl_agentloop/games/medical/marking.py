"""What a rewritten note changes, marked word by word for a reader."""

from __future__ import annotations

from difflib import SequenceMatcher

from rich.control import strip_control_codes
from rich.text import Text


def marked_changes(old: str, new: str) -> Text:
    """``new`` with what it has in place of ``old`` marked word by word."""
    before, after = plain(old).split(), plain(new).split()
    text = Text()
    for tag, i1, i2, j1, j2 in SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes():
        if tag in ("replace", "delete"):
            text.append("[-" + " ".join(before[i1:i2]) + "-] ", style="strike dim")
        if tag in ("replace", "insert"):
            text.append("{+" + " ".join(after[j1:j2]) + "+} ", style="bold")
        if tag == "equal":
            text.append(" ".join(after[j1:j2]) + " ")
    return text


def plain(text: str) -> str:
    """Untrusted text without the control codes that a terminal would obey."""
    return strip_control_codes(text).replace("\x1b", "")
