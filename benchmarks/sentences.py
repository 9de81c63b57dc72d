"""Compare the splitter of the medical game with the lists of sentences that a file of notes has.

``python benchmarks/sentences.py FILE``: of the listed sentences, and of the wrong ones, those that
the splitter cuts out alike, by their letters and digits. A file without lists has wrong ones alone.
"""

from __future__ import annotations

from pathlib import Path

import typer

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.edit import split_sentences
from medserl_agentloop.scoring.notes import alphanumeric


def main(file: Path) -> None:
    listed: list[bool] = []
    wrong: list[bool] = []
    for case in read_files([file], as_published=True).cases:
        note = case.error_note or case.clean_note or ""
        found = {alphanumeric(sentence) for sentence in split_sentences(note)}
        texts = filter(None, map(alphanumeric, case.sentences.values()))
        listed += [text in found for text in texts]
        if case.error_note and case.error_sentence:
            wrong.append(alphanumeric(case.error_sentence) in found)
    for name, equal in (("listed sentences", listed), ("wrong sentences", wrong)):
        if equal:
            print(f"{name}: {sum(equal)} of {len(equal)} are equal ({sum(equal) / len(equal):.3f})")


if __name__ == "__main__":
    typer.run(main)
