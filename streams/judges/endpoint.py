"""One request to an OpenAI-compatible chat endpoint, and what its failures mean.

EndpointDown     no answer, a status such as 401, 404, 429 or 500, or an answer that is no chat completion: the same
                 request may succeed later, when somebody has repaired server, key or name of the model
EndpointSlow     the same, after the timeout
JudgeRequestRefused   400, 413 or 422: the server read the request and does not want it, for example because it is too long
"""

from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

_REFUSED = frozenset({400, 413, 422})
_COMPLAINT_CHARACTERS_MAX = 300
_CHARACTERS_PER_TOKEN = 4
"of a rough count, for a server that does not count"


class EndpointDown(Exception):
    """The endpoint does not answer as it should. Later it may."""


class EndpointSlow(EndpointDown):
    """No answer within the timeout."""


class JudgeRequestRefused(Exception):
    """The endpoint rejects this request."""


@dataclass(frozen=True)
class Completion:
    """A reply of a model."""

    text: str
    tokens_in: int
    tokens_out: int


class ChatEndpoint:
    """A client of one endpoint. It belongs to one event loop."""

    def __init__(self, url: str, key: str, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/",
            timeout=timeout_seconds,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def complete(
        self, model: str, messages: Sequence[dict[str, str]], temperature: float, tokens_max: int
    ) -> Completion:
        """Raises EndpointDown, EndpointSlow, JudgeRequestRefused."""
        body = {"model": model, "messages": list(messages), "temperature": temperature, "max_tokens": tokens_max}
        try:
            response = await self._client.post("chat/completions", json=body)
        except httpx.TimeoutException as error:
            raise EndpointSlow(f"no answer within {self._timeout_seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointDown(f"{type(error).__name__}: {error}") from error
        if response.status_code in _REFUSED:
            raise JudgeRequestRefused(_complaint(response))
        if response.status_code != 200:
            raise EndpointDown(_complaint(response))
        return _completion(response.content, messages)

    async def close(self) -> None:
        await self._client.aclose()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Response(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def _completion(body: bytes, messages: Sequence[dict[str, str]]) -> Completion:
    """Raises EndpointDown for what is no chat completion."""
    try:
        response = msgspec.json.decode(body, type=_Response)
        # Null for a refusal or a structured call: an answer without a verdict.
        text = response.choices[0].message.content or ""
    # RecursionError: brackets nested too deep.
    except (msgspec.MsgspecError, IndexError, RecursionError) as error:
        raise EndpointDown(f"its answer is no chat completion: {error}") from error
    # Without a count the budget would never be used up.
    asked = sum(len(message["content"]) for message in messages)
    counted = response.usage or _Usage(asked // _CHARACTERS_PER_TOKEN + 1, len(text) // _CHARACTERS_PER_TOKEN + 1)
    return Completion(text, max(0, counted.prompt_tokens), max(0, counted.completion_tokens))


def _complaint(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {' '.join(response.text.split())[:_COMPLAINT_CHARACTERS_MAX]}"
