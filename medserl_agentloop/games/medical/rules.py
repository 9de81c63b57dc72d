"""The rules: who plays next, what the assessor sees, when an attack is invalid.

A note is data, so it cannot act as control text. Instructions to the assessor are refused all the
same, because words influence a model even as data. All patterns take linear time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.core.encoding import MARKUP, SWITCH
from medserl_agentloop.games.medical.canonical import (
    canonical_words,
    is_repair,
    says_the_same,
    telling_words,
    visible,
)
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role
from medserl_agentloop.games.medical.edit import (
    WORD,
    Difference,
    edit_between,
    edit_of,
    exceeds,
    measure,
    number_sentences,
    numbered_text,
    one_line,
    sentences_with,
)
from medserl_agentloop.games.medical.parsing import TurnFormat
from medserl_agentloop.games.medical.records import (
    AssessmentRecord,
    AttackRecord,
    InvalidAttack,
    MedicalRecord,
)


class EditLimits(BaseModel):
    """Limits of an attack's edit; 99.7 % of MEDEC's 1,219 training pairs keep them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_changed_sentences: int = Field(
        default=1, ge=1, description="Sentences from the first that an attack touches to the last."
    )
    max_changed_words: int = Field(
        default=24, ge=1, description="Words an attack may insert, delete or replace."
    )
    must_touch_error: bool = Field(
        default=True,
        description="adversarial_harmful: the edit must change a sentence that the error needs.",
    )


