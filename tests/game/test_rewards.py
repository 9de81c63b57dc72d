"""Rewards: zero_sum and medserl in full, rules of every scheme, and schemes corrected for a
judge."""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from game.builders import (
    CLEAN_NOTE,
    DECIDED,
    ERROR_NOTE,
    ERROR_SENTENCE,
    any_game,
    attack_record,
    finished,
    spec,
)
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.case import Category, ErrorType, Label, Role
from medserl_agentloop.games.medical.records import (
    InvalidAttack,
    Judgement,
    MedicalRecord,
    Outcome,
    Rewards,
)
from medserl_agentloop.games.medical.rewards import (
    SCHEMES,
    Medserl,
    RewardScheme,
    ZeroSum,
    load_scheme,
    reward_game,
)
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.medical_team.formats import BASELINE

SLIP = ["no_reasoning"]
PLAYED = [*DECIDED, Outcome.UNREADABLE]

each_scheme = pytest.mark.parametrize("scheme", [ZeroSum(), Medserl()], ids=["zero_sum", "medserl"])


def earned(record: MedicalRecord, name: str) -> Rewards:
    reward_game(record, load_scheme(name))
    return record.rewards


def total(scheme: RewardScheme, record: MedicalRecord) -> float:
    return sum(scheme.rewards(record)[Role.ATTACKER].values())


def honest(outcome: Outcome, **changes: Any) -> MedicalRecord:
    """A game whose attack did what its category asked for."""
    safe = outcome in (Outcome.CORRECT_REJECTION, Outcome.FALSE_POSITIVE)
    return finished(outcome, category="decoy_benign" if safe else "adversarial_benign", **changes)


GAME = {
    # outcome: (attacker, assessor)
    Outcome.CORRECT_DETECTION: (-1.0, 1.0),
    Outcome.MISSED_ERROR: (1.0, -1.0),
    Outcome.CORRECT_REJECTION: (-1.0, 1.0),
    Outcome.FALSE_POSITIVE: (1.0, -1.0),
    Outcome.UNREADABLE: (0.0, 0.0),
}
TABLE = [(o, *v) for o in GAME for v in itertools.product([False, True], repeat=2)]


@pytest.mark.parametrize(("outcome", "attacker_slips", "assessor_slips"), TABLE)
def test_zero_sum_pays_game_and_format_and_medserl_adds_faithfulness(
    outcome: Outcome, attacker_slips: bool, assessor_slips: bool
) -> None:
    slips = [SLIP * attacker_slips, SLIP * assessor_slips]
    turns = zip(("attack", "assessment"), ({"violations": own} for own in slips), strict=True)
    record = honest(outcome, **dict(turns))
    forms = [-0.5 * attacker_slips, -0.5 * assessor_slips]
    if outcome is Outcome.UNREADABLE:
        forms[1] = -2.0
    games = zip(Role, GAME[outcome], forms, strict=True)
    expected = {role: {"game": game, "format": form} for role, game, form in games}
    assert ZeroSum().rewards(record) == expected
    if record.category is Category.DECOY_BENIGN:
        expected[Role.ATTACKER]["game"] = 0.0
    else:
        expected[Role.ATTACKER]["faithfulness"] = -0.125  # half of what the limits allow
    assert Medserl().rewards(record) == expected


FAILED = [  # nothing was injected, or the error is gone; a decoy with a real error
    *itertools.product(
        ["adversarial_benign", "adversarial_harmful"],
        [Outcome.CORRECT_REJECTION, Outcome.FALSE_POSITIVE],
    ),
    *itertools.product(["decoy_benign"], [Outcome.CORRECT_DETECTION, Outcome.MISSED_ERROR]),
]


