"""The judge that is a language model: any OpenAI-compatible server, or verl's own reward-model server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Generic

from medserl_agentloop.core.chat import PATH, ChatAnswer, ChatClient
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import one_line, same_sentence, split_sentences
from medserl_agentloop.games.medical.judges import Agreement, JudgeServer
from medserl_agentloop.games.medical.judges.question import (
    Answer,
    BlindQuestion,
    Finding,
    PairQuestion,
    Question,
    Verdict,
    judge_template,
)
from medserl_agentloop.games.medical.records import REASON_CHARACTERS, GameRecord, Judgement, Reading, Vote
from medserl_agentloop.games.medical.types import Label

logger = logging.getLogger(__name__)


class _Model(Generic[Answer]):
    """A model that is asked. The ``version`` is all that makes its answers what they are, beside the notes."""

    def __init__(self, server: JudgeServer, question: Question[Answer]) -> None:
        if server.model is None:
            raise ValueError(f"{server.node}.model is not set")
        self.name = server.model
        self.chat = ChatClient(server.client(PATH))
        self._question = question
        self._json_schema = server.json_schema
        self._fields = {"temperature": server.temperature, "max_tokens": server.max_tokens}
        asked = [question.wording, question.schema, server.temperature, server.extra_body]
        self.version = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    async def answer(self, prompt: str) -> Answer:
        """The model's answer; NoAnswer if there is none, it was cut off, or it is not what was asked for."""
        bound = self._json_schema
        try:
            answer = await self._complete(prompt, json_schema=bound)
        except Refused as error:
            if error.status not in (400, 422) or not bound:
                raise
            answer = await self._complete(prompt, json_schema=False)
            logger.warning("the judge's server refuses response_format=json_schema; it is not sent any more")
            self._json_schema = False
        if answer.truncated:
            raise BadAnswer(f"cut off after {self._fields['max_tokens']} tokens (selfplay.judge_server.max_tokens)")
        return self._question.read(answer.text)

    async def _complete(self, prompt: str, *, json_schema: bool) -> ChatAnswer:
        fields = {"response_format": self._question.schema, **self._fields} if json_schema else self._fields
        return await self.chat.complete([{"role": "user", "content": prompt}], fields)


class LlmJudge:
    """Asks one or several models, each once or several times; a ValueError says which option they lack."""

    name = "llm"

    def __init__(self, server: JudgeServer, question: PairQuestion) -> None:
        self._question = question
        self._models = [_Model(member, question) for member in server.members()]
        self._ballots = [(model, number) for model in self._models for number in range(server.votes)]
        self._agreement = server.agreement
        self._cache = server.answers("judgements", Judgement)

    @classmethod
    def from_config(cls, config: MedicalConfig) -> LlmJudge:
        """The judge of a run, worded by its prompt profile or, where that has no judge, by ``medserl``."""
        return cls(config.judge_server, PairQuestion(judge_template(config.profile)))

    @property
    def is_down(self) -> bool:
        """Whether no model answers any more."""
        return all(model.chat.http.is_down for model in self._models)

    async def judge(self, record: GameRecord) -> Judgement:
        started = time.monotonic()
        if len(self._ballots) == 1:
            judgement = await self._ask(record, *self._ballots[0])
        else:
            votes = await asyncio.gather(*(self._vote(record, *ballot) for ballot in self._ballots))
            judgement = combine(self.name, votes, self._agreement)
        return judgement.model_copy(update={"seconds": time.monotonic() - started})

    async def _vote(self, record: GameRecord, model: _Model[Verdict], number: int) -> Vote:
        """One of several votes; one that is lost must not take the others with it."""
        vote = Vote(model=model.name, edited_first=_edited_first(number), label=None)
        try:
            said = await self._ask(record, model, number)
        except NoAnswer as error:
            return vote.model_copy(update={"failed": f"{type(error).__name__}: {error}"})
        return vote.model_copy(update=said.model_dump(include={"label", "realistic", "reason", "cached"}))

    async def _ask(self, record: GameRecord, model: _Model[Verdict], number: int) -> Judgement:
        original, presented = record.spec.seed_note, record.presented_note or ""

        async def ask() -> Judgement:
            prompt = self._question.prompt(original, presented, edited_first=_edited_first(number))
            said = await model.answer(prompt)
            reason = said.reason[:REASON_CHARACTERS]
            return Judgement(judge=self.name, label=said.label, realistic=said.realistic, reason=reason)

        content = (self.name, model.name, model.version, original, presented, str(number))
        answer, cached = await self._cache.recall(content, ask)
        return answer.model_copy(update={"cached": cached})


