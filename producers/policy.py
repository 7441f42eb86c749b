"""Policies: the model being trained behind vLLM servers, models behind OpenAI-compatible servers, scripted teachers.
The only file that knows vLLM's generate API.

Turns are sampled token in, token out (`POST /inference/v1/generate`, vLLM 0.32; the server needs `--enable-scale-out`).
The response carries the sampled ids, their log-probabilities and, for every span of ids, the weight version that
sampled it (decision 0002). A version that is not a whole number ("default") means that the reloader has not verified
the server: such a turn is never used. A server without this endpoint can only teach (ChatTeacher): its turns have no
versions and never go into GRPO.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec

from replayground.producers.agent import Model
from replayground.producers.chat import Chat, Message
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Sampling, Task, VersionSpan

_NO_LOGPROB = -9999.0
"What vLLM sends for a log-probability that is missing, -inf or NaN."
_REST_SECONDS = 1.0
"How long a server that failed is tried last; doubles with each further failure."
_REST_SECONDS_MAX = 30.0
_ANSWERS_KEPT = 4096


class PolicyFailed(Exception):
    """No server could sample the turn. The rollout ends by infra_error and is retried; the agent is not at fault."""


class RequestRefused(PolicyFailed):
    """A server that answers others refuses this request as it is: its context is too long, say. After the first turn the
    context is what the agent made of it."""


class TurnTooLong(PolicyFailed):
    """A server that went on answering others did not finish this turn in time. After the first turn that is the agent's
    doing: it could otherwise have any bad attempt repeated by a turn without end."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Everything a policy needs to produce the next turn."""

    task: Task
    seed: int
    tokens: list[int]
    "the context so far; the turn is appended to it"
    turns: list[tuple[str, str]]
    "(turn, observation) so far, as text"
    sampling: Sampling
    tokens_max: int
    "limit on the length of the turn"
    required_version: int | None
    "the weight version that must sample it; None = any"
    messages: Sequence[Message] = ()
    "the same context as text, for models that do not take token ids"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn with its token ids. A teacher's turn has neither log-probabilities nor versions."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: str


class Policy(Protocol):
    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        """Produces the next turn. Raises PolicyFailed."""


class Demonstrator:
    """A scripted teacher: the job's `demonstrate` function writes the text, which is encoded and not sampled."""

    def __init__(self, demonstrate: Callable[[Task, list[tuple[str, str]], int], str], chat: Chat) -> None:
        self._demonstrate = demonstrate
        self._chat = chat

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        tokens = self._chat.turn(self._demonstrate(turn_request.task, turn_request.turns, turn_request.seed))
        return Turn(tokens, [], [], "stop")


@asynccontextmanager
async def served_models(models: Mapping[str, Model], chat: Chat) -> AsyncIterator[dict[str, Policy]]:
    """Policies for the models of [models], by name. Raises BadInput when an API key is missing."""
    async with AsyncExitStack() as stack:
        teachers: dict[str, Policy] = {}
        for name, model in models.items():
            teachers[name] = await stack.enter_async_context(_teacher(model, chat))
        yield teachers


def _teacher(model: Model, chat: Chat) -> "ChatTeacher":
    # Read from the environment: settings and events go onto the log, and a key must not.
    key = os.environ.get(model.key_variable) if model.key_variable else None
    if model.key_variable and not key:
        raise BadInput(f"model {model.name} needs a key: set the environment variable {model.key_variable}")
    return ChatTeacher(
        model.servers,
        model.served_name,
        chat,
        key=key,
        timeout_seconds=model.timeout_seconds,
        patience_seconds=model.patience_seconds,
    )


class _ServerFailed(Exception):
    """One server could not sample this turn. Another server, or the same one later, may succeed."""


@dataclass(slots=True)
class _Server:
    url: str
    running: int = 0
    failures: int = 0
    "failures since its last success"
    resting_until: float = 0.0
    version: int | None = None
    "the weight version that sampled its last turn"
    answered: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_ANSWERS_KEPT))
    "when each of its latest turns was asked for, and when it came"

    def has_sampled(self, asked: float, now: float) -> bool:
        """Whether a turn without an answer has been sampled for at least half of its time, as far as the others tell: by
        then one that was asked for later had come, since turns are begun in order, and the server has not paused since."""
        overtaken_by = now - (now - asked) / 2
        first = min((came for later, came in self.answered if later >= asked and came <= overtaken_by), default=None)
        if first is None:
            return False
        seen = sorted(came for _, came in self.answered if came >= first)
        return all(after - before <= (now - asked) / 4 for before, after in pairwise([*seen, now]))