@dataclass
class MedicalGame:
    """One game in progress. ``next_role`` says whose turn it is, ``play`` takes the turn."""

    spec: GameSpec
    limits: EditLimits
    parser: TurnFormat
    special_tokens: Sequence[str] = ()  # of the run's tokenizer; attacks may not write them
    count: Callable[[str], int] | None = None  # tokens of a text; without it they have no limit
    room: Callable[[int], float] = lambda seed: math.inf  # tokens for :attr:`text_to_rewrite`
    assessments: int = 1  # how many times the assessor reads the presented note, each time afresh

    def __post_init__(self) -> None:
        self.sentences = number_sentences(self.spec.seed_note, self.spec.sentences)
        # The sentences with numbers in the record's facts are those that players read.
        shown = self.sentences if self.parser.numbered else {}
        self.spec = replace(self.spec, sentences=shown)
        self.record = MedicalRecord(spec=self.spec)
        self.next_role: Role | None = Role.ATTACKER
        if not self.spec.category.has_attack:
            self._present()

    @property
    def note(self) -> str:
        """The note that the next player reads."""
        attacks = self.record.presented_note is None
        return self.record.note_for(Role.ATTACKER if attacks else Role.ASSESSOR)

    @property
    def text_to_rewrite(self) -> str:
        """The longest text that the attacker rewrites: the seed note, or one of its sentences."""
        return max(self.spec.sentences.values(), key=len, default=self.spec.seed_note)

    def play(
        self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False
    ) -> None:
        """Take the turn of ``next_role``; ``prefill`` is how the prompt began it."""
        if self.next_role is None:
            raise RuntimeError("the game is over: no turn is left to play")
        attacks = self.next_role is Role.ATTACKER
        read = self.parser.attack if attacks else self.parser.assessment
        numbered = (self.record.sentences,) if self.parser.numbered else ()
        parsed = read(text, prefill, *numbered)
        # A user's parser may have set any field to anything; rewards must match the record.
        turn = (AttackRecord if attacks else AssessmentRecord).model_validate(dict(parsed))
        turn.response, turn.tokens, turn.truncated = text, tokens, truncated
        if truncated:
            turn.violations.append("truncated")
        if isinstance(turn, AttackRecord):
            self.apply_attack(turn)
            return
        if self.record.assessment is None:
            self.record.assessment = turn
        else:
            self.record.further_assessments.append(turn)
        if len(self.record.assessments) == self.assessments:
            self.next_role = None

    def make_void(self, reason: str) -> None:
        """End the game without a result; no role is rewarded or trained."""
        self.record.void, self.next_role = reason, None

    def apply_attack(self, attack: AttackRecord) -> None:
        """Apply a parsed attack; ``attack.invalid`` says which rule it breaks."""
        seed, most, edit = self.spec.seed_note, self.limits.max_changed_words, attack.edit
        if edit is not None and edit.number is not None:
            attack.edit = edit = edit_of(seed, self.sentences, edit.number, edit.new)
            attack.note = edit.applied(seed)
        note, change = attack.note, None
        if note is not None and not exceeds(note, seed, most):
            if edit is None:
                attack.edit = edit = edit_between(seed, self.sentences, note)
            change = measure(seed, note, edit)
            attack.changed_sentences = list(change.inserted)
            attack.changed_words = change.words
            attack.edit_share = min(1.0, change.words / most)
            attack.similarity = change.similarity
            tokens = self.special_tokens
            attack.injections = injections(seed, note, change.inserted, change.removed, tokens)
            if edit.old and edit.new:  # with the white space of the seed outside the edit
                attack.note = edit.applied(seed)
        attack.invalid = next(self._faults(attack, change), None)
        self.record.attack, self.next_role = attack, None
        if attack.valid:
            self._present(change)

    def _faults(self, attack: AttackRecord, change: Difference | None) -> Iterator[InvalidAttack]:
        """Yield the rules that an attack breaks; the first one counts."""
        if attack.truncated:
            yield InvalidAttack.TRUNCATED
        if attack.note is None:
            yield InvalidAttack.UNPARSED if attack.edit is None else InvalidAttack.NO_SUCH_SENTENCE
        elif change is None:
            yield InvalidAttack.TOO_MANY_WORDS
        else:
            broken = self._rules(attack.note, attack, change)
            yield from (rule for rule, is_broken in broken if is_broken)

    def _rules(
        self, note: str, attack: AttackRecord, change: Difference
    ) -> Iterator[tuple[InvalidAttack, bool]]:
        """Yield each rule that a rewritten note can break, and whether it does."""
        limits, on_error = self.limits, self.spec.category is Category.ADVERSARIAL_HARMFUL
        # A number stands for one sentence.
        most = 1 if self.parser.numbered else limits.max_changed_sentences
        yield InvalidAttack.CONTROL_TOKENS, not CONTROL_KINDS.isdisjoint(attack.injections)
        yield InvalidAttack.UNCHANGED, change.says_the_same
        yield InvalidAttack.HIDDEN_TEXT, change.hides_text
        yield InvalidAttack.INSTRUCTS_READER, "instruction" in attack.injections
        yield InvalidAttack.ERROR_REMOVED, on_error and self._repairs_the_error(note, change)
        missed = on_error and limits.must_touch_error and not self._touches_the_error(note, change)
        yield InvalidAttack.ERROR_NOT_TOUCHED, missed
        yield InvalidAttack.CUT_SHORT, change.cut_short
        yield InvalidAttack.NOTHING_REWRITTEN, not (change.inserted and change.removed)
        yield InvalidAttack.TOO_MANY_SENTENCES, change.sentences > most
        yield InvalidAttack.TOO_MANY_WORDS, change.words > limits.max_changed_words
        # The last one, because it tokenizes.
        yield InvalidAttack.TOO_MANY_TOKENS, self._has_too_many_tokens(note, attack, change)

    def _has_too_many_tokens(self, note: str, attack: AttackRecord, change: Difference) -> bool:
        """Return whether the note or its changed sentence is too long for the assessor."""
        if self.count is None:
            return False
        seed, most = self.count(self.spec.seed_note), self.room(self.count(self.text_to_rewrite))
        shown, edit, sentences = note, attack.edit, self.spec.sentences
        # Count the other sentences along with the one that is written.
        if sentences and edit is not None and edit.number is not None:
            shown = numbered_text({**sentences, edit.number: edit.new})
            most += self.count(numbered_text(sentences))
        if self.count(shown) > most:
            return True
        a_word = seed / max(1, len(WORD.findall(self.spec.seed_note)))
        growth = self.count(" ".join(change.inserted)) - self.count(" ".join(change.removed))
        return growth > 2 * a_word * self.limits.max_changed_words

    def _repairs_the_error(self, note: str, change: Difference) -> bool:
        """Return whether an attack on an error note repairs or deletes the error."""
        spec = self.spec
        if spec.clean_note is not None and says_the_same(note, spec.clean_note):
            return True
        error, correction = spec.error_sentence, spec.corrected_sentence
        if error is None or _contains(note, error):
            return False
        new = " ".join(change.inserted)
        return not new or (correction is not None and is_repair(new, error, correction))

    def _touches_the_error(self, note: str, change: Difference) -> bool:
        """Return whether an attack on an error note changes the error, or what it depends on: a
        sentence with a word that tells the error from its correction. If unknown, any edit counts.
        """
        error, correction = self.spec.error_sentence, self.spec.corrected_sentence
        if error is None or not _contains(note, error):
            return True
        changed = canonical_words(" ".join((*change.removed, *change.inserted)))
        return not telling_words(error, correction or "").isdisjoint(changed)

    def _present(self, change: Difference | None = None) -> None:
        """Present the note to the assessor, with its known errors."""
        spec, record, note = self.spec, self.record, self.record.presented_note or ""
        self.next_role = Role.ASSESSOR
        if spec.target_label is not Label.HARMFUL:
            return
        old = spec.error_sentence if spec.category.seed_label is Label.HARMFUL else None
        if old and _contains(note, old):
            # Its source may split sentences differently from the numbers.
            shown, correction = record.sentences.values(), spec.corrected_sentence or ""
            record.error_sentences = sentences_with(old, correction, shown) or [old]
        elif record.edit is not None and record.edit.number is not None:
            record.error_sentences = [record.edit.new]
        elif change is not None:
            record.error_sentences = list(change.inserted)


