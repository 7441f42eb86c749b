"""The policy against servers that speak vLLM's generate API as it is, and as it fails."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from replayground.producers import stockroom
from replayground.producers.agent import Model
from replayground.producers.chat import ChatFormat, Message
from replayground.producers.policy import (
    ChatTeacher,
    Demonstrator,
    PolicyFailed,
    RequestRefused,
    ServedPolicy,
    TurnRequest,
    TurnTooLong,
    _Server,
    served_models,
)
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Sampling, VersionSpan
from tests.producers.field import tokenizer_json

type FinalAnswer = Callable[[dict[str, Any]], dict[str, Any] | int]


def answer(*versions: tuple[str, int, int], tokens: tuple[int, ...] = (7, 8, 4), **changes: Any) -> FinalAnswer:
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
async def server(*answers: FinalAnswer) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
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


def turn_request(required_version: int | None = None) -> TurnRequest:
    task = next(stockroom.tasks("train", 0))
    return TurnRequest(task, 1, [1, 2, 3], [], Sampling(temperature=0.7), 33, required_version)


def policy(*urls: str, patience_seconds: float = 0.0, rest_seconds: float = 1.0) -> ServedPolicy:
    return ServedPolicy(
        list(urls), 4, timeout_seconds=2.0, patience_seconds=patience_seconds, rest_seconds=rest_seconds
    )


async def test_a_turn_is_ids_logprobs_and_versions() -> None:
    async with server(answer(("3", 0, 2), ("4", 2, 3))) as (url, asked), policy(url) as served:
        turn = await served.next_turn(turn_request())
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
        (answer(("3", 0, 3), weight_versions=None), "malformed response"),
        (answer(("3", 0, 3), logprobs=None), "malformed response"),
        (answer(("3", 0, 3), token_ids=[7, 8]), "do not belong together"),
        (answer(("3", 0, 0), tokens=()), "do not belong together"),
        (answer(("3", 0, 1), logprobs={"content": [{"token_id": 7, "logprob": -9999.0}]}, token_ids=[7]), "missing"),
        (lambda body: {"choices": []}, "malformed response"),
        (lambda body: 500, "HTTP 500"),
        (lambda body: 403, "scale-out"),
        (lambda body: 400, "HTTP 400"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused(bad: FinalAnswer, says: str) -> None:
    async with server(bad) as (url, _), policy(url) as served:
        with pytest.raises(PolicyFailed, match=says):
            await served.next_turn(turn_request())


async def test_an_unverified_server_is_waited_for() -> None:
    async with server(answer(("default", 0, 3)), GOOD) as (url, asked), policy(url, patience_seconds=5.0) as served:
        assert (await served.next_turn(turn_request())).tokens == [7, 8, 4]
        assert len(asked) == 2


async def test_another_server_takes_over() -> None:
    async with server(lambda body: 500) as (bad, _), server(GOOD) as (good, asked):
        async with policy("http://127.0.0.1:9", bad, good) as served:
            for _ in range(4):
                assert (await served.next_turn(turn_request())).versions[0].version == 3
        assert len(asked) == 4


async def test_a_server_that_failed_is_left_alone_for_a_while() -> None:
    async with (
        server(lambda body: 500, GOOD) as (once, asked_once),
        server(GOOD) as (good, asked_good),
        policy(once, good, rest_seconds=3600.0) as served,
    ):
        for _ in range(5):
            await served.next_turn(turn_request())
        assert (len(asked_once), len(asked_good)) == (1, 5)


async def test_a_server_that_has_rested_has_its_share_again() -> None:
    async with (
        server(lambda body: 500, GOOD) as (once, asked_once),
        server(GOOD) as (good, _),
        policy(once, good, rest_seconds=0.0) as served,
    ):
        for _ in range(5):
            await served.next_turn(turn_request())
        assert len(asked_once) == 5


async def test_servers_that_all_rest_are_asked_all_the_same() -> None:
    async with (
        server(lambda body: 500, GOOD) as (url, asked),
        policy(url, rest_seconds=3600.0, patience_seconds=60.0) as served,
    ):
        assert (await served.next_turn(turn_request())).tokens == [7, 8, 4]
        assert len(asked) == 2


async def test_a_server_with_its_endpoint_switched_off_does_not_take_the_others_with_it() -> None:
    async with server(lambda body: 403) as (closed, _), server(GOOD) as (good, _), policy(closed, good) as served:
        assert (await served.next_turn(turn_request())).tokens == [7, 8, 4]


async def test_a_request_that_no_server_will_take_is_asked_once() -> None:
    async with (
        server(lambda body: 400) as (one, asked_one),
        server(lambda body: 400) as (two, asked_two),
        policy(one, two, patience_seconds=60.0) as served,
    ):
        with pytest.raises(PolicyFailed, match="HTTP 400"):
            await served.next_turn(turn_request())
    assert len(asked_one) + len(asked_two) == 1


async def test_a_server_that_answers_others_refuses_this_request() -> None:
    """Told from a server that was never asked rightly: there the setup is wrong, and not the context."""
    async with server(GOOD, lambda body: 400) as (url, _), policy(url) as served:
        await served.next_turn(turn_request())
        with pytest.raises(RequestRefused, match="HTTP 400"):
            await served.next_turn(turn_request())
    async with server(lambda body: 400) as (url, _), policy(url) as served:
        with pytest.raises(PolicyFailed) as failed:
            await served.next_turn(turn_request())
    assert not isinstance(failed.value, RequestRefused)


async def test_an_answer_that_broke_off_is_thrown_away_whole() -> None:
    """A server dies in the middle of its answer: the turn is another server's, once, and nothing of the first one's."""

    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(answer(("3", 0, 3), tokens=(9, 9, 9))({})).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
        await writer.drain()
        writer.close()

    dying = await asyncio.start_server(cut_off, "127.0.0.1", 0)
    port = dying.sockets[0].getsockname()[1]
    async with dying, server(GOOD) as (good, asked), policy(f"http://127.0.0.1:{port}", good) as served:
        assert (await served.next_turn(turn_request())).tokens == [7, 8, 4]
        assert len(asked) == 1


async def test_a_slow_server_is_an_infrastructure_error() -> None:
    slow: FinalAnswer = lambda body: {"sleep": 0.5, "choices": []}  # noqa: E731
    async with server(slow) as (url, _), ServedPolicy([url], 4, timeout_seconds=0.1, patience_seconds=0.0) as served:
        with pytest.raises(PolicyFailed, match="Timeout"):
            await served.next_turn(turn_request())


async def test_a_turn_without_end_is_told_from_a_server_that_does_not_answer() -> None:
    """By those that were asked for later: they came, and the server answered all the time."""
    first_is_there = asyncio.Event()

    def slow_or_not(body: dict[str, Any]) -> dict[str, Any] | int:
        if first_is_there.is_set():
            return GOOD(body)
        first_is_there.set()
        return {"sleep": 60.0}

    async with (
        server(slow_or_not) as (url, _),
        ServedPolicy([url], 4, timeout_seconds=1.0, patience_seconds=0.0) as served,
    ):
        long = asyncio.create_task(served.next_turn(turn_request()))
        await first_is_there.wait()
        while not long.done():
            await served.next_turn(turn_request())
            await asyncio.sleep(0.02)
        with pytest.raises(TurnTooLong, match="did not get to its end"):
            await long


@pytest.mark.parametrize(
    ("answered", "is_sampled"),
    [
        ((), False),
        # Those that were asked for before tell nothing: this one may have waited behind them.
        (tuple((90.0 + n, 100.0 + 5 * n) for n in range(10)), False),
        (tuple((101.0, 100.0 + 5 * n) for n in range(1, 12)), True),
        # The first of those came too late: half of the time this one may have waited.
        (tuple((101.0, 140.0 + 5 * n) for n in range(4)), False),
        # The server paused in between.
        (((101.0, 110.0), (102.0, 120.0), (103.0, 150.0), (104.0, 155.0)), False),
        # And at the end.
        (((101.0, 110.0), (102.0, 120.0), (103.0, 130.0), (104.0, 140.0)), False),
    ],
)
def test_what_other_turns_tell_of_one_that_has_not_come(
    answered: tuple[tuple[float, float], ...], is_sampled: bool
) -> None:
    one = _Server("http://127.0.0.1:9", answered=deque(answered))
    assert one.has_sampled(100.0, 160.0) == is_sampled


async def test_no_server_at_all() -> None:
    async with policy() as served:
        with pytest.raises(PolicyFailed, match="servers"):
            await served.next_turn(turn_request())


async def test_the_least_loaded_server_is_asked() -> None:
    def waiting(body: dict[str, Any]) -> dict[str, Any] | int:
        return {**GOOD(body), "sleep": 0.05}  # type: ignore[dict-item]

    async with server(waiting) as (one, asked_one), server(waiting) as (two, asked_two), policy(one, two) as served:
        await asyncio.gather(*(served.next_turn(turn_request()) for _ in range(20)))
    assert len(asked_one) == len(asked_two) == 10


async def test_the_server_that_serves_the_required_version_is_preferred() -> None:
    of_three, of_four = answer(("3", 0, 3)), answer(("4", 0, 3))
    async with server(of_three) as (three, _), server(of_four) as (four, _), policy(three, four) as served:
        await asyncio.gather(*(served.next_turn(turn_request()) for _ in range(2)))
        for version in (3, 4, 4, 3):
            assert (await served.next_turn(turn_request(version))).versions[0].version == version


@asynccontextmanager
async def chat_server(
    *answers: dict[str, Any] | int,
) -> AsyncIterator[tuple[str, list[tuple[dict[str, Any], str | None]]]]:
    """A server with OpenAI's chat endpoint that gives these answers, the last one for ever."""
    asked: list[tuple[dict[str, Any], str | None]] = []
    rest = list(answers)

    async def complete(received: web.Request) -> web.Response:
        asked.append((await received.json(), received.headers.get("Authorization")))
        given = rest.pop(0) if len(rest) > 1 else rest[0]
        if isinstance(given, int):
            return web.json_response({"error": {"message": "no"}}, status=given)
        return web.json_response(given)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def completion(content: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    """What such servers answer."""
    message = {"role": "assistant", "content": content, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 9}}


