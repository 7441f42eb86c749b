"""Search in a corpus, and by an endpoint that answers as SearXNG does until it begins to refuse."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from replayground.sandboxes.outside import calls
from replayground.sandboxes.outside.config import SearchSettings
from replayground.sandboxes.outside.contract import OutsideFailed
from replayground.sandboxes.outside.search import PROOF_QUERY, Search, dig
from replayground.sandboxes.outside.search_recordings import SearchRecordings
from replayground.sandboxes.worlds.perturbations import Rule
from replayground.sandboxes.worlds.world import World
from tests.sandboxes.outside_rollout import http_server, rollout_of

DOCUMENTS = {
    "Lamps": "A lamp gives light. " + "It hangs on a wall. " * 40 + "Some lamps burn whale oil, which smells.",
    "Ovens": "An oven gives heat and no light worth the name.",
    "Whales": "Whales are large. " * 1000,
}
WORLD = World(name="library", corpus=DOCUMENTS)


class SearxngLike:
    """Answers /search?q=…&format=json as SearXNG does; `status` is what it answers when it does not."""

    def __init__(self) -> None:
        self.status = 200
        self.queries: list[dict[str, str]] = []
        self.url = ""

    async def search(self, request: web.Request) -> web.Response:
        self.queries.append(dict(request.query))
        query = request.query["q"]
        if self.status != 200 or "the word that ends you" in query:
            return web.Response(status=500 if "the word that ends you" in query else self.status)
        results = [
            {
                "url": f"https://site{number}.example/{query}",
                "title": f"{query} {number}",
                "content": f"All about\n {query}.",
                "engine": "test",
                "score": 1.0 / number,
            }
            for number in range(1, 8)
        ]
        return web.json_response({"query": query, "number_of_results": 7, "results": results, "suggestions": []})


@pytest.fixture
async def engine() -> AsyncIterator[SearxngLike]:
    made = SearxngLike()
    async with http_server({"/search": made.search}) as url:
        made.url = f"{url}/search"
        yield made


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)


async def test_corpus_of_the_world() -> None:
    async with rollout_of(Search(), WORLD) as rollout:
        found = await rollout.text("search", query="which lamps burn oil?")
        first, *_ = found.split("\n2. ")
        assert first.startswith("1. Lamps\n   …")
        assert "lamps burn whale oil" in first
        assert await rollout.text("search", query="light", count=1) in (
            "1. Lamps\n   " + " ".join(DOCUMENTS["Lamps"].split())[:300].strip() + "…",
            "1. Ovens\n   An oven gives heat and no light worth the name.",
        )
        assert await rollout.text("search", query="submarine") == "no results for 'submarine'"
        assert await rollout.text("search_read", title="Ovens") == DOCUMENTS["Ovens"]
        assert rollout.sandboxes == []


async def test_long_documents_are_read_in_parts() -> None:
    async with rollout_of(Search(), WORLD) as rollout:
        first = await rollout.text("search_read", title="Whales")
        assert first.endswith("\n[characters 0 to 8000 of 18000]")
        last = await rollout.text("search_read", title="Whales", first_character=16_000)
        assert last == DOCUMENTS["Whales"][16_000:] + "\n[characters 16000 to 18000 of 18000]"


async def test_errors_help_the_agent() -> None:
    async with rollout_of(Search(), WORLD) as rollout:
        unknown = await rollout.call("search_read", title="Trains")
        assert (unknown.error_kind, unknown.content) == (
            "agent",
            "error: there is no document with the title 'Trains'; search shows titles",
        )
        assert (await rollout.call("search", query="  ")).error_kind == "agent"
        assert "missing argument 'query'" in await rollout.text("search")
    async with rollout_of(Search(), World(name="empty")) as rollout:
        assert (await rollout.call("search", query="lamps")).error_kind == "tool"


async def test_weather_falls_on_search_too() -> None:
    world = World(name="w", corpus=DOCUMENTS, perturbations=(Rule(kind="busy", tools=("search",)),))
    async with rollout_of(Search(), world) as rollout:
        assert await rollout.text("search", query="lamps") == "error: busy"


async def test_corpus_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "lamp.md").write_text("# Lamps\nlight")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG light")
    lines = '{"title": "Oven", "text": "heat and light", "url": "https://ovens.example/"}\n'
    (tmp_path / "texts.jsonl").write_text(lines)
    for name, expected in (("texts", "1. deep/lamp\n   # Lamps light"), ("texts.jsonl", "1. Oven\n   https://ovens.")):
        search = Search(SearchSettings(corpus=str(tmp_path / name)))
        await search.start()
        async with rollout_of(search) as rollout:
            assert (await rollout.text("search", query="light")).startswith(expected)
    (tmp_path / "texts.jsonl").write_text(lines + '{"title": 3}\n')
    with pytest.raises(OutsideFailed, match=r"texts.jsonl, line 2: "):
        await Search(SearchSettings(corpus=str(tmp_path / "texts.jsonl"))).start()


async def test_endpoint_is_asked_recorded_and_replaced_by_its_recordings(engine: SearxngLike, tmp_path: Path) -> None:
    settings = SearchSettings(endpoint=engine.url, recordings=str(tmp_path / "recordings"), results_max=3)
    search = Search(settings)
    async with rollout_of(search) as rollout:
        fresh = await rollout.text("search", query="  red   lamps ", count=2)
        assert fresh == (
            "1. red lamps 1\n   https://site1.example/red lamps\n   All about red lamps.\n"
            "2. red lamps 2\n   https://site2.example/red lamps\n   All about red lamps."
        )
        assert engine.queries == [{"format": "json", "q": "red lamps"}]
        engine.status = 403
        replayed = await rollout.text("search", query="red lamps", count=2)
        assert replayed.startswith(f"{fresh}\n[as recorded on 20")
        assert replayed.endswith(": the search endpoint answered 403]")
        assert "red lamps 3" in await rollout.text("search", query="red lamps", count=50)
    await search.close()


@pytest.mark.parametrize("status", [403, 503])
async def test_an_endpoint_that_refuses_what_was_never_recorded_is_an_infra_error(
    engine: SearxngLike, tmp_path: Path, status: int
) -> None:
    search = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path)))
    engine.status = status
    async with rollout_of(search) as rollout:
        with pytest.raises(OutsideFailed, match=f"the search endpoint answered {status}"):
            await rollout.call("search", query="lamps")
    # A search may be repeated, so it was, a bounded number of times; then words of our own were tried.
    assert [query["q"] for query in engine.queries] == ["lamps"] * calls.ATTEMPTS_MAX + [PROOF_QUERY]
    await search.close()


async def test_queries_that_the_agent_used_up_are_a_tool_error(engine: SearxngLike, tmp_path: Path) -> None:
    """Also when the query of our own that follows a failed one is refused because of the limit."""
    search = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path)))
    engine.status = 429
    async with rollout_of(search) as rollout:
        for query in ("lamps", "the word that ends you"):
            limited = await rollout.call("search", query=query)
            assert (limited.error_kind, "too many requests: " in limited.content) == ("tool", True), limited.content
    await search.close()


async def test_a_query_at_which_the_endpoint_fails_is_a_tool_error(engine: SearxngLike, tmp_path: Path) -> None:
    """Else whoever knows such a query could have bad attempts repeated."""
    search = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path)))
    async with rollout_of(search) as rollout:
        failed = await rollout.call("search", query="the word that ends you")
        assert (failed.error_kind, "answered 500" in failed.content) == ("tool", True), failed.content
        assert (await rollout.call("search", query="lamps")).error_kind is None
    await search.close()


async def test_recorded_only_needs_no_network(engine: SearxngLike, tmp_path: Path) -> None:
    live = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path)))
    async with rollout_of(live) as rollout:
        fresh = await rollout.text("search", query="lamps")
    await live.close()
    replaying = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path), mode="recorded_only"))
    asked = len(engine.queries)
    async with rollout_of(replaying) as rollout:
        assert await rollout.text("search", query="lamps") == fresh
        never = await rollout.call("search", query="ovens")
        assert (never.error_kind, "no recorded result" in never.content) == ("tool", True)
    assert len(engine.queries) == asked
    await replaying.close()


async def test_recorded_first_asks_only_what_is_new(engine: SearxngLike, tmp_path: Path) -> None:
    search = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path), mode="recorded_first"))
    async with rollout_of(search) as rollout:
        assert await rollout.text("search", query="lamps") == await rollout.text("search", query="lamps")
        await rollout.text("search", query="ovens")
    assert [query["q"] for query in engine.queries] == ["lamps", "ovens"]
    await search.close()


async def test_a_damaged_recording_counts_as_none(
    engine: SearxngLike, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = Search(SearchSettings(endpoint=engine.url, recordings=str(tmp_path)))
    async with rollout_of(search) as rollout:
        await rollout.text("search", query="lamps")
        file = tmp_path / os.listdir(tmp_path)[0]
        file.write_bytes(file.read_bytes()[:40])
        engine.status = 403
        with pytest.raises(OutsideFailed):
            await rollout.call("search", query="lamps")
        assert "recorded_search_unreadable" in caplog.text
    assert SearchRecordings(tmp_path / "nowhere").folder.exists() is False
    await search.close()


async def test_any_json_by_paths() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer let me in"
        items = [{"name": request.query["query"], "link": {"href": "https://a.example/"}, "texts": ["one", "two"]}]
        return web.json_response({"data": {"items": items * int(request.query["n"])}})

    async with http_server({"/v1/find": answer}) as url:
        settings = SearchSettings(
            endpoint=f"{url}/v1/find",
            query_parameter="query",
            count_parameter="n",
            parameters={},
            headers={"Authorization": "Bearer let me in"},
            results_path="data.items",
            title_path="name",
            url_path="link.href",
            snippet_path="texts.1",
        )
        search = Search(settings)
        async with rollout_of(search) as rollout:
            assert await rollout.text("search", query="x", count=1) == "1. x\n   https://a.example/\n   two"
        await search.close()


async def test_an_answer_of_another_form_is_an_infra_error(engine: SearxngLike) -> None:
    search = Search(SearchSettings(endpoint=engine.url, results_path="hits"))
    async with rollout_of(search) as rollout:
        with pytest.raises(OutsideFailed, match="no list at 'hits'"):
            await rollout.call("search", query="lamps")
    await search.close()


def test_dig() -> None:
    assert dig({"a": [{"b": 1}]}, "a.0.b") == 1
    assert dig({"a": [{"b": 1}]}, "a.7.b") is None
    assert dig([1], "") == [1]
