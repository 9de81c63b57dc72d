"""Checks, alarms, tables and pages of the medical game."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medserl_agentloop.core.interaction import GameView, Prompt
from medserl_agentloop.core.metrics import Rule, common_rules
from medserl_agentloop.core.records import Pieces, Section, as_text
from medserl_agentloop.games.medical.case import EVAL_SPLIT, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edit import changed_runs, one_line
from medserl_agentloop.games.medical.judges import UNREAD_WARNING
from medserl_agentloop.games.medical.judges.report import judge_lines, judge_problems
from medserl_agentloop.games.medical.metrics import (
    RULES,
    UNREAD_RATE,
    trained_role_won,
    validation_numbers,
)
from medserl_agentloop.games.medical.prompting import load_profile, template_name
from medserl_agentloop.games.medical.records import (
    GAMES,
    AssessmentRecord,
    AttackRecord,
    MedicalRecord,
)
from medserl_agentloop.scoring.metrics import NotesBySet, notes_by_set, scores_by_set
from medserl_agentloop.scoring.notes import TEXTS

if TYPE_CHECKING:
    from omegaconf import DictConfig


TOY_PLAYERS = {"novice": "brief", "tiny_player": "medserl"}
"""The players in ``assets`` and the prompt profile each one knows."""


class MedicalView(GameView[MedicalRecord]):
    """Checks and alarms of judges and roles, MEDEC's scores in validation, a game's sections."""

    trained_role_won = staticmethod(trained_role_won)
    validation_numbers = staticmethod(validation_numbers)
    check_run = staticmethod(judge_problems)
    columns = GAMES
    gains = (("errors found", "recall"), ("false alarms", "false_positive_rate"))
    headline = (
        "selfplay/attacker/undetected_rate",
        "selfplay/attacker/effective_kinds",
        "selfplay/assessor/recall",
        "selfplay/assessor/false_positive_rate",
        "selfplay/shortcut/index",
        "selfplay/attacker/parse_rate",
        "selfplay/assessor/parse_rate",
    )
    shown = (
        ("valid", "selfplay/attacker/valid_rate"),
        ("undetected", "selfplay/attacker/undetected_rate"),
        ("accuracy", "selfplay/assessor/accuracy"),
    )

    @classmethod
    def folders(cls, selfplay: MedicalConfig) -> dict[str, Path]:
        return {"profile": load_profile(selfplay.profile, selfplay.error_types).folder}

    @classmethod
    def caveats(cls, config: DictConfig, selfplay: MedicalConfig) -> Iterator[str]:
        model = Path(config.actor_rollout_ref.model.path)
        taught = TOY_PLAYERS.get(model.name) if model.parent.name == "assets" else None
        if taught and taught != selfplay.profile:
            yield (
                f"the player {model.name} was taught the profile {taught} only: few of its answers "
                f"to the prompts of {selfplay.profile} can be read"
            )
        if selfplay.judge == "labels":
            toy = ", and its player knows only the toy clinic" * bool(taught)
            yield (
                f"selfplay.judge=labels reads no note{toy}: this run tests data and commands, and "
                "its rewards say nothing about medicine"
            )

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: MedicalConfig) -> Iterator[str]:
        yield from judge_lines(selfplay)
        if selfplay.credit.normalize.get(Role.ASSESSOR) == "kind":
            key = "selfplay.credit.normalize.assessor"
            yield f"credit: {key}=kind gives more weight to kinds of games with few mistakes"

    def __init__(self, roles: Sequence[str]) -> None:
        super().__init__(roles)
        self._notes: NotesBySet = {}

    @classmethod
    def rules(cls, roles: Sequence[str]) -> tuple[Rule, ...]:
        return (*RULES, *common_rules(roles))

    def notices(self, numbers: Mapping[str, float]) -> Iterator[str]:
        if numbers.get(UNREAD_RATE):
            yield UNREAD_WARNING

    def read_validation_set(self, dataset: Any) -> None:
        rows = zip(dataset.dataframe["data_source"], dataset.dataframe["extra_info"], strict=True)
        self._notes = notes_by_set(
            (source, facts) for source, facts in rows if facts.get("split") == EVAL_SPLIT
        )

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        return scores_by_set(self._notes, sources, facts) if facts.keys() >= set(TEXTS) else ()

    @classmethod
    def sections(
        cls, record: MedicalRecord, prompts: Sequence[Mapping[str, Any]] = ()
    ) -> list[Section]:
        """Both turns with changes and quotes marked, and what the judge said."""
        seed, presented = record.spec.seed_note, record.presented_note or ""
        untouched = "no attack: the note is shown as it is in the data"
        sections = [Section(untouched, "note", text=[("", seed)])]
        if (attack := record.attack) is not None:
            standing = f"invalid: {attack.invalid.value}" if attack.invalid else "valid"
            edit, note = attack.edit, [("", attack.response)]
            if edit is not None and edit.start is not None:
                end = edit.start + len(edit.old)
                changed = marked_changes(edit.old, edit.new)
                note = [("", seed[: edit.start]), *changed, ("", seed[end:])]
            elif attack.note is not None:
                note = [*marked_changes(seed, attack.note)]
            read = _read(record, prompts, Role.ATTACKER)
            sections = [_turn(Role.ATTACKER, standing, attack, note, read)]
        read = _read(record, prompts, Role.ASSESSOR)
        for each in record.assessments:
            verdict = each.verdict.value if each.verdict else "unreadable"
            text = marked_quote(presented, each.sentence)
            sections.append(_turn(Role.ASSESSOR, verdict, each, text, read))
        if (judgement := record.judgement) is not None:
            wrong = " | ".join(record.error_sentences)
            facts = {"intended": record.spec.target_label.value, "wrong in this note": wrong}
            shown_elsewhere = {"judge", "label", "cached", "seconds"}
            facts |= judgement.model_dump(mode="json", exclude=shown_elsewhere)
            label = judgement.label.value if judgement.label else "abstains"
            sections.append(Section(f"judge {judgement.judge}: {label}", "judge", facts=facts))
        return sections


def _turn(
    role: Role, result: str, turn: AttackRecord | AssessmentRecord, text: Pieces, read: str
) -> Section:
    title = f"{role}: {result} · {turn.tokens} tokens{', cut off' if turn.truncated else ''}"
    elsewhere = "response tokens truncated reasoning note edit changed_sentences verdict invalid"
    facts = turn.model_dump(mode="json", exclude=set(elsewhere.split()))
    folded = {f"what the {role} read": read, "answer as written": turn.response}
    return Section(title, role.value, turn.reasoning or "no reasoning", text, facts, folded)


def _read(record: MedicalRecord, prompts: Sequence[Mapping[str, Any]], role: Role) -> str:
    """Return the text that the role read: as the run recorded it, else as the profile is now."""
    note, wanted = record.note_for(role), (role.value, template_name(role, record.spec.task))
    for row in prompts:
        if (row.get("role"), row.get("template")) == wanted and row["step"] <= record.step:
            return as_text(Prompt(tuple(row["messages"]), {"note": note}).filled(str))
    try:
        return as_text(load_profile(record.profile).messages(role, record.spec.task, note))
    except ValueError:  # a user's own folder, which is not here
        return ""


_WORD = re.compile(r"\S+\s*|\s+")
# product of two notes' word counts above which they are not compared
MOST_COMPARED = 25_000_000


def marked_changes(old: str, new: str) -> Pieces:
    """Return ``new`` with its differences from ``old`` marked word by word."""
    was, now = _WORD.findall(old), _WORD.findall(new)
    if len(was) * len(now) > MOST_COMPARED:
        return [("", new)]
    pieces, at = [], 0
    words_was, words_now = ([word.strip() for word in words] for words in (was, now))
    for start, end, new_start, new_end in changed_runs(words_was, words_now):
        runs = (("", now[at:new_start]), ("del", was[start:end]), ("ins", now[new_start:new_end]))
        pieces += [(mark, "".join(words)) for mark, words in runs if words]
        at = new_end
    return [*pieces, ("", "".join(now[at:]))]


def marked_quote(note: str, quote: str | None) -> Pieces:
    """``note`` with the first occurrence of ``quote`` marked, ignoring white space."""
    quote = (quote or "").strip()
    for text, words in ((note, quote), (one_line(note), one_line(quote))):
        if words and words in text:
            before, _, after = text.partition(words)
            return [("", before), ("mark", words), ("", after)]
    return [("", note)]