CHAT = ChatFormat(tokenizer_json())
SAID = (
    Message("system", "Tools: python"),
    Message("user", "What is 5*9?"),
    Message("assistant", "<tool_call>…</tool_call>"),
    Message("tool", "45"),
)


def teacher(*urls: str, patience_seconds: float = 0.0, key: str | None = None) -> ChatTeacher:
    return ChatTeacher(urls, "big-model", CHAT, key=key, timeout_seconds=10.0, patience_seconds=patience_seconds)


def of_said(tokens_max: int = 100) -> TurnRequest:
    return replace(turn_request(), messages=SAID, tokens_max=tokens_max)


async def test_a_model_without_ids_is_spoken_to_in_text_and_its_turn_is_a_teachers() -> None:
    async with chat_server(completion("<answer>45</answer>")) as (url, asked), teacher(url, key="secret") as big:
        turn = await big.next_turn(of_said())
    assert CHAT.decode(turn.tokens) == "<answer>45</answer>"
    assert turn.tokens[-1] == CHAT.end
    assert (turn.logprobs, turn.versions, turn.finish_reason) == ([], [], "stop")
    ((body, authorization),) = asked
    assert authorization == "Bearer secret"
    assert body["messages"] == [
        {"role": "system", "content": "Tools: python"},
        {"role": "user", "content": "What is 5*9?"},
        {"role": "assistant", "content": "<tool_call>…</tool_call>"},
        {"role": "user", "content": "<tool_response>45</tool_response>"},
    ]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big-model", 0.7, 100)


