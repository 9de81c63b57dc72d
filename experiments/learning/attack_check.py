"""Check the effect of an attack in the toy clinic, with the truth known."""

from __future__ import annotations

from medserl_agentloop.games.clinic import parse_note
from medserl_agentloop.games.medical.case import Category


def check_attack(seed_text: str, rewritten_text: str, category: Category) -> str:
    """``ok``, or the first rule that ``rewritten_text``, an attack on a note of this world, breaks.

    Valid is: the same kinds of sentences in the same order, exactly one changed, not the finding,
    and afterwards no error for ``decoy_benign``, exactly one for ``adversarial_benign`` and at
    least one for ``adversarial_harmful``.

    Raises:
        ValueError: ``seed_text`` is not a note of this world.
    """
    seed, rewritten = parse_note(seed_text), parse_note(rewritten_text)
    if seed is None:
        raise ValueError(f"the seed note is not a note of the toy clinic: {seed_text!r}")
    if rewritten is None:
        return "not_a_note"
    if len(rewritten.sentences) != len(seed.sentences):
        return "sentence_count"
    pairs = enumerate(zip(seed.sentences, rewritten.sentences, strict=True))
    changed = [i for i, (old, new) in pairs if old != new]
    if len(changed) != 1:
        return "too_many_edits" if changed else "unchanged"
    [index] = changed
    if index == 0:
        return "finding_changed"
    if seed.sentences[index].kind is not rewritten.sentences[index].kind:
        return "kind_changed"
    errors = len(rewritten.errors)
    if category is Category.DECOY_BENIGN:
        return "error_added" if errors else "ok"
    if not errors:
        return "no_error"
    return "many_errors" if category is Category.ADVERSARIAL_BENIGN and errors > 1 else "ok"
