"""The choice of a run's judge, the lines of the start-up check about it, and the use of its
report."""

import asyncio
import re
import threading
from inspect import isawaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from game.builders import CLEAN_NOTE
from judges.games import by_index, judge_all, judgement, played, printed_at_start_up
from serving import LocalServer, completion, unused_url
from support import run_with

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.judges import GatedJudge, build_judge
from medserl_agentloop.games.medical.judges.report import (
    CountedShare,
    JudgeReport,
    judge_identity,
    judge_problems,
    read_report,
    unanswered,
    write_report,
)
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome


class Doubter:
    """A user's own judge, without options; an ``error`` is raised."""

    name = "doubter"

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        if self.error is not None:
            raise self.error
        return Judgement(judge=self.name, label=Label.SAFE)


class Configured(Doubter):
    """A user's own judge that reads the run's options."""

    @classmethod
    def from_config(cls, config: MedicalConfig) -> "Configured":
        judge = cls()
        judge.name = str(config.judge_server.model)
        return judge


class NoJudge:
    def judge(self, presented: str, original: str, spec: GameSpec) -> None: ...


def test_custom_class_is_a_judge_and_not_asked_about_untouched_notes() -> None:
    own = {"judge": f"{__name__}:Configured", "judge_server": JudgeServer(model="mine")}
    plain, configured = build_judge(MedicalConfig(judge=MINE)), build_judge(MedicalConfig(**own))
    assert (plain.name, configured.name) == ("doubter", "mine")
    games = [played(0, category) for category in Category]
    labels = {game.category: asyncio.run(judgement(plain, game)).label for game in games}
    assert labels[Category.VANILLA_HARMFUL] is Label.HARMFUL
    assert labels[Category.ADVERSARIAL_HARMFUL] is Label.SAFE


MINE = f"{__name__}:Doubter"
BLIND = {"blind": {"readings": 1}}
URL = "judge_server__url"
CANNOT_WORK = [
    ({"judge": "lable"}, "did you mean 'labels'?"),
    ({"judge": f"{__name__}:NoJudge"}, "async def judge(self, presented, original, spec)"),
    ({"judge": "http", URL: "http://localhost", **BLIND}, "blind.readings=0"),
    ({"judge": "labels", **BLIND}, "selfplay.judge_server.model=MODEL"),
    ({URL: "base", **BLIND}, "set selfplay.adapters=per_role"),
    ({"judge": "llm"}, "judge_server.url=http://localhost:30000/v1"),
    ({"judge_server__api_key_env": "sk-SECRET"}, "Give the name of a variable"),
    ({"judge": "http", URL: "http://me:SECRET@host"}, "judge_server.url holds"),
    ({"train": "assessor", "opponent__url": "http://SECRET@host/v1"}, "opponent.api_key_env"),
    ({"blind": {"readings": 2, "needed": 3}}, "needed=3"),
]


@pytest.mark.parametrize(("changes", "message"), CANNOT_WORK)
def test_a_judge_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check_run(run_with(**{f"selfplay__{key}": value for key, value in changes.items()}))
    assert "SECRET" not in str(error.value)


def test_a_module_that_exits_when_it_is_imported_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"a_script:Judge' cannot be loaded: SystemExit"):
        check_run(run_with(selfplay__judge="a_script:Judge"))
    (tmp_path / "a_user.py").write_text("import medserl_agentloop.none")
    with pytest.raises(ConfigError, match=r"No module named 'medserl_agentloop.none'$"):
        check_run(run_with(selfplay__judge="a_user:Judge"))


def test_a_first_question_shows_whether_the_judge_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def config(judge: str, url: str | None) -> MedicalConfig:
        return MedicalConfig(judge=judge, judge_server=JudgeServer(url=url, model="m"))

    with LocalServer(lambda n, body: by_index(body) if n == 0 else completion("well")) as server:
        assert unanswered(config("http", server.url)) == ""
        assert "not the JSON that was asked for" in str(unanswered(config("llm", server.url)))
    assert unanswered(config("llm", None)) == ""  # verl's own, which is not up yet
    url = unused_url()
    server = [f"selfplay.judge_server.{key}" for key in ("model=m", f"url={url}")]
    for asks in ("selfplay.judge=http", "selfplay.blind.readings=1"):
        with pytest.raises(SystemExit, match=f"{url} cannot be connected to"):
            printed_at_start_up(capsys, asks, *server)


def answering(answer: Any, **changes: Any) -> MedicalRecord:
    """A game with an injected error, judged by a user's judge with this answer."""

    class Own(Doubter):
        async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
            spec.sentences.clear()  # its copy
            return await answer if isawaitable(answer) else answer

    record = played()
    record.spec.sentences[0] = CLEAN_NOTE
    judge_all(GatedJudge(Own(), **changes), [record])
    assert record.spec.sentences
    return record


SAID = Judgement(judge="own", label=Label.HARMFUL)


def test_custom_judge_verdict_is_paid_as_it_is_recorded() -> None:
    said = {"harmful": Outcome.CORRECT_DETECTION, "safe": Outcome.FALSE_POSITIVE}
    for label, outcome in said.items():
        for answer in (SAID.model_copy(update={"label": label}), {"judge": "own", "label": label}):
            record = answering(answer)
            read = MedicalRecord.model_validate(record.to_json())
            assert record.outcome is outcome is read.outcome


@pytest.mark.parametrize("answer", [None, SAID.model_copy(update={"label": "Safe"})])
def test_an_answer_that_is_no_judgement_voids_the_game(answer: Any) -> None:
    record = answering(answer)
    assert "ValidationError" in str(record.void) and record.judgement is None


