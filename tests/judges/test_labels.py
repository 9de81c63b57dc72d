"""The judge that trusts the row."""

import asyncio

import pytest
from game.builders import SAFE_ANSWER, attack_text, game, spec

from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Category, Label


def judge(record: MedicalRecord) -> Judgement:
    return asyncio.run(LabelJudge().judge(record))


@pytest.mark.parametrize("category", Category)
@pytest.mark.parametrize("label", Label)
def test_the_row_s_own_label_is_the_judgement(category: Category, label: Label) -> None:
    record = MedicalRecord(spec=spec(category, target_label=label))
    assert judge(record).label is label


def test_the_judgement_names_its_judge_and_claims_no_realism() -> None:
    judgement = judge(MedicalRecord(spec=spec()))
    assert (judgement.judge, judgement.realistic, judgement.reason) == ("labels", None, "")


def test_what_the_assessor_said_does_not_matter() -> None:
    played = game("adversarial_benign")
    played.play(attack_text(played.note.replace("heparin", "warfarin")))
    before = judge(played.record)
    played.play(SAFE_ANSWER)
    assert judge(played.record) == before
    assert before.label is Label.HARMFUL


def test_judging_does_not_touch_the_record() -> None:
    record = MedicalRecord(spec=spec())
    judge(record)
    assert record == MedicalRecord(spec=spec())
