"""A tiny random model for the tests of the CPU backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from medserl_agentloop.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, as verl loads them."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_model(len(tokenizer)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
