"""Optional parts of a game besides its play: alarms, validation, checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from omegaconf import DictConfig

from medserl_agentloop.core.alarms import Rule, common_rules
from medserl_agentloop.core.records import COLUMNS, Column, GameRecord, Section, as_text

R = TypeVar("R", bound=GameRecord)


class GameHooks(Generic[R]):
    """Optional parts of a game, in the order in which a run meets them; ``Interaction`` inherits the defaults."""

    roles: ClassVar[tuple[str, ...]]

    # -- before the first step -----------------------------------------------------------------------------------

    @classmethod
    def check_run(cls, run: Any) -> Iterator[str]:
        """Yield a sentence for each fault of the config, a ``core.run_check.RunConfig``, for this game."""
        return iter(())

    @classmethod
    def startup_lines(cls, config: DictConfig, selfplay: Any) -> Iterator[str]:
        """Yield the lines that a run prints once before it starts; warnings begin with ``warning:``."""
        return iter(())

    same_run: ClassVar[tuple[str, ...]] = ()
    """Keys of the game's own under ``selfplay`` that decide what a run learns: a resumed run keeps them."""

    def prompts(self) -> list[dict[str, Any]]:
        """Return the prompts for ``prompts.jsonl``: ``role``, ``template`` and ``messages`` with places."""
        return []

    @property
    def stop_strings(self) -> list[str]:
        """All strings that end a turn of the game besides the end-of-turn token."""
        return []

    def use_reward_model(self, address: str | None, model: str | None) -> None:
        """Learn where verl serves a reward model (``host:port`` and name), before the first game is scored."""

    # -- in a game -----------------------------------------------------------------------------------------------

    async def ask_base_model(self, record: R, base: Any) -> None:
        """Ask the base model, served with ``selfplay.adapters=per_role``, what the score needs, after the last turn."""

    # -- after a step's games ------------------------------------------------------------------------------------

    @property
    def repeated_roles(self) -> Sequence[str]:
        """Roles whose conversations of one game all answer the same prompt: baselines compare these with each other."""
        return ()

    def trained_role_won(self, record: R) -> bool | None:
        """Return whether the trained role beat its opponent; None for games that decide nothing between them."""
        return None

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        """The alarms; ``selfplay.alarms.limits`` may change their limits."""
        return common_rules(cls.roles)

    shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The game's own columns, label and metric, of the table of steps; it has the rewards of all roles anyway."""

    def notices(self, numbers: Mapping[str, float]) -> Iterator[str]:
        """Yield comments on the numbers of a step; the run prints each sentence once."""
        return iter(())

    # -- where games are looked at -------------------------------------------------------------------------------

    columns: ClassVar[Mapping[str, Column]] = COLUMNS
    """The table of games, a column for each fact; pages filter by those of words and draw those of numbers."""

    headline: ClassVar[tuple[str, ...]] = ()
    """Metrics that ``medserl show`` prints besides rewards and those of :attr:`shown`."""

    @classmethod
    def sections(cls, record: R, prompts: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
        """Return the sections of a game's page, besides its rewards: the turns as played, and the game's own fields.

        ``prompts`` is the run's ``prompts.jsonl``, the latest first.
        """
        sections = []
        for number, turn in enumerate(record.turns):
            title = f"{turn.role} · {turn.tokens} tokens{', cut off' if turn.truncated else ''}"
            facts = {"earned": record.turn_rewards.get(number)}
            folded = {f"what {turn.role} read": as_text(turn.messages)}
            sections.append(Section(title, turn.role, text=[("", turn.response)], facts=facts, folded=folded))
        own = {name: value for name, value in record.to_json().items() if name not in GameRecord.model_fields}
        return [*sections, Section("game", facts=own)] if own else sections

    # -- in validation -------------------------------------------------------------------------------------------

    def read_validation_set(self, dataset: Any) -> None:
        """See the rows of ``data.val_files`` before the first validation."""

    def validation_numbers(self, record: R) -> dict[str, float | str | None]:
        """One game as numbers for verl's validation metrics, and texts for :meth:`validation_scores`."""
        return {f"{role}_reward": record.reward(role) for role in self.roles}

    def validation_scores(
        self, sources: Sequence[str], facts: Mapping[str, Sequence[Any]]
    ) -> Iterable[tuple[dict[str, float], str]]:
        """Scores of a whole validation that are no averages of single games: metrics, and a line that says them.

        ``sources`` is the ``data_source`` of every game's row; ``facts`` are lists of what ``validation_numbers`` gave.
        """
        return ()