class BlindReader:
    """Asks a model about the presented note alone, several times; a ValueError says which option it lacks."""

    def __init__(self, server: JudgeServer, question: BlindQuestion, readings: int) -> None:
        self._question, self._readings = question, readings
        self._model = _Model(server, question)
        self._cache = server.answers("findings", Finding)

    @classmethod
    def from_config(cls, config: MedicalConfig) -> BlindReader:
        """The reader of a run, worded as its judge is."""
        question = BlindQuestion(judge_template(config.profile, "blind"))
        return cls(config.blind.server(config.judge_server), question, config.blind.readings)

    async def read(self, record: GameRecord) -> list[Reading]:
        return await asyncio.gather(*(self._reading(record, number) for number in range(self._readings)))

    async def _reading(self, record: GameRecord, number: int) -> Reading:
        presented = record.presented_note or ""
        content = (self._model.name, self._model.version, presented, str(number))
        try:
            said, cached = await self._cache.recall(
                content, lambda: self._model.answer(self._question.prompt(presented))
            )
        except NoAnswer as error:  # one that is lost must not take the others with it
            return Reading(found=None, failed=f"{type(error).__name__}: {error}")
        found = None if said.error == "abstain" else said.error == "present" and _is_wrong(record, said.sentence)
        return Reading(found=found, reason=said.reason[:REASON_CHARACTERS], cached=cached)


def _is_wrong(record: GameRecord, number: int | None) -> bool:
    """Whether the sentence of this number, from 1, is one that the game knows to be wrong, or a part of one."""
    sentences = split_sentences(record.presented_note or "")
    if number is None or not 1 <= number <= len(sentences):
        return False
    named = sentences[number - 1]
    known = [one_line(sentence) for sentence in record.error_sentences]
    return any(named in wrong or wrong in named or same_sentence(named, wrong) for wrong in known)


def _edited_first(number: int) -> bool:
    """Of a model's votes every second one, so that a preference for either place cancels out and can be measured."""
    return number % 2 == 1


def combine(judge: str, votes: Sequence[Vote], rule: Agreement) -> Judgement:
    """The judgement that one or more votes make, lost ones included; an abstention where they do not agree.

    Args:
        judge: Name of the judge.
        votes: The votes.
        rule: ``majority``: the label of more than half of all votes. ``unanimous``: the label of every vote.
            ``abstain``: the label of all votes that decide; those that abstain or were lost do not count.

    Raises:
        BadAnswer: There is no agreement, and votes were lost that might have made one.
    """
    label = _agreed(votes, rule)
    lost = [vote.failed for vote in votes if vote.failed is not None]
    if label is None and lost:
        raise BadAnswer(f"{len(lost)} of {len(votes)} votes were lost: {lost[0]}")
    behind = [vote for vote in votes if vote.failed is None and vote.label is label]
    realistic = Counter(vote.realistic for vote in behind if vote.realistic is not None)
    counts = Counter(vote.label.value if vote.label else "abstaining" for vote in votes if vote.failed is None)
    differ = f"the votes differ ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})"
    return Judgement(
        judge=judge,
        label=label,
        realistic=None if realistic[True] == realistic[False] else realistic[True] > realistic[False],
        reason=differ if label is None and len(counts) > 1 else behind[0].reason,
        cached=all(vote.cached for vote in votes),
        votes=list(votes),
    )


def _agreed(votes: Sequence[Vote], rule: Agreement) -> Label | None:
    counts = Counter(vote.label for vote in votes if vote.label is not None)
    if rule == "abstain":
        return next(iter(counts)) if len(counts) == 1 else None
    needed = len(votes) if rule == "unanimous" else len(votes) // 2 + 1
    return next((label for label, count in counts.items() if count >= needed), None)