class _Servers:
    """The servers of one model. A turn goes to the least loaded server. A server that fails is tried last for a while,
    longer each time.

    A turn goes to another server only after the response of the first was discarded whole, so no token counts twice."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_seconds: float,
        patience_seconds: float,
        rest_seconds: float = _REST_SECONDS,
    ) -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._rest_seconds = rest_seconds
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # No limit: slots bound the number of requests, and aiohttp's default of 100 would queue them here.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            # A dead host is noticed in 5 s; a turn itself may take long, and a paused server holds requests back.
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds, sock_connect=5.0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def _request_turn(
        self, path: str, body: bytes, headers: Mapping[str, str], read: Callable[[bytes], Turn], version: int | None
    ) -> Turn:
        """Tries the best server, then the others, then all of them again until `patience_seconds` are over. Raises
        PolicyFailed.

        `read` makes a turn of a response or raises _ServerFailed. Servers that sampled `version` last are preferred."""
        give_up = time.monotonic() + self._patience_seconds
        wait_seconds = 0.1
        while True:
            refusals: list[str] = []
            # Ranked anew each round: load, back-off and versions have changed meanwhile.
            for server in self._rank(version):
                try:
                    turn = read(await self._post(server, path, body, headers))
                except _ServerFailed as refusal:
                    refusals.append(f"{server.url}: {refusal}")
                    self._back_off(server)
                else:
                    server.failures, server.resting_until = 0, 0.0
                    self._has_answered = True
                    server.version = turn.versions[-1].version if turn.versions else None
                    return turn
            # A server may be loading weights, or the reloader may not have verified it yet: both pass.
            if time.monotonic() + wait_seconds > give_up:
                raise PolicyFailed("; ".join(refusals) or "the model has no servers")
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, 2.0)

    def _rank(self, required_version: int | None) -> list[_Server]:
        """All servers, best first: not backing off, serving the required version, least loaded."""
        now = time.monotonic()

        def rank(server: _Server) -> tuple[bool, bool, int]:
            # A server that has not sampled yet may serve the required version: worth a try.
            serves_another = required_version is not None and server.version not in (None, required_version)
            return server.resting_until > now, serves_another, server.running

        return sorted(self._servers, key=rank)

    async def _post(self, server: _Server, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        assert self._session is not None, "use `async with`"
        # Counted before the await: turns that start together must see each other's load.
        server.running += 1
        asked = time.monotonic()
        try:
            async with self._session.post(server.url + path, data=body, headers=headers) as response:
                # Read whole before anything is used: a response that breaks off raises ClientError.
                answer = await response.read()
                if response.status in _HOPELESS:
                    # Before the first answer the setup may be wrong, such as the name of the model.
                    kind = RequestRefused if self._has_answered else PolicyFailed
                    raise kind(f"{server.url}: {_complaint(response.status, answer)}")
                if response.status != 200:
                    raise _ServerFailed(_complaint(response.status, answer))
                server.answered.append((asked, time.monotonic()))
                return answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and server.has_sampled(asked, time.monotonic()):
                seconds = self._timeout_seconds
                raise TurnTooLong(
                    f"{server.url} sampled a turn for {seconds:g} s and did not get to its end"
                ) from error
            raise _ServerFailed(f"{type(error).__name__}: {error}") from error
        finally:
            server.running -= 1

    def _back_off(self, server: _Server) -> None:
        # max: a rest_seconds above the cap is kept. The exponent is capped too, so that the power stays small.
        seconds = min(self._rest_seconds * 2**server.failures, max(self._rest_seconds, _REST_SECONDS_MAX))
        server.failures = min(server.failures + 1, 16)
        server.resting_until = time.monotonic() + seconds


class ServedPolicy(_Servers):
    """The model being trained, behind one or more vLLM servers. Use `async with`."""

    def __init__(
        self,
        servers: Sequence[str],
        end_token: int,
        *,
        timeout_seconds: float,
        patience_seconds: float,
        rest_seconds: float = _REST_SECONDS,
    ) -> None:
        """`timeout_seconds` is for one request. A turn is retried for `patience_seconds` while every server fails. A
        server that fails is tried last for `rest_seconds`, which doubles with each further failure."""
        super().__init__(
            servers, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds, rest_seconds=rest_seconds
        )
        self._end_token = end_token

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        if not self._servers:
            raise PolicyFailed("this worker has no policy server: set [rollouts] servers")
        body = _body(turn_request, self._end_token)
        return await self._request_turn("/inference/v1/generate", body, _HEADERS, _turn, turn_request.required_version)


class ChatTeacher(_Servers):
    """A model behind any server with OpenAI's /v1/chat/completions: text in, text out. Use `async with`.

    Its turns are encoded to ids, so that SFT can use them. They have neither log-probabilities nor versions, so that
    nobody takes them for turns of the policy."""

    def __init__(
        self,
        servers: Sequence[str],
        served_name: str,
        chat: Chat,
        *,
        key: str | None,
        timeout_seconds: float,
        patience_seconds: float,
    ) -> None:
        super().__init__(servers, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds)
        self._served_name = served_name
        self._chat = chat
        self._headers = _HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        request = _ChatRequest(
            model=self._served_name,
            messages=[_chat_message(message) for message in turn_request.messages],
            temperature=turn_request.sampling.temperature,
            top_p=turn_request.sampling.top_p,
            max_tokens=turn_request.tokens_max,
        )
        return await self._request_turn(
            "/v1/chat/completions",
            _ENCODER.encode(request),
            self._headers,
            lambda answer: self._read(answer, turn_request.tokens_max),
            None,
        )

    def _read(self, answer: bytes, tokens_max: int) -> Turn:
        try:
            choice = _CHAT_DECODER.decode(answer).choices[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise _ServerFailed(f"malformed response: {error}") from error
        # content is null for a structured tool call or a refusal: neither is a turn in our formats.
        if not choice.message.content:
            raise _ServerFailed(f"an empty turn, ended by {choice.finish_reason}")
        tokens = self._chat.turn(choice.message.content)
        if choice.finish_reason == "length":
            # It was cut off: the end token that `turn` appends was not part of it.
            tokens = tokens[:-1]
        # Its tokenizer is not ours: within max_tokens there, the text may have more tokens here.
        finish_reason = "length" if len(tokens) > tokens_max else choice.finish_reason or "stop"
        return Turn(tokens[:tokens_max], [], [], finish_reason)


_HEADERS = {"Content-Type": "application/json"}
_HOPELESS = (400, 422)
"The request itself is wrong (a prompt too long, say): no other server and no retry will accept it."


class _SamplingParams(msgspec.Struct):
    """Names of vLLM. logprobs=0: of the sampled token only. No detokenization: ids are decoded here."""

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


class _Response(msgspec.Struct):
    choices: list[_Choice]


class _ChatRequest(msgspec.Struct):
    """Names of OpenAI."""

    model: str
    messages: list[dict[str, str]]
    temperature: float
    top_p: float
    max_tokens: int


class _ChatMessage(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatResponse(msgspec.Struct):
    choices: list[_ChatChoice]


_ENCODER = msgspec.json.Encoder()
_CHAT_DECODER = msgspec.json.Decoder(_ChatResponse)
_DECODER = msgspec.json.Decoder(_Response)


def _body(turn_request: TurnRequest, end_token: int) -> bytes:
    sampling = turn_request.sampling
    # No seed: that of a rollout is for its perturbations and its teacher. Sampling is not meant to be repeatable.
    params = _SamplingParams(sampling.temperature, sampling.top_p, turn_request.tokens_max, [end_token])
    return _ENCODER.encode(_Request(turn_request.tokens, params))


def _chat_message(message: Message) -> dict[str, str]:
    """A message in the form that every such server accepts."""
    # Role "tool" needs the id of a structured call. Calls are plain text here, so an observation is sent as a user.
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>{message.content}</tool_response>"}
    return {"role": message.role, "content": message.content}


def _turn(answer: bytes) -> Turn:
    """The turn in a response of vLLM. Raises _ServerFailed when it cannot be trained on."""
    try:
        choice = _DECODER.decode(answer).choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise _ServerFailed(f"malformed response: {error}") from error
    # "abort": the server gave the request up in the middle, and the turn is not whole.
    if choice.finish_reason not in ("stop", "length"):
        raise _ServerFailed(f"generation ended by {choice.finish_reason}")
    if [entry.token_id for entry in choice.logprobs.content] != choice.token_ids or not choice.token_ids:
        raise _ServerFailed("ids and log-probabilities do not belong together")
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    # As a number it would pass for a very unlikely token and distort the importance weights.
    if min(logprobs) <= _NO_LOGPROB:
        raise _ServerFailed("a log-probability is missing")
    return Turn(choice.token_ids, logprobs, _spans(choice), choice.finish_reason)


def _spans(choice: _Choice) -> list[VersionSpan]:
    """The versions as numbers, checked to cover every token without a gap. Raises _ServerFailed."""
    spans: list[VersionSpan] = []
    for span in choice.weight_versions:
        # A wrong label is silent and spoils the importance weights, so an unverified server is never believed.
        if not span.version.isdecimal():
            raise _ServerFailed(f"its weights ({span.version!r}) are not verified")
        if span.start != (spans[-1].end if spans else 0):
            raise _ServerFailed("weight versions do not cover the turn")
        spans.append(VersionSpan(version=int(span.version), start=span.start, end=span.end))
    if not spans or spans[-1].end != len(choice.token_ids):
        raise _ServerFailed("weight versions do not cover the turn")
    return spans


def _complaint(status: int, answer: bytes) -> str:
    # vLLM answers 403 on this path when the endpoint is switched off.
    if status == 403:
        return "HTTP 403: a vLLM server must be started with --enable-scale-out; another server may need an API key"
    return f"HTTP {status}: {answer[:300].decode(errors='replace')}"