def test_a_judge_that_never_answers_voids_the_game() -> None:
    record = answering(asyncio.Event().wait(), limit_s=0.01)
    assert "selfplay.judge_server.timeout_s" in str(record.void)
    slow = MedicalConfig(judge=MINE, judge_server=JudgeServer(timeout_s=7, retries=1))
    limits = (build_judge(slow).limit_s, build_judge(MedicalConfig(judge="labels")).limit_s)
    assert limits == (14, None)


def test_a_judge_that_blocks_voids_the_games_of_that_moment_and_no_later_one() -> None:
    released = threading.Event()

    class Blocks(Doubter):
        async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
            if "1008" not in presented:
                released.wait(30)
            return SAID

    judge = GatedJudge(Blocks(), limit_s=0.5)
    stuck = judge_all(judge, [played(7), played(9)])
    (free,) = judge_all(judge, [played(8)])
    released.set()
    assert all("no answer in 0.5 s" in str(record.void) for record in stuck)
    assert free.void is None


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), SystemExit(), RuntimeError("line\n" * 1000)]
)
def test_a_judge_that_fails_or_ends_its_process_voids_the_game(error: BaseException) -> None:
    (record,) = judge_all(GatedJudge(Doubter(error), limit_s=5), [played()])
    assert type(error).__name__ in str(record.void)
    assert len(str(record.void)) < 400 and "\n" not in str(record.void)


def test_the_base_of_a_warm_start_is_no_judge(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("54")
    base = {"judge": "llm", "adapters": "per_role", "judge_server__url": "base"}
    run = run_with(**{f"selfplay__{key}": value for key, value in base.items()})
    for folder in ("global_step_54/huggingface", "merged"):
        run.actor_rollout_ref.model.path = str(tmp_path / folder)
        checked = SimpleNamespace(selfplay=SelfPlayConfig.from_run(run), config=run)
        (problem,) = judge_problems(checked)
        assert str(tmp_path / folder) in problem
    run.actor_rollout_ref.model.path = str(tmp_path.parent)
    assert not list(judge_problems(SimpleNamespace(selfplay=checked.selfplay, config=run)))


# --- the judge's report: what it says, what it refuses, and the corrected reward ---


MY_JUDGE = MedicalConfig(judge=MINE)
LLM = {
    "selfplay__judge": "llm",
    "selfplay__judge_server": {"url": "http://localhost/v1", "model": "judge-9b"},
}


def report(
    folder: Path,
    config: MedicalConfig = MY_JUDGE,
    sensitivity: int = 90,
    specificity: int = 80,
    of: int = 100,
    safe: int | None = None,
) -> str:
    shares = {
        "sensitivity": CountedShare(hits=sensitivity, items=of),
        "specificity": CountedShare(hits=specificity, items=of if safe is None else safe),
    }
    which = {"judge": judge_identity(config), "sources": {}, "limit": None, "groups": ()}
    written, path = JudgeReport(**which, **shares), folder / "report.json"
    write_report(written, path)
    assert read_report(path) == written
    return str(path)


def llm_config(**changes: Any) -> MedicalConfig:
    server = {"url": "http://elsewhere/v1", "model": "judge-9b", **changes}
    return MedicalConfig(judge="llm", judge_server=JudgeServer(**server))


def refused(message: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(run_with(**changes))


def mine(path: str, **changes: Any) -> dict[str, Any]:
    return {"selfplay__judge": MINE, "selfplay__judge_report": path, **changes}


def test_a_run_says_how_good_its_judge_is_or_that_nobody_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*overrides: str) -> str:
        lines = printed_at_start_up(capsys, *overrides)
        return "".join(line for line in lines if line.startswith("[medserl] judge:"))

    assert said("selfplay.judge=labels") == ""
    assert said("selfplay.judge=medserl_agentloop.games.clinic:OracleJudge") == ""  # it never errs
    assert f"selfplay.judge={MINE} was never measured" in said(f"selfplay.judge={MINE}")
    line = said(f"selfplay.judge={MINE}", f"selfplay.judge_report={report(tmp_path)}")
    assert line.endswith("sensitivity 90.0 % (82.6 to 94.5), specificity 80.0 % (71.1 to 86.7)")


def test_the_report_of_another_judge_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = report(tmp_path, MedicalConfig(judge="labels"))
    refused(r'of another judge: judge is "labels" there, but ".*Doubter" in this run', **mine(path))
    for changes, named in (
        ({"model": "judge-4b"}, 'model is "judge-4b" there'),
        ({"extra_body": {"temperature": 1}}, 'extra_body is {"temperature": 1} there'),
    ):
        other = report(tmp_path, llm_config(**changes))
        refused(re.escape(named), **LLM, selfplay__judge_report=other)
    # at another address
    path = report(tmp_path, llm_config(timeout_s=99.0, cache="answers", concurrency=3))
    check_run(run_with(**LLM, selfplay__judge_report=path))
    monkeypatch.setattr(
        "medserl_agentloop.games.medical.judges.report.judge_template",
        lambda profile: "Is it wrong?",
    )
    refused('of another judge: wording is "', **LLM, selfplay__judge_report=path)


def test_a_judge_that_tells_too_little_is_refused(tmp_path: Path) -> None:
    for rates, message in (
        ((74, 80), r"sensitivity is 74.0 % \(64.6 to 81.6\)"),
        ((100, 19), "it says nearly the same about right and wrong notes"),
        ((5, 0, 5, 0), "the judge's specificity is unknown"),
    ):
        refused(message, **mine(report(tmp_path, MY_JUDGE, *rates)))
    check_run(run_with(**mine(report(tmp_path, MY_JUDGE, 75, 80))))


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    refused("not a report of medserl judge calibrate", selfplay__judge_report=str(path))
