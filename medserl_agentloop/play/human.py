"""A person at the terminal as a player. Notes are model text: control characters are spelt out, markup is text."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.prompt import IntPrompt
from rich.prompt import Prompt as Question

from medserl_agentloop.command_line import plain
from medserl_agentloop.core.interaction import Message, Prompt, Reply, Turn
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import split_sentences
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.parsing import load_parser
from medserl_agentloop.games.medical.rules import MedicalGame
from medserl_agentloop.games.medical.types import Category, ErrorType, Label, Role

END_LINE = "."
_CLOSED_REASONING = "<think>\n</think>\n"  # a person is not asked to reason in writing

_TASKS = {
    Category.ADVERSARIAL_HARMFUL: "The note contains an error. Change one sentence to make it worse or less visible.",
    Category.ADVERSARIAL_BENIGN: "The note is correct. Change one sentence into a clinically significant error.",
    Category.DECOY_BENIGN: "The note is correct. Reword one sentence and keep the medicine as it is.",
}


class HumanGame(MedicalGameInteraction):
    """The medical game with a person in one role: reads their turns in the ``medserl`` format, whatever the profile."""

    def __init__(self, config: MedicalConfig, human: Role) -> None:
        super().__init__(config)
        self._human, written = human, load_parser("medserl")
        self._profile = copy(self._profile)
        part = "attack" if human is Role.ATTACKER else "assessment"
        self._profile.parser = replace(self._profile.parser, **{part: getattr(written, part)})

    def next_turn(self, game: MedicalGame) -> Turn | None:
        """The person gets a task in place of the profile's prompt."""
        turn = super().next_turn(game)
        if turn is None or turn.role != self._human:
            return turn
        task = "Is this note correct?"  # the assessor must not learn the category
        if self._human is Role.ATTACKER:
            task = _TASKS.get(game.record.spec.task, "Copy the note as it is.")
        return replace(turn, prompt=Prompt(({"role": "user", "content": task},), turn.prompt.data))


class HumanPlayer:
    """Asks the person at ``console`` for the turns of a :class:`HumanGame`."""

    name = "human"

    def __init__(self, console: Console) -> None:
        self._console = console

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        """Take a turn; waits for the person, and so does everything else.

        EOFError and KeyboardInterrupt: the person wants to stop. A ValueError names an editor that cannot be used.
        """
        task, note = messages[-1]["content"], turn.prompt.data["note"]
        with _interruptible():
            text = self._attack(task, note) if turn.role == Role.ATTACKER else self._assess(task, note)
        return Reply(text, prefill=_CLOSED_REASONING)

    def _attack(self, task: str, note: str) -> str:
        self._show("You are the attacker", f"{task}\n\n{note}")
        if editor := shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""):
            return f"<note>\n{_edited(note, editor)}\n</note>"
        self._console.print(
            f"Write the whole note, then a line with a single {END_LINE!r} (set EDITOR to edit it in place).",
            markup=False,
        )
        lines: list[str] = []
        while (line := self._console.input()) != END_LINE:
            lines.append(line)
        return "\n".join(["<note>", *lines, "</note>"])

    def _assess(self, task: str, note: str) -> str:
        sentences = split_sentences(note)
        numbered = "\n".join(f"{number:>3}  {sentence}" for number, sentence in enumerate(sentences, start=1))
        self._show("You are the assessor", f"{task}\n\n{numbered}")
        verdict = Question.ask("verdict", choices=[label.value for label in Label], console=self._console)
        fields = [f"verdict: {verdict}"]
        if verdict == Label.HARMFUL.value:
            numbers = [str(n) for n in range(1, len(sentences) + 1)]
            number = IntPrompt.ask("number of the wrong sentence", choices=numbers, console=self._console)
            kind = Question.ask("error type", choices=[kind.value for kind in ErrorType], console=self._console)
            correction = Question.ask("the sentence as it should read", console=self._console)
            fields += [f"sentence: {sentences[number - 1]}", f"error_type: {kind}", f"correction: {correction}"]
        return "\n".join(["<answer>", *fields, "</answer>"])

    def _show(self, title: str, text: str) -> None:
        self._console.print(Panel(plain(text), title=title, title_align="left"))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a prompt at once; asyncio's own handler would wait until the prompt is answered."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _edited(text: str, editor: list[str]) -> str:
    """``text`` as the person leaves it in the editor."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "note.txt"
        file.write_text(text, encoding="utf-8", errors="replace")
        try:
            subprocess.run([*editor, str(file)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"the editor of VISUAL or EDITOR failed: {error}") from error
        return file.read_text(encoding="utf-8", errors="replace").strip()
