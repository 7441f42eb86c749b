"""The tools `search` and `search_read`: the corpus of the world, or a corpus of the program, or an endpoint.

The first of these that exists is searched, so a world with its own documents needs no network. If a folder for
recordings is set, every response of an endpoint is recorded; when the endpoint fails, the recorded response is used,
and the result says so.

Not covered: an endpoint may return other results tomorrow. For runs that must be repeatable, use mode recorded_only.
"""

import asyncio
import datetime
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from replayground.sandboxes.outside.config import MEBIBYTE, SearchSettings
from replayground.sandboxes.outside.contract import (
    MethodSession,
    OutsideFailed,
    OutsideTool,
    RateLimited,
    RolloutHandle,
    ToolFailed,
    ToolOutput,
    method_tools,
    tool_method,
)
from replayground.sandboxes.outside.corpus import Corpus, corpus_from, corpus_of_world
from replayground.sandboxes.outside.search_recordings import RecordedSearch, SearchQuery, SearchRecordings, SearchResult
from replayground.sandboxes.tools.tool import ToolError

logger = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 4 * MEBIBYTE
QUERY_CHARACTERS_MAX = 1000
DOCUMENT_CHARACTERS_MAX = 8000
PROOF_QUERY = "water"
CORPORA_REMEMBERED_MAX = 8


class Search:
    """The provider of the search tools."""

    def __init__(self, settings: SearchSettings | None = None) -> None:
        self.settings = settings or SearchSettings()
        self.endpoint = Endpoint(self.settings) if self.settings.endpoint is not None else None
        self._corpus: Corpus | None = None
        self._corpora: dict[str, Corpus] = {}
        "corpora of worlds, by content hash: the rollouts of a group share one"
        # Longer than the HTTP timeout, so that a slow endpoint is an infra error, or answered from a recording.
        self.tools: Mapping[str, OutsideTool] = method_tools(
            SearchSession, self, "search", self.settings.timeout_seconds + 15
        )

    async def start(self) -> None:
        if self.settings.corpus is None:
            return
        try:
            self._corpus = await asyncio.to_thread(corpus_from, Path(self.settings.corpus))
        except (OSError, ValueError) as error:
            raise OutsideFailed(f"the corpus of the tool search cannot be read: {error}") from error

    async def open(self, rollout_handle: RolloutHandle) -> "SearchSession":
        if rollout_handle.world.corpus:
            return SearchSession(self, await self._corpus_of(rollout_handle.world.corpus))
        return SearchSession(self, self._corpus)

    async def prove_health(self) -> None:
        """Ask the endpoint for words that no agent chose; a corpus cannot fail. Raises OutsideFailed."""
        if self.endpoint is not None:
            await self.endpoint.ask(PROOF_QUERY)

    async def close(self) -> None:
        if self.endpoint is not None:
            await self.endpoint.close()

    async def _corpus_of(self, documents: dict[str, str]) -> Corpus:
        digest = hashlib.sha256(msgspec.json.encode(documents)).hexdigest()
        if digest not in self._corpora:
            self._corpora[digest] = await asyncio.to_thread(corpus_of_world, documents)
            # Dicts keep their order: the oldest goes first.
            while len(self._corpora) > CORPORA_REMEMBERED_MAX:
                del self._corpora[next(iter(self._corpora))]
        return self._corpora[digest]


class SearchSession(MethodSession):
    """One rollout's searches. Has no state."""

    def __init__(self, provider: Search, corpus: Corpus | None) -> None:
        self._provider = provider
        self._corpus = corpus

    async def close(self) -> None:
        """Nothing is held."""

    @tool_method(is_idempotent=True)
    async def search(self, query: str, count: int = 5) -> ToolOutput:
        """Search for documents. Shows title, address if there is one, and a part of the text of each.

        query: words to look for
        count: how many results to show
        """
        # Normalised, so that equal queries find the same recording.
        words = " ".join(query.split())
        if not words or len(words) > QUERY_CHARACTERS_MAX:
            raise ToolError(f"a query has between 1 and {QUERY_CHARACTERS_MAX} characters")
        wanted = max(1, min(count, self._provider.settings.results_max))
        if self._corpus is not None:
            return ToolOutput(render_results(words, await asyncio.to_thread(self._corpus.search, words, wanted)))
        if self._provider.endpoint is None:
            raise ToolFailed("there is nothing to search: the world has no corpus and no endpoint is configured")
        results, remark = await self._provider.endpoint.search(words, wanted)
        return ToolOutput(render_results(words, results) + remark)

    @tool_method(is_idempotent=True)
    async def search_read(self, title: str, first_character: int = 0) -> ToolOutput:
        """Read a document that search has found.

        title: the exact title
        first_character: where to begin, when the document is too long for one answer
        """
        if self._corpus is None:
            raise ToolError("documents of this search engine are web pages, not documents to read here")
        document = self._corpus.documents.get(title)
        if document is None:
            raise ToolError(f"there is no document with the title {title!r}; search shows titles")
        text, first = document.text, max(0, first_character)
        last = min(len(text), first + DOCUMENT_CHARACTERS_MAX)
        if first == 0 and last == len(text):
            return ToolOutput(text)
        return ToolOutput(f"{text[first:last]}\n[characters {first} to {last} of {len(text)}]")


