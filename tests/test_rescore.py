"""Old records: other schemes on them, and what happens to a file that cannot be read."""

import csv
import json
import os
import sys
from pathlib import Path

import pytest
from game.baseline_transcripts import transcripts
from game.builders import any_game, finished
from hypothesis import given
from typer.testing import CliRunner, Result

from medserl_agentloop.cli import app
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.evaluation.rescoring import CHECKOUT, comparisons
from medserl_agentloop.games.medical.records import SCHEMA_VERSION, MedicalRecord, Outcome, read_games
from medserl_agentloop.games.medical.rewards import SCHEMES, medserl, zero_sum
from medserl_agentloop.games.medical.types import Role

RECORDS = [
    finished(Outcome.MISSED_ERROR),
    finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful"),
    finished(Outcome.INVALID_ATTACK),
    finished(Outcome.VOID),
]


def scored(record: MedicalRecord) -> MedicalRecord:
    return record.model_copy(update={"rewards": medserl(record), "scheme": "medserl"})


@pytest.fixture
def games(tmp_path: Path) -> Path:
    path = tmp_path / "games.jsonl"
    StepFile(path).append(scored(record).to_json() for record in RECORDS)
    return path


def rescore(games: Path, output: Path, reward: str = "zero_sum") -> Result:
    arguments = ["rescore", str(games), "--reward", reward, "--output", str(output)]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def test_the_new_file_differs_in_rewards_and_scheme_alone(games: Path, tmp_path: Path) -> None:
    result = rescore(games, tmp_path / "new" / "games.jsonl")
    assert result.exit_code == 0, result.output
    new = list(read_games(tmp_path / "new" / "games.jsonl"))
    assert [r.rewards for r in new] == [zero_sum(r) for r in RECORDS]
    same = {"rewards": {}, "scheme": ""}
    assert [r.model_copy(update=same) for r in new] == [r.model_copy(update=same) for r in RECORDS]
    assert {r.scheme for r in new} == {"zero_sum"}


def test_a_run_s_folder_will_do(games: Path, tmp_path: Path) -> None:
    assert rescore(games.parent, tmp_path / "new.jsonl").exit_code == 0
    assert {r.scheme for r in read_games(tmp_path / "new.jsonl")} == {"zero_sum"}


def test_a_file_that_exists_is_never_written_to(games: Path) -> None:
    before = games.read_bytes()
    result = rescore(games, games)
    assert result.exit_code == 2 and f"{games} exists already; name a new file with --output" in result.output
    assert games.read_bytes() == before