async def test_a_turn_of_a_model_that_was_cut_off_has_no_end() -> None:
    async with chat_server(completion("<answer>4", "length")) as (url, _), teacher(url) as big:
        turn = await big.next_turn(of_said())
    assert (CHAT.decode(turn.tokens), turn.finish_reason) == ("<answer>4", "length")
    assert turn.tokens[-1] != CHAT.end


async def test_a_turn_that_is_longer_here_than_there_is_cut() -> None:
    async with chat_server(completion("<answer>" + "9" * 50 + "</answer>")) as (url, _), teacher(url) as big:
        turn = await big.next_turn(of_said(tokens_max=10))
    assert (len(turn.tokens), turn.finish_reason) == (10, "length")


async def test_a_busy_model_is_asked_again_and_a_silent_one_is_an_infrastructure_error() -> None:
    async with chat_server(429, 503, completion("ok")) as (url, asked), teacher(url, patience_seconds=60.0) as big:
        assert CHAT.decode((await big.next_turn(of_said())).tokens) == "ok"
        assert len(asked) == 3
    answers: list[dict[str, Any]] = [completion(None), completion(""), {"choices": []}, {}]
    for silent in answers:
        async with chat_server(silent) as (url, _), teacher(url) as big:
            with pytest.raises(PolicyFailed, match=r"empty turn|malformed response"):
                await big.next_turn(of_said())


async def test_another_server_of_the_model_takes_over() -> None:
    async with chat_server(500) as (bad, _), chat_server(completion("ok")) as (good, asked), teacher(bad, good) as big:
        for _ in range(3):
            await big.next_turn(of_said())
    assert len(asked) == 3


async def test_a_key_comes_from_the_environment_and_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat_server(completion("ok")) as (url, asked):
        model = Model(name="big", servers=(url,), served_name="b", key_variable="REPLAYGROUND_TEST_KEY")
        monkeypatch.delenv("REPLAYGROUND_TEST_KEY", raising=False)
        with pytest.raises(BadInput, match="REPLAYGROUND_TEST_KEY"):
            async with served_models({"big": model}, CHAT):
                pass
        monkeypatch.setenv("REPLAYGROUND_TEST_KEY", "k")
        async with served_models({"big": model}, CHAT) as models:
            await models["big"].next_turn(of_said())
    assert asked[0][1] == "Bearer k"


async def test_a_teachers_turn_has_no_logprobs_and_no_version() -> None:
    chat = ChatFormat(tokenizer_json())
    teacher = Demonstrator(lambda task, turns, seed: f"<answer>{seed}</answer>", chat)
    turn = await teacher.next_turn(turn_request())
    assert chat.decode(turn.tokens) == "<answer>1</answer>"
    assert turn.tokens[-1] == chat.end
    assert (turn.logprobs, turn.versions) == ([], [])
