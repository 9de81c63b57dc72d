"""SmolLM2 is converted from its package into a folder that both trainer and engine load."""

from pathlib import Path

import get_smollm2
import pytest
from transformers import AutoConfig, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_converted_model_ends_its_turns_and_nothing_is_converted_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "smollm2"
    get_smollm2.main(folder)
    said = capsys.readouterr().out
    assert str(folder) in said and "Paris" in said
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == get_smollm2.END_OF_TURN
    assert AutoConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    note = "A  note,\nwith <odd> spacing ."
    assert tokenizer.decode(tokenizer.encode(note, add_special_tokens=False)) == note

    written = (folder / "config.json").stat().st_mtime_ns
    get_smollm2.main(folder)
    assert "there already" in capsys.readouterr().out
    assert (folder / "config.json").stat().st_mtime_ns == written


def test_a_model_that_talks_nonsense_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_smollm2, "find_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(get_smollm2, "convert", lambda gguf, output: output.mkdir())
    monkeypatch.setattr(get_smollm2, "answer", lambda folder, question: "Lyon, or")
    with pytest.raises(SystemExit, match="'Lyon, or', without Paris"):
        get_smollm2.main(tmp_path / "smollm2")
    assert not (tmp_path / "smollm2").exists()