def test_there_and_back_gives_the_same_bytes(games: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there.jsonl", tmp_path / "back.jsonl"
    rescore(games, there, "medical_general_sum")
    assert there.read_bytes() != games.read_bytes()
    rescore(there, back, "medserl")
    assert back.read_bytes() == games.read_bytes()


USERS = """
def flat(record): return {"attacker": {"flat": 1}}
def broken(record): return 1 / 0
def shapeless(record): return 3.5
"""


def test_a_user_s_scheme_scores_too(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_rewards.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    assert rescore(games, tmp_path / "flat.jsonl", "users_rewards:flat").exit_code == 0
    assert [r.rewards for r in read_games(tmp_path / "flat.jsonl")] == [{Role.ATTACKER: {"flat": 1.0}}] * 4


@pytest.mark.parametrize("function", ["broken", "shapeless"])
def test_a_scheme_that_fails_is_named_and_leaves_everything_as_it_was(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    (tmp_path / "users_rewards.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    result = rescore(games, tmp_path / "new.jsonl", f"users_rewards:{function}")
    assert result.exit_code == 2
    assert f"line 1: reward scheme users_rewards:{function} failed" in result.output
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["games.jsonl", "users_rewards.py"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 5 is not a game record"),
        (b'{"step": 3}', "line 5 is not a game record"),
        (b'{"schema_version": 99}', f"Input should be less than or equal to {SCHEMA_VERSION}"),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_gives_no_output(
    games: Path, tmp_path: Path, line: bytes, says: str
) -> None:
    games.write_bytes(games.read_bytes() + line + b"\n")
    result = rescore(games, tmp_path / "new.jsonl")
    assert result.exit_code == 2
    assert says in result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["games.jsonl"]


@pytest.mark.parametrize("games", [Path("/nonesuch.jsonl")])
def test_a_file_that_is_not_there_is_named(games: Path, tmp_path: Path) -> None:
    result = rescore(games, tmp_path / "new.jsonl")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "/nonesuch.jsonl: No such file" in result.output


def test_an_unknown_scheme_is_named(games: Path, tmp_path: Path) -> None:
    assert "no reward scheme 'medsrl'" in rescore(games, tmp_path / "new.jsonl", "medsrl").output


def test_only_a_regular_file_is_replaced(games: Path, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "linked")
    for output in (pipe, tmp_path, Path("/dev/null")):
        result = rescore(games, output)
        assert result.exit_code == 2 and f"{output} is no regular file" in result.output
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    assert rescore(games, link).exit_code == 0
    assert link.is_symlink() and (tmp_path / "linked").is_file()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_said_of_the_output(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"os.{call}", full)
    result = rescore(games, tmp_path / "new.jsonl")
    assert result.exit_code == 2 and f"{tmp_path / 'new.jsonl'}: No space left on device" in result.output
    assert list(tmp_path.iterdir()) == [games]


# --- two schemes compared ---


def replay(games: Path, *schemes: str, output: Path | None = None) -> Result:
    arguments = ["replay", str(games), *(word for scheme in schemes for word in ("--scheme", scheme))]
    arguments += ["--output", str(output)] if output else []
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def test_every_reward_that_differs_is_listed_with_the_components_that_do(games: Path, tmp_path: Path) -> None:
    result = replay(games, "zero_sum", "medserl", output=tmp_path / "differ.csv")
    assert result.exit_code == 0, result.output
    assert "4 rewards compared, 2 differ: zero_sum and medserl" in result.output
    assert list(csv.reader((tmp_path / "differ.csv").open())) == [
        ["line", "step", "category", "outcome", "role", "first", "second", "components"],
        ["1", "-1", "adversarial_benign", "missed_error", "attacker", "1.0", "0.875", "faithfulness"],
        ["3", "-1", "adversarial_benign", "invalid_attack", "attacker", "-1.0", "-2.0", "validity"],
    ]


def test_one_scheme_is_compared_with_the_rewards_in_the_file(games: Path) -> None:
    assert "4 rewards compared, 0 differ: medserl and recorded" in replay(games, "medserl").output
    assert (
        "4 rewards compared, 1 differ: medserl,invalid_attack=-1 and recorded"
        in replay(games, "medserl,invalid_attack=-1").output
    )


@pytest.mark.parametrize(
    ("schemes", "says"),
    [
        (["medsrl"], "--scheme medsrl: no reward scheme 'medsrl' (did you mean 'medserl'?)"),
        (["medserl,decay=1"], "has no term 'decay' (did you mean 'decoy'?)"),
        (["medserl,decoy"], "(constants are written as medserl,term=number)"),
        (["medserl"] * 3, "3 schemes are given; replay compares two"),
        (["original"], "set MEDSERL_ORIGINAL to a checkout of the OpenRLHF system"),
    ],
)
def test_a_scheme_that_cannot_be_replayed_is_named(
    games: Path, schemes: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHECKOUT, raising=False)
    result = replay(games, *schemes)
    assert result.exit_code == 2
    assert says in result.output


ORIGINAL = """
from medical_team import MedicalGameOutcome
from medical_team.prompts import PREFIX
def get_medical_game_reward_general_sum(game, labels):
    return (10.0 if game["game_role"] == "attacker" else 1.0 * labels["error_present"]), {MedicalGameOutcome.TIE}
def get_medical_error_realism_reward(role, realistic):
    return (0.5 if role == "attacker" else 0.0), set()
def get_medical_cot_formatting_reward(violated):
    return -1.0 if violated else 1.0
"""


def test_of_the_original_system_the_reward_module_alone_is_imported(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "medical_team"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0  # loads a judge model")
    (package / "prompts.py").write_text("PREFIX = ''")
    (package / "utils.py").write_text(ORIGINAL)
    monkeypatch.setenv(CHECKOUT, str(tmp_path))
    for name in ("medical_team", "medical_team.utils", "medical_team.prompts"):
        monkeypatch.setitem(sys.modules, name, None)  # remembers what is there, to be put back
        del sys.modules[name]
    found = list(comparisons(games, ["medical_general_sum", "original"]))
    assert len(found) == 4
    assert [(each.line, each.role, each.first, each.second, each.components) for each in found if each] == [
        (1, "attacker", 2.5, 11.0, "detection"),
        (1, "assessor", 0.0, 2.0, "detection"),
        (3, "attacker", 1.5, 11.0, "detection"),
    ]


@pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout of the OpenRLHF system")
def test_the_original_system_s_code_rewards_1200_transcripts_as_our_scheme_does(tmp_path: Path) -> None:
    StepFile(tmp_path / "games.jsonl").append(record.to_json() for record, _ in transcripts())
    assert list(comparisons(tmp_path / "games.jsonl", ["medical_general_sum", "original"])) == [None] * (1047 + 671)


@given(any_game())
def test_a_record_read_again_scores_the_same(record: MedicalRecord) -> None:
    again = MedicalRecord.model_validate(json.loads(json.dumps(record.to_json())))
    for scheme in SCHEMES.values():
        assert scheme(again) == scheme(record)
