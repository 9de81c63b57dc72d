"""``python tests/fuzz/run.py TARGET``: gives a target of ``targets.py`` mutated inputs until one breaks it.

They depend on the seed alone: the same inputs every time.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
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


def _mutated(rng: random.Random, data: bytes, seeds: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([0, 1, 2, 5, 20, 80]))
    before, inside, after = data[:start], data[start:end], data[end:]

    def other(most: int | None = None) -> bytes:
        seed = rng.choice(seeds)
        return seed[rng.randrange(most or len(seed) + 1) :]

    kinds = (
        lambda: before + after,
        lambda: before + inside + inside * rng.choice([1, 2, 5]) + after,
        lambda: before + rng.choice(pieces) + after,
        lambda: before + rng.choice(pieces) + inside + after,
        lambda: before + chr(rng.randrange(0x110000)).encode(errors="surrogatepass") + inside + after,
        lambda: before + inside.swapcase() + after,
        lambda: before + other(100),
        lambda: data + other(),
        lambda: before + rng.randbytes(rng.randrange(1, 4)) + after,
        lambda: before if rng.random() < 0.3 else inside + before + after,
    )
    return rng.choice(kinds)()


def main(
    target: Annotated[str, typer.Argument(help="parsers, readers, records, judge_answers or templates")],
    runs: Annotated[int, typer.Option(help="how many inputs")] = 1_000_000,
    seconds: Annotated[int, typer.Option(help="the longest time; 0 for no limit")] = 0,
    keep: Annotated[Path, typer.Option(help="folder for an input that broke the target")] = Path("runs/fuzz"),
    seed: int = 0,
) -> None:
    """Give a target mutated inputs until one breaks it; that one is kept."""
    sys.path.insert(0, str(HERE.parent))
    kept = keep / target
    kept.mkdir(parents=True, exist_ok=True)
    from fuzz.targets import PIECES, SEEN, TARGETS

    began = time.monotonic()
    inputs = mutations(seed, corpus(target), PIECES[target])
    for done in range(runs):
        data = next(inputs)
        try:
            TARGETS[target](data)
        except BaseException:
            (kept / "failed").write_bytes(data)
            print(f"{target}, input {done} is in {kept / 'failed'}", file=sys.stderr)
            raise
        if seconds and done % 256 == 0 and time.monotonic() - began > seconds:
            break
    print(f"{target}: {done + 1} inputs in {time.monotonic() - began:.0f} s, {dict(SEEN.most_common())}")


if __name__ == "__main__":
    typer.run(main)
