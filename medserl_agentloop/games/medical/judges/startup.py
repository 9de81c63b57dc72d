"""What is checked of a judge before a run starts. Called by ``run_check`` and the recipes' callback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from medserl_agentloop.core.chat import PATH
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused
from medserl_agentloop.games.medical.judges.options import JudgeServer
from medserl_agentloop.games.medical.judges.report import differences, judge_identity, read_report
from medserl_agentloop.games.medical.rewards import LEAST_INFORMATION, corrected, load_scheme

if TYPE_CHECKING:
    from medserl_agentloop.games.medical.config import MedicalConfig

_NODE = JudgeServer.node
_PROBES = {"http": ("/judge", "/health"), "llm": (PATH, "/models")}
"""Of judges that ask a server: the path they ask, and one that answers at once."""

_PROBE_TIMEOUT_S = 3.0

_NEED_NO_REPORT = ("labels", "oracle")
"""``labels`` reads no note, so that there is nothing to measure; ``oracle`` is never wrong in the toy clinic."""


def check_judge_server(selfplay: MedicalConfig, reward: DictConfig) -> None:
    """Refuse a judge that lacks what it needs.

    Args:
        selfplay: The run's ``selfplay`` node.
        reward: verl's ``reward`` node.

    Raises:
        ValueError: Says which key to set, and to what.
    """
    server = selfplay.judge_server
    if selfplay.judge == "http" and server.url is None:
        raise ValueError(
            "selfplay.judge=http needs a server: set selfplay.judge_server.url, e.g. http://localhost:8001 "
            "('medserl judge serve' starts one)."
        )
    if selfplay.judge == "llm" and server.url is None and not reward.reward_model.enable:
        raise ValueError(
            f"selfplay.judge=llm needs a model that reads the notes: set {_NODE}.url to the base of an "
            f"OpenAI-compatible API, e.g. http://localhost:30000/v1, and {_NODE}.model; or let verl serve one on GPUs "
            "of its own with reward.reward_model.enable=True and reward.reward_model.enable_resource_pool=True. "
            "docs/judges.md has the commands."
        )
    for member in server.members():
        if member.url is not None:
            member.check_address()
        if selfplay.judge == "llm" and member.url is not None and member.model is None:
            raise ValueError(f"selfplay.judge=llm needs {_NODE}.model: the name the server knows its model by.")
        member.api_key()
    server.check_votes()


def unreachable(judge: str, server: JudgeServer) -> str | None:
    """The first of the judge's servers that cannot be asked now, and why; None if all can, or none is ours to ask."""
    if judge not in _PROBES:
        return None
    asked, probed = _PROBES[judge]
    for member in server.members():
        if member.url is None:
            continue
        client = member.client(asked, _PROBE_TIMEOUT_S)
        try:
            client.blocking(client.get(probed))
        except BadAnswer:  # it answers
            continue
        except NoAnswer as error:
            if isinstance(error, Refused) and error.status not in (401, 403):  # not every server offers the probe
                continue
            return (
                f"the judge's server does not answer ({client.url}{probed}: {error}); games that it does not judge are "
                "void"
            )
    return None


def check_judge_report(selfplay: MedicalConfig, reward: DictConfig) -> None:
    """Refuse a report that is missing, of another judge, or of a judge that is too bad for the run.

    Args:
        selfplay: The run's ``selfplay`` node.
        reward: verl's ``reward`` node.

    Raises:
        ValueError: Says which key to set, and to what.
    """
    if selfplay.judge_report is None:
        if selfplay.correct_judge:
            raise ValueError(
                "selfplay.correct_judge=True needs the judge's error rates: write them with "
                f"'medserl judge calibrate --judge {selfplay.judge} ...' and name the file in selfplay.judge_report."
            )
        return
    try:
        report = read_report(selfplay.judge_report)
    except ValueError as error:
        raise ValueError(f"selfplay.judge_report={error}") from None
    least = selfplay.judge_min_sensitivity
    if least > 0:
        waived = "or set selfplay.judge_min_sensitivity=0 to go on all the same."
        model = reward.reward_model.model_path if reward.reward_model.enable else None
        if other := differences(report.judge, judge_identity(selfplay, model)):
            raise ValueError(
                f"selfplay.judge_report={selfplay.judge_report} is of another judge: {'; '.join(other)}. Measure this "
                f"run's with 'medserl judge calibrate', {waived}"
            )
        if not report.sensitivity.items or report.sensitivity.hits < least * report.sensitivity.items:
            raise ValueError(
                f"selfplay.judge_report={selfplay.judge_report}: the judge's sensitivity is {report.sensitivity}, "
                f"and selfplay.judge_min_sensitivity is {least:g}. Each error that it misses punishes the player who "
                f"was right. Use another judge, {waived}"
            )
        if report.rates is not None and report.rates.information < LEAST_INFORMATION:
            raise ValueError(
                f"selfplay.judge_report={selfplay.judge_report}: the judge's sensitivity is {report.sensitivity} and "
                f"its specificity {report.specificity}: it says nearly the same of right and of wrong notes, so games "
                f"are won and lost by chance. Use another judge, {waived}"
            )
    if selfplay.correct_judge:
        if report.rates is None:
            raise ValueError(
                f"selfplay.correct_judge=True: {selfplay.judge_report} has no sensitivity or no specificity; "
                "measure the judge on a file with pairs."
            )
        try:
            corrected(load_scheme(selfplay.reward), report.rates)
        except ValueError as error:
            raise ValueError(f"selfplay.correct_judge=True: {error}. Use a better judge, or set it to false.") from None


def calibration_line(selfplay: MedicalConfig) -> str | None:
    """What a run says once of its judge's calibration; None for a judge that needs none and has none."""
    if selfplay.judge_report is not None:
        report = read_report(selfplay.judge_report)
        rewards = "; rewards are corrected for them" if selfplay.correct_judge else ""
        return f"judge: sensitivity {report.sensitivity}, specificity {report.specificity}{rewards}"
    if selfplay.judge in _NEED_NO_REPORT:
        return None
    return (
        f"judge: selfplay.judge={selfplay.judge} was never measured, and rewards are as good as it is. Measure it with "
        "'medserl judge calibrate' and name the report in selfplay.judge_report (docs/judges.md)"
    )