@pytest.mark.parametrize(
    ("scheme", "penalty"), [(ZeroSum(), -1.0), (Medserl(), -2.0)], ids=["zero_sum", "medserl"]
)
def test_an_invalid_attack_and_one_that_the_judge_contradicts_cost_the_attacker_alike(
    scheme: RewardScheme, penalty: float
) -> None:
    for reason, slip in itertools.product(InvalidAttack, [False, True]):
        attack = {"invalid": reason, "violations": SLIP * slip}
        assert scheme.rewards(finished(Outcome.INVALID_ATTACK, attack=attack)) == {
            Role.ATTACKER: {"validity": penalty, "format": -0.5 if slip else 0.0}
        }
    for category, outcome in FAILED:
        record = finished(outcome, category=category)
        rewards = scheme.rewards(record)
        assert record.attack_failed
        assert rewards[Role.ATTACKER] == {"validity": penalty, "format": 0.0}
        assert rewards[Role.ASSESSOR]["game"] == GAME[outcome][1]


@each_scheme
def test_reward_follows_the_label_of_the_row_and_not_the_category(scheme: RewardScheme) -> None:
    # Older data asks adversarial_benign for an accurate variation, a decoy.
    record = finished(Outcome.FALSE_POSITIVE, facts={"target_label": Label.SAFE})
    assert not record.attack_failed
    assert scheme.rewards(record)[Role.ATTACKER]["game"] == float(scheme == ZeroSum())


@each_scheme
def test_a_cut_off_assessment_pays_the_attacker_what_being_caught_pays(
    scheme: RewardScheme,
) -> None:
    cut_off = finished(Outcome.UNREADABLE, assessment={"truncated": True})
    caught = finished(Outcome.CORRECT_DETECTION)
    assert scheme.rewards(cut_off)[Role.ATTACKER] == scheme.rewards(caught)[Role.ATTACKER]
    assert scheme.rewards(cut_off)[Role.ASSESSOR] == {"game": 0.0, "format": -2.0}
    assert replace(scheme, cut_off_assessment=0.0).rewards(cut_off)[Role.ATTACKER]["game"] == 0.0


@each_scheme
def test_who_only_copied_the_note_has_no_part_in_the_game(scheme: RewardScheme) -> None:
    record = finished(Outcome.MISSED_ERROR, category="vanilla_harmful")
    record.attack = attack_record()
    assert scheme.rewards(record)[Role.ATTACKER] == {"format": 0.0}
    record.attack = attack_record(invalid=InvalidAttack.UNPARSED)
    assert "validity" in scheme.rewards(record)[Role.ATTACKER]


def test_medserl_charges_for_an_attack_that_the_judge_calls_unrealistic() -> None:
    for realistic, realism in ((None, None), (True, 0.0), (False, -0.5)):
        judgement = Judgement(judge="llm", label=Label.HARMFUL, realistic=realistic)
        paid = Medserl().rewards(finished(Outcome.MISSED_ERROR, judgement=judgement))
        assert paid[Role.ATTACKER].get("realism") == realism


WELL, TYPED = "She is well.", ErrorType.DIAGNOSIS
UNTOUCHED, REWRITTEN = "vanilla_harmful", "adversarial_benign"
DETECTED = [
    # category, sentence or error type of the answer, wrong sentences, the row's type, credit
    (UNTOUCHED, {"sentence": ERROR_SENTENCE.lower()}, [ERROR_SENTENCE], None, {"sentence": 0.25}),
    (UNTOUCHED, {"sentence": WELL}, [ERROR_SENTENCE], None, {"sentence": -0.25}),
    (UNTOUCHED, {"sentence": None}, [ERROR_SENTENCE], None, {"sentence": -0.25}),
    (UNTOUCHED, {"sentence": WELL}, [ERROR_SENTENCE, WELL], None, {"sentence": 0.25}),
    (UNTOUCHED, {"sentence": ERROR_SENTENCE}, [], None, {}),  # it is not known which it is
    (UNTOUCHED, {"error_type": TYPED}, [], TYPED, {"error_type": 0.125}),
    (UNTOUCHED, {"error_type": None}, [], TYPED, {"error_type": -0.125}),
    (UNTOUCHED, {"error_type": TYPED}, [], None, {}),
    (REWRITTEN, {"error_type": TYPED}, [], TYPED, {}),  # the seed's type may not hold
]


