"""Who speaks next: the policy behind vLLM servers, or a scripted teacher. The only file that knows vLLM's generate API.

Turns are sampled token in, token out (`POST /inference/v1/generate`, vLLM 0.32; the server needs `--enable-scale-out`).
The answer carries the sampled ids, their log-probabilities and, for every stretch of ids, the weight version that sampled
it. A version that is no whole number ("default") belongs to a server that the reloader has not verified: such a turn is
never used.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec

from producers.agent import ChatFormat
from schemas.events import Sampling, Task, VersionSpan

_NO_LOGPROB = -9999.0
"What vLLM sends where a log-probability is missing or not a number."
_REST_SECONDS = 1.0
"A server that failed is asked last for so long."


class PolicyFailed(Exception):
    """No server could sample the turn: an infrastructure error, nobody's fault."""


@dataclass(frozen=True, slots=True)
class Moment:
    """All there is to know when the next turn is due."""

    task: Task
    seed: int
    tokens: list[int]
    "everything read and said so far; the next turn extends it"
    turns: list[tuple[str, str]]
    "(said, observed) so far, as text"
    sampling: Sampling
    tokens_max: int
    "most tokens the turn may have"
    required_version: int | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: its ids, and who sampled them. A teacher's has neither log-probabilities nor versions."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: str


class Policy(Protocol):
    async def next_turn(self, moment: Moment) -> Turn:
        """The next turn. Raises PolicyFailed."""


class Demonstrator:
    """A scripted teacher: its text comes from the job and is encoded, not sampled."""

    def __init__(self, demonstrate: Callable[[Task, list[tuple[str, str]], int], str], chat: ChatFormat) -> None:
        self._demonstrate = demonstrate
        self._chat = chat

    async def next_turn(self, moment: Moment) -> Turn:
        tokens = self._chat.turn(self._demonstrate(moment.task, moment.turns, moment.seed))
        return Turn(tokens, [], [], "stop")


class _Refused(Exception):
    """One server could not sample this turn; another one, or the same one later, may."""


@dataclass(slots=True)
class _Server:
    url: str
    running: int = 0
    resting_until: float = 0.0
    version: int | None = None
    "newest version it was seen to sample with"


class ServedPolicy:
    """The policy behind one or more vLLM servers. Use `async with`."""

    def __init__(self, servers: list[str], end_token: int, *, timeout_seconds: float, patience_seconds: float) -> None:
        """`timeout_seconds` is for one request; a turn that every server refuses is tried again for `patience_seconds`."""
        self._servers = [_Server(url.rstrip("/")) for url in servers]
        self._end_token = end_token
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds, sock_connect=5.0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def next_turn(self, moment: Moment) -> Turn:
        """Asks the best server, then the others, then all of them again until patience ends."""
        if not self._servers:
            raise PolicyFailed("this worker knows no policy server: set [rollouts] servers")
        body = _body(moment, self._end_token)
        give_up = time.monotonic() + self._patience_seconds
        wait_seconds = 0.1
        while True:
            refusals: list[str] = []
            for server in self._ranked(moment.required_version):
                try:
                    return await self._asked(server, body)
                except _Refused as refusal:
                    server.resting_until = time.monotonic() + _REST_SECONDS
                    refusals.append(f"{server.url}: {refusal}")
            if time.monotonic() + wait_seconds > give_up:
                raise PolicyFailed("; ".join(refusals))
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, 2.0)

    def _ranked(self, required_version: int | None) -> list[_Server]:
        """Servers from best to worst: not resting, serving what is required, least loaded."""
        now = time.monotonic()

        def rank(server: _Server) -> tuple[bool, bool, int]:
            serves_another = required_version is not None and server.version not in (None, required_version)
            return server.resting_until > now, serves_another, server.running

        return sorted(self._servers, key=rank)

    async def _asked(self, server: _Server, body: bytes) -> Turn:
        assert self._session is not None, "use `async with`"
        server.running += 1
        try:
            async with self._session.post(
                f"{server.url}/inference/v1/generate", data=body, headers=_HEADERS
            ) as response:
                answer = await response.read()
                if response.status in _HOPELESS:
                    raise PolicyFailed(f"{server.url}: {_complaint(response.status, answer)}")
                if response.status != 200:
                    raise _Refused(_complaint(response.status, answer))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _Refused(f"{type(error).__name__}: {error}") from error
        finally:
            server.running -= 1
        turn = _turn(answer)
        server.version = turn.versions[-1].version
        return turn


_HEADERS = {"Content-Type": "application/json"}
_HOPELESS = (400, 403, 422)
"The request itself is refused (a prompt too long, an endpoint switched off): no other try will do better."


class _SamplingParams(msgspec.Struct):
    """vLLM's names. log-probabilities of the sampled token only; no text, since ids are decoded here."""

    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: list[int]
    logprobs: int = 0
    detokenize: bool = False


class _Request(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _SamplingParams


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Answer)


def _body(moment: Moment, end_token: int) -> bytes:
    sampling = moment.sampling
    params = _SamplingParams(sampling.temperature, sampling.top_p, moment.tokens_max, [end_token])
    return _ENCODER.encode(_Request(moment.tokens, params))


def _turn(answer: bytes) -> Turn:
    """The turn in a server's answer. Raises _Refused when it cannot be trained on."""
    try:
        choice = _DECODER.decode(answer).choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise _Refused(f"an answer that is none: {error}") from error
    if choice.finish_reason not in ("stop", "length"):
        raise _Refused(f"generation ended by {choice.finish_reason}")
    if [entry.token_id for entry in choice.logprobs.content] != choice.token_ids or not choice.token_ids:
        raise _Refused("ids and log-probabilities do not belong together")
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if min(logprobs) <= _NO_LOGPROB:
        raise _Refused("a log-probability is missing")
    return Turn(choice.token_ids, logprobs, _spans(choice), choice.finish_reason)


def _spans(choice: _Choice) -> list[VersionSpan]:
    """Whole-numbered versions for every token, without a gap. Raises _Refused."""
    spans: list[VersionSpan] = []
    for span in choice.weight_versions:
        if not span.version.isdecimal():
            raise _Refused(f"its weights ({span.version!r}) are not verified")
        if span.start != (spans[-1].end if spans else 0):
            raise _Refused("weight versions do not cover the turn")
        spans.append(VersionSpan(version=int(span.version), start=span.start, end=span.end))
    if not spans or spans[-1].end != len(choice.token_ids):
        raise _Refused("weight versions do not cover the turn")
    return spans


def _complaint(status: int, answer: bytes) -> str:
    if status == 403:
        return "it was started without --enable-scale-out"
    return f"HTTP {status}: {answer[:300].decode(errors='replace')}"
