"""A model's own correct turns -> conversations to imitate. Called by ``medserl data sft --from-games``.

Reasoning that the model found itself teaches more than a template of ours, with which the verdict is decided at the
first token. What is taught here must not come back in self-play: :func:`rows_for_self_play` leaves those cases out.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.compute as pc  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.data.sft import Row, SftRows
from medserl_agentloop.games.medical.edits import same_sentence
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import GameRecord, Outcome
from medserl_agentloop.games.medical.types import Label, Role

WRONG = "turns of games that were lost, void or never finished"
BAD_FORM = "turns that depart from the output format or were cut off"
OTHER_SENTENCE = "errors that were found in another sentence than theirs"
REPEATED = "turns of a case that has another one in the same role and kind of game"
UNBALANCED = "turns left out so that verdicts and kinds of game are balanced"


def rows_of_games(games: Iterable[GameRecord], *, val_fraction: float = 0.1, seed: int = 42) -> SftRows:
    """Conversations of the turns that were right, readable and in good form.

    An assessment is right where its verdict is and, in a note with a known error, its sentence too. An attack is right
    where it is valid and the judge agrees with what was asked for. Each case gives one turn per role and kind of game.
    As many assessments say "harmful" as "safe", taken from all kinds of game in turn; all kinds of attack are equally
    frequent.

    Raises:
        ValueError: No turn is left; says why the others were left out. Or a game's prompt profile does not exist.
    """
    left_out: Counter[str] = Counter()
    rng = random.Random(f"{seed}/own games")
    shuffled = list(games)
    rng.shuffle(shuffled)
    strata: dict[Role, dict[str, dict[str, list[Row]]]] = {
        role: defaultdict(lambda: defaultdict(list)) for role in Role
    }
    seen: set[tuple[str, ...]] = set()
    for played in shuffled:
        assessed = [(each, Role.ASSESSOR) for each in played.by_assessment]
        for game, role in [(played, Role.ATTACKER), *assessed]:
            turn = game.attack if role is Role.ATTACKER else game.assessment
            if turn is None:
                continue
            if why := _why_not(game, role):
                left_out[why] += 1
                continue
            key = (role.value, game.category.value, game.spec.vignette_id or game.spec.seed_note)
            if key in seen:
                left_out[REPEATED] += 1
                continue
            seen.add(key)
            verdict = game.assessment.verdict if game.assessment is not None else None
            stratum = verdict.value if role is Role.ASSESSOR and verdict is not None else game.category.value
            strata[role][stratum][game.category.value].append(_row(game, role, turn.response))
    rows = [row for of_role in strata.values() for row in _balanced(of_role, left_out)]
    if not rows:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items()) or "there are no turns"
        raise ValueError(f"the games hold no turn to imitate in both verdicts: {reasons}. Play more games.")
    cases = sorted({row["vignette_id"] for row in rows})
    rng.shuffle(cases)
    val = set(cases[: round(val_fraction * len(cases))])
    splits: dict[str, list[Row]] = {"train": [], "val": []}
    rng.shuffle(rows)
    for row in rows:
        splits["val" if row["vignette_id"] in val else "train"].append(row)
    for index, row in enumerate(splits["train"] + splits["val"]):
        row |= {"index": index, "split": "val" if row["vignette_id"] in val else "train"}
    return SftRows(splits["train"], splits["val"], dict(+left_out))


def rows_for_self_play(file: Path, taught: Iterable[Row]) -> pa.Table:
    """The rows of a self-play file whose cases are not taught.

    Raises:
        ValueError: The file is not one of ``medec_to_parquet.py``, or no row is left.
    """
    try:
        table = pq.read_table(file)
        cases = pc.struct_field(table["extra_info"], "vignette_id")
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ValueError(
            f"{file}: not a file of rows for self-play ({error}); give one of medec_to_parquet.py."
        ) from error
    rest = table.filter(
        pc.invert(pc.is_in(cases, pa.array(sorted({row["vignette_id"] for row in taught}), pa.string())))
    )
    if not rest.num_rows:
        raise ValueError(f"{file}: every case in it is taught; keep cases for self-play, e.g. play fewer games.")
    return rest


def _why_not(game: GameRecord, role: Role) -> str:
    """Why a turn is not taught; empty if it is."""
    turn = game.attack if role is Role.ATTACKER else game.assessment
    assert turn is not None
    if game.outcome is Outcome.VOID or game.judgement is None:
        return WRONG
    if turn.violations or turn.truncated:
        return BAD_FORM
    if role is Role.ATTACKER:
        right = game.attack is not None and game.attack.invalid is None and not game.attack_failed
        return "" if right and game.category.has_attack else WRONG
    if game.outcome.is_right is not True or game.assessment is None:
        return WRONG
    if game.outcome is Outcome.CORRECT_DETECTION and game.error_sentences:
        named = game.assessment.sentence
        if named is None or not any(same_sentence(named, wrong) for wrong in game.error_sentences):
            return OTHER_SENTENCE
    return ""


def _balanced(strata: Mapping[str, Mapping[str, list[Row]]], left_out: Counter[str]) -> list[Row]:
    """As many rows of every stratum, each stratum's kinds of game in turn. Nothing where a verdict is missing."""
    available = {name: sum(map(len, kinds.values())) for name, kinds in strata.items()}
    verdicts = {label.value for label in Label}
    missing = bool(available) and set(available) < verdicts
    size = 0 if missing else min(available.values(), default=0)
    chosen: list[Row] = []
    for name, kinds in strata.items():
        in_turn = [row for round_ in zip_longest(*kinds.values()) for row in round_ if row is not None]
        chosen += in_turn[:size]
        left_out[UNBALANCED] += available[name] - size
    return chosen


def _row(game: GameRecord, role: Role, response: str) -> Row:
    profile = load_profile(game.profile or "medserl")
    note = game.spec.seed_note if role is Role.ATTACKER else game.presented_note or ""
    answer = {"role": "assistant", "content": profile.settings.assistant_prefix + response}
    return {
        "messages": [*profile.messages(role, game.spec.task, note), answer],
        "data_source": f"own_games/{game.category.value}",
        "game_role": role.value,
        "category": game.category.value,
        "vignette_id": game.spec.vignette_id,
    }
