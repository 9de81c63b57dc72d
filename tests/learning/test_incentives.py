"""The simulation of where the rewards lead: its directions, its files, and the matrix of payoffs in docs/rewards.md."""

import csv
import io
from collections.abc import Callable
from itertools import chain

import pytest
from pydantic import ValidationError
from typer import BadParameter

from experiments.incentives import payoffs, simulate
from experiments.incentives.assumptions import Assumptions
from experiments.incentives.payoffs import ATTACKS, Terms, matrix
from experiments.incentives.robustness import robustness_table
from experiments.incentives.simulate import ALL, EARLIER, FIGURES, Table, as_csv, as_markdown
from experiments.pages import with_table
from medserl_agentloop.games.medical.records import InvalidAttack
from medserl_agentloop.games.medical.types import Category, Label, Role

ASSUMED = Assumptions()


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return simulate.tables(ASSUMED)


Row = Callable[..., dict[str, float]]


@pytest.fixture
def row(tables: dict[str, Table]) -> Row:
    def find(judge: str, setting: str = EARLIER) -> dict[str, float]:
        [found] = [row for row in tables["dynamics"] if (row["judge"], row["setting"]) == (judge, setting)]
        return found

    return find


@pytest.mark.parametrize("name", ["dynamics", "gate", "validity", "assessments"])
def test_the_committed_tables_are_what_the_code_makes(tables: dict[str, Table], name: str) -> None:
    file = (FIGURES / f"{name}.csv").read_text(encoding="utf-8")
    kept, made = (list(csv.reader(io.StringIO(text))) for text in (file, as_csv(tables[name])))
    assert [len(line) for line in kept] == [len(line) for line in made]
    for old, new in zip(chain(*kept), chain(*made), strict=True):
        try:
            assert float(old) == pytest.approx(float(new), abs=0.03)  # another numpy may round otherwise
        except ValueError:
            assert old == new, "run python -m experiments.incentives.simulate"
    page = simulate.PAGE.read_text(encoding="utf-8")
    assert with_table(page, name, as_markdown([dict(zip(kept[0], line, strict=True)) for line in kept[1:]])) == page


@pytest.mark.parametrize("judge", ["labels", "errs", "pair", "perfect"])
def test_earlier_the_look_of_an_edit_decides_and_recall_on_untouched_notes_suffers(row: Row, judge: str) -> None:
    earlier = row(judge)
    assert earlier["edited, nothing seen"] > 0.8
    assert earlier["shortcut"] > 0.4
    assert earlier["F1"] < simulate.best_f1(ASSUMED) - 0.1


def test_earlier_the_best_attack_is_one_that_nobody_can_find(row: Row) -> None:
    assert row("perfect")["unknowable"] > 0.8
    assert row("errs")["unknowable"] > 0.8
    assert row("labels")["unknowable"] + row("labels")["no error"] > 0.8
    assert row("perfect", "blind gate")["unknowable"] < 0.1
    assert row("pair", "neutral decoys, gate")["unknowable"] < 0.1


def test_earlier_misses_of_the_judge_drive_out_subtle_errors_and_a_milder_penalty_with_the_gate_brings_them_back(
    row: Row,
) -> None:
    assert row("pair")["subtle"] < 0.1 < row("pair")["blatant"]
    assert row("pair", "blind gate")["blatant"] > 0.8
    assert row("pair", "blind gate, milder failed_attack")["subtle"] > 0.8
    assert row("pair", "milder failed_attack")["unknowable"] > row("pair")["unknowable"]


def test_decoys_that_are_paid_for_suspicion_look_wrong_and_turn_the_evidence_round(row: Row) -> None:
    for judge in ("pair", "perfect"):
        suspected, neutral = row(judge, "decoys paid for suspicion, gate"), row(judge, "neutral decoys, gate")
        assert suspected["odd decoys"] > 0.8 > 0.2 > neutral["odd decoys"]
        assert suspected["edited, error seen"] < neutral["edited, error seen"]


def test_an_edit_elsewhere_pays_until_it_must_touch_the_error(row: Row) -> None:
    assert row("pair")["elsewhere"] > 0.8
    assert row("pair", "edit must touch the error")["elsewhere"] < 0.1


@pytest.mark.parametrize("judge", ["pair", "perfect"])
def test_all_changes_together_leave_subtle_errors_and_no_edit_detector(row: Row, judge: str) -> None:
    together, earlier = row(judge, ALL), row(judge)
    assert together["subtle"] > 0.8
    assert together["edited, nothing seen"] < 0.1
    assert together["shortcut"] < 0.1
    assert together["F1"] > earlier["F1"]


def test_the_learnable_reward_does_not_replace_the_gate(row: Row) -> None:
    assert row("perfect", "neutral decoys, learnable reward")["unknowable"] > 0.8
    assert row("perfect", "all four, learnable reward")["subtle"] > 0.8


