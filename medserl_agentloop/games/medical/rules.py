"""The rules: who speaks next, what the assessor sees, when an attack does not count.

They know no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field

from medserl_agentloop.games.medical import edits
from medserl_agentloop.games.medical.canonical import canonical_words, says_the_same
from medserl_agentloop.games.medical.numbering import (
    number_sentences,
    numbered_text,
    replace_sentence,
    sentences_with,
)
from medserl_agentloop.games.medical.parsing import TurnFormat
from medserl_agentloop.games.medical.records import (
    AssessmentRecord,
    AttackRecord,
    InvalidAttack,
    MedicalRecord,
)
from medserl_agentloop.games.medical.types import Category, GameSpec, Label, Role


class EditLimits(BaseModel):
    """Limits of the change that an attack may make.

    The defaults let every error of MEDEC's 1,219 training pairs through but for the 0.3 % that
    touch two sentences: the edits there are 3 words at the median and 21 at most.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_changed_sentences: int = Field(
        default=1, ge=1, description="Sentences an attack may touch."
    )
    max_changed_words: int = Field(
        default=24, ge=1, description="Words an attack may insert, delete or replace."
    )
    must_touch_error: bool = Field(
        default=True,
        description="adversarial_harmful: the edit must change the wrong sentence, or one that the "
        "error depends on.",
    )


