"""What is checked of a judge before a run starts. Called by ``run_check`` and the recipes' callback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from medserl_agentloop.core.chat import PATH
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused
from medserl_agentloop.games.medical.judges import JudgeServer
from medserl_agentloop.games.medical.judges.report import differences, judge_identity, read_report
from medserl_agentloop.games.medical.rewards import LEAST_INFORMATION, corrected, load_scheme

if TYPE_CHECKING:
    from medserl_agentloop.core.run_check.run import Run
    from medserl_agentloop.games.medical.config import MedicalConfig

_NODE = JudgeServer.node
_PROBES = {"http": ("/judge", "/health"), "llm": (PATH, "/models")}  # the path that is asked, one that answers at once
_SERVED_BY = ("sglang", "vllm", "trtllm")  # rollouts of verl's whose servers speak the OpenAI protocol


def check_judge_server(selfplay: MedicalConfig, reward: DictConfig) -> None:
    """Refuse a judge that lacks what it needs; a ValueError says which key to set. ``reward`` is verl's node."""
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
    if selfplay.blind.readings:
        reader = selfplay.blind.server(server)
        served = reader.url is not None or (reward.reward_model.enable and selfplay.judge == "llm")
        # The http judge's server does not answer chat requests.
        if (
            not served
            or (reader.url is not None and reader.model is None)
            or (selfplay.judge != "llm" and selfplay.blind.url is None)
        ):
            raise ValueError(
                "selfplay.blind.readings needs a model that reads the note alone: set selfplay.blind.url and "
                "selfplay.blind.model (with selfplay.judge=llm, those of selfplay.judge_server are used), or "
                "selfplay.blind.readings=0."
            )
        if reader.url is not None:
            reader.check_address()
        selfplay.blind.api_key()


def unreachable(judge: str, server: JudgeServer) -> str | None:
    """The first of the judge's servers that cannot be asked now, and why; None if all can, or none is ours to ask."""
    for member in server.members() if judge in _PROBES else ():
        if member.url is None:
            continue
        asked, probed = _PROBES[judge]
        client = member.client(asked, timeout_s=3.0)
        try:
            client.blocking(client.get(probed))
        except NoAnswer as error:
            # Not every server offers the probe, and some answer it in words of their own.
            if isinstance(error, BadAnswer) or (isinstance(error, Refused) and error.status not in (401, 403)):
                continue
            where = f"{client.url}{probed}: {error}"
            return f"the judge's server does not answer ({where}); games that it does not judge are void"
    return None


def check_judge_report(selfplay: MedicalConfig, reward: DictConfig) -> None:
    """Refuse a report that is missing, of another judge, or of a judge that is too bad for the run."""
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
        found = f"selfplay.judge_report={selfplay.judge_report}"
        waived = "or set selfplay.judge_min_sensitivity=0 to go on all the same."
        model = reward.reward_model.model_path if reward.reward_model.enable else None
        if other := differences(report.judge, judge_identity(selfplay, model)):
            raise ValueError(
                f"{found} is of another judge: {'; '.join(other)}. Measure this run's with 'medserl judge calibrate', "
                f"{waived}"
            )
        if not report.sensitivity.items or report.sensitivity.hits < least * report.sensitivity.items:
            raise ValueError(
                f"{found}: the judge's sensitivity is {report.sensitivity}, and selfplay.judge_min_sensitivity is "
                f"{least:g}. Each error that it misses punishes the player who was right. Use another judge, {waived}"
            )
        if report.rates is not None and report.rates.information < LEAST_INFORMATION:
            raise ValueError(
                f"{found}: the judge's sensitivity is {report.sensitivity} and its specificity {report.specificity}: "
                "it says nearly the same of right and of wrong notes, so games are won and lost by chance. Use "
                f"another judge, {waived}"
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
    # labels reads no note, so that there is nothing to measure; oracle is never wrong in the toy clinic.
    if selfplay.judge in ("labels", "oracle"):
        return None
    return (
        f"judge: selfplay.judge={selfplay.judge} was never measured, and rewards are as good as it is. Measure it with "
        "'medserl judge calibrate' and name the report in selfplay.judge_report (docs/judges.md)"
    )


def reward_model(run: Run) -> Iterator[str]:
    """What keeps the model that verl serves from being asked; verl says so once the policy is loaded, or never."""
    node, rollout = "reward.reward_model", "reward.reward_model.rollout"
    if not run[f"{node}.enable"]:
        return
    own_gpus, name = run[f"{node}.enable_resource_pool"], run[f"{rollout}.name"]
    if not own_gpus:
        # verl/experimental/reward_loop/reward_loop.py, reward_loop_worker_handles
        yield (
            f"{node}.enable=True on the trainer's GPUs: verl wakes such a model when all games of a step are over, so "
            "no game could be judged. Give it GPUs of its own (enable_resource_pool=True, n_gpus_per_node and nnodes "
            f"of {node}), or serve it outside of the run, with selfplay.judge_server.url and {node}.enable=False."
        )
    if run["reward.custom_reward_function.path"] is None:
        # verl/experimental/reward_loop/reward_loop.py, compute_score
        yield (
            f"{node}.enable=True: verl would score with that model's own head and never ask the judge. Set "
            "reward.custom_reward_function.path=pkg://medserl_agentloop.core.reward_manager and "
            "reward.custom_reward_function.name=PerTurnRewardManager; verl then leaves scoring to the reward manager."
        )
    if run[f"{node}.model_path"] is None:
        yield f"{node}.enable=True needs {node}.model_path: the folder or Hugging Face name of the model."
    if name not in _SERVED_BY:
        yield (
            f"{rollout}.name={name or '???'}: set it to the engine that serves the judge's model, "
            f"one of {', '.join(_SERVED_BY)}."
        )
    per_node, nodes = run[f"{node}.n_gpus_per_node"], run[f"{node}.nnodes"]
    tensor_parallel = run[f"{rollout}.tensor_model_parallel_size"]
    needed = tensor_parallel * run[f"{rollout}.data_parallel_size"] * run[f"{rollout}.pipeline_model_parallel_size"]
    if own_gpus and per_node * nodes < needed:
        yield (
            f"{node}.n_gpus_per_node={per_node} and nnodes={nodes} are {per_node * nodes} GPUs, and one server takes "
            f"{needed} ({rollout}.tensor_model_parallel_size={tensor_parallel}). Give it more GPUs or a smaller size."
        )
    if own_gpus and run[f"{rollout}.free_cache_engine"]:
        # verl/experimental/reward_loop/reward_model.py puts it to sleep; only compute_rm_score wakes it, and that is
        # called for a colocated model alone (trainer/ppo/v1/trainer_base.py, _compute_reward_colocate).
        yield (
            f"{rollout}.free_cache_engine=True, verl's default: verl takes the memory of a reward model with GPUs of "
            f"its own away at the start and never gives it back. Set {rollout}.free_cache_engine=False."
        )
    selfplay: Any = run.selfplay
    bound = selfplay.judge == "llm" and selfplay.judge_server.json_schema
    if name == "sglang" and bound and run[f"{rollout}.engine_kwargs.sglang.grammar_backend"] == "none":
        yield (
            f"{rollout}.engine_kwargs.sglang.grammar_backend=none: SGLang refuses answers bound to a JSON schema, and "
            "verl's router hides why. Set selfplay.judge_server.json_schema=False."
        )
