"""How a run's judge is found and built, and what start-up says of one that cannot work."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from game.builders import finished
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from judges.games import played
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
from medserl_agentloop.plugin import StartupCheck


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


def test_a_user_s_class_is_a_judge_with_or_without_options() -> None:
    server = JudgeServer(model="mine")
    plain = build_judge(MedicalConfig(judge=f"{__name__}:Doubter"))
    configured = build_judge(MedicalConfig(judge=f"{__name__}:Configured", judge_server=server))
    assert (plain.name, configured.name) == ("doubter", "mine")


def test_a_user_s_class_is_not_asked_about_untouched_notes_either() -> None:
    judge = build_judge(MedicalConfig(judge=f"{__name__}:Doubter"))
    labels = {c: asyncio.run(judge.judge(played(0, c))).label for c in Category}
    assert labels[Category.VANILLA_HARMFUL] is Label.HARMFUL
    assert labels[Category.ADVERSARIAL_HARMFUL] is Label.SAFE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lable",
            "no judge 'lable' (did you mean 'labels'?): expected one of http, labels, llm, or package.module",
        ),
        ("no_such_package.mine:Judge", "judge 'no_such_package.mine:Judge' cannot be loaded: ModuleNotFoundError"),
        (f"{__name__}:Nobody", "cannot be loaded: AttributeError"),
        (f"{__name__}:NoJudge", "Class of a class with a method 'async def judge(self, record) -> Judgement'"),
        (f"{__name__}:played", "Class of a class with a method"),
        ("broken_judge_module:Judge", "cannot be loaded: RuntimeError: not today"),
    ],
)
def test_a_judge_that_cannot_be_loaded_is_refused_at_start_up(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_judge_module.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_with(selfplay__judge=name))
    sys.modules.pop("broken_judge_module", None)


def test_a_judge_of_the_experiments_needs_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "experiments", None)
    monkeypatch.delitem(sys.modules, "experiments.clinic", raising=False)
    with pytest.raises(ConfigError, match=r"not in the installed package: start the command in the root of a checkout"):
        check_run(run_with(selfplay__judge="experiments.clinic:OracleJudge"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selfplay__judge": "http"}, "set selfplay.judge_server.url to the address"),
        ({"selfplay__judge": "llm"}, "or let verl serve one on GPUs of its own with reward.reward_model.enable=True"),
        (
            {"selfplay__judge": "llm", "selfplay__judge_server__url": "http://localhost/v1"},
            "selfplay.judge_server.model is not set",
        ),
        ({"selfplay__judge_server__url": "localhost:8001"}, "url=localhost:8001: expected http://host:port"),
        ({"selfplay__judge_server__timeout_s": 0}, "selfplay.judge_server.timeout_s=0: Input should be greater than 0"),
    ],
)
def test_a_judge_that_lacks_something_is_told_what(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_with(**changes))


def test_a_key_in_the_place_of_a_variable_s_name_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="wants the name of a variable") as error:
        check_run(run_with(selfplay__judge_server__api_key_env="sk-SECRET"))
    assert "SECRET" not in str(error.value)


def test_a_first_question_shows_whether_the_judge_answers() -> None:
    def config(judge: str, url: str | None) -> MedicalConfig:
        return MedicalConfig.model_validate({"judge": judge, "judge_server": {"url": url, "model": "m"}})

    with serving(lambda number, body: by_index(body) if "queries" in body else completion("well")) as server:
        assert unanswered(config("http", server.url)) is None
        assert "not the JSON that was asked for" in str(unanswered(config("llm", server.url)))
        assert len(server.requests) == 2
    assert "ConnectError" in str(unanswered(config("http", unused_url())))
    assert unanswered(config("labels", None)) is None
    assert unanswered(config("llm", None)) is None  # verl's own, which is not up yet


def test_start_up_warns_of_a_judge_that_is_not_there_and_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (data := tmp_path / "notes.jsonl").touch()  # only rows of parquet files are looked at
    GlobalHydra.instance().clear()
    overrides = ["+recipes=quickstart", f"data.train_files={data}", f"data.val_files={data}"]
    overrides += ["selfplay.judge=http", f"selfplay.judge_server.url={unused_url()}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        StartupCheck().on_run_start(compose("ppo_trainer", overrides=overrides, return_hydra_config=True))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert line.startswith("[medserl] warning: the judge gave no answer to a first question (Unreachable: ConnectError")


def test_games_with_nothing_to_judge_are_left_alone() -> None:
    for record in (finished(Outcome.INVALID_ATTACK), MedicalRecord(spec=played().spec, void="aborted")):
        before = record.model_copy(deep=True)
        asyncio.run(judge_game(Doubter(), record))
        assert record == before


def test_a_failure_s_reason_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    class Talkative(Doubter):
        async def judge(self, record: MedicalRecord) -> Judgement:
            raise RuntimeError("line\n" * 1000)

    record = played()
    asyncio.run(judge_game(Talkative(), record))
    assert record.void is not None and record.void.startswith("judge failed: RuntimeError: line line")
    assert len(record.void) < 400 and "\n" not in record.void
    assert record.judgement is None
