"""The optional part of a game: its checks, alarms, tables and pages.

A game names its own in ``Interaction.View``. The defaults show any game turn by turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from omegaconf import DictConfig

from medserl_agentloop.core.metrics import Rule, common_rules
from medserl_agentloop.core.records import COLUMNS, Column, GameRecord, Section, as_text

R = TypeVar("R", bound=GameRecord)


class GameView(Generic[R]):
    """Checks, alarms, tables and pages of a kind of game; ``roles`` are the game's."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = roles

    # -- before the first step

    @classmethod
    def check_run(cls, run: Any) -> Iterator[str]:
        """Yield a sentence for each problem of a ``core.run_check.RunConfig`` for this game."""
        return iter(())

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield lines to print before a run starts; warnings begin with ``warning:``."""
        return iter(())

    @classmethod
    def folders(cls, selfplay: Any) -> Mapping[str, Path]:
        """Return the folders that ``selfplay`` keys name; a resume compares them."""
        return {}

    # -- after a step's games

    def trained_role_won(self, record: R) -> bool | None:
        """Return whether the trained role beat its opponent; None if undecided."""
        return None

    @classmethod
    def rules(cls, roles: Sequence[str]) -> tuple[Rule, ...]:
        """The alarms; ``selfplay.alarms.limits`` may change their limits."""
        return common_rules(roles)

    shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Labels and metrics of the game's own columns in the table of steps."""

    def notices(self, numbers: Mapping[str, float]) -> Iterator[str]:
        """Yield comments on a step's metrics; the run prints each one once."""
        return iter(())

    # -- where games are looked at -----------------------------------------------------------------

    columns: ClassVar[Mapping[str, Column]] = COLUMNS
    """The table of games, a column for each fact."""

    gains: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Labels and validation measures (shares) that say what a run gained."""

    @classmethod
    def caveats(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield sentences on what a run with this config cannot show."""
        return iter(())

    headline: ClassVar[tuple[str, ...]] = ()
    """Metrics that ``medserl show`` prints in addition to rewards and :attr:`shown`."""

    @classmethod
    def sections(cls, record: R, prompts: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
        """Return the sections of a game's page: the turns as played, and the game's own fields.

        ``prompts`` is the run's ``prompts.jsonl``, the latest first.
        """
        sections = []
        for number, turn in enumerate(record.turns):
            title = f"{turn.role} · {turn.tokens} tokens{', cut off' if turn.truncated else ''}"
            facts = {"earned": record.turn_rewards.get(number)}
            folded = {f"what {turn.role} read": as_text(turn.messages)}
            sections.append(
                Section(title, turn.role, text=[("", turn.response)], facts=facts, folded=folded)
            )
        own = {
            name: value
            for name, value in record.to_json().items()
            if name not in GameRecord.model_fields
        }
        return [*sections, Section("game", facts=own)] if own else sections

    # -- in validation -----------------------------------------------------------------------------

    def read_validation_set(self, dataset: Any) -> None:
        """Receive the rows of ``data.val_files`` before the first validation."""

    def validation_numbers(self, record: R) -> dict[str, float | str | None]:
        """One game's numbers for verl's validation, and texts for :meth:`validation_scores`."""
        return {f"{role}_reward": record.reward(role) for role in self.roles}

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        """Scores of a whole validation: metrics, and a line to print.

        ``sources`` is the ``data_source`` of every game's row; ``facts`` are lists of
        ``validation_numbers``' values.
        """
        return ()
