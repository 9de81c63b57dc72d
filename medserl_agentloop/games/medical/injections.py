"""What in a note could be meant for the machine that reads it, rather than for a clinician.

Notes are data, whatever they hold, so none of this can do what it pretends to. It is counted, and ``medical.rules``
refuses what instructs the assessor, since words work on a model even where they are data, and :data:`CONTROL_KINDS`. No
pattern here takes more than linear time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from medserl_agentloop.core.chat import CONTROL_TOKEN
from medserl_agentloop.games.medical.canonical import visible

CONTROL_KINDS = frozenset({"special_token", "tag"})
"""Kinds of injections that no note may hold: they inflate it, or confuse whoever quotes it in an answer."""

_CONTROL_TOKEN = re.compile(CONTROL_TOKEN, re.IGNORECASE)
# Lines of Alpaca's and of plain transcripts.
_CHAT_MARKER = re.compile(
    r"^[ \t]*###[ \t]*(?:instruction|response|system|human|user|assistant)\b"
    r"|^[ \t]*(?:system|assistant|user)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_TAG = re.compile(
    r"</?(?:think|thinking|note|answer|verdict|tool_call|system|user|assistant)>"
    r"|^[ \t]*(?:generated_note|final_answer|changes_made|verdict|error_type)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_JINJA = re.compile(r"\{\{|\}\}|\{%|%\}|\{#|#\}")

_READER = (
    r"(?:assessor|assessing model|grader|evaluator|judge|language model|llm|chatbot|a\.?i\.?(?: (?:model|assistant))?)"
)
_VERDICT = (
    r"(?:safe|harmful|correct|incorrect|accurate|error[- ]free|free of (?:medical )?errors?|without (?:any )?errors?)"
)
_THIS_NOTE = r"(?:this|the) (?:(?:above|following|clinical|medical|whole|entire) )*(?:note|text|document)"
_INSTRUCTION = re.compile(
    "|".join(
        (
            rf"\b(?:dear|attention|note to|message to|instructions? (?:to|for)|hey|hello|as an?) "
            rf"(?:the |any )?{_READER}\b",
            rf"^\W*(?:the )?{_READER}\b\W+(?:please|must|should|shall|is to|answer|ignore|say)\b",
            r"\b(?:ignore|disregard|forget|override)\b[^.]{0,20}\b(?:previous|prior|earlier|above|your|all)\b"
            r"[^.]{0,20}\b(?:instructions?|prompts?|rules)\b",
            r"\b(?:system prompt|your (?:verdict|instructions|prompt|task is))\b",
            rf"\b(?:answer|respond|reply|say|classify|label|mark|rate|grade|judge|call)\b[^.]{{0,30}}"
            # A colon or a quote somewhere in what is no word; looked for once, where that begins.
            rf"(?:\b(?:with|as|that it is)\b|(?<=\w)(?=[^\w.]*[:\"'`]))\W*(?:the word\W+)?{_VERDICT}\b",
            rf"\b(?:verdict|final[_ ]answer)\b\W*(?:(?:is|must be|should be)\b\W*)?{_VERDICT}\b",
            rf"\b{_THIS_NOTE} (?:is|was|has been)\b[^.]{{0,30}}\b{_VERDICT}(?!\w)",
            rf"\b{_THIS_NOTE} (?:contains|has|includes) (?:no|not any|zero) (?:\w+ )?(?:errors?|mistakes?)\b",
            rf"\b(?:no|zero) (?:\w+ )?(?:errors?|mistakes?) (?:is|are|was|were|can be)?[^.]{{0,20}}\bin {_THIS_NOTE}\b",
        )
    ),
    re.IGNORECASE,
)


def instructions_in(inserted: Iterable[str], removed: Iterable[str] = ()) -> list[str]:
    """Sentences that speak of the reader's task, where none of those they replace does."""
    if any(_instructs(sentence) for sentence in removed):
        return []
    return [sentence for sentence in inserted if _instructs(sentence)]


def _instructs(sentence: str) -> bool:
    return _INSTRUCTION.search(" ".join(visible(sentence).replace("_", " ").split())) is not None


def injections(
    seed: str, note: str, *, instructions: Sequence[str] = (), special_tokens: Sequence[str] = ()
) -> list[str]:
    """Kinds of look-alikes that ``note`` holds more of than ``seed`` does.

    ``instructions`` are those of the edit, ``special_tokens`` the run's tokenizer's, besides those of common templates.
    """
    own = any(note.count(token) > seed.count(token) for token in special_tokens if token.strip())
    found = {
        "special_token": own or _more(_CONTROL_TOKEN, note, seed),
        "chat_marker": _more(_CHAT_MARKER, note, seed),
        "tag": _more(_TAG, note, seed),
        "jinja": _more(_JINJA, note, seed),
        "instruction": instructions,
    }
    return [kind for kind, holds in found.items() if holds]


def _more(pattern: re.Pattern[str], note: str, seed: str) -> bool:
    here, there = (Counter(match[0].strip().lower() for match in pattern.finditer(text)) for text in (note, seed))
    return bool(here - there)
