"""``python tests/fuzz/run.py TARGET``: gives a target of ``targets.py`` mutated inputs until one
breaks it.

They depend on the seed alone: the same inputs every time.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent
_LONGEST = 20_000


def corpus(target: str) -> list[bytes]:
    """The inputs that are kept in git."""
    return [file.read_bytes() for file in sorted((HERE / "corpus" / target).iterdir())]


def mutations(seed: int, seeds: Sequence[bytes], pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Endless variations of ``seeds``, with ``pieces`` put in."""
    rng = random.Random(seed)
    while True:
        data = rng.choice(seeds)
        for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 9])):
            data = _mutated(rng, data, seeds, pieces)
        yield data[:_LONGEST]


def _mutated(
    rng: random.Random, data: bytes, seeds: Sequence[bytes], pieces: Sequence[bytes]
) -> bytes:
    """Put something in the place of a span of ``data``, which may be empty, or end it there."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([0, 1, 2, 5, 20, 80]))
    inside, after, seed = data[start:end], data[end:], rng.choice(seeds)
    character = chr(rng.randrange(0x110000)).encode(errors="surrogatepass")
    new = [
        b"",
        inside * rng.choice([2, 3, 6]),
        rng.choice(pieces),
        rng.choice(pieces) + inside,
        character + inside,
    ]
    new += [inside.swapcase(), rng.randbytes(rng.randrange(1, 4))]
    rest = seed[rng.randrange(len(seed) + 1) :]
    rests = [text + after for text in new] + [rest, inside + after + rest, b""]
    return data[:start] + rng.choice(rests)


def main(
    target: Annotated[
        str, typer.Argument(help="parsers, readers, records, judge_answers or templates")
    ],
    runs: Annotated[int, typer.Option(help="how many inputs")] = 1_000_000,
    seed: int = 0,
) -> None:
    """Give a target mutated inputs until one breaks it; that one is kept in runs/fuzz."""
    sys.path.insert(0, str(HERE.parent))
    from fuzz.targets import PIECES, SEEN, TARGETS

    began, failed = time.monotonic(), Path("runs/fuzz", target, "failed")
    for number, data in enumerate(islice(mutations(seed, corpus(target), PIECES[target]), runs)):
        try:
            TARGETS[target](data)
        except BaseException:
            failed.parent.mkdir(parents=True, exist_ok=True)
            failed.write_bytes(data)
            print(f"{target}, input {number} is in {failed}", file=sys.stderr)
            raise
    print(
        f"{target}: {runs} inputs in {time.monotonic() - began:.0f} s, {dict(SEEN.most_common())}"
    )


if __name__ == "__main__":
    typer.run(main)