@pytest.mark.parametrize(("category", "answer", "wrong", "error_type", "credit"), DETECTED)
def test_medserl_pays_a_detection_for_wrong_sentence_and_error_type(
    category: str,
    answer: dict[str, Any],
    wrong: list[str],
    error_type: ErrorType | None,
    credit: dict[str, float],
) -> None:
    parts: dict[str, Any] = {"facts": {"error_type": error_type}, "error_sentences": wrong}
    record = finished(Outcome.CORRECT_DETECTION, category=category, assessment=answer, **parts)
    assert Medserl().rewards(record)[Role.ASSESSOR] == {"game": 1.0, "format": 0.0, **credit}
    assert ZeroSum().rewards(record)[Role.ASSESSOR] == {"game": 1.0, "format": 0.0}


@given(any_game(), st.sampled_from([ZeroSum(), Medserl()]))
def test_rewards_are_zero_sum_and_partial_credit_needs_a_detection(
    record: MedicalRecord, scheme: RewardScheme
) -> None:
    rewards, is_decoy = scheme.rewards(record), record.spec.task is Category.DECOY_BENIGN
    attacker, assessor = rewards.get(Role.ATTACKER), rewards.get(Role.ASSESSOR, {})
    assert record.outcome is Outcome.CORRECT_DETECTION or assessor.keys() <= {"game", "format"}
    if attacker is None:
        return
    does_not_count = record.outcome is Outcome.INVALID_ATTACK or record.attack_failed
    assert ("validity" in attacker) == does_not_count
    assert ("game" in attacker) == (not does_not_count and record.category.has_attack)
    if scheme == Medserl():
        assert ("faithfulness" in attacker) == ("game" in attacker and not is_decoy)
        assert -0.25 <= attacker.get("faithfulness", 0.0) <= 0
    if "game" in attacker and scheme == Medserl() and is_decoy:
        assert attacker == {"game": 0.0, "format": attacker["format"]}
    elif "game" in attacker:
        assert attacker["game"] + assessor["game"] == 0


def counts(record: MedicalRecord) -> bool:
    return record.category.has_attack and record.outcome in PLAYED and not record.attack_failed


@given(any_game().filter(counts), st.sampled_from([ZeroSum(), Medserl()]))
def test_rule_breaking_and_harmless_edits_never_pay_more_than_real_errors(
    record: MedicalRecord, scheme: RewardScheme
) -> None:
    form = {"violations": record.attack.violations}
    against_the_rules = finished(Outcome.INVALID_ATTACK, attack=form)
    contradicted = finished(Outcome.FALSE_POSITIVE, category="adversarial_benign", attack=form)
    least = total(scheme, against_the_rules)
    assert least <= total(scheme, record)
    assert least <= total(scheme, contradicted)
    milder = replace(Medserl(), failed_attack=-1.25) if scheme == Medserl() else scheme
    if record.judgement is None or record.judgement.realistic is not False:
        assert total(milder, contradicted) <= total(milder, record)


# Every scheme, how one is found, and how one is corrected for a judge that errs.


@given(any_game(), st.sampled_from(sorted(SCHEMES)))
def test_a_scheme_rewards_whoever_generated_a_turn_that_counts(
    record: MedicalRecord, name: str
) -> None:
    rewards = earned(record, name)
    played = {Role.ATTACKER: record.attack, Role.ASSESSOR: record.assessment}
    counts = [role for role, turn in played.items() if turn is not None and not record.is_void]
    assert list(rewards) == counts
    assert [record.reward(role) for role in rewards] == [
        sum(own.values()) for own in rewards.values()
    ]


@dataclass(frozen=True)
class Own(RewardScheme):
    """A scheme of a user's own."""

    answer: Callable[[MedicalRecord], Any]

    def rewards(self, record: MedicalRecord) -> Any:
        return self.answer(record)


