"""``MedicalDialogueGameManager`` in both shapes that code written for OpenRLHF knows.

Dicts by game index, generators in, outputs and states out. Rewards and the format are those of this
package's core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.medical_team.protocol import Labels, make_labels
from medserl_agentloop.medical_team.remote_judge import (
    JudgeFunction,
    Query,
    create_medical_judge_remote_function,
)
from medserl_agentloop.medical_team.utils import (
    GENERAL_SUM_CONFIG,
    answer_without_reasoning,
    convert_medical_game_history_to_messages,
    get_medical_cot_formatting_reward,
    get_medical_game_reward_general_sum,
    medical_cot_format_check_and_extract,
)

GameDict = dict[str, Any]
Generator = Callable[..., Sequence[Any]]

CATEGORIES = tuple(category.value for category in Category if category is not Category.DECOY_BENIGN)
DEFAULT_ERROR_TYPES = ("dosage", "diagnosis", "contraindication", "drug_interaction")


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


class MedicalDialogueGameManager:
    """Plays, judges and scores a batch of two-turn games; docs/migration.md has the
    ``custom_configs``.

    ``remote_rm_url`` is the judge's address, or a list whose first entry it is. A judge function in
    its place, or as ``medical_judge_fn``, gives the second shape.
    """

    def __new__(
        cls,
        tokenizer: Any = None,
        remote_rm_url: Any = None,
        *args: Any,
        medical_judge_fn: Any = None,
        **kwargs: Any,
    ) -> MedicalDialogueGameManager:
        # Only here: a subclass of a user's chose its shape, and unpickling calls this without
        # arguments.
        has_function = medical_judge_fn is not None or callable(remote_rm_url)
        second = has_function and cls is MedicalDialogueGameManager
        return super().__new__(_WithJudgeFunction if second else cls)

    def __init__(
        self,
        tokenizer: Any,
        remote_rm_url: Any = None,
        strategy: Any = None,
        custom_configs: dict[str, Any] | None = None,
        *,
        medical_judge_fn: JudgeFunction | None = None,
    ) -> None:
        self.medical_judge_fn = medical_judge_fn or (
            remote_rm_url if callable(remote_rm_url) else None
        )
        self.remote_rm_url = None if self.medical_judge_fn else remote_rm_url
        self.tokenizer, self.strategy, self.custom_configs = (
            tokenizer,
            strategy,
            custom_configs or {},
        )
        get = self.custom_configs.get
        self.max_turns: int = get("max_turns", 2)
        self.reward_type: str = get("reward_type", GENERAL_SUM_CONFIG)
        self.error_types: list[str] = list(get("error_types", DEFAULT_ERROR_TYPES))
        self.disable_hidden_cot: bool = get("direct_chat_no_cot", False)
        self.no_attacker_turn: bool = get("no_attacker_turn", False)
        self.no_assessor_turn: bool = get("no_assessor_turn", False)
        if GENERAL_SUM_CONFIG not in self.reward_type:
            raise ValueError(
                f"Unknown reward type: {self.reward_type}; expected {GENERAL_SUM_CONFIG!r}"
            )
        self.active_games: dict[int, GameDict] = {}

    def initialize_games(
        self, prompts: Sequence[str], completions: Sequence[str], data_types: Sequence[str]
    ) -> None:
        """Start a game for each note; no vanilla ones with ``no_assessor_turn``.

        ValueError for other data types.
        """
        if unknown := sorted(set(data_types) - set(CATEGORIES)):
            raise ValueError(
                f"no data type {unknown[0]!r}: expected one of {', '.join(CATEGORIES)}"
            )
        rows = zip(prompts, completions, data_types, strict=True)
        played = [
            row for row in rows if not (self.no_assessor_turn and not Category(row[2]).has_attack)
        ]
        self.active_games = {}
        for index, (prompt, completion, data_type) in enumerate(played):
            game: GameDict = {
                name: [] for name in ("history", "raw_history", "processed_output_history")
            }
            game |= {"prompts": prompt, "prompt_type": data_type, "completion": completion}
            self.active_games[index] = game | {
                "finished": False,
                "current_turn": 0,
                "is_generated_attack": False,
            }

    def play_games(
        self, attacker_llm_generator: Generator, assessor_llm_generator: Generator, **kwargs: Any
    ) -> Any:
        """Play all games, the attacker in even turns and the assessor in odd ones, and return them
        by index.

        A generator is called ``(batch_chat_messages, labels, **kwargs)`` with a prompt and a data
        type per game, and returns one vLLM-like output each, with ``outputs[0].token_ids``.
        """
        players = ((Role.ATTACKER, attacker_llm_generator), (Role.ASSESSOR, assessor_llm_generator))
        for turn in range(self.max_turns):
            self._play_turn(*players[turn % 2], turn, kwargs)
        for game in self.active_games.values():
            game["finished"] = True
        return self.active_games

    def evaluate_game_outcomes(self) -> dict[int, Labels]:
        """Labels by game index, from one judge request for the batch; a ValueError if there is no
        judge.
        """
        labels: dict[int, Labels] = {}
        queries: list[Query] = []
        for index, game in self.active_games.items():
            if game.get("invalid_attack"):
                labels[index] = make_labels(
                    reasoning="no note could be read from the attacker's turn"
                )
            elif len(game["history"]) < 2:
                labels[index] = make_labels(
                    is_parsing_error=True, reasoning="the assessor has not played"
                )
            else:
                turns = {
                    "medical_note": _last_turn(game, Role.ATTACKER),
                    "assessment": _last_turn(game, Role.ASSESSOR),
                }
                row = {"original_note": game["prompts"], "game_category": game["prompt_type"]}
                queries.append({"game_idx": index, **turns, **row})
        return labels | self._ask_judge(queries)

    def filter_and_compute_rewards(self, batch_labels_dict: dict[int, Labels]) -> Any:
        """Rewards of all generated turns; games that are parsing errors are left out. A game needs
        labels.

        Returns:
            ``(attacker_outputs, attacker_states, assessor_outputs, assessor_states, labels)``: the
            generators' outputs and, in the same order, the turn states with ``reward`` and
            ``game_outcomes``.
        """
        outputs: dict[str, list[Any]] = {role.value: [] for role in Role}
        states: dict[str, list[dict[str, Any]]] = {role.value: [] for role in Role}
        coefficients = self.custom_configs.get("reward_coeff_config", GENERAL_SUM_CONFIG)
        for index, game in self.active_games.items():
            if index not in batch_labels_dict:
                raise ValueError(f"Game {index} not found in batch_labels_dict")
            labels = batch_labels_dict[index]
            if labels.get("is_parsing_error", False):
                continue
            for turn in game["processed_output_history"]:
                state = turn["game_states"]
                if not state:
                    continue  # it was not generated
                reward, outcomes = get_medical_game_reward_general_sum(state, labels, coefficients)
                if not self.disable_hidden_cot:
                    reward += get_medical_cot_formatting_reward(state["cot_format_violation"])
                state |= {"reward": reward, "game_outcomes": outcomes}
                outputs[state["game_role"]].append(turn["output"])
                states[state["game_role"]].append(state)
        return (
            outputs["attacker"],
            states["attacker"],
            outputs["assessor"],
            states["assessor"],
            batch_labels_dict,
        )

    def get_game_statistics(self) -> dict[str, Any]:
        """Count all games, those that have ended, and those of each data type."""
        types = Counter(sorted(game["prompt_type"] for game in self.active_games.values()))
        finished = sum(game["finished"] for game in self.active_games.values())
        return {"total_games": types.total(), "finished_games": finished, "data_types": dict(types)}

    def _play_turn(
        self, role: Role, generator: Generator, turn: int, kwargs: dict[str, Any]
    ) -> None:
        asked: dict[int, GameDict] = {}
        for index, game in self.active_games.items():
            if game["finished"]:
                continue
            game["current_turn"] = turn
            if role is Role.ATTACKER and (
                self.no_attacker_turn or not Category(game["prompt_type"]).has_attack
            ):
                _write_down(game, role, turn, game["prompts"], game["prompts"], game["prompts"], {})
            else:
                asked[index] = game
        if not asked:
            return
        configs = {**self.custom_configs, "error_types": self.error_types}
        prompts = [
            convert_medical_game_history_to_messages(
                game["history"],
                player_role=role.value,
                medical_note=game["prompts"],
                game_type="harmful"
                if Category(game["prompt_type"]).seed_label is Label.HARMFUL
                else "benign",
                custom_configs=configs,
                tokenizer=self.tokenizer,
            )
            for game in asked.values()
        ]
        outputs = list(
            generator(prompts, [game["prompt_type"] for game in asked.values()], **kwargs)
        )
        if len(outputs) != len(prompts):
            raise ValueError(
                f"the {role.value}'s generator returned {len(outputs)} outputs for {len(prompts)} "
                "prompts"
            )
        for (index, game), output in zip(asked.items(), outputs, strict=True):
            self._take_turn(role, turn, index, game, output)

    def _take_turn(self, role: Role, turn: int, index: int, game: GameDict, output: Any) -> None:
        response = self._decode(output)
        game["is_generated_attack"] |= role is Role.ATTACKER
        state: dict[str, Any] = {"game_role": role.value, "turn": turn, "game_idx": index}
        copied = ("finished", "is_generated_attack", "prompt_type", "prompts", "completion")
        state |= {name: game[name] for name in copied}
        if self.disable_hidden_cot:
            answer = answer_without_reasoning(response)
        else:
            (thinking, answer), violated = medical_cot_format_check_and_extract(response)
            text = ("", "") if violated else (thinking or "", answer)
            lengths = (None, None) if violated else tuple(map(self._length, text))
            state |= {
                "text_cot_and_answer": text,
                "length_cot_and_answer": lengths,
                "cot_format_violation": violated,
            }
        if role is Role.ATTACKER:
            # Passing the raw response on would show the attacker's reasoning to the assessor.
            game["invalid_attack"] = game["finished"] = not answer
        _write_down(game, role, turn, answer, response.strip(), output, state)

    def _decode(self, output: Any) -> str:
        if isinstance(output, str):
            return output
        ids, options = output.outputs[0].token_ids, {"skip_special_tokens": True}
        if hasattr(self.tokenizer, "batch_decode"):  # tokenizers of the second shape have none
            return str(self.tokenizer.batch_decode([ids], **options)[0])
        return str(self.tokenizer.decode(ids, **options))

    def _length(self, text: str) -> int | None:
        encode = getattr(self.tokenizer, "encode", None)
        return len(encode(text, add_special_tokens=False)) if encode else None

    def _ask_judge(self, queries: list[Query]) -> dict[int, Labels]:
        if self.medical_judge_fn is not None:
            return (
                self.medical_judge_fn(url="", batch_queries=queries, score_key="labels")
                if queries
                else {}
            )
        url = (
            self.remote_rm_url[0]
            if isinstance(self.remote_rm_url, (list, tuple))
            else self.remote_rm_url
        )
        if not url:
            raise ValueError("there is no judge: remote_rm_url is not set")
        return create_medical_judge_remote_function(url)(url, queries, score_key="labels")


class _WithJudgeFunction(MedicalDialogueGameManager):
    """The second shape: a judge function, lists, parsed texts for outputs, and more keys in its
    games.
    """

    def initialize_games(
        self, medical_notes: Sequence[str], completions: Sequence[str], data_types: Sequence[str]
    ) -> None:
        super().initialize_games(medical_notes, completions, data_types)
        for index, game in self.active_games.items():
            game |= {
                "game_idx": index,
                "medical_note": game["prompts"],
                "data_type": game["prompt_type"],
            }
            game |= {"attacker_output": None, "assessor_output": None, "labels": None}

    def play_games(self, *generators: Generator, **kwargs: Any) -> list[GameDict]:
        super().play_games(*generators, **kwargs)
        for game in self.active_games.values():
            for role in Role:
                game[f"{role.value}_output"] = _last_turn(game, role)
        return list(self.active_games.values())

    def evaluate_game_outcomes(self) -> dict[int, Labels]:
        labels = super().evaluate_game_outcomes()
        missing = make_labels(is_parsing_error=True, reasoning="no labels for this game")
        for index, game in self.active_games.items():
            game["labels"] = labels.setdefault(index, missing)
        return labels

    def filter_and_compute_rewards(self, batch_labels: dict[int, Labels]) -> Any:
        _, attacker_states, _, assessor_states, _ = super().filter_and_compute_rewards(batch_labels)
        texts, kept = [], []
        for states in (attacker_states, assessor_states):
            # A turn's place in the history is its number.
            texts.append(
                [self.active_games[s["game_idx"]]["history"][s["turn"]]["content"] for s in states]
            )
            names = ("game_idx", "reward", "game_outcomes")
            kept.append(
                [
                    {**{name: s[name] for name in names}, "data_type": s["prompt_type"]}
                    for s in states
                ]
            )
        return texts[0], kept[0], texts[1], kept[1]


def _write_down(
    game: GameDict,
    role: Role,
    turn: int,
    answer: str,
    response: str,
    output: Any,
    state: dict[str, Any],
) -> None:
    """Add a turn to a game: what counts of it, all of it, and what the generator gave."""
    place = {"game_role": role.value, "turn": turn}
    game["history"].append({**place, "content": answer})
    game["raw_history"].append({**place, "content": response})
    game["processed_output_history"].append({**place, "output": output, "game_states": state})


def _last_turn(game: GameDict, role: Role) -> str | None:
    return next(
        (turn["content"] for turn in reversed(game["history"]) if turn["game_role"] == role.value),
        None,
    )
