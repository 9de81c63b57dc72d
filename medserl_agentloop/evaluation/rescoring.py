"""Old game records under other reward schemes: ``medserl rescore`` writes them, ``medserl replay`` compares two.

Nothing is judged or played again: a scheme is a function of the record.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from medserl_agentloop.command_line import errors_in_one_line, plain
from medserl_agentloop.core.step_file import GAMES_FILE, to_line
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, Rewards, read_games
from medserl_agentloop.games.medical.rewards import RewardScheme, load_scheme, reward_game
from medserl_agentloop.games.medical.types import Label, Role
from medserl_agentloop.paths import replacing


def rescore(
    games: Annotated[Path, typer.Argument(help="File of game records, or the folder of a run.")],
    reward: Annotated[str, typer.Option(help="Reward scheme, or package.module:function.")],
    output: Annotated[Path, typer.Option(help="New file for the records with their new rewards.")],
) -> None:
    """Apply another reward scheme to games that were played before."""
    games = games / GAMES_FILE if games.is_dir() else games
    with errors_in_one_line():
        if output.is_file():
            raise ValueError(f"{output} exists already; name a new file with --output")
        score = load_scheme(reward)
        with replacing(output) as file:  # all records or none
            for number, record in enumerate(read_games(games), start=1):
                _reward(record, reward, score, f"{games}, line {number}")
                record.scheme = reward
                file.write(to_line(record.to_json()))
    typer.echo(f"games: {output}")


_REWARDS = TypeAdapter(Rewards)


def _reward(record: MedicalRecord, scheme: str, score: RewardScheme, where: str) -> None:
    try:
        reward_game(record, lambda game: _REWARDS.validate_python(score(game)))
    except Exception as error:  # a user's scheme may raise anything
        raise ValueError(f"{where}: reward scheme {scheme} failed: {error}") from error


RECORDED, ORIGINAL = "recorded", "original"
CHECKOUT = "MEDSERL_ORIGINAL"
"""Environment variable with the folder that holds ``medical_team`` of the OpenRLHF system."""


class Disagreement(NamedTuple):
    """A role whose reward differs between two schemes: in which game, both rewards (None: not rewarded), and why."""

    line: int
    step: int
    category: str
    outcome: str
    role: str
    first: float | None
    second: float | None
    components: str


def replay(
    games: Annotated[Path, typer.Argument(help="File of game records, or the folder of a run.")],
    scheme: Annotated[
        list[str],
        typer.Option(
            help="Reward scheme, with constants if they are not its own: medserl,decoy=1. Twice; once compares with "
            f"'{RECORDED}', the rewards in the file. '{ORIGINAL}' is the OpenRLHF system's code, in {CHECKOUT}."
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="CSV for all disagreements.")] = None,
) -> None:
    """Reward recorded games by two schemes and list every game in which a role's rewards differ."""
    games = games / GAMES_FILE if games.is_dir() else games
    with errors_in_one_line():
        if len(scheme) > 2:
            raise ValueError(f"{len(scheme)} schemes are given; replay compares two")
        names = [*scheme, RECORDED][:2]
        compared, kinds = 0, Counter[tuple[str, str, str]]()
        with open(os.devnull, "wb") if output is None else replacing(output) as file:
            rows = csv.writer(codecs.getwriter("utf-8")(file, "backslashreplace"))
            rows.writerow(Disagreement._fields)
            for found in comparisons(games, names):
                compared += 1
                if found is not None:
                    kinds[found.outcome, found.role, found.components] += 1
                    rows.writerow(found)
    table = Table("outcome", "role", "components", "rewards", box=None)
    for kind, count in kinds.most_common():
        table.add_row(*map(plain, kind), str(count))
    if kinds:
        Console().print(table)
    typer.echo(f"{compared} rewards compared, {kinds.total()} differ: {names[0]} and {names[1]}")
    if output is not None:
        typer.echo(f"disagreements: {output}")


def comparisons(games: Path, names: list[str]) -> Iterator[Disagreement | None]:
    """Each reward of a games file under two schemes: None where they agree.

    A ValueError names a scheme that does not exist or fails, or a line that is not a game record.
    """
    schemes = {name: _scheme(name) for name in names}
    for number, record in enumerate(read_games(games), start=1):
        rewards = []
        for name in names:
            rewarded = record.model_copy()
            _reward(rewarded, name, schemes[name], f"{games}, line {number}")
            rewards.append(rewarded.rewards)
        for role in Role:
            first, second = (None if role not in r else round(sum(r[role].values()), 9) for r in rewards)
            if first == second:
                if first is not None:
                    yield None
            else:
                a, b = (r.get(role, {}) for r in rewards)
                components = "; ".join(name for name in {**a, **b} if a.get(name, 0.0) != b.get(name, 0.0))
                facts = (number, record.step, record.category.value, record.outcome.value, role.value)
                yield Disagreement(*facts, first, second, components)


def _scheme(text: str) -> RewardScheme:
    """The scheme with its constants."""
    if text == RECORDED:
        return lambda record: record.rewards
    if text == ORIGINAL:
        return original_scheme()
    name, *terms = text.split(",")
    try:
        return load_scheme(name, {term: float(value) for term, _, value in (each.partition("=") for each in terms)})
    except ValueError as error:
        raise ValueError(f"--scheme {text}: {error} (constants are written as {name},term=number)") from None


def original_scheme() -> RewardScheme:
    """The OpenRLHF system's own reward functions, of the checkout that :data:`CHECKOUT` names, as a scheme.

    Only their module is imported: the package around it loads a judge model's libraries.
    """
    from medserl_agentloop.medical_team.utils import MedicalGameOutcome

    folder = Path(os.environ.get(CHECKOUT, "")) / "medical_team"
    if CHECKOUT not in os.environ or not (folder / "utils.py").exists():
        raise ValueError(f"set {CHECKOUT} to a checkout of the OpenRLHF system, which holds medical_team/utils.py")
    package = ModuleType(folder.name)
    package.__path__ = [str(folder)]
    package.MedicalGameOutcome = MedicalGameOutcome  # type: ignore[attr-defined]
    sys.modules[folder.name] = package
    code = importlib.import_module(f"{folder.name}.utils")

    def score(record: MedicalRecord) -> Rewards:
        if record.outcome is Outcome.VOID:  # a parsing error there, and left out
            return {}
        said = record.assessment
        labels = {
            "error_present": record.label is Label.HARMFUL,
            "error_detected": said is not None and said.verdict is Label.HARMFUL,
        }
        if record.judgement is not None and record.judgement.realistic is not None:
            labels["error_realistic"] = record.judgement.realistic
        rewards: Rewards = {}
        for role, turn in ((Role.ATTACKER, record.attack), (Role.ASSESSOR, said)):
            if turn is not None:
                game, _ = code.get_medical_game_reward_general_sum({"game_role": role.value}, labels)
                realism, _ = code.get_medical_error_realism_reward(role.value, labels.get("error_realistic", True))
                form = code.get_medical_cot_formatting_reward(bool(turn.violations))
                rewards[role] = {"detection": game - realism, "realism": realism, "format": form}
        return rewards

    return score
