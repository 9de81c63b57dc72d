"""A person at the terminal: what they answer is what the parser reads, and the note cannot play tricks on them."""

import sys
from pathlib import Path
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, ERROR_SENTENCE, SAFE_ANSWER, spec
from play.chat_server import ChatServer
from play.test_play_command import good_player, run

from medserl_agentloop.data.conversion import write_parquet
from medserl_agentloop.games.medical.records import MedicalRecord, read_games
from medserl_agentloop.games.medical.types import ErrorType, Label, Role


@pytest.fixture(autouse=True)
def _no_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDITOR", raising=False)
    monkeypatch.delenv("VISUAL", raising=False)


def test_an_attacker_is_given_games_with_an_attack_alone(server: ChatServer, rows: Path, tmp_path: Path) -> None:
    server.answer = good_player
    output = tmp_path / "games.jsonl"
    result = run(server, rows, output, "--games", "6", "--human", "attacker", input=f"{ERROR_NOTE}\n.\n" * 6)
    assert result.exit_code == 0, result.output
    assert all(record.category.has_attack for record in read_games(output))
    result = run(server, rows, tmp_path / "more.jsonl", "--games", "7", "--human", "attacker")
    assert "holds 6 rows that begin with the attacker's turn" in result.output


@pytest.fixture
def one_row(tmp_path: Path) -> Any:
    """Writes a file that holds one row, of the category asked for."""

    def write(category: str, **facts: Any) -> Path:
        row = MedicalRecord(spec=spec(category, **facts)).to_json()["spec"]
        write_parquet([{"extra_info": row}], tmp_path / "one.parquet")
        return tmp_path / "one.parquet"

    return write


def play_one(server: ChatServer, data: Path, human: str, typed: str) -> tuple[MedicalRecord, str]:
    output = data.parent / "games.jsonl"
    result = run(server, data, output, "--games", "1", "--human", human, input=typed)
    assert result.exit_code == 0, result.output
    (record,) = read_games(output)
    return record, result.output


def test_an_assessor_is_asked_for_everything_and_read_without_a_slip(server: ChatServer, one_row: Any) -> None:
    record, shown = play_one(
        server, one_row("vanilla_harmful"), "assessor", "harmful\n2\npharmacotherapy\nShe receives heparin.\n"
    )
    said = record.assessment
    assert said is not None
    assert (said.verdict, said.sentence, said.error_type) == (
        Label.HARMFUL,
        ERROR_SENTENCE,
        ErrorType.PHARMACOTHERAPY,
    )
    assert (said.correction, said.violations) == ("She receives heparin.", [])
    assert record.players == {Role.ASSESSOR: "human"}
    assert "2  She receives warfarin 500 units." in shown
    assert "vanilla_harmful; presented note: harmful; outcome: correct_detection" in shown
    assert server.requests == []


def test_a_safe_verdict_ends_the_questions(server: ChatServer, one_row: Any) -> None:
    record, _ = play_one(server, one_row("vanilla_benign"), "assessor", "safe\n")
    assert record.assessment is not None
    assert (record.assessment.verdict, record.assessment.violations) == (Label.SAFE, [])


def test_a_slip_of_the_keyboard_is_asked_again(server: ChatServer, one_row: Any) -> None:
    record, _ = play_one(server, one_row("vanilla_benign"), "assessor", "perhaps\nsafe\n")
    assert record.assessment is not None and record.assessment.verdict is Label.SAFE


def test_an_assessor_never_sees_the_category_before_the_end(server: ChatServer, one_row: Any) -> None:
    server.answer = good_player
    _, shown = play_one(server, one_row("adversarial_benign"), "assessor", "safe\n")
    before, _, _ = shown.partition("verdict")
    assert "benign" not in before and "swap the drug" not in before


def test_an_attacker_types_the_note_up_to_the_end_line(server: ChatServer, one_row: Any) -> None:
    server.answer = good_player
    typed = ERROR_NOTE.replace("cough. ", "cough.\n") + "\n.\n"
    record, shown = play_one(server, one_row("adversarial_benign"), "attacker", typed)
    attack = record.attack
    assert attack is not None
    assert (attack.invalid, attack.violations, attack.reasoning) == (None, [], "")
    assert " ".join((attack.note or "").split()) == ERROR_NOTE
    assert record.players == {Role.ATTACKER: "human", Role.ASSESSOR: "toy-4b"}
    assert "into a clinically significant error" in " ".join(shown.replace("│", " ").split())  # however it is wrapped


def test_an_attacker_with_an_editor_changes_the_note_in_place(
    server: ChatServer, one_row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "editor.py"
    script.write_text(
        "import sys, pathlib\nfile = pathlib.Path(sys.argv[1])\n"
        "file.write_text(file.read_text().replace('heparin', 'warfarin'))\n"
    )
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
    server.answer = lambda role, prompt: SAFE_ANSWER
    record, _ = play_one(server, one_row("adversarial_benign"), "attacker", "")
    assert record.presented_note == ERROR_NOTE


def test_a_broken_editor_is_named(server: ChatServer, one_row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "/nonesuch/editor")
    data = one_row("adversarial_benign")
    result = run(server, data, data.parent / "games.jsonl", "--games", "1", "--human", "attacker")
    assert result.exit_code == 2 and "EDITOR failed" in result.output


def test_a_note_s_markup_and_control_codes_stay_text(server: ChatServer, one_row: Any) -> None:
    note = f"[bold]{CLEAN_NOTE}[/bold] \x1b[31mred\x07"
    _, shown = play_one(server, one_row("vanilla_benign", seed_note=note), "assessor", "safe\n")
    assert "[bold]A 52-year-old" in shown
    assert "\x1b[31m" not in shown and "\x07" not in shown


def test_the_end_of_the_input_ends_the_command(server: ChatServer, one_row: Any) -> None:
    data = one_row("vanilla_benign")
    result = run(server, data, data.parent / "games.jsonl", "--games", "1", "--human", "assessor", input="")
    assert result.exit_code == 130
    assert "stopped; the games finished so far are in" in result.output
