"""The policy against servers that speak vLLM's generate API as it is, and as it fails."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from producers import stockroom
from producers.agent import ChatFormat
from producers.policy import Demonstrator, Moment, PolicyFailed, ServedPolicy
from schemas.events import Sampling, VersionSpan
from tests.producers.field import tokenizer_json

type Answer = Callable[[dict[str, Any]], dict[str, Any] | int]


def answer(*versions: tuple[str, int, int], tokens: tuple[int, ...] = (7, 8, 4), **changes: Any) -> Answer:
    """What vLLM 0.32 answers."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 4,
        "token_ids": list(tokens),
        "logprobs": {
            "content": [{"token_id": token, "logprob": -0.1 * token, "rank": 1, "top_logprobs": []} for token in tokens]
        },
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in versions],
        "routed_experts": None,
    }
    return lambda body: {"request_id": "r", "choices": [choice | changes], "usage": None}


GOOD = answer(("3", 0, 3))


@asynccontextmanager
async def server(*answers: Answer) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these answers, the last one for ever. A whole number is an HTTP status."""
    asked: list[dict[str, Any]] = []
    rest = list(answers)

    async def generate(received: web.Request) -> web.Response:
        asked.append(await received.json())
        given = (rest.pop(0) if len(rest) > 1 else rest[0])(asked[-1])
        if isinstance(given, int):
            return web.json_response({"error": {"message": "no"}}, status=given)
        await asyncio.sleep(given.pop("sleep", 0))
        return web.Response(body=json.dumps(given), content_type="application/json")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


def moment(required_version: int | None = None) -> Moment:
    task = next(stockroom.tasks("train", 0))
    return Moment(task, 1, [1, 2, 3], [], Sampling(temperature=0.7), 33, required_version)


def policy(*urls: str, patience_seconds: float = 0.0) -> ServedPolicy:
    return ServedPolicy(list(urls), 4, timeout_seconds=2.0, patience_seconds=patience_seconds)


async def test_a_turn_is_ids_logprobs_and_versions() -> None:
    async with server(answer(("3", 0, 2), ("4", 2, 3))) as (url, asked), policy(url) as served:
        turn = await served.next_turn(moment())
    assert turn.tokens == [7, 8, 4]
    assert turn.logprobs == pytest.approx([-0.7, -0.8, -0.4])
    assert turn.versions == [VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3)]
    assert asked[0]["token_ids"] == [1, 2, 3]
    assert asked[0]["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "max_tokens": 33,
        "stop_token_ids": [4],
        "logprobs": 0,
        "detokenize": False,
    }


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (answer(("default", 0, 3)), "not verified"),
        (answer(), "do not cover"),
        (answer(("3", 0, 2)), "do not cover"),
        (answer(("3", 1, 3)), "do not cover"),
        (answer(("3", 0, 3), finish_reason="abort"), "abort"),
        (answer(("3", 0, 3), weight_versions=None), "an answer that is none"),
        (answer(("3", 0, 3), logprobs=None), "an answer that is none"),
        (answer(("3", 0, 3), token_ids=[7, 8]), "do not belong together"),
        (answer(("3", 0, 0), tokens=()), "do not belong together"),
        (answer(("3", 0, 1), logprobs={"content": [{"token_id": 7, "logprob": -9999.0}]}, token_ids=[7]), "missing"),
        (lambda body: {"choices": []}, "an answer that is none"),
        (lambda body: 500, "HTTP 500"),
        (lambda body: 403, "scale-out"),
        (lambda body: 400, "HTTP 400"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused(bad: Answer, says: str) -> None:
    async with server(bad) as (url, _), policy(url) as served:
        with pytest.raises(PolicyFailed, match=says):
            await served.next_turn(moment())


async def test_an_unverified_server_is_waited_for() -> None:
    async with server(answer(("default", 0, 3)), GOOD) as (url, asked), policy(url, patience_seconds=5.0) as served:
        assert (await served.next_turn(moment())).tokens == [7, 8, 4]
        assert len(asked) == 2


async def test_another_server_takes_over() -> None:
    async with server(lambda body: 500) as (bad, _), server(GOOD) as (good, asked):
        async with policy("http://127.0.0.1:9", bad, good) as served:
            for _ in range(4):
                assert (await served.next_turn(moment())).versions[0].version == 3
        assert len(asked) == 4


async def test_a_slow_server_is_an_infrastructure_error() -> None:
    slow: Answer = lambda body: {"sleep": 0.5, "choices": []}  # noqa: E731
    async with server(slow) as (url, _), ServedPolicy([url], 4, timeout_seconds=0.1, patience_seconds=0.0) as served:
        with pytest.raises(PolicyFailed, match="Timeout"):
            await served.next_turn(moment())


async def test_no_server_at_all() -> None:
    async with policy() as served:
        with pytest.raises(PolicyFailed, match="servers"):
            await served.next_turn(moment())


async def test_the_least_loaded_server_is_asked() -> None:
    def waiting(body: dict[str, Any]) -> dict[str, Any] | int:
        return {**GOOD(body), "sleep": 0.05}  # type: ignore[dict-item]

    async with server(waiting) as (one, asked_one), server(waiting) as (two, asked_two), policy(one, two) as served:
        await asyncio.gather(*(served.next_turn(moment()) for _ in range(20)))
    assert len(asked_one) == len(asked_two) == 10


async def test_the_server_that_serves_the_required_version_is_preferred() -> None:
    of_three, of_four = answer(("3", 0, 3)), answer(("4", 0, 3))
    async with server(of_three) as (three, _), server(of_four) as (four, _), policy(three, four) as served:
        await asyncio.gather(*(served.next_turn(moment()) for _ in range(2)))
        for version in (3, 4, 4, 3):
            assert (await served.next_turn(moment(version))).versions[0].version == version


async def test_a_teachers_turn_has_no_logprobs_and_no_version() -> None:
    chat = ChatFormat(tokenizer_json())
    teacher = Demonstrator(lambda task, turns, seed: f"<answer>{seed}</answer>", chat)
    turn = await teacher.next_turn(moment())
    assert chat.decode(turn.tokens) == "<answer>1</answer>"
    assert turn.tokens[-1] == chat.end
    assert (turn.logprobs, turn.versions) == ([], [])