class Endpoint:
    """A search engine that answers GET with JSON, and the recordings of its responses."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self._recordings = SearchRecordings(settings.recordings) if settings.recordings is not None else None
        self._client = httpx.AsyncClient(timeout=settings.timeout_seconds, headers=headers_of(settings))

    async def close(self) -> None:
        await self._client.aclose()

    async def search(self, query: str, count: int) -> tuple[tuple[SearchResult, ...], str]:
        """The results, and a remark if they come from a recording because the endpoint failed. Raises OutsideFailed
        when it failed and nothing is recorded, ToolFailed when nothing is recorded and the mode forbids to ask."""
        question = self._question(query, count)
        recording = await asyncio.to_thread(self._recordings.find, question) if self._recordings is not None else None
        if self._settings.mode == "recorded_only" and recording is None:
            raise ToolFailed("there is no recorded result for this query, and none may be asked for")
        if recording is not None and self._settings.mode != "live":
            return recording.results[:count], ""
        try:
            results = await self._ask(question)
        except OutsideFailed as error:
            if recording is None:
                raise
            return recording.results[:count], f"\n[as recorded on {recording.recorded_at}: {error}]"
        await self._keep(question, results)
        return results[:count], ""

    async def ask(self, query: str) -> None:
        """Ask for one result, which is neither recorded nor returned. Raises OutsideFailed."""
        await self._ask(self._question(query, 1))

    def _question(self, query: str, count: int) -> SearchQuery:
        settings = self._settings
        asked = {settings.count_parameter: str(count)} if settings.count_parameter is not None else {}
        return SearchQuery(endpoint=settings.endpoint or "", parameters=settings.parameters | asked, query=query)

    async def _ask(self, question: SearchQuery) -> tuple[SearchResult, ...]:
        parameters = question.parameters | {self._settings.query_parameter: question.query}
        try:
            async with self._client.stream("GET", question.endpoint, params=parameters) as response:
                if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                    raise RateLimited("the search endpoint answered 429")
                if response.status_code != httpx.codes.OK:
                    raise OutsideFailed(f"the search endpoint answered {response.status_code}")
                body = await read_bounded(response)
        except httpx.TimeoutException as error:
            raise OutsideFailed(
                f"the search endpoint did not answer in {self._settings.timeout_seconds:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise OutsideFailed(f"the search endpoint cannot be reached: {error}") from error
        return results_in(body, self._settings)

    async def _keep(self, question: SearchQuery, results: tuple[SearchResult, ...]) -> None:
        if self._recordings is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            recording = RecordedSearch(question=question, recorded_at=now, results=results)
            await asyncio.to_thread(self._recordings.keep, recording)
        # The response is here; only a later failure of the endpoint will miss the recording.
        except OSError as error:
            logger.warning("search_not_recorded", extra={"reason": str(error)})


def headers_of(settings: SearchSettings) -> dict[str, str]:
    if settings.key_environment is None:
        return settings.headers
    return settings.headers | {"Authorization": f"Bearer {os.environ.get(settings.key_environment, '')}"}


async def read_bounded(response: httpx.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_bytes():
        # Read in pieces: a response without end must not fill the memory.
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise OutsideFailed(f"the search endpoint answered more than {ANSWER_BYTES_MAX} bytes")
    return body


def results_in(body: bytes, settings: SearchSettings) -> tuple[SearchResult, ...]:
    """The results in a response. OutsideFailed when it is not the JSON that the settings describe."""
    try:
        results = dig(msgspec.json.decode(body), settings.results_path)
    except msgspec.DecodeError as error:
        raise OutsideFailed(f"the search endpoint did not answer in JSON: {error}") from error
    if not isinstance(results, list):
        raise OutsideFailed(f"the search endpoint's answer has no list at {settings.results_path!r}")
    paths = (settings.title_path, settings.url_path, settings.snippet_path)
    return tuple(SearchResult(*(text_of(dig(result, path)) for path in paths)) for result in results)


def dig(value: Any, path: str) -> Any:
    """The value at a path such as data.items.0.title; None when there is none."""
    for part in path.split(".") if path else ():
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def text_of(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())


def render_results(query: str, results: tuple[SearchResult, ...]) -> str:
    if not results:
        return f"no results for {query!r}"
    entries = []
    for number, result in enumerate(results, 1):
        entries.append("\n   ".join(line for line in (f"{number}. {result.title}", result.url, result.snippet) if line))
    return "\n".join(entries)
