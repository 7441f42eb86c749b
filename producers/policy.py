"""Who speaks next: the policy behind vLLM servers, a model behind any OpenAI-compatible ones, or a scripted teacher.
The only file that knows vLLM's generate API.

Turns are sampled token in, token out (`POST /inference/v1/generate`, vLLM 0.32; the server needs `--enable-scale-out`).
The answer carries the sampled ids, their log-probabilities and, for every stretch of ids, the weight version that sampled
it. A version that is no whole number ("default") belongs to a server that the reloader has not verified: such a turn is
never used. Servers that cannot say all this may teach (ChatTeacher): their turns carry no versions, and are never trained
on by reinforcement.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec

from producers.agent import Model
from producers.chat import Chat, Message
from schemas.errors import BadInput
from schemas.events import Sampling, Task, VersionSpan

_NO_LOGPROB = -9999.0
"What vLLM sends where a log-probability is missing or not a number."
_REST_SECONDS = 1.0
"A server that failed is asked last for so long, twice as long each time it fails again."
_REST_SECONDS_MAX = 30.0


class PolicyFailed(Exception):
    """No server could sample the turn: an infrastructure error, nobody's fault."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Everything a policy needs to produce the next turn."""

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
    messages: Sequence[Message] = ()
    "the same as `tokens`, as text: for models that take no ids"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: its ids, and who sampled them. A teacher's has neither log-probabilities nor versions."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: str


class Policy(Protocol):
    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        """The next turn. Raises PolicyFailed."""


class Demonstrator:
    """A scripted teacher: its text comes from the job and is encoded, not sampled."""

    def __init__(self, demonstrate: Callable[[Task, list[tuple[str, str]], int], str], chat: Chat) -> None:
        self._demonstrate = demonstrate
        self._chat = chat

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        tokens = self._chat.turn(self._demonstrate(turn_request.task, turn_request.turns, turn_request.seed))
        return Turn(tokens, [], [], "stop")


@asynccontextmanager
async def served_models(models: Mapping[str, Model], chat: Chat) -> AsyncIterator[dict[str, Policy]]:
    """Who speaks for models other than the policy, by name. Raises BadInput when a key is missing."""
    async with AsyncExitStack() as stack:
        teachers: dict[str, Policy] = {}
        for name, model in models.items():
            teachers[name] = await stack.enter_async_context(_teacher(model, chat))
        yield teachers


def _teacher(model: Model, chat: Chat) -> "ChatTeacher":
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
    """One server could not sample this turn; another one, or the same one later, may succeed."""


@dataclass(slots=True)
class _Server:
    url: str
    running: int = 0
    failures: int = 0
    "refusals since it last answered"
    resting_until: float = 0.0
    version: int | None = None
    "newest version it was seen to sample with"


