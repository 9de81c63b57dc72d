"""Whatever a batch holds: no NaN, no infinity, shares are shares, and no name is made of free text."""

import math
import random
import re

import pytest
from game.builders import attack_record, finished
from hypothesis import given, settings
from hypothesis import strategies as st

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, ErrorType, Label, Role

free_text = st.text(max_size=20)
rewards = st.dictionaries(st.sampled_from(["game", "format", "sentence"]), st.floats(-3, 3), max_size=3)
attacks = st.builds(
    attack_record,
    tokens=st.integers(0, 3),
    changed_words=st.integers(0, 3),
    changed_sentences=st.lists(st.sampled_from(["She is well.", "He is ill.", ".", "\ud800"]) | free_text, max_size=2),
    violations=st.lists(st.sampled_from(["no_note", "truncated"]) | free_text, max_size=3),
    invalid=st.sampled_from([None, None, *InvalidAttack]),
)
judgements = st.builds(
    Judgement,
    judge=free_text,
    label=st.sampled_from([None, *Label]),
    realistic=st.sampled_from([None, True, False]),
    reason=free_text,
)


@st.composite
def records(draw: st.DrawFn) -> MedicalRecord:
    category = draw(st.sampled_from(Category))
    outcome = draw(st.sampled_from([o for o in Outcome if category.has_attack or o is not Outcome.INVALID_ATTACK]))
    facts = {
        "error_type": draw(st.sampled_from([None, *ErrorType])),
        "vignette_id": draw(st.sampled_from(["", "a", "b"])),
    }
    record = finished(outcome, category=category, facts=facts, uid=draw(st.sampled_from(["", "g", "h"])))
    record.rewards = draw(st.dictionaries(st.sampled_from(Role), rewards))
    if draw(st.booleans()):
        record.judgement = draw(st.none() | judgements)
    if draw(st.booleans()):
        record.attack = draw(st.none() | attacks)
    if draw(st.integers(0, 9)) == 0:
        record.assessment = None
    if draw(st.integers(0, 3)) == 0:
        record.void = draw(st.sampled_from(["judge failed: TimeoutError", "judge abstained"]) | free_text)
    return record


NO_SHARES = re.compile(
    r"selfplay/(games|shortcut/\w+|(judge/)(asked|injected)"
    r"|(attacker|assessor)/(turns|tokens|tokens_max|groups|decided|compared|changed_\w+|reward\w*))"
)


@given(st.lists(records(), max_size=8), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_no_batch_gives_nan_a_share_is_a_share_and_the_order_does_not_matter(
    games: list[MedicalRecord], rng: random.Random
) -> None:
    metrics = role_metrics(games)
    assert all(type(v) is float and math.isfinite(v) for v in metrics.values())
    assert all(0 <= v <= 1 for n, v in metrics.items() if not NO_SHARES.fullmatch(n)), metrics
    assert all(-1 <= v <= 1 for n, v in metrics.items() if "/shortcut/" in n and not n.endswith("/compared")), metrics
    assert all(re.fullmatch(r"selfplay(/[A-Za-z][A-Za-z0-9_]*)+", n) for n in metrics)
    rng.shuffle(games)
    assert role_metrics(games) == pytest.approx(metrics, abs=1e-9)
