"""Asking a judge over HTTP: ``POST /judge`` for a whole batch, ``GET /health``.

A judge that fails labels its games ``is_parsing_error``, which leaves them out; nothing is
invented.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, ServerOptions, blocking
from medserl_agentloop.games.medical.case import Label
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.medical_team.protocol import SCORE_KEY, JudgeAnswer, Labels, ask, make_labels

logger = logging.getLogger(__name__)

Query = dict[str, Any]
JudgeFunction = Callable[..., dict[int, Labels]]
"""Called ``(url, batch_queries, score_key="labels")``, answers with labels by game index."""


def create_medical_judge_remote_function(judge_url: str, timeout: float = 30.0) -> JudgeFunction:
    """A function that asks the judge at ``judge_url`` about a batch in one request of ``timeout``
    seconds.
    """
    client = _client(judge_url, timeout)

    def ask_judge(
        url: str, batch_queries: Sequence[Query], score_key: str = SCORE_KEY
    ) -> dict[int, Labels]:
        """Labels by game index for every query. ``url`` is part of the interface and not used."""
        if not batch_queries:
            return {}
        answers = blocking(ask(client, batch_queries, score_key))
        if lost := [answer for answer in answers.values() if isinstance(answer, NoAnswer)]:
            warning = "the judge at %s gave no answer about %d of %d games, which are left out: %s"
            logger.warning(warning, client.url, len(lost), len(answers), lost[0])
        return {
            query["game_idx"]: _labels(answers[str(query["game_idx"])]) for query in batch_queries
        }

    return ask_judge


def _labels(one: Any) -> Labels:
    """The labels of one game with every key; an answer that says nothing of the assessor or the
    note is none.
    """
    try:
        if isinstance(one, NoAnswer):
            raise ValueError(f"{type(one).__name__}: {one}")
        answer = JudgeAnswer.model_validate(one)
        judgement = answer.to_judgement("remote")
        if judgement.label is None or "error_detected" not in one:
            raise ValueError(judgement.reason or "error_detected is missing")
    except ValueError as error:
        return make_labels(is_parsing_error=True, reasoning=one_line(str(error)))
    return make_labels(
        error_present=judgement.label is Label.HARMFUL,
        error_detected=answer.error_detected is True,
        error_realistic=judgement.realistic is not False,
        assessor_correct=answer.assessor_correct,
        reasoning=judgement.reason,
    )


def test_judge_connection(judge_url: str) -> bool:
    """Return whether the judge's ``/health`` answers."""
    client = _client(judge_url, 5.0)
    try:
        blocking(client.get("/health"))
    except BadAnswer:  # it answers, in words of its own
        return True
    except NoAnswer as error:
        logger.info("the judge at %s does not answer: %s", client.url, error)
        return False
    return True


# pytest collects what is called test_... in every test module that imports it.
test_judge_connection.__test__ = False  # type: ignore[attr-defined]


def wait_for_judge_server(judge_url: str, max_wait: float = 60, check_interval: float = 2) -> bool:
    """Wait until the judge's ``/health`` answers; False if it does not within ``max_wait``
    seconds."""
    until = time.monotonic() + max_wait
    while (
        not (ready := test_judge_connection(judge_url))
        and time.monotonic() + check_interval <= until
    ):
        time.sleep(check_interval)
    return ready


def _client(judge_url: str, timeout_s: float) -> HttpClient:
    return ServerOptions(url=judge_url, timeout_s=timeout_s, retries=0).client("/judge")