class _Servers:
    """Servers of one model: the least loaded one is asked; one that fails is asked last for a while, longer each time.

    A turn is asked of another server only after the first one's answer was refused whole: nothing of it was counted."""

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

    async def _request_turn(
        self, path: str, body: bytes, headers: Mapping[str, str], read: Callable[[bytes], Turn], version: int | None
    ) -> Turn:
        """Asks the best server, then the others, then all of them again until patience ends. Raises PolicyFailed.

        `read` turns a response into a turn, or raises _ServerFailed; servers that sampled `version` last are preferred."""
        give_up = time.monotonic() + self._patience_seconds
        wait_seconds = 0.1
        while True:
            refusals: list[str] = []
            for server in self._rank(version):
                try:
                    turn = read(await self._post(server, path, body, headers))
                except _ServerFailed as refusal:
                    refusals.append(f"{server.url}: {refusal}")
                    self._back_off(server)
                else:
                    server.failures, server.resting_until = 0, 0.0
                    server.version = turn.versions[-1].version if turn.versions else None
                    return turn
            if time.monotonic() + wait_seconds > give_up:
                raise PolicyFailed("; ".join(refusals) or "it has no server")
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, 2.0)

    def _rank(self, required_version: int | None) -> list[_Server]:
        """Servers from best to worst: not resting, serving what is required, least loaded."""
        now = time.monotonic()

        def rank(server: _Server) -> tuple[bool, bool, int]:
            serves_another = required_version is not None and server.version not in (None, required_version)
            return server.resting_until > now, serves_another, server.running

        return sorted(self._servers, key=rank)

    async def _post(self, server: _Server, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        assert self._session is not None, "use `async with`"
        server.running += 1
        try:
            async with self._session.post(server.url + path, data=body, headers=headers) as response:
                answer = await response.read()
                if response.status in _HOPELESS:
                    raise PolicyFailed(f"{server.url}: {_complaint(response.status, answer)}")
                if response.status != 200:
                    raise _ServerFailed(_complaint(response.status, answer))
                return answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _ServerFailed(f"{type(error).__name__}: {error}") from error
        finally:
            server.running -= 1

    def _back_off(self, server: _Server) -> None:
        seconds = min(self._rest_seconds * 2**server.failures, max(self._rest_seconds, _REST_SECONDS_MAX))
        server.failures = min(server.failures + 1, 16)
        server.resting_until = time.monotonic() + seconds


class ServedPolicy(_Servers):
    """The policy behind one or more vLLM servers. Use `async with`."""

    def __init__(
        self,
        servers: Sequence[str],
        end_token: int,
        *,
        timeout_seconds: float,
        patience_seconds: float,
        rest_seconds: float = _REST_SECONDS,
    ) -> None:
        """`timeout_seconds` is for one request; a turn that every server refuses is tried again for `patience_seconds`; a
        server that fails is asked last for `rest_seconds`, twice as long each time it fails again."""
        super().__init__(
            servers, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds, rest_seconds=rest_seconds
        )
        self._end_token = end_token

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        if not self._servers:
            raise PolicyFailed("this worker knows no policy server: set [rollouts] servers")
        body = _body(turn_request, self._end_token)
        return await self._request_turn("/inference/v1/generate", body, _HEADERS, _turn, turn_request.required_version)


class ChatTeacher(_Servers):
    """A model behind any server with OpenAI's /v1/chat/completions: text in, text out. Use `async with`.

    Its turns have ids, so that they can be learned from, but neither log-probabilities nor versions: what it said is never
    mistaken for the policy's."""

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
            raise _ServerFailed(f"an answer that is none: {error}") from error
        if not choice.message.content:
            raise _ServerFailed(f"an empty turn, ended by {choice.finish_reason}")
        tokens = self._chat.turn(choice.message.content)
        if choice.finish_reason == "length":
            tokens = tokens[:-1]  # it was cut off: its end was not said
        finish_reason = "length" if len(tokens) > tokens_max else choice.finish_reason or "stop"
        return Turn(tokens[:tokens_max], [], [], finish_reason)


_HEADERS = {"Content-Type": "application/json"}
_HOPELESS = (400, 422)
"The request itself is refused (a prompt too long): no other server and no other try will do better."


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


class _Response(msgspec.Struct):
    choices: list[_Choice]


class _ChatRequest(msgspec.Struct):
    """OpenAI's names."""

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
    params = _SamplingParams(sampling.temperature, sampling.top_p, turn_request.tokens_max, [end_token])
    return _ENCODER.encode(_Request(turn_request.tokens, params))


def _chat_message(message: Message) -> dict[str, str]:
    """As any such server takes it: the role of a tool needs the record of a call, which our calls, being text, have not."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>{message.content}</tool_response>"}
    return {"role": message.role, "content": message.content}


def _turn(answer: bytes) -> Turn:
    """The turn in a server's answer. Raises _ServerFailed when it cannot be trained on."""
    try:
        choice = _DECODER.decode(answer).choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise _ServerFailed(f"an answer that is none: {error}") from error
    if choice.finish_reason not in ("stop", "length"):
        raise _ServerFailed(f"generation ended by {choice.finish_reason}")
    if [entry.token_id for entry in choice.logprobs.content] != choice.token_ids or not choice.token_ids:
        raise _ServerFailed("ids and log-probabilities do not belong together")
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if min(logprobs) <= _NO_LOGPROB:
        raise _ServerFailed("a log-probability is missing")
    return Turn(choice.token_ids, logprobs, _spans(choice), choice.finish_reason)


def _spans(choice: _Choice) -> list[VersionSpan]:
    """Whole-numbered versions for every token, without a gap. Raises _ServerFailed."""
    spans: list[VersionSpan] = []
    for span in choice.weight_versions:
        if not span.version.isdecimal():
            raise _ServerFailed(f"its weights ({span.version!r}) are not verified")
        if span.start != (spans[-1].end if spans else 0):
            raise _ServerFailed("weight versions do not cover the turn")
        spans.append(VersionSpan(version=int(span.version), start=span.start, end=span.end))
    if not spans or spans[-1].end != len(choice.token_ids):
        raise _ServerFailed("weight versions do not cover the turn")
    return spans


def _complaint(status: int, answer: bytes) -> str:
    if status == 403:
        return "HTTP 403: a vLLM server must be started with --enable-scale-out, any other may want a key"
    return f"HTTP {status}: {answer[:300].decode(errors='replace')}"
