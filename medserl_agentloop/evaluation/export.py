"""``medserl export``: a checkpoint of a run as a Hugging Face folder, with its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf

from medserl_agentloop.core.checkpoints import Checkpoint, choose
from medserl_agentloop.core.step_file import CONFIG_FILE, METRICS_FILE, StepFile
from medserl_agentloop.terminal import errors_in_one_line

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [medserl, self-play, medical-error-detection]
---

# {title}

Step {step} of the self-play run `{run}`, trained from `{base}` with medserl-agentloop to find
errors in clinical notes. For research: not tested in care, and no substitute for a clinician.

| validation | before training | this checkpoint |
|---|---:|---:|
{rows}

Prompts: profile `{profile}` of medserl-agentloop. Weights: {dtype}. To score it on notes of yours:

```bash
medserl evaluate {folder} --profile {profile} --notes NOTES.csv
```
"""


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as trainer.default_local_dir.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder; else RUN/export/STEP.")
    ] = None,
    step: Annotated[
        str, typer.Option(help="best (by validation), newest, or the number of a step.")
    ] = "best",
    role: Annotated[
        str, typer.Option(help="Whose adapter is merged, in a run with an adapter for each role.")
    ] = "assessor",
) -> None:
    """Write a checkpoint as a Hugging Face folder, with a model card."""
    with errors_in_one_line():
        checkpoint = choose(run, step)
        target = output or run / "export" / f"step_{checkpoint.step}"
        if target.exists() and any(target.iterdir()):
            raise ValueError(f"{target} is not empty: name a new folder with --output")
        write_model(run, checkpoint, target, role)
    typer.echo(f"{checkpoint}: {target}")


def write_model(run: Path, checkpoint: Checkpoint, target: Path, role: str) -> None:
    """Write the model of a checkpoint, adapters merged, in the number format that its run played
    in. ValueError if it cannot be loaded, or has no adapter of that role.
    """
    import torch  # slow, and every command loads this module

    from medserl_agentloop.evaluation.local_models import find_weights, load_model

    model, tokenizer = load_model(find_weights(checkpoint.folder))
    if adapters := getattr(model, "peft_config", None):
        if role not in adapters:
            raise ValueError(f"--role {role}: the run has adapters of {', '.join(adapters)}")
        model.set_adapter(role)
        model = model.merge_and_unload()
    config: Any = (
        OmegaConf.load(run / CONFIG_FILE) if (run / CONFIG_FILE).is_file() else OmegaConf.create()
    )
    dtype = str(OmegaConf.select(config, "actor_rollout_ref.rollout.dtype", default="bfloat16"))
    model.to(getattr(torch, dtype)).save_pretrained(target)
    tokenizer.save_pretrained(target)
    card = _CARD.format(
        title=f"{run.resolve().name}, step {checkpoint.step}",
        step=checkpoint.step,
        run=run.resolve().name,
        base=OmegaConf.select(config, "actor_rollout_ref.model.path", default="an unknown model"),
        rows="\n".join(_score_rows(run, checkpoint.step)) or "| none in this step | | |",
        profile=OmegaConf.select(config, "selfplay.profile", default="medserl"),
        dtype=dtype,
        folder=target.name,
    )
    (target / "README.md").write_text(card, encoding="utf-8")


def _score_rows(run: Path, step: int) -> list[str]:
    """Rows of the card: the validation scores of a step and those before training."""
    file = StepFile(run / METRICS_FILE)
    found: dict[int, dict[str, float]] = {0: {}, step: {}}
    for row in file.read() if file.path.is_file() else ():
        if row["step"] in found:
            scores = {name: row[name] for name in row if name.startswith("val-core/")}
            found[row["step"]] |= scores
    return [
        f"| {name.removeprefix('val-core/')} | "
        + (f"{found[0][name]:.3f}" if name in found[0] else "")
        + f" | {value:.3f} |"
        for name, value in sorted(found[step].items())
    ]