def test_the_gate_fails_with_a_bad_reader_unless_failing_it_costs(tables: dict[str, Table]) -> None:
    best = {tuple(row.values())[:3]: list(row.values())[3:] for row in tables["gate"]}
    sharp, deaf = (ASSUMED.changed([f"subtle.blind={found}"]).gate("subtle") for found in (0.6, 0.3))
    tight, leaky = (ASSUMED.changed([f"unknowable.blind={passed}"]).gate("unknowable") for passed in (0.05, 0.35))
    assert best[0.95, tight, sharp] == ["subtle", "subtle"]
    assert best[0.95, leaky, sharp] == ["unknowable", "subtle"]
    assert best[0.65, tight, deaf] == ["blatant", "blatant"]


def test_a_milder_penalty_takes_noise_out_of_the_attacker_s_reward(tables: dict[str, Table]) -> None:
    for line in tables["validity"]:
        assert line["earlier defaults"] > line["milder failed_attack"]
    errs, _, perfect = tables["validity"]
    assert errs["earlier defaults"] > perfect["earlier defaults"]


def test_several_assessments_help_the_assessor_and_cost_the_attacker(tables: dict[str, Table]) -> None:
    for _, _, four, _ in (tables["assessments"][:4], tables["assessments"][4:]):
        assert four["assessor"] > 1 > four["attacker"]
    little, much = (lines[2] for lines in (tables["assessments"][:4], tables["assessments"][4:]))
    assert much["assessor"] > little["assessor"]


def test_the_page_shows_in_how_many_draws_of_the_guesses_each_direction_holds() -> None:
    kept = list(csv.reader(io.StringIO((FIGURES / "robustness.csv").read_text(encoding="utf-8"))))
    page = simulate.PAGE.read_text(encoding="utf-8")
    assert (
        with_table(page, "robustness", as_markdown([dict(zip(kept[0], row, strict=True)) for row in kept[1:]])) == page
    )
    made = robustness_table(ASSUMED.changed(["steps=100", "rate=0.6"]), draws=1)
    assert [row[0] for row in kept[1:]] == [row["statement"] for row in made]
    for _, holds in kept[1:]:
        assert 0 <= int(holds) <= 50


def test_other_assumptions_are_taken_by_their_key_and_leave_the_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ASSUMED.changed(["subtle.blind=0.3", "steps=20"]).subtle.blind == 0.3
    with pytest.raises(ValidationError, match=r"subtle\.blnd"):
        ASSUMED.changed(["subtle.blnd=0.3"])
    with pytest.raises(BadParameter, match=r"assumptions\.py"):
        simulate.main(["steps=many"])
    before = {path: path.stat().st_mtime_ns for path in (simulate.PAGE, *FIGURES.iterdir())}
    simulate.main(["steps=10", "games=100"])
    assert "| pair | all four changes |" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (simulate.PAGE, *FIGURES.iterdir())}


def test_the_rewards_page_shows_the_payoffs_of_today() -> None:
    page = payoffs.PAGE.read_text(encoding="utf-8")
    assert "| unknowable (`right lower` → `left lower`) |" in page
    assert with_table(page, "payoffs", matrix()) == page, "run python -m experiments.incentives.payoffs"


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.category.value}-{attack.kind}")
def test_every_attack_of_the_matrix_but_two_passes_the_rules(attack: payoffs.Attack) -> None:
    record = attack.played("harmful", attack.truth)
    assert record.void is None
    if record.attack is not None:
        assert record.attack.violations == []
        refused = {"no-op": InvalidAttack.UNCHANGED, "elsewhere": InvalidAttack.ERROR_NOT_TOUCHED}
        assert record.attack.invalid is refused.get(attack.kind)
    if record.assessment is not None:
        assert record.assessment.violations == []


def test_the_terms_change_only_what_they_name() -> None:
    decoy = next(a for a in ATTACKS if a.category is Category.DECOY_BENIGN and a.kind == "odd")
    before, changed = Terms().scheme, Terms(decoy=0.0, failed_attack=-1.5).scheme
    for answer in ("safe", "harmful"):
        valid, failed = (decoy.played(answer, label) for label in (Label.SAFE, Label.HARMFUL))
        assert changed(valid)[Role.ATTACKER] == {"game": 0.0, "format": 0.0}
        assert changed(failed)[Role.ATTACKER] == {"validity": -1.5, "format": 0.0}
        for record in (valid, failed):
            assert changed(record)[Role.ASSESSOR] == before(record)[Role.ASSESSOR]
    for attack in ATTACKS:
        if attack.category is not Category.DECOY_BENIGN:
            record = attack.played("harmful", attack.truth)
            if not record.attack_failed:
                assert changed(record) == before(record)
