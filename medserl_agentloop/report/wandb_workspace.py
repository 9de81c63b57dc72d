"""A workspace of Weights & Biases with the panels to look at first. ``medserl wandb-workspace ENTITY/PROJECT``."""

from __future__ import annotations

from typing import Any

from medserl_agentloop.core.metrics import TABLE_NAME

_ATTACKER, _ASSESSOR = "selfplay/attacker/", "selfplay/assessor/"

SECTIONS: dict[str, dict[str, list[str]]] = {
    "Who gets better (each is measured against the other: compare with validation)": {
        "errors undetected, of valid attacks": [_ATTACKER + "success_rate"],
        "right verdicts": [_ASSESSOR + "accuracy", _ASSESSOR + "balanced_accuracy"],
        "errors found, false alarms": [_ASSESSOR + "recall", _ASSESSOR + "false_positive_rate"],
        "reward": [_ATTACKER + "reward", _ASSESSOR + "reward"],
    },
    "Do they play by the rules": {
        "valid attacks": [_ATTACKER + "valid_rate"],
        "readable turns": [_ATTACKER + "parse_rate", _ASSESSOR + "parse_rate"],
        "tokens": [_ATTACKER + "tokens", _ASSESSOR + "tokens"],
        "truncated turns": [_ATTACKER + "truncation_rate", _ASSESSOR + "truncation_rate"],
    },
    "Can the numbers be trusted": {
        "games without a result": ["selfplay/void_rate", "selfplay/lost_rate"],
        "judge: answers, no error where one was injected": [
            "selfplay/judge/answer_rate",
            "selfplay/judge/no_error_rate",
        ],
        "assessor detects edits, not errors": ["selfplay/shortcut/index"],
        "attacks alike": [_ATTACKER + "self_similarity", _ATTACKER + "duplicate_rate"],
    },
    "Does it learn": {
        "groups without a signal": [_ATTACKER + "no_signal_rate", _ASSESSOR + "no_signal_rate"],
        "share of the gradient signal": [_ATTACKER + "signal_share", _ASSESSOR + "signal_share"],
        "gradient norm": ["actor/grad_norm"],
        "rollout against actor": ["training/rollout_probs_diff_max", "selfplay/context_leak"],
        "seconds per step": ["timing_s/step"],
    },
}
"""Sections, their panels by title, the metrics of each; docs/metrics.md says what they mean."""


def save_workspace(project: str) -> str:
    """Save the workspace as a new view of a project (``entity/project``), and return its address.

    A ValueError says what to do if the name has another form, wandb-workspaces is not installed, or W&B refuses.
    """
    entity, slash, name = project.partition("/")
    if not (entity and slash and name) or "/" in name:
        raise ValueError(f"{project!r} is not the name of a W&B project: write entity/project")
    try:
        import wandb
        from wandb_workspaces.reports import v2 as panels
        from wandb_workspaces.workspaces import Section, Workspace
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install wandb-workspaces") from None
    shown: dict[str, list[Any]] = {
        title: [panels.LinePlot(title=plot, x="Step", y=metrics) for plot, metrics in plots.items()]
        for title, plots in SECTIONS.items()
    }
    shown["Games of the last step"] = [panels.WeavePanelSummaryTable(table_name=TABLE_NAME)]
    sections = [Section(name=title, is_open=True, panels=drawn) for title, drawn in shown.items()]
    of = {"entity": entity, "project": name, "name": "self-play"}
    workspace = Workspace(**of, sections=sections, auto_generate_panels=False)
    try:
        return str(workspace.save().url)
    except wandb.errors.Error as error:
        raise ValueError(f"W&B did not save the workspace: {error}") from None