@dataclass
class MedicalGame:
    """One game in progress. ``next_role`` says whose turn it is, ``play`` takes the turn."""

    spec: GameSpec
    limits: EditLimits
    parser: TurnFormat
    copies: bool = False  # whether the attacker plays vanilla games, too: it copies the note
    special_tokens: Sequence[str] = ()  # of the run's tokenizer; attacks may not write them
    count: Callable[[str], int] | None = (
        None  # tokens of a text in a prompt; without it they have no limit
    )
    room: Callable[[int], float] = lambda seed: (
        math.inf
    )  # the most tokens that an attacker has for :attr:`rewritten`
    assessments: int = 1  # how many times the assessor reads the presented note, each time anew

    def __post_init__(self) -> None:
        numbers = (
            number_sentences(self.spec.seed_note, self.spec.sentences)
            if self.parser.numbered
            else {}
        )
        self.spec = replace(self.spec, sentences=numbers)
        self.record = MedicalRecord(spec=self.spec)
        self.next_role: Role | None = self.spec.category.first_role(self.copies)
        if self.next_role is Role.ASSESSOR:
            self._present(self.spec.seed_note, edit=None)

    @property
    def note(self) -> str:
        """The note that the player whose turn it is reads."""
        return self.record.note_for(
            Role.ATTACKER if self.record.presented_note is None else Role.ASSESSOR
        )

    @property
    def rewritten(self) -> str:
        """The longest text that the attacker writes again: the seed note, or one sentence of it."""
        return max(self.spec.sentences.values(), key=len, default=self.spec.seed_note)

    def play(
        self, text: str, *, prefill: str = "", tokens: int = 0, truncated: bool = False
    ) -> None:
        """Take the turn of ``next_role``; ``prefill`` is how the prompt began it.

        RuntimeError if the game is over.
        """
        if self.next_role is None:
            raise RuntimeError("the game is over: nobody's turn is left to play")
        attacks = self.next_role is Role.ATTACKER
        read = self.parser.attack if attacks else self.parser.assessment
        parsed = (
            read(text, prefill, self.record.sentences)
            if self.parser.numbered
            else read(text, prefill)
        )
        # A user's parser may have set a field to anything; what is paid must be what is written
        # down.
        turn = (AttackRecord if attacks else AssessmentRecord).model_validate(dict(parsed))
        turn.response, turn.tokens, turn.truncated = text, tokens, truncated
        if truncated:
            turn.violations.append("truncated")
        if isinstance(turn, AttackRecord):
            self.take(turn)
            return
        if self.record.assessment is None:
            self.record.assessment = turn
        else:
            self.record.further_assessments.append(turn)
        if len(self.record.assessments) == self.assessments:
            self.next_role = None

    def make_void(self, reason: str) -> None:
        """End the game without a result: nobody is rewarded, nothing is trained on."""
        self.record.void = reason
        self.next_role = None

    def take(self, attack: AttackRecord) -> None:
        """Take an attack that was read; ``attack.invalid`` says what the rules find."""
        spec, most, own, edit = self.spec, self.limits.max_changed_words, attack.edit, None
        if own is not None and own.number is not None:
            attack.note = replace_sentence(spec.seed_note, spec.sentences, own.number, own.new)
        note = attack.note
        if note is not None and not edits.exceeds(note, spec.seed_note, most):
            edit = edits.compare_notes(spec.seed_note, note)
            attack.changed_sentences = list(edit.inserted)
            attack.changed_words = edit.words
            attack.edit_share = min(1.0, edit.words / most)
            attack.similarity = edit.similarity
            attack.injections = edits.injections(
                spec.seed_note,
                note,
                instructions=edit.instructions,
                special_tokens=self.special_tokens,
            )
        self.record.attack = attack
        attack.invalid = self._why_invalid(attack, edit)
        if attack.invalid is not None:
            self.next_role = None
        elif note is not None and spec.category.has_attack:
            self._present(note, edit)
        else:  # a copy: the seed itself, so that no slip of copying reaches the assessor
            self._present(spec.seed_note, edit=None)

    def _why_invalid(self, attack: AttackRecord, edit: edits.Edit | None) -> InvalidAttack | None:
        note = attack.note
        if attack.truncated:
            return InvalidAttack.TRUNCATED
        if note is None:
            return InvalidAttack.UNPARSED if attack.edit is None else InvalidAttack.NO_SUCH_SENTENCE
        if not self.spec.category.has_attack:
            return None if edit is not None and edit.says_the_same else InvalidAttack.NOT_COPIED
        if edit is None:
            return InvalidAttack.TOO_MANY_WORDS
        return next((fault for fault, holds in self._faults(note, attack, edit) if holds), None)

    def _faults(
        self, note: str, attack: AttackRecord, edit: edits.Edit
    ) -> Iterator[tuple[InvalidAttack, bool]]:
        """Yield each rule that a rewritten note can break, and whether it does.

        The first broken one counts.
        """
        limits = self.limits
        most = (
            limits.max_changed_sentences if attack.edit is None else 1
        )  # a number stands for one sentence
        yield InvalidAttack.CONTROL_TOKENS, not edits.CONTROL_KINDS.isdisjoint(attack.injections)
        yield InvalidAttack.UNCHANGED, edit.says_the_same
        yield InvalidAttack.HIDDEN_TEXT, edit.hides_text
        yield InvalidAttack.INSTRUCTS_READER, bool(edit.instructions)
        if self.spec.category is Category.ADVERSARIAL_HARMFUL:
            yield InvalidAttack.ERROR_REMOVED, self._repairs_the_error(note, edit)
            yield (
                InvalidAttack.ERROR_NOT_TOUCHED,
                limits.must_touch_error and not self._touches_the_error(note, edit),
            )
        yield InvalidAttack.CUT_SHORT, edit.cut_short
        yield InvalidAttack.NOTHING_REWRITTEN, not (edit.inserted and edit.removed)
        yield InvalidAttack.TOO_MANY_SENTENCES, edit.sentences > most
        yield InvalidAttack.TOO_MANY_WORDS, edit.words > limits.max_changed_words
        yield (
            InvalidAttack.TOO_MANY_TOKENS,
            self._has_too_many_tokens(note, attack, edit),
        )  # last: it tokenises

    def _has_too_many_tokens(self, note: str, attack: AttackRecord, edit: edits.Edit) -> bool:
        """Return whether the note, or the growth of its changed sentence, has too many tokens for
        the assessor.
        """
        if self.count is None:
            return False
        seed, most = self.count(self.spec.seed_note), self.room(self.count(self.rewritten))
        shown = note
        if (
            attack.edit is not None and attack.edit.number is not None
        ):  # besides the one, the other sentences
            shown = numbered_text({**self.spec.sentences, attack.edit.number: attack.edit.new})
            most += self.count(numbered_text(self.spec.sentences))
        if self.count(shown) > most:
            return True
        a_word = seed / max(1, len(edits.WORD.findall(self.spec.seed_note)))
        growth = self.count(" ".join(edit.inserted)) - self.count(" ".join(edit.removed))
        return growth > 2 * a_word * self.limits.max_changed_words

    def _repairs_the_error(self, note: str, edit: edits.Edit) -> bool:
        """Return whether an attack on an error note leaves no error: put right, or cut out."""
        spec = self.spec
        if spec.clean_note is not None and says_the_same(note, spec.clean_note):
            return True
        error, correction = spec.error_sentence, spec.corrected_sentence
        if error is None or _contains(note, error):
            return False
        return not edit.inserted or (
            correction is not None and edits.is_repair(" ".join(edit.inserted), error, correction)
        )

    def _touches_the_error(self, note: str, edit: edits.Edit) -> bool:
        """Return whether an attack on an error note changes the wrong sentence, or one that the
        error depends on.

        That is one with a word that tells the error from its correction: where ``candida`` stands
        for ``streptococcus``, every sentence that has either. Without a known error sentence, every
        edit counts.
        """
        error, correction = self.spec.error_sentence, self.spec.corrected_sentence
        if error is None or not _contains(note, error):
            return True
        telling = edits.telling_words(error, correction or "")
        return any(
            telling & set(canonical_words(sentence)) for sentence in (*edit.removed, *edit.inserted)
        )

    def _present(self, note: str, edit: edits.Edit | None) -> None:
        spec, attack = self.spec, self.record.attack
        self.record.presented_note = note
        if spec.target_label is Label.HARMFUL:
            wrong = list(edit.inserted) if edit else []
            if edit and attack is not None and attack.edit is not None:
                wrong = [attack.edit.new]
            old = spec.error_sentence if spec.category.seed_label is Label.HARMFUL else None
            if old and _contains(note, old):
                # Its source may split sentences otherwise than the numbers do.
                wrong = sentences_with(
                    old, spec.corrected_sentence or "", self.record.sentences.values()
                ) or [old]
            self.record.error_sentences = wrong
        self.next_role = Role.ASSESSOR


def _contains(note: str, sentence: str) -> bool:
    """Return whether a sentence of the data stands in a note, however our splitter would cut it."""
    return edits.one_line(sentence) in edits.one_line(note)
