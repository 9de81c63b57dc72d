"""The judge, the rewards and the profile on the page for people who add their own.

The game: test_newcomer.
"""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from game.builders import finished
from judges.games import judge_all, played
from run_check.runs import start_up
from support import TOKENIZER, scored
from verl.trainer.ppo.reward import load_reward_manager

from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import build_judge
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.rewards import Medserl, load_scheme
from medserl_agentloop.testing import compose_run

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the page, saved as it says."""
    for name, code in re.findall(r"Save this as `(\w+\.py)`.*?```python\n(.*?)```", PAGE, re.S):
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("dose", "label"), [(2, Label.SAFE), (7, Label.HARMFUL)])
def test_the_judge_of_the_page_judges(dose: int, label: Label) -> None:
    judge = build_judge(MedicalConfig(judge="my_judges:DoseJudge"))
    spec = finished(Outcome.MISSED_ERROR).spec
    judgement = asyncio.run(judge.judge(f"He takes {dose} grams.", spec.seed_note, spec))
    assert (judgement.label, judgement.reason) == (label, f"doses in grams: ['{dose}']")


def test_the_rewards_of_the_page_pay() -> None:
    missed, invalid = finished(Outcome.MISSED_ERROR), finished(Outcome.INVALID_ATTACK)
    assert load_scheme("my_rewards:UndetectedOnly").rewards(missed) == {
        Role.ATTACKER: {"undetected": 1.0}
    }
    gentle, usual = (
        scheme.rewards(invalid)[Role.ATTACKER]["validity"]
        for scheme in (load_scheme("my_rewards:Gentle"), Medserl())
    )
    assert usual < gentle == -1.8


COMMANDS = [
    shlex.split(command.replace("\\\n", ""))
    for command in re.findall(r"python -m verl.trainer.main_ppo ((?:.*\\\n)*.*)", PAGE)
    if ".parquet" not in command
]


@pytest.mark.parametrize("overrides", COMMANDS, ids=lambda overrides: overrides[1])
def test_a_command_of_the_page_scores_a_game(overrides: list[str]) -> None:
    run = compose_run(*overrides)
    (judged,) = judge_all(build_judge(check_run(run)), [played(verdict="safe")])
    answer = asyncio.run(scored(load_reward_manager(run, TOKENIZER), judged))
    record = answer["reward_extra_info"][RECORD_KEY]
    assert record.void is None and record.rewards[Role.ATTACKER]
    if "+selfplay.reward_terms.undetected=2" in overrides:
        assert record.rewards == {Role.ATTACKER: {"undetected": 0.0}}


def test_a_term_that_a_recipe_sets_and_the_scheme_lacks_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"selfplay\.reward_terms\.decoy=null"):
        start_up("selfplay.reward=my_rewards:UndetectedOnly", recipe="quickstart")


def test_the_profile_of_the_page_has_all_that_it_needs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "prompts.md").read_text(encoding="utf-8")
    [tree] = re.findall(r"```\n(mine/\n.*?)```", page, re.S)
    for file in [line.split()[0] for line in tree.splitlines()[1:] if "optional" not in line]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("Read this: {{ note }}")
    profile = load_profile(str(tmp_path))
    for role in Role:
        [message] = profile.messages(role, Category.ADVERSARIAL_BENIGN, "He is well.")
        assert message["content"] == "Read this: He is well."
