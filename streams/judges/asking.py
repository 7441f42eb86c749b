"""Asks a model about one attempt, until there is a judgement.

An endpoint that is down delays: it is asked again and again, with growing waits. An answer that cannot be read is asked
for again `tries_max` times, then the attempt is excluded. A request that the endpoint refuses, or that timed out
`timeouts_max` times, excludes the attempt only if the endpoint answers a short question of our own: without that, the
endpoint is at fault and not the attempt, and it counts as down. A used-up budget excludes. Nothing here scores 0.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from replayground.schemas.events import Address, JudgementMade, TrajectoryAssembled
from replayground.schemas.ids import now_microseconds
from replayground.streams.config import JudgeEndpointSettings, JudgeSettings
from replayground.streams.judges.endpoint import (
    ChatEndpoint,
    Completion,
    EndpointDown,
    EndpointSlow,
    JudgeRequestRefused,
)
from replayground.streams.rules.judges import LlmJudge
from replayground.streams.rules.judging import (
    ANSWER_CHARACTERS_MAX,
    UnreadableVerdict,
    again,
    chat_messages,
    judgement_meta,
    mean_of,
    prompt_hash,
    read_verdict,
)

logger = structlog.get_logger()

BUDGET_USED_UP = "judge budget used up"
_TOKENS_PER_PRICE = 1_000_000
_PROBE = [{"role": "user", "content": "Reply with the word yes."}]
_PROBE_TOKENS_MAX = 4


class NotJudged(Exception):
    """Why an attempt is excluded."""


@dataclass
class Budget:
    """What judges may cost in a run. Checked before each request, so requests that run at once may exceed it a little."""

    tokens_max: int
    cost_max: float
    tokens: int = 0
    cost: float = 0.0

    def spend(self, tokens: int, cost: float) -> None:
        self.tokens += tokens
        self.cost += cost

    @property
    def is_used_up(self) -> bool:
        return 0 < self.tokens_max <= self.tokens or 0 < self.cost_max <= self.cost


@dataclass
class JudgeUsage:
    """What one judgement has taken so far."""

    scores: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    tries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0


class Asker:
    """Asks the endpoints of the config. All its coroutines run on one event loop."""

    def __init__(self, settings: JudgeSettings, endpoints: Mapping[str, ChatEndpoint], budget: Budget) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._budget = budget
        self._slots = asyncio.Semaphore(settings.concurrency)
        self.trouble: dict[str, str] = {}
        "endpoints whose last request failed, and why"

    async def judge(self, trajectory: TrajectoryAssembled, address: Address, judge: LlmJudge) -> JudgementMade:
        """The judgement of an attempt. Waits as long as the endpoint is down."""
        began = time.monotonic()
        usage = JudgeUsage()
        excluded: str | None = None
        try:
            for _ in range(judge.votes):
                usage.scores.append(await self._vote(trajectory, judge, usage))
        except NotJudged as reason:
            excluded = str(reason)
        return JudgementMade(
            meta=judgement_meta(trajectory, judge, now_microseconds()),
            trajectory=address,
            judge=judge.name,
            judge_version=judge.version,
            judged_by="model",
            verdict="scored" if excluded is None else "excluded",
            score=mean_of(usage.scores) if excluded is None else 0.0,
            excluded_because=excluded,
            scores=usage.scores,
            votes=judge.votes,
            tries=usage.tries,
            answers=usage.answers,
            model=judge.model,
            prompt_hash=prompt_hash(trajectory, judge),
            tokens_in=usage.tokens_in,
            tokens_out=usage.tokens_out,
            cost=usage.cost,
            milliseconds=1000.0 * (time.monotonic() - began),
            verdicts=[],
        )

    async def _vote(self, trajectory: TrajectoryAssembled, judge: LlmJudge, usage: JudgeUsage) -> float:
        """One vote. Raises NotJudged."""
        # Drawn for each vote: nothing that the agent or an earlier reply contains can match it.
        messages = question = chat_messages(trajectory, judge, secrets.token_hex(16))
        complaint = ""
        for _ in range(self._settings.tries_max):
            completion = await self._complete(judge, messages, usage)
            usage.tries += 1
            usage.answers.append(_storable(completion.text))
            try:
                return read_verdict(completion.text, judge.scale).score
            except UnreadableVerdict as error:
                complaint = str(error)
                messages = again(question, complaint)
        raise NotJudged(f"the judge's answer could not be read, {self._settings.tries_max} times: {complaint}")

    async def _complete(self, judge: LlmJudge, messages: list[dict[str, str]], usage: JudgeUsage) -> Completion:
        """A reply, however long the endpoint is down. Raises NotJudged when the attempt is at fault, or the budget."""
        endpoint = self._endpoints[judge.endpoint]
        wait_seconds, timeouts = self._settings.backoff_seconds, 0
        while True:
            try:
                completion = await self._request(
                    judge,
                    usage,
                    lambda: endpoint.complete(judge.model, messages, judge.temperature, judge.answer_tokens_max),
                )
                self.trouble.pop(judge.endpoint, None)
                return completion
            except JudgeRequestRefused as error:
                reason = f"the judge's endpoint refuses the question: {error}"
                if await self._answers_a_probe(judge, usage):
                    raise NotJudged(reason) from error
            except EndpointSlow as error:
                timeouts += 1
                reason = f"the judge did not answer, {timeouts} times: {error}"
                if timeouts >= self._settings.timeouts_max and await self._answers_a_probe(judge, usage):
                    raise NotJudged(reason) from error
            except EndpointDown as error:
                reason = str(error)
            self._note_trouble(judge.endpoint, reason)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, self._settings.backoff_seconds_max)

    async def _answers_a_probe(self, judge: LlmJudge, usage: JudgeUsage) -> bool:
        """Whether the endpoint answers a short question of our own with the same model."""
        endpoint = self._endpoints[judge.endpoint]
        try:
            await self._request(
                judge, usage, lambda: endpoint.complete(judge.model, _PROBE, judge.temperature, _PROBE_TOKENS_MAX)
            )
        except (EndpointDown, JudgeRequestRefused):
            return False
        return True

    async def _request(
        self, judge: LlmJudge, usage: JudgeUsage, send: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """One request within concurrency and budget. Raises NotJudged, and what `send` raises."""
        async with self._slots:
            if self._budget.is_used_up:
                raise NotJudged(BUDGET_USED_UP)
            completion = await send()
        prices = self._settings.endpoints[judge.endpoint]
        cost = _cost(completion, prices)
        usage.tokens_in += completion.tokens_in
        usage.tokens_out += completion.tokens_out
        usage.cost += cost
        self._budget.spend(completion.tokens_in + completion.tokens_out, cost)
        return completion

    def _note_trouble(self, endpoint: str, reason: str) -> None:
        # Once for each outage: all waiting questions meet the same one.
        if endpoint not in self.trouble:
            logger.warning("judge_endpoint_down", endpoint=endpoint, reason=reason)
        self.trouble[endpoint] = reason


class AskingThread:
    """An event loop in a thread, on which questions are asked while the program reads and writes the log."""

    def __init__(self, settings: JudgeSettings, keys: Mapping[str, str], budget: Budget) -> None:
        """`keys`: the secrets of the endpoints, by name."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asking", daemon=True)
        self._thread.start()
        self._endpoints = {
            name: ChatEndpoint(endpoint.url, keys.get(name, ""), settings.timeout_seconds)
            for name, endpoint in settings.endpoints.items()
        }
        self._asker = Asker(settings, self._endpoints, budget)

    @property
    def trouble(self) -> dict[str, str]:
        """Endpoints that are down, and why."""
        return dict(self._asker.trouble)

    def ask(self, trajectory: TrajectoryAssembled, address: Address, judge: LlmJudge) -> "Future[JudgementMade]":
        return asyncio.run_coroutine_threadsafe(self._asker.judge(trajectory, address, judge), self._loop)

    def close(self) -> None:
        """Gives up what is under way, and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._give_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _give_up(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for endpoint in self._endpoints.values():
            await endpoint.close()


def _cost(completion: Completion, prices: JudgeEndpointSettings) -> float:
    paid = completion.tokens_in * prices.price_in_per_million + completion.tokens_out * prices.price_out_per_million
    return paid / _TOKENS_PER_PRICE


def _storable(text: str) -> str:
    # JSON may escape a lone surrogate, which Avro could not write as UTF-8.
    return text[:ANSWER_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
