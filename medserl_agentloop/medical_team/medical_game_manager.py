"""``MedicalDialogueGameManager``: plays, judges and scores batches of games for OpenRLHF code.

Generators in, outputs and turn states out. Rewards and format checks are the package's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.medical_team.prompts import convert_medical_game_history_to_messages
from medserl_agentloop.medical_team.remote_judge import (
    JudgeFunction,
    Labels,
    Query,
    create_medical_judge_remote_function,
    no_labels,
)
from medserl_agentloop.medical_team.utils import (
    GENERAL_SUM,
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
    """A game's state as a value; part of the interface (the manager keeps dicts)."""

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
    """Plays, judges and scores a batch of two-turn games; see docs/migration.md.

    ``remote_rm_url`` is the judge's address, or a list whose first entry it is. With a judge
    function in its place, or as ``medical_judge_fn``, games are returned as a list and outputs as
    texts.
    """

    def __init__(
        self,
        tokenizer: Any,
        remote_rm_url: Any = None,
        strategy: Any = None,
        custom_configs: dict[str, Any] | None = None,
        *,
        medical_judge_fn: JudgeFunction | None = None,
    ) -> None:
        if callable(remote_rm_url):
            medical_judge_fn, remote_rm_url = remote_rm_url, None
        self.medical_judge_fn, self.remote_rm_url = medical_judge_fn, remote_rm_url
        self.tokenizer, self.strategy = tokenizer, strategy
        self.custom_configs = custom_configs or {}
        get = self.custom_configs.get
        self.max_turns: int = get("max_turns", 2)
        self.reward_type: str = get("reward_type", GENERAL_SUM)
        self.error_types: list[str] = list(get("error_types", DEFAULT_ERROR_TYPES))
        self.disable_hidden_cot: bool = get("direct_chat_no_cot", False)
        self.no_attacker_turn: bool = get("no_attacker_turn", False)
        self.no_assessor_turn: bool = get("no_assessor_turn", False)
        if self.reward_type != GENERAL_SUM:
            raise ValueError(f"no reward type {self.reward_type!r}: use {GENERAL_SUM!r}")
        self.active_games: dict[int, GameDict] = {}

    def initialize_games(
        self, prompts: Sequence[str], completions: Sequence[str], data_types: Sequence[str]
    ) -> None:
        """Start a game for each note, with ``no_assessor_turn`` except for vanilla ones."""
        if unknown := sorted(set(data_types) - set(CATEGORIES)):
            raise ValueError(f"no data type {unknown[0]!r}: use one of {', '.join(CATEGORIES)}")
        rows = zip(prompts, completions, data_types, strict=True)
        played = (row for row in rows if not self.no_assessor_turn or Category(row[2]).has_attack)
        self.active_games = {
            index: {
                "game_idx": index,
                "prompts": note,
                "medical_note": note,
                "prompt_type": data_type,
                "data_type": data_type,
                "completion": completion,
                "history": [],
                "raw_history": [],
                "processed_output_history": [],
                "finished": False,
                "current_turn": 0,
                "is_generated_attack": False,
            }
            for index, (note, completion, data_type) in enumerate(played)
        }

    def play_games(
        self, attacker_llm_generator: Generator, assessor_llm_generator: Generator, **kwargs: Any
    ) -> Any:
        """Play all games, the attacker in even turns and the assessor in odd ones; return them.

        A generator is called ``(batch_chat_messages, labels, **kwargs)`` with a prompt and a data
        type per game, and returns one vLLM-like output each, with ``outputs[0].token_ids``.
        """
        players = ((Role.ATTACKER, attacker_llm_generator), (Role.ASSESSOR, assessor_llm_generator))
        for turn in range(self.max_turns):
            self._play_turn(*players[turn % 2], turn, kwargs)
        for game in self.active_games.values():
            game["finished"] = True
            game |= {f"{role.value}_output": _last_turn(game, role) for role in Role}
        return list(self.active_games.values()) if self.medical_judge_fn else self.active_games

    def evaluate_game_outcomes(self) -> dict[int, Labels]:
        """Labels by game index, from one judge request; ValueError without a judge."""
        labels: dict[int, Labels] = {}
        queries: list[Query] = []
        for index, game in self.active_games.items():
            note, assessment = (_last_turn(game, role) for role in Role)
            labels[index] = no_labels("no labels for this game").model_dump()
            if game.get("invalid_attack"):  # no note could be read from the attacker's turn
                labels[index]["is_parsing_error"] = False
            elif note is not None and assessment is not None:
                row = {"original_note": game["prompts"], "game_category": game["prompt_type"]}
                turns = {"medical_note": note, "assessment": assessment}
                queries.append({"game_idx": index, **turns, **row})
        labels |= self._ask_judge(queries)
        for index, game in self.active_games.items():
            game["labels"] = labels[index]
        return labels

    def filter_and_compute_rewards(self, batch_labels_dict: dict[int, Labels]) -> Any:
        """Rewards of all generated turns; games that are parsing errors are left out.

        Returns ``(attacker_outputs, attacker_states, assessor_outputs, assessor_states, labels)``:
        the generators' outputs and, in the same order, the turn states with ``reward`` and
        ``game_outcomes``. With a judge function no labels, and the parsed texts for outputs.
        """
        outputs: dict[str, list[Any]] = {role.value: [] for role in Role}
        states: dict[str, list[dict[str, Any]]] = {role.value: [] for role in Role}
        coefficients = self.custom_configs.get("reward_coeff_config", GENERAL_SUM)
        for index, game in self.active_games.items():
            if index not in batch_labels_dict:
                raise ValueError(f"Game {index} not found in batch_labels_dict")
            labels = batch_labels_dict[index]
            if labels.get("is_parsing_error", False):
                continue
            for said, turn in zip(game["history"], game["processed_output_history"], strict=True):
                if not (state := turn["game_states"]):
                    continue  # it was not generated
                reward, outcomes = get_medical_game_reward_general_sum(state, labels, coefficients)
                if not self.disable_hidden_cot:
                    reward += get_medical_cot_formatting_reward(state["cot_format_violation"])
                state |= {"reward": reward, "game_outcomes": outcomes}
                output = said["content"] if self.medical_judge_fn else turn["output"]
                outputs[state["game_role"]].append(output)
                states[state["game_role"]].append(state)
        of_roles = [part[role.value] for role in Role for part in (outputs, states)]
        return tuple(of_roles if self.medical_judge_fn else [*of_roles, batch_labels_dict])

    def get_game_statistics(self) -> dict[str, Any]:
        """Count all games, those that have ended, and those of each data type."""
        types = Counter(sorted(game["prompt_type"] for game in self.active_games.values()))
        finished = sum(game["finished"] for game in self.active_games.values())
        return {"total_games": types.total(), "finished_games": finished, "data_types": dict(types)}

    def _play_turn(
        self, role: Role, generator: Generator, turn: int, kwargs: dict[str, Any]
    ) -> None:
        asked: list[GameDict] = []
        for game in self.active_games.values():
            if game["finished"]:
                continue
            game["current_turn"] = turn
            attacks = Category(game["prompt_type"]).has_attack and not self.no_attacker_turn
            if attacks or role is Role.ASSESSOR:
                asked.append(game)
            else:  # the note stays unchanged
                _write_down(game, role, *[game["prompts"]] * 3)
        if not asked:
            return
        prompts = [self._prompt(game, role) for game in asked]
        outputs = generator(prompts, [game["prompt_type"] for game in asked], **kwargs)
        if len(outputs) != len(prompts):
            count = f"{len(outputs)} outputs for {len(prompts)} prompts"
            raise ValueError(f"the {role.value}'s generator returned {count}")
        for game, output in zip(asked, outputs, strict=True):
            self._take_turn(role, game, output)

    def _prompt(self, game: GameDict, role: Role) -> str:
        harmful = Category(game["prompt_type"]).seed_label is Label.HARMFUL
        return convert_medical_game_history_to_messages(
            game["history"],
            player_role=role.value,
            medical_note=game["prompts"],
            game_type="harmful" if harmful else "benign",
            custom_configs={**self.custom_configs, "error_types": self.error_types},
            tokenizer=self.tokenizer,
        )

    def _take_turn(self, role: Role, game: GameDict, output: Any) -> None:
        response = self._decode(output)
        game["is_generated_attack"] |= role is Role.ATTACKER
        state = {"game_role": role.value, "turn": game["current_turn"]}
        copied = "game_idx finished is_generated_attack prompt_type data_type prompts completion"
        state |= {name: game[name] for name in copied.split()}
        if self.disable_hidden_cot:
            answer = _without_reasoning(response)
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
        _write_down(game, role, answer, response.strip(), output, state)

    def _decode(self, output: Any) -> str:
        ids, options = output.outputs[0].token_ids, {"skip_special_tokens": True}
        if hasattr(self.tokenizer, "batch_decode"):  # the original's own tests have one of the two
            return str(self.tokenizer.batch_decode([ids], **options)[0])
        return str(self.tokenizer.decode(ids, **options))

    def _length(self, text: str) -> int | None:
        encode = getattr(self.tokenizer, "encode", None)
        return len(encode(text, add_special_tokens=False)) if encode else None

    def _ask_judge(self, queries: list[Query]) -> dict[int, Labels]:
        url = self.remote_rm_url
        if self.medical_judge_fn is not None:
            ask, url = self.medical_judge_fn, ""
        elif url:
            url = url if isinstance(url, str) else url[0]
            ask = create_medical_judge_remote_function(url)
        else:
            raise ValueError("there is no judge: remote_rm_url is not set")
        return ask(url=url, batch_queries=queries, score_key="labels") if queries else {}


def _write_down(
    game: GameDict,
    role: Role,
    answer: str,
    response: str,
    output: Any = None,
    state: GameDict | None = None,
) -> None:
    """Add a turn to a game: its parsed text, its full text, and the generator's output."""
    place = {"game_role": role.value, "turn": game["current_turn"]}
    game["history"].append({**place, "content": answer})
    game["raw_history"].append({**place, "content": response})
    game["processed_output_history"].append({**place, "output": output, "game_states": state or {}})


def _last_turn(game: GameDict, role: Role) -> str | None:
    turns = [turn["content"] for turn in game["history"] if turn["game_role"] == role.value]
    return turns[-1] if turns else None


def _without_reasoning(response: str) -> str:
    """A turn without requested reasoning; reasoning is removed if there is any."""
    answer = response.rpartition("</think>")[2].strip()
    return "" if "<think>" in answer else answer  # reasoning that never ended
