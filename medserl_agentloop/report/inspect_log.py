"""A run as an evaluation log of Inspect (``inspect_ai``), for its viewer. ``medserl export RUN --to inspect``.

A game is a sample. Its transcript is written as events, one span per role: the viewer's tab of messages would show
both roles as one chat. inspect_ai needs versions that verl's other packages refuse, so this module runs in an
environment of its own: of ours it imports records and prompts only.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean

from inspect_ai import dataset, event, log, model, scorer, viewer

from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord, MedicalRecord
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.report.frames import GAMES
from medserl_agentloop.report.page import Prompts, reads

_NO_CLOCK = datetime(2026, 1, 1, tzinfo=UTC)
_FAKED = "The records hold no clock: the times are made up, so that events keep their order."
_SPAN = "role"
"""Type of a role's span. With ``agent`` the viewer hides it behind a card."""


def write_log(games: Sequence[MedicalRecord], played: int, prompts: Prompts, name: str, output: Path) -> None:
    """Write games of a run that ``played`` so many as an Inspect log, with the prompts that the run wrote down."""
    samples = [_Transcript(_encodable(game), prompts, number).sample() for number, game in enumerate(games)]
    clocks = [finished for game in games if (finished := game.finished)]
    started, ended = (min(clocks), max(clocks)) if clocks else (_NO_CLOCK, _NO_CLOCK)
    written = log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=started.isoformat(),
            task=f"self-play {name}",
            model="policy",
            dataset=log.EvalDataset(name=name, samples=len(samples)),
            config=log.EvalConfig(),
            metadata=({} if len(clocks) == len(games) else {"clock": _FAKED})
            | ({} if len(games) == played else {"games": f"a sample of {len(games)} of {played}"}),
            viewer=viewer.ViewerConfig(trust_content=False),  # models wrote it
        ),
        results=_results(samples),
        stats=log.EvalStats(started_at=started.isoformat(), completed_at=ended.isoformat()),
        samples=samples,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    log.write_eval_log(written, str(output), format="eval")


