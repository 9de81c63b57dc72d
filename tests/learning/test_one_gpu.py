"""The warm starts that ran on a machine with nothing but torch and Transformers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from experiments.real_notes import one_gpu
from medserl_agentloop.paths import resource


def test_each_run_starts_from_the_same_weights_learns_and_answers_every_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        one_gpu, "load", lambda file: AutoModelForCausalLM.from_pretrained(file, dtype="float32")
    )
    monkeypatch.setattr(one_gpu, "BUDGET", {"attack": 5, "assessment": 3})
    taught = [
        {"format": "brief", "ids": [7, 8, 9, *[number] * 6], "answer_from": 3}
        for number in range(20, 40)
    ]
    asked = [
        ("brief", "attack", 0, [7, 8]),
        ("brief", "assessment", 0, [7, 8, 9]),
        ("edits", "attack", 0, [7]),
    ]
    pq.write_table(pa.Table.from_pylist(taught), tmp_path / "conversations.parquet")
    prompts = [dict(zip(("profile", "kind", "number", "ids"), row, strict=True)) for row in asked]
    pq.write_table(pa.Table.from_pylist(prompts), tmp_path / "prompts.parquet")
    one_gpu.train(
        tmp_path, resource("assets/tiny_player"), tmp_path / "out", (("brief", 12), ("brief", 2))
    )
    long, short = (
        json.loads((tmp_path / "out" / f"brief_{steps}.json").read_text()) for steps in (12, 2)
    )
    assert long["losses"][0] == short["losses"][0] and long["losses"][-1] < 0.8 * long["losses"][0]
    assert [(a["kind"], a["number"]) for a in long["answers"]] == [("attack", 0), ("assessment", 0)]
    assert all(len(a["ids"]) <= one_gpu.BUDGET[a["kind"]] for a in long["answers"])