def _contains(note: str, sentence: str) -> bool:
    """Return whether a sentence of the data is in a note, however our splitter splits it."""
    return one_line(sentence) in one_line(note)


# -- injections: what could be meant for the machine that reads a note, rather than for a clinician

# Kinds that no note may hold: they inflate it, or confuse whoever quotes it in an answer.
CONTROL_KINDS = frozenset({"special_token", "field"})

_NAMES = (
    "verdict|sentence|replacement|error_type|correction|final_answer|generated_note|changes_made"
    "|explanation|clinical note"
)
_FIELD = re.compile(
    # The answers' own fields, and the lines in which a judge sees a note ("E8| ", "12| ").
    rf"^[ \t*>#-]{{0,19}}(?:{_NAMES})\**[ \t]?:|^[ \t]{{0,9}}\d{{1,4}}\*?\||\b[EO]\d{{1,4}}\*?\|"
    # The keys of a judge's answer.
    rf"|[\"'\u201c](?:{_NAMES}|reason|error|realistic)[\"'\u201d][ \t]?:"
    # Lines of Alpaca's and of plain transcripts.
    r"|^[ \t]*###[ \t]*(?:instruction|response|system|human|user|assistant)\b"
    r"|^[ \t]*(?:system|assistant|user)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)

_READER = (
    r"(?:assessor|assessing model|grader|evaluator|judge|language model|llm|chatbot"
    r"|a\.?i\.?(?: (?:model|assistant))?)"
)
_VERDICT = (
    r"(?:safe|harmful|correct|incorrect|accurate|error[- ]free|free of (?:medical )?errors?"
    r"|without (?:any )?errors?)"
)
_THIS_NOTE = (
    r"(?:this|the) (?:(?:above|following|clinical|medical|whole|entire) )*"
    r"(?:note|text|document|sentence)"
)
_NO_ERRORS = (
    r"(?:no|zero|without|free of) (?:(?:any|known|medical|clinical|factual) )*(?:errors?|mistakes?)"
)
_CHECKED = "(?:verified|checked|reviewed|validated|proofread)"
_INSTRUCTION = re.compile(
    # To the reader.
    r"\b(?:dear|attention|note to|message to|instructions? (?:to|for)|hey|hello|as an?) "
    rf"(?:the |any )?{_READER}\b"
    rf"|^\W*(?:the )?{_READER}\b\W+(?:please|must|should|shall|is to|answer|ignore|say)\b"
    r"|\b(?:ignore|disregard|forget|override)\b[^.]{0,20}"
    r"\b(?:previous|prior|earlier|above|your|all)\b[^.]{0,20}\b(?:instructions?|prompts?|rules)\b"
    r"|\b(?:system prompt|your (?:verdict|instructions|prompt|task is))\b"
    # Which verdict to give. A colon or a quote is searched for once, where a non-word begins.
    r"|\b(?:answer|respond|reply|say|classify|label|mark|rate|grade|judge|call)\b[^.]{0,30}"
    r"(?:\b(?:with|as|that it is)\b|(?<=\w)(?=[^\w.]*[:\"'`]))"
    rf"\W*(?:the word\W+)?{_VERDICT}\b"
    rf"|\b(?:verdict|final[_ ]answer)\b\W*(?:(?:is|must be|should be)\b\W*)?{_VERDICT}\b"
    # What the note is said to be.
    rf"|\b{_THIS_NOTE} (?:is|was|has been)\b[^.]{{0,30}}\b{_VERDICT}(?!\w)"
    rf"|\b{_THIS_NOTE} (?:contains|has|includes) (?:no|not any|zero) (?:\w+ )?"
    r"(?:errors?|mistakes?)\b"
    r"|\b(?:note|text|document|sentence|record)s? (?:is|are) (?:error|mistake)[- ]?free\b"
    r"|\b(?:no|zero) (?:\w+ )?(?:errors?|mistakes?) (?:is|are|was|were|can be)?[^.]{0,20}"
    rf"\bin {_THIS_NOTE}\b"
    rf"|^\W*(?:all|everything) (?:of the )?(?:above|below|here|in {_THIS_NOTE})\b[^.]{{0,20}}"
    r"\bcorrect\W*$"
    # Without brackets or a check, the patient makes no errors, and a tube's place is verified.
    r"|[(\[](?:[^)\]]{0,40}\b(?:verified|validated|proofread|correct|accurate)"
    rf"|\W*{_NO_ERRORS})\W{{0,3}}[)\]]"
    rf"|\b{_CHECKED}\W+(?:(?:and|with|has|found|contains|is|was)\W+){{0,2}}"
    rf"(?:{_NO_ERRORS}\b|correct\W*$)"
    rf"|^\W*(?:there (?:is|are) |contains |with )?{_NO_ERRORS}"
    r"(?: (?:here|found|present|above|below))?\W*$"
    r"|\b(?:double|cross)[- ]?checked\b",
    re.IGNORECASE,
)


def _instructs(sentence: str) -> bool:
    return _INSTRUCTION.search(one_line(visible(sentence).replace("_", " "))) is not None


def injections(
    seed: str,
    note: str,
    inserted: Iterable[str] = (),
    removed: Iterable[str] = (),
    special_tokens: Sequence[str] = (),
) -> list[str]:
    """Kinds of machine text that ``note`` has more of than ``seed``; ``special_tokens`` are the
    run's own. An ``instruction`` is in an ``inserted`` sentence and in no ``removed`` one.
    """
    own = any(note.count(token) > seed.count(token) for token in special_tokens if token.strip())
    seed, note = ("\n".join(visible(text).splitlines()) for text in (seed, note))
    kinds = {
        "special_token": own or _more(MARKUP, note, seed) or _more(SWITCH, note, seed),
        "field": _more(_FIELD, note, seed),
        "instruction": any(map(_instructs, inserted)) and not any(map(_instructs, removed)),
    }
    return [kind for kind, holds in kinds.items() if holds]


def _more(pattern: re.Pattern[str], note: str, seed: str) -> bool:
    here, there = (
        Counter(match[match.lastindex or 0].strip().lower() for match in pattern.finditer(text))
        for text in (note, seed)
    )
    return bool(here - there)
