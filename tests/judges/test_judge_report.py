"""What a run makes of its judge's report: what it says, what it refuses, and the corrected reward."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from judges.games import played, reward, reward_manager
from support import run_with

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.judges.report import (
    CountedShare,
    JudgeReport,
    judge_identity,
    read_report,
    write_report,
)
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.rewards import ErrorRates, corrected, medserl
from medserl_agentloop.games.medical.types import Category, Label, Role
from medserl_agentloop.paths import PACKAGE
from medserl_agentloop.plugin import StartupCheck

MINE = f"{__name__}:Believer"
LLM = {
    "selfplay__judge": "llm",
    "selfplay__judge_server__url": "http://localhost/v1",
    "selfplay__judge_server__model": "judge-9b",
}


class Believer:
    """A user's own judge, which takes every note for harmful."""

    name = "believer"

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=Label.HARMFUL)


def report(folder: Path, config: MedicalConfig, sensitivity: int = 90, specificity: int = 80, of: int = 100) -> str:
    path = folder / "report.json"
    none = CountedShare(hits=0, items=200)
    written = JudgeReport(
        judge=judge_identity(config),
        sources={},
        limit=None,
        seed=0,
        sensitivity=CountedShare(hits=sensitivity, items=of),
        specificity=CountedShare(hits=specificity, items=of),
        abstained=none,
        failed=none,
        groups=(),
        asked=2 * of,
        cached=0,
    )
    write_report(written, path)
    assert read_report(path) == written
    return str(path)


def llm_config(**changes: Any) -> MedicalConfig:
    server = {"url": "http://elsewhere/v1", "model": "judge-9b", **changes}
    return MedicalConfig(judge="llm", judge_server=JudgeServer(**server))


def printed_at_start_up(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    data = PACKAGE.parent / "README.md"  # start-up looks whether the files are there; nothing reads them
    overrides = (f"data.train_files={data}", f"data.val_files={data}", *overrides)
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        StartupCheck().on_run_start(
            compose("ppo_trainer", overrides=["+recipes=quickstart", *overrides], return_hydra_config=True)
        )
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[medserl] judge:")]


def test_a_run_whose_judge_was_never_measured_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed_at_start_up(capsys, f"selfplay.judge={MINE}")
    assert f"selfplay.judge={MINE} was never measured" in line and "medserl judge calibrate" in line


def test_labels_need_no_report_and_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_at_start_up(capsys, "selfplay.judge=labels") == []


def test_a_run_with_a_report_says_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = report(tmp_path, MedicalConfig(judge=MINE))
    named = (f"selfplay.judge={MINE}", f"selfplay.judge_report={path}")
    rates = "[medserl] judge: sensitivity 90.0 % (82.6 to 94.5), specificity 80.0 % (71.1 to 86.7)"
    assert printed_at_start_up(capsys, *named) == [rates]
    corrects = printed_at_start_up(capsys, *named, "selfplay.correct_judge=true")
    assert corrects == [f"{rates}; rewards are corrected for them"]


def test_the_report_of_another_judge_is_refused(tmp_path: Path) -> None:
    path = report(tmp_path, MedicalConfig(judge="labels"))
    with pytest.raises(ConfigError, match=r'of another judge: judge is "labels" there and ".*Believer" in this run'):
        check_run(run_with(selfplay__judge=MINE, selfplay__judge_report=path))
    check_run(run_with(selfplay__judge=MINE, selfplay__judge_report=path, selfplay__judge_min_sensitivity=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "judge-4b"}, 'model is "judge-4b" there and "judge-9b" in this run'),
        ({"extra_body": {"temperature": 1}}, 'extra_body is {"temperature": 1} there and {} in this run'),
    ],
)
def test_another_model_or_option_is_another_judge(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = report(tmp_path, llm_config(**changes))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_with(**LLM, selfplay__judge_report=path))


def test_another_wording_of_the_question_is_another_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = report(tmp_path, llm_config())
    monkeypatch.setattr("medserl_agentloop.games.medical.judges.report.judge_template", lambda profile: "Is it wrong?")
    with pytest.raises(ConfigError, match='of another judge: wording is "'):
        check_run(run_with(**LLM, selfplay__judge_report=path))


def test_another_address_of_the_same_judge_is_no_other_judge(tmp_path: Path) -> None:
    path = report(tmp_path, llm_config(timeout_s=99.0, cache="answers", concurrency=3))
    check_run(run_with(**LLM, selfplay__judge_report=path))


