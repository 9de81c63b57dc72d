"""The workspace that is saved to W&B: its definition is built by W&B's own package, only the request is faked."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.metrics import TABLE_NAME
from medserl_agentloop.report.export import SECTIONS

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_VERL = {"actor/grad_norm", "training/rollout_probs_diff_max", "timing_s/step"}


def test_every_panel_shows_a_documented_metric() -> None:
    documented = set(re.findall(r"^\| `(\S+)` \|", METRICS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)) | OF_VERL
    shown = {metric for plots in SECTIONS.values() for metrics in plots.values() for metric in metrics}
    assert {m for m in shown if not {m, re.sub("/(attacker|assessor)/", "/<role>/", m)} & documented} == set()


def test_the_workspace_is_saved_with_all_panels_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    internal = pytest.importorskip("wandb_workspaces.workspaces.internal", reason="pip install wandb-workspaces")
    sent: list[dict[str, Any]] = []

    def answer(api: Any, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        sent.append(variables)
        return {"upsertView": {"view": {"id": "1", "name": variables["name"]}}}

    monkeypatch.setattr(internal, "execute_graphql", answer)
    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace(client=SimpleNamespace(app_url="https://wandb.ai")))
    done = CliRunner().invoke(app, ["wandb-workspace", "clinic/games"])
    assert done.exit_code == 0, done.output
    assert "https://wandb.ai/clinic/games" in done.output
    (variables,) = sent
    assert (variables["entityName"], variables["projectName"]) == ("clinic", "games")
    bank = json.loads(variables["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in bank][: len(SECTIONS)] == list(SECTIONS)
    plots = [
        panel["config"]["metrics"] for section in bank for panel in section["panels"] if "metrics" in panel["config"]
    ]
    assert plots == [metrics for section in SECTIONS.values() for metrics in section.values()]
    assert TABLE_NAME in variables["spec"]


def test_a_project_without_its_entity_is_refused() -> None:
    done = CliRunner().invoke(app, ["wandb-workspace", "games"])
    assert done.exit_code == 2 and "write entity/project" in done.output
