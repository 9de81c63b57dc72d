"""docs/metrics.csv has every metric the code can produce, and none that it cannot."""

import csv
import re
from functools import cache, partial
from itertools import product

import torch
from game.builders import finished
from make_reference import METRICS

from medserl_agentloop.core.advantages import (
    ROLE_ESTIMATORS,
    Baselines,
    RoleBatch,
    role_token_metrics,
)
from medserl_agentloop.core.certificate import Certificate, Measure
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.core.loss import context_gaps, context_leak_metrics
from medserl_agentloop.core.metrics import METRIC_PREFIX, lost_games_metrics, opponent_metrics
from medserl_agentloop.core.recorder import LOST_METRICS, update_metrics
from medserl_agentloop.core.records import OpponentRecord
from medserl_agentloop.games.medical.case import Category, ErrorType, Label, Role
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.metrics import role_metrics, trained_role_won
from medserl_agentloop.games.medical.records import (
    InvalidAttack,
    Judgement,
    MedicalRecord,
    Outcome,
    Reading,
)
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.report import headline_metrics

RULES = MedicalGameInteraction.View.rules(MedicalGameInteraction.roles)
with METRICS.open(encoding="utf-8", newline="") as file:
    MEANINGS = {row["name"]: row["meaning"] for row in csv.DictReader(file)}
PLACEHOLDERS = {
    "<role>": "(?:attacker|assessor)",
    "<component>": "(?!std$)[a-z_]+",
    "<category>": "|".join(c.value for c in Category),
    "<error_type>": "|".join(t.value for t in ErrorType),
    "<reason>": "|".join(r.value for r in InvalidAttack),
    "<class>": "judge_failed|judge_abstained|no_room|aborted|failed|timed_out|no_log_probs|"
    "no_number|other",
    "<alarm>": "|".join(r.name for r in RULES),
    "<kind>": "[a-z_]+",
    "<claim>": "isolation|credit|loss",
    "<part>": "[a-z_]+",
}

ROLES = [role.value for role in Role]


@cache
def documented() -> dict[str, re.Pattern[str]]:
    """Each name of the table, a row of a role twice, with the names it stands for."""
    names = {name.replace("<role>", role): "" for name in MEANINGS for role in ROLES}
    fill = partial(re.sub, "<.*?>", lambda match: f"(?:{PLACEHOLDERS[match[0]]})")
    return {name: re.compile(fill(name)) for name in names}


def everything() -> list[MedicalRecord]:
    """Scored games of every category, outcome, error type and kind of failure, in groups and
    alone.
    """
    games = []
    for category, outcome, error_type in product(Category, Outcome, ErrorType):
        if category.has_attack or outcome is not Outcome.INVALID_ATTACK:
            kind = error_type.value
            facts = {"error_type": error_type, "vignette_id": f"{kind} {outcome.value}"}
            attack = {"violations": ["no_note"], "changed_sentences": [f"She has {kind}."]}
            turns = {"attack": attack, "assessment": {"violations": ["no_verdict"]}}
            place = {"category": category, "uid": f"{category.value} {kind}"}
            games.append(finished(outcome, facts=facts, **place, **turns))
    for invalid in InvalidAttack:
        games.append(finished(Outcome.INVALID_ATTACK, attack={"invalid": invalid}))
    for reason in (
        "judge abstained",
        "else",
        "no room for the assessor's turn",
        "assessor: generation aborted",
        "assessor: 0 log-probs for 5 tokens",
        "assessor: generation timed out after 3600.0 s",
    ):
        games.append(finished(Outcome.VOID).model_copy(update={"void": reason}))
    judged = Judgement(judge="llm", label=Label.HARMFUL)
    for changes in (
        {"realistic": True, "error_type": "dose"},
        {"knowable": True, "readings": [Reading(found=True)]},
    ):
        note = " ".join(["longer", *changes])
        answer = judged.model_copy(update=changes)
        games.append(finished(Outcome.MISSED_ERROR, judgement=answer, attack={"note": note}))
    for game in games:
        game.rewards = load_scheme("medserl").rewards(game)
    return games


def against_opponents() -> list[MedicalRecord]:
    met = OpponentRecord(role=Role.ASSESSOR, kind="endpoint", version="model")
    return [game.model_copy(update={"opponent": met}) for game in everything()]


@cache
def produced() -> frozenset[str]:
    role_ids = torch.tensor([[role.id for role in Role]])
    ones = torch.ones_like(role_ids, dtype=torch.float)
    metrics = role_metrics(everything()) | lost_games_metrics(8, 7)
    metrics |= opponent_metrics(against_opponents(), map(trained_role_won, against_opponents()))
    metrics |= role_token_metrics({"advantage": ones, "entropy": ones}, ones, role_ids, ROLES)
    gaps = context_gaps(torch.ones(1, 3), torch.ones(1, 3), torch.tensor([[1, 0, 1]]))
    metrics |= context_leak_metrics(gaps)
    metrics |= Certificate([Measure("isolation", "actor", 0.0, 0.1, {}, "")], 0, 2, 1.0).metrics
    one = {"groups": ["a"], "kinds": ["vanilla_benign"], "values": ones}
    batch = RoleBatch(ones, ones, role_ids, ROLES, **one)
    for estimator in ROLE_ESTIMATORS.values():
        metrics |= estimator(batch, CreditSettings(), Baselines()).metrics
    metrics |= update_metrics({"actor/grad_norm": 1.0}) | {LOST_METRICS: 0.0}
    return frozenset({*metrics, *(METRIC_PREFIX + rule.name for rule in RULES)})


def test_every_metric_stands_in_the_table_once_and_every_row_is_a_metric() -> None:
    seen = set()
    for name in produced():
        rows = [row for row, pattern in documented().items() if pattern.fullmatch(name)]
        assert len(rows) == 1, (name, rows)
        seen.update(rows)
    assert documented().keys() == seen


def test_the_rules_and_medserl_show_read_metrics_that_exist() -> None:
    read = {name for rule in RULES for name in (rule.metric, rule.games) if name}
    read |= set(headline_metrics(MedicalGameInteraction, ROLES))
    assert {name for name in read if name.startswith("selfplay/")} <= produced()
