"""``MedicalDialogueGameManager`` in both shapes that code written for OpenRLHF knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from medserl_agentloop.games.medical.judges.protocol import Labels, make_labels
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.medical_team.games import GameBatch, GameDict, Generator, last_said, said_in
from medserl_agentloop.medical_team.remote_judge import JudgeFunction, Query


@dataclass
class MedicalGameState:
    """A game's state as a value; part of the interface, the manager itself keeps dicts."""

    medical_case: str
    current_response: str
    error_type: str
    error_present: bool
    data_type: str
    game_idx: int
    current_turn: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


class MedicalDialogueGameManager(GameBatch):
    """The game manager; arguments and methods are those of :class:`GameBatch`.

    A judge function in place of the address, or as ``medical_judge_fn``, is the second shape of the
    constructor and gives a :class:`JudgeFunctionGameManager`.
    """

    def __new__(
        cls, tokenizer: Any = None, remote_rm_url: Any = None, *args: Any, medical_judge_fn: Any = None, **kwargs: Any
    ) -> MedicalDialogueGameManager:
        # Only here: a subclass of a user's chose its shape, and unpickling calls this without arguments.
        has_function = medical_judge_fn is not None or callable(remote_rm_url)
        second = has_function and cls is MedicalDialogueGameManager
        return super().__new__(JudgeFunctionGameManager if second else cls)

    def __init__(
        self,
        tokenizer: Any,
        remote_rm_url: Any = None,
        strategy: Any = None,
        custom_configs: dict[str, Any] | None = None,
        *,
        medical_judge_fn: JudgeFunction | None = None,
    ) -> None:
        self.medical_judge_fn = medical_judge_fn or (remote_rm_url if callable(remote_rm_url) else None)
        super().__init__(tokenizer, None if self.medical_judge_fn else remote_rm_url, strategy, custom_configs)


class JudgeFunctionGameManager(MedicalDialogueGameManager):
    """The second shape of the interface: a judge function, lists, and parsed texts for outputs.

    Its games hold, besides the keys of the first, ``game_idx``, ``medical_note``, ``data_type``,
    ``attacker_output``, ``assessor_output`` and ``labels``.
    """

    def initialize_games(
        self, medical_notes: Sequence[str], completions: Sequence[str], data_types: Sequence[str]
    ) -> None:
        """As in the first shape, under another name of the first argument."""
        super().initialize_games(medical_notes, completions, data_types)
        for index, game in self.active_games.items():
            game |= {"game_idx": index, "medical_note": game["prompts"], "data_type": game["prompt_type"]}
            game |= {"attacker_output": None, "assessor_output": None, "labels": None}

    def play_games(
        self, attacker_llm_generator: Generator, assessor_llm_generator: Generator, **kwargs: Any
    ) -> list[GameDict]:
        """As in the first shape; returns the games as a list."""
        super().play_games(attacker_llm_generator, assessor_llm_generator, **kwargs)
        for game in self.active_games.values():
            for role in Role:
                game[f"{role.value}_output"] = last_said(game, role)
        return list(self.active_games.values())

    def evaluate_game_outcomes(self) -> dict[int, Labels]:
        """As in the first shape, from one call of the judge function; labels are kept in the games too."""
        labels = super().evaluate_game_outcomes()
        for index, game in self.active_games.items():
            game["labels"] = labels.setdefault(
                index, make_labels(is_parsing_error=True, reasoning="no labels for this game")
            )
        return labels

    def filter_and_compute_rewards(
        self, batch_labels: dict[int, Labels]
    ) -> tuple[list[str], list[dict[str, Any]], list[str], list[dict[str, Any]]]:
        """As in the first shape, without the labels, and with the parsed texts as outputs."""
        _, attacker_states, _, assessor_states, _ = super().filter_and_compute_rewards(batch_labels)
        states = [attacker_states, assessor_states]
        texts = [[said_in(self.active_games[s["game_idx"]], s["turn"]) for s in of_role] for of_role in states]
        kept = [
            [{**{k: s[k] for k in ("game_idx", "reward", "game_outcomes")}, "data_type": s["prompt_type"]} for s in of]
            for of in states
        ]
        return texts[0], kept[0], texts[1], kept[1]

    def get_game_statistics(self) -> dict[str, Any]:
        """How many games there are, how many have ended, and how many of each data type."""
        types = [game["data_type"] for game in self.active_games.values()]
        return {
            "total_games": len(types),
            "finished_games": sum(game["finished"] for game in self.active_games.values()),
            "data_types": {data_type: types.count(data_type) for data_type in sorted(set(types))},
        }

    def _decode(self, output: Any) -> str:
        if isinstance(output, str):
            return output
        if hasattr(self.tokenizer, "batch_decode"):
            return super()._decode(output)
        text: str = self.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        return text

    def _length(self, text: str) -> int | None:
        return None  # tokenizers of this shape need not encode

    def _ask_judge(self, queries: list[Query]) -> dict[int, Labels]:
        assert self.medical_judge_fn is not None
        return self.medical_judge_fn(url="", batch_queries=queries, score_key="labels") if queries else {}