class _Transcript:
    """The events of one game, in order."""

    def __init__(self, game: MedicalRecord, prompts: Prompts, number: int) -> None:
        self.game, self.prompts = game, prompts
        self.id = f"{game.step:05d}.{number:06d}"
        self.events: list[event.Event] = []
        self.messages: list[model.ChatMessage] = []
        self.usage: dict[str, model.ModelUsage] = {}
        # Inspect sorts events by time.
        self.seconds = iter(game.seconds)
        self.now = (game.finished or _NO_CLOCK) - timedelta(seconds=sum(game.seconds))

    def sample(self) -> log.EvalSample:
        game, target = self.game, self.game.spec.target_label.value
        opening = dataset.Sample(input=game.spec.seed_note, target=target, id=self.id)
        self._add(event.SampleInitEvent(sample=opening, state={}))
        read = reads(game, self.prompts)
        assessed = [(Role.ASSESSOR, each.assessment) for each in game.by_assessment]
        for role, turn in [(Role.ATTACKER, game.attack), *assessed]:
            if turn is not None:
                self._turn(role, turn, read.get(role.value, []))
        if game.judgement is not None:
            judgement = game.judgement.model_dump(mode="json")
            self._span("judge", event.InfoEvent(source=game.judgement.judge, data=judgement))
        scores = _scores(game)
        self._span(
            "scores", *(event.ScoreEvent(score=score, scorer=name, target=target) for name, score in scores.items())
        )
        return log.EvalSample(
            id=self.id,
            epoch=1,
            input=game.spec.seed_note,
            target=target,
            messages=self.messages,
            output=model.ModelOutput.from_message(self.messages[-1]) if self.messages else model.ModelOutput(),
            scores=scores,
            metadata={name: value for name, column in GAMES.items() if (value := column.value(game)) is not None},
            events=self.events,
            role_usage=self.usage,
        )

    def _turn(self, role: Role, turn: AttackRecord | AssessmentRecord, read: list[dict[str, str]]) -> None:
        game, key = self.game, f"{self.id}.{len(self.events)}.{role.value}"
        version = "" if game.policy_version is None else f" after step {game.policy_version}"
        played_by = game.players.get(role.value, "policy" + version)
        if game.opponent is not None and game.opponent.role == role.value:
            played_by = f"{game.opponent.kind} {game.opponent.version}"
        # A prompt profile that is not on this machine leaves the note alone to be shown.
        note = game.spec.seed_note if role is Role.ATTACKER else game.presented_note or ""
        kinds = {"system": model.ChatMessageSystem, "user": model.ChatMessageUser}
        prompt: list[model.ChatMessage] = [
            kinds[message["role"]](content=message["content"], id=f"{key}.{place}")
            for place, message in enumerate(read or [{"role": "user", "content": note}])
        ]
        thought, end, rest = turn.response.partition("</think>")
        apart = end and thought.strip().removeprefix("<think>").strip() == turn.reasoning.strip()
        said: list[model.Content] = [model.ContentText(text=rest.strip() if apart else turn.response)]
        if turn.reasoning:
            said.insert(0, model.ContentReasoning(reasoning=turn.reasoning))
        answer = model.ChatMessageAssistant(
            content=said, model=played_by, source="generate", id=f"{key}.answer", metadata={"role": role.value}
        )
        output = model.ModelOutput.from_message(answer, "max_tokens" if turn.truncated else "stop")
        output.model = played_by
        output.usage = self.usage[role.value] = model.ModelUsage(output_tokens=turn.tokens, total_tokens=turn.tokens)
        self.messages += [*prompt, answer]
        parsed = turn.model_dump(mode="json", exclude={"response", "reasoning"}, exclude_defaults=True)
        call = event.ModelEvent(
            model=played_by,
            role=role.value,
            input=prompt,
            tools=[],
            tool_choice="none",
            config=model.GenerateConfig(),
            output=output,
            working_time=next(self.seconds, None),
        )
        self._span(role.value, call, event.InfoEvent(source=role.value, data=parsed))

    def _span(self, name: str, *events: event.Event) -> None:
        span = f"{self.id}.{len(self.events)}.{name}"
        self._add(event.SpanBeginEvent(id=span, name=name, type=_SPAN), span)
        for each in events:
            self._add(each, span)
        self._add(event.SpanEndEvent(id=span), span)

    def _add(self, new: event.Event, span: str | None = None) -> None:
        new.span_id, new.timestamp = span, self.now
        self.now += timedelta(microseconds=1)
        if isinstance(new, event.ModelEvent) and new.working_time is not None:
            self.now += timedelta(seconds=new.working_time)
            new.completed = self.now
        self.events.append(new)


def _scores(game: MedicalRecord) -> dict[str, scorer.Score]:
    """The outcome, each role's reward, and each component as ``role/component``."""
    verdict = game.assessment.verdict if game.assessment else None
    scores = {"outcome": scorer.Score(value=game.outcome.value, answer=verdict.value if verdict else None)}
    for role, components in game.rewards.items():
        parts = {name: round(value, 4) for name, value in components.items()}
        explanation = " ".join(f"{name} {value:+.3f}" for name, value in parts.items())
        scores[role.value] = scorer.Score(value=round(sum(components.values()), 4), explanation=explanation)
        scores |= {f"{role.value}/{name}": scorer.Score(value=value) for name, value in parts.items()}
    return scores


def _results(samples: Sequence[log.EvalSample]) -> log.EvalResults:
    """The mean of each score that is a number."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, score in (each for sample in samples for each in (sample.scores or {}).items()):
        if not isinstance(score.value, str):
            values[name].append(score.as_float())
    means = []
    for name, numbers in sorted(values.items()):
        mean = {"mean": log.EvalMetric(name="mean", value=round(fmean(numbers), 4))}
        means.append(log.EvalScore(name=name, scorer=name, scored_samples=len(numbers), metrics=mean))
    return log.EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=means)


def _encodable(game: MedicalRecord) -> MedicalRecord:
    """The game with ``?`` for each half of a surrogate pair, which a model may write and Inspect's JSON cannot hold."""
    text = json.dumps(game.to_json(), ensure_ascii=False)
    return MedicalRecord.model_validate(json.loads(text.encode("utf-8", errors="replace")))
