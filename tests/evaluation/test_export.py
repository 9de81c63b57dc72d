"""A checkpoint as a Hugging Face folder: what loads it, and what it scores."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from invoking import invoke
from note_files import SAMPLE
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST, METRICS_FILE, StepFile
from medserl_agentloop.evaluation.evaluate import SUBMISSION
from medserl_agentloop.paths import resource


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints of small models, the first one the better."""
    run = tmp_path / "quick"
    for step, model in ((2, "novice"), (4, "tiny_player")):
        shutil.copytree(
            resource(f"assets/{model}"), run / f"global_step_{step}" / "actor" / "huggingface"
        )
    (run / LATEST).write_text("4")
    scores = {0: 0.25, 2: 0.75, 4: 0.5}
    StepFile(run / METRICS_FILE).append(
        {"step": step, "val-core/medec/sentence_accuracy": score} for step, score in scores.items()
    )
    (run / CONFIG_FILE).write_text(
        "selfplay: {best_by: sentence_accuracy, profile: brief}\n"
        "actor_rollout_ref: {model: {path: assets/novice}, rollout: {dtype: float32}}\n"
    )
    return run


def test_the_best_checkpoint_is_written_whole_with_its_scores(run: Path) -> None:
    done = invoke("export", run)
    assert done.exit_code == 0 and "step 2 (best, 0.750)" in done.output
    folder, start = run / "export" / "step_2", resource("assets/novice")
    model, same = map(AutoModelForCausalLM.from_pretrained, (folder, start))
    for name, weight in same.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert (
        GenerationConfig.from_pretrained(folder).eos_token_id == same.generation_config.eos_token_id
    )
    text = "a note"
    assert AutoTokenizer.from_pretrained(folder)(text) == AutoTokenizer.from_pretrained(start)(text)
    card = (folder / "README.md").read_text()
    assert "| medec/sentence_accuracy | 0.250 | 0.750 |" in card and "profile `brief`" in card


def test_what_is_exported_scores_as_the_run_does(run: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.csv"
    with SAMPLE.open(newline="") as file, notes.open("w", newline="") as few:
        csv.writer(few).writerows(list(csv.reader(file))[:9])
    assert invoke("export", run, "--step", "2", "-o", tmp_path / "exported").exit_code == 0
    found = []
    for model in (run / "global_step_2", tmp_path / "exported"):
        output = tmp_path / f"scores_{model.name}"
        asked = ("--profile", "brief", "--max-tokens", "64", "--output", output)
        done = invoke("evaluate", model, "--notes", notes, *asked)
        assert done.exit_code == 0, done.output
        found.append((output / SUBMISSION).read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "named"), [(("--step", "3"), "no checkpoint '3'"), (("-o", "/"), "not empty")]
)
def test_an_export_that_cannot_be_written_is_refused(
    run: Path, options: tuple[str, ...], named: str
) -> None:
    done = invoke("export", run, *options)
    assert done.exit_code == 2 and named in done.output


def test_the_adapter_of_a_role_is_merged_into_its_base(run: Path) -> None:
    base = resource("assets/novice")
    actor = run / "global_step_2" / "actor"
    shutil.rmtree(actor)
    actor.mkdir()
    (actor / "model_world_size_1_rank_0.pt").touch()  # verl's own file of the base, never read
    for number, role in enumerate(("attacker", "assessor"), start=1):
        torch.manual_seed(number)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
        )
        model.save_pretrained(actor / "lora_adapters" / role)
        config = actor / "lora_adapters" / role / "adapter_config.json"
        named = json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}
        config.write_text(json.dumps(named))
    assert invoke("export", run).exit_code == 0
    merged = AutoModelForCausalLM.from_pretrained(run / "export" / "step_2")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = merged(ids).logits, model.eval()(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert (
        "adapters for attacker, assessor" in invoke("export", run, "--role", "x", "-o", "y").output
    )
