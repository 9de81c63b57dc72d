"""How a run's judge is found and built, and what start-up says of one that cannot work."""

import asyncio
import re
import sys
from typing import Any

import pytest
from game.builders import finished
from judges.games import played, printed_at_start_up
from judges.local_server import by_index, serving, unused_url
from serving import completion
from support import run_with

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.judges import JUDGES, build_judge, judge_class, judge_game
from medserl_agentloop.games.medical.judges.report import unanswered
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, Label


class Doubter:
    """A user's own judge, without options."""

    name = "doubter"

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=Label.SAFE)


class Configured(Doubter):
    """A user's own judge that reads the run's options."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def from_config(cls, config: MedicalConfig) -> "Configured":
        return cls(config.judge_server.model or "")


class NoJudge:
    def judge(self, record: MedicalRecord) -> None: ...


def test_every_registered_judge_is_a_judge_by_that_name() -> None:
    assert {name: judge_class(name).name for name in JUDGES} == {name: name for name in JUDGES}


def test_a_user_s_class_is_a_judge_with_or_without_options_and_not_asked_about_untouched_notes() -> None:
    plain = build_judge(MedicalConfig(judge=f"{__name__}:Doubter"))
    configured = build_judge(MedicalConfig(judge=f"{__name__}:Configured", judge_server=JudgeServer(model="mine")))
    assert (plain.name, configured.name) == ("doubter", "mine")
    labels = {category: asyncio.run(plain.judge(played(0, category))).label for category in Category}
    assert labels[Category.VANILLA_HARMFUL] is Label.HARMFUL
    assert labels[Category.ADVERSARIAL_HARMFUL] is Label.SAFE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"judge": "lable"},
            "no judge 'lable' (did you mean 'labels'?): expected one of http, labels, llm, or package.module",
        ),
        ({"judge": "no_such_package.mine:Judge"}, "'no_such_package.mine:Judge' cannot be loaded: ModuleNotFoundError"),
        ({"judge": f"{__name__}:NoJudge"}, "Class of a class with a method 'async def judge(self, record) -> Judge"),
        ({"judge": f"{__name__}:played"}, "Class of a class with a method"),
        ({"judge": "experiments.clinic:OracleJudge"}, "not in the installed package: start the command in the root of"),
        ({"judge": "http"}, "set selfplay.judge_server.url to the address"),
        ({"judge": "llm"}, "or let verl serve one on GPUs of its own with reward.reward_model.enable=True"),
        ({"judge": "llm", "judge_server__url": "http://localhost/v1"}, "selfplay.judge_server.model is not set"),
        ({"judge_server__url": "localhost:8001"}, "url=localhost:8001: expected http://host:port"),
        ({"judge_server__timeout_s": 0}, "selfplay.judge_server.timeout_s=0: Input should be greater than 0"),
        ({"judge_server__api_key_env": "sk-SECRET"}, "wants the name of a variable"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_at_start_up(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "experiments" in str(changes):
        monkeypatch.setitem(sys.modules, "experiments", None)
        monkeypatch.delitem(sys.modules, "experiments.clinic", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check_run(run_with(**{f"selfplay__{key}": value for key, value in changes.items()}))
    assert "SECRET" not in str(error.value)


def test_a_first_question_shows_whether_the_judge_answers(capsys: pytest.CaptureFixture[str]) -> None:
    def config(judge: str, url: str | None) -> MedicalConfig:
        return MedicalConfig.model_validate({"judge": judge, "judge_server": {"url": url, "model": "m"}})

    with serving(lambda number, body: by_index(body) if "queries" in body else completion("well")) as server:
        assert unanswered(config("http", server.url)) is None
        assert "not the JSON that was asked for" in str(unanswered(config("llm", server.url)))
        assert len(server.requests) == 2
    assert unanswered(config("labels", None)) is None
    assert unanswered(config("llm", None)) is None  # verl's own, which is not up yet
    printed = printed_at_start_up(capsys, "selfplay.judge=http", f"selfplay.judge_server.url={unused_url()}")
    (line,) = [line for line in printed if "warning" in line]
    assert line.startswith("[medserl] warning: the judge gave no answer to a first question (Unreachable: ConnectError")


def test_games_with_nothing_to_judge_are_left_alone() -> None:
    for record in (finished(Outcome.INVALID_ATTACK), MedicalRecord(spec=played().spec, void="aborted")):
        before = record.model_copy(deep=True)
        asyncio.run(judge_game(Doubter(), record))
        assert record == before


def test_a_failure_s_reason_is_one_short_line() -> None:
    class Talkative(Doubter):
        async def judge(self, record: MedicalRecord) -> Judgement:
            raise RuntimeError("line\n" * 1000)

    record = played()
    asyncio.run(judge_game(Talkative(), record))
    assert record.void is not None and record.void.startswith("judge failed: RuntimeError: line line")
    assert len(record.void) < 400 and "\n" not in record.void
    assert record.judgement is None