USERS_SCHEME = """
from dataclasses import dataclass
from medserl_agentloop.games.medical.rewards import RewardScheme

@dataclass(frozen=True)
class Flat(RewardScheme):
    def rewards(self, record):
        return {role: {"flat": 0.25} for role in record.rewards}

number = 3
"""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"atacker": {"game": 1.0}}, "atacker"),
        ({Role.ATTACKER: {"game": None}}, r"attacker.game\n"),
        (None, "Input should be a valid dictionary"),
    ],
)
def test_a_scheme_that_returns_no_rewards_is_refused(answer: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        reward_game(finished(Outcome.MISSED_ERROR), Own(lambda record: answer))


def test_a_void_game_earns_nothing_and_its_scheme_is_not_asked() -> None:
    record = finished(Outcome.VOID, rewards={Role.ATTACKER: {"game": 1.0}})
    reward_game(record, Own(lambda record: {Role.ATTACKER: {"game": 1 / 0}}))
    assert record.rewards == {}


def test_constants_of_a_scheme_can_be_replaced() -> None:
    record = finished(Outcome.CORRECT_REJECTION, category="adversarial_benign")
    milder = load_scheme("medserl", {"failed_attack": -1.6})
    assert milder.rewards(record)[Role.ATTACKER]["validity"] == -1.6
    assert load_scheme("medserl", {"failed_attack": None}) == Medserl()
    played_for_points = {"game": 1.0, "format": 0.0, "faithfulness": -0.125}
    decoy = load_scheme("medserl", {"decoy": 1.0}).rewards(honest(Outcome.FALSE_POSITIVE))
    assert decoy[Role.ATTACKER] == played_for_points


@pytest.mark.parametrize(
    ("name", "terms", "says"),
    [
        ("medsrl", {}, "did you mean 'medserl'"),
        ("no_such_module:flat", {}, "cannot be loaded: ModuleNotFoundError"),
        ("flat_rewards:number", {}, "no reward scheme 'flat_rewards:number'"),
        ("medserl", {"faild_attack": -1.0}, "did you mean 'failed_attack'"),
        ("medserl", {"win": -1.0}, "win=-1 of 'medserl' must be a number, at least 0"),
        ("zero_sum", {"failed_attack": 100.0}, "failed_attack=100 of 'zero_sum'"),
        ("medserl", {"sentence": math.nan}, "sentence=nan of 'medserl'"),
        ("flat_rewards:Flat", {"faild_attack": -1.0}, "selfplay.reward_terms.faild_attack=null"),
    ],
)
def test_a_scheme_or_a_constant_that_cannot_be_found_is_named(
    name: str, terms: dict[str, float], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_rewards.py").write_text(USERS_SCHEME)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_scheme("flat_rewards:Flat").rewards(finished(Outcome.VOID)) == {}
    with pytest.raises(ValueError, match=says):
        load_scheme(name, terms)


# --- the baseline's scheme: 1,200 transcripts in its format earn what its table pays ---


# They are played by our rules. The table is written here once more, from its text: nothing of it is
# the package's. Those that keep the format, those that have an answer, and those that have none.
FORMS = [
    "{t}</think><answer>{a}</answer>", "{t}</think>\n<answer>\n{a}\n</answer>\n",
    "<think>{t}</think><answer>{a}</answer>", " </think><answer>{a}</answer>",
    "{t}<answer>{a}</answer>", "{t}</think>So: <answer>{a}</answer>",
    "{t}</think><answer>{a}</answer> Done.", "{t}</think></think><answer>{a}</answer>",
    "<answer>{a}</answer>{t}</think>", "{t}</think><answer>{a}</answer></answer>",
    "{t}</think>{a}", "{a}", "{t}</think><answer></answer>", "{t}</think><answer>{a}", "",
]  # fmt: skip
CATEGORIES = [category for category in Category if category is not Category.DECOY_BENIGN]

# Category, attacker's form, its form as an assessor, what it says, the judge's label (None: it
# failed), realism
LABELS, REALISTIC = [*Label, *Label, None], [None, 1, 0]
SAYS = ["Safe", "Harmful", "unsure"]
PLAYS = list(itertools.product(CATEGORIES, FORMS, FORMS, SAYS, LABELS, REALISTIC))
EDIT = {
    Category.ADVERSARIAL_BENIGN: CLEAN_NOTE.replace("heparin", "warfarin"),
    Category.ADVERSARIAL_HARMFUL: ERROR_NOTE.replace("warfarin", "methotrexate"),
}

_TAG = r"(?!</?(?:think|answer)>)"
_TEXT = rf"(?:{_TAG}.)*{_TAG}\S(?:{_TAG}.)*"
_KEEPS = re.compile(rf"(?s){_TEXT}</think>\s*<answer>{_TEXT}</answer>\s*")
_ANSWER = re.compile(r"(?s)<answer>\s*(\S.*?)\s*</answer>")


def transcripts(number: int = 1200) -> list[tuple[MedicalRecord, dict[Role, float]]]:
    """Finished games, always the same ones, and the rewards that the baseline's table gives
    them."""
    return [_played(*facts) for facts in random.Random(11).sample(PLAYS, number)]


def _played(
    category: Category,
    attack_form: str,
    form: str,
    says: str,
    label: Label | None,
    realistic: int | None,
) -> tuple[MedicalRecord, dict[Role, float]]:
    facts = spec(category)
    attack = attack_form.format(t="swap it", a=EDIT.get(category, facts.seed_note))
    assessment = form.format(t="reads oddly", a=says)
    game = MedicalGame(facts, EditLimits(), BASELINE)
    if category.has_attack:
        game.play(attack)
    if game.next_role is not None:
        game.play(assessment)
        if label is None:
            game.make_void("judge failed")
        else:
            game.record.judgement = Judgement(judge="table", label=label, realistic=realistic)
    paid = _table(attack if category.has_attack else None, assessment, label, realistic)
    return game.record, paid


def _table(
    attack: str | None, assessment: str, label: Label | None, realistic: int | None
) -> dict[Role, float]:
    """Detection, realism and format, as the table says; an attack without an answer ends the game
    without an error.
    """
    attacker_form, assessor_form = (
        1.0 if _KEEPS.fullmatch(text or "") else -1.0 for text in (attack, assessment)
    )
    if attack is not None and not _ANSWER.search(attack):
        return {Role.ATTACKER: 0.0 + 0.5 + attacker_form}
    if label is None:
        return {}
    answer = _ANSWER.search(assessment)
    detected, present = answer is not None and answer[1] == "Harmful", label is Label.HARMFUL
    detection = {(True, True): -1.0, (True, False): 1.0}.get((present, detected), 0.0)
    assessor = {Role.ASSESSOR: (1.0 if present == detected else -1.0) + assessor_form}
    if attack is None:
        return assessor
    return {
        Role.ATTACKER: detection + (-0.5 if realistic == 0 else 0.5) + attacker_form,
        **assessor,
    }


def test_1200_transcripts_earn_what_the_table_of_the_baseline_pays() -> None:
    compared: Counter[str] = Counter()
    seen = set()
    for record, expected in transcripts():
        paid, plain = (earned(record, f"medical_general_sum{suffix}") for suffix in ("", "_no_cot"))
        assert {role: sum(parts.values()) for role, parts in paid.items()} == expected
        assert {
            role: {**parts, "format": paid[role]["format"]} for role, parts in plain.items()
        } == paid
        compared.update(role.value for role in expected)
        seen |= {
            record.outcome,
            record.category,
            record.attack is not None and bool(record.attack.violations),
        }
    assert compared == {"attacker": 519, "assessor": 833}
    assert seen == {*Outcome, *CATEGORIES, True, False}
