"""SmolLM2 is converted from its package into a folder that both trainer and engine load."""

from pathlib import Path

import get_smollm2
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_converted_model_talks_sense_and_ends_its_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "smollm2"
    get_smollm2.main(folder)
    assert str(folder) in capsys.readouterr().out
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    assert tokenizer.eos_token == get_smollm2.END_OF_TURN
    assert model.config.eos_token_id == tokenizer.eos_token_id
    note = "A  note,\nwith <odd> spacing ."
    assert tokenizer.decode(tokenizer.encode(note, add_special_tokens=False)) == note
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = tokenizer.decode(model.generate(**prompt, do_sample=False, max_new_tokens=40)[0])
    assert "Paris" in reply and reply.endswith(get_smollm2.END_OF_TURN)

    written = (folder / "config.json").stat().st_mtime_ns
    get_smollm2.main(folder)
    assert "there already" in capsys.readouterr().out
    assert (folder / "config.json").stat().st_mtime_ns == written