def test_a_model_that_verl_serves_is_known_by_its_path() -> None:
    served = MedicalConfig(judge="llm")
    assert judge_identity(served, "models/judge-9b") == judge_identity(llm_config(model="models/judge-9b"))


def test_a_judge_that_misses_too_many_errors_is_refused(tmp_path: Path) -> None:
    path = report(tmp_path, MedicalConfig(judge=MINE), sensitivity=74)
    run = run_with(selfplay__judge=MINE, selfplay__judge_report=path)
    with pytest.raises(
        ConfigError, match=r"sensitivity is 74.0 % \(64.6 to 81.6\), and selfplay.judge_min_sensitivity"
    ):
        check_run(run)
    for least in (0.7, 0):
        run.selfplay.judge_min_sensitivity = least
        check_run(run)


def test_a_judge_that_calls_every_note_harmful_is_refused(tmp_path: Path) -> None:
    path = report(tmp_path, MedicalConfig(judge=MINE), sensitivity=100, specificity=19)
    run = run_with(selfplay__judge=MINE, selfplay__judge_report=path)
    with pytest.raises(ConfigError, match="it says nearly the same of right and of wrong notes"):
        check_run(run)
    run.selfplay.judge_min_sensitivity = 0
    check_run(run)
    check_run(
        run_with(selfplay__judge=MINE, selfplay__judge_report=report(tmp_path, MedicalConfig(judge=MINE), 100, 21))
    )


def test_a_report_without_harmful_edits_does_not_pass_the_threshold(tmp_path: Path) -> None:
    path = report(tmp_path, MedicalConfig(judge=MINE), 0, 0, of=0)
    with pytest.raises(ConfigError, match="the judge's sensitivity is none"):
        check_run(run_with(selfplay__judge=MINE, selfplay__judge_report=path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file"),
        ("{", "not a report of medserl judge calibrate"),
        ("{}", "not a report of medserl judge calibrate (judge: Field required)"),
    ],
)
def test_a_file_that_is_no_report_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_with(selfplay__judge_report=str(path)))


def test_correction_needs_a_report_and_a_judge_that_says_something(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"selfplay.correct_judge=True needs the judge's error rates"):
        check_run(run_with(selfplay__correct_judge=True))
    bad = report(tmp_path, MedicalConfig(judge=MINE), sensitivity=100, specificity=10)
    changes = {"selfplay__judge": MINE, "selfplay__judge_report": bad, "selfplay__correct_judge": True}
    changes["selfplay__judge_min_sensitivity"] = 0
    with pytest.raises(ConfigError, match=r"specificity 0.1 cannot be corrected for: their sum less 1 is 0.1"):
        check_run(run_with(**changes))


@pytest.mark.parametrize("verdict", ["harmful", "safe"])
def test_the_reward_manager_corrects_for_the_rates_of_the_report(tmp_path: Path, verdict: str) -> None:
    path = report(tmp_path, MedicalConfig(judge=MINE), sensitivity=90, specificity=80)
    changes = {"selfplay__judge_report": path, "selfplay__correct_judge": True}
    manager = reward_manager(MINE, JudgeServer(), **changes)
    record, result = asyncio.run(reward(manager, played(verdict=verdict)))
    assert record.scheme == "medserl, corrected"
    assert record.rewards == corrected(medserl, ErrorRates(0.9, 0.8))(record) != medserl(record)
    totals = {role: sum(components.values()) for role, components in record.rewards.items()}
    assert result["reward_score"] == pytest.approx(sum(totals.values()))
    assert result["reward_extra_info"]["attacker_reward"] == totals[Role.ATTACKER]
    # Called harmful: 8/7 of the reward under "harmful" less 1/7 of that under "safe".
    expected = (0.8 - -0.1) / 0.7 if verdict == "harmful" else -(0.8 - -0.1) / 0.7
    assert record.rewards[Role.ASSESSOR]["game"] == pytest.approx(expected)


def test_an_untouched_note_is_not_corrected(tmp_path: Path) -> None:
    path = report(tmp_path, MedicalConfig(judge=MINE))
    manager = reward_manager(MINE, JudgeServer(), selfplay__judge_report=path, selfplay__correct_judge=True)
    record, _ = asyncio.run(reward(manager, played(category=Category.VANILLA_HARMFUL)))
    assert record.rewards == medserl(record)
