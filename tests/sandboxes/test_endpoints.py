"""Questions about images and transcriptions, by a real server that checks the form of every request."""

import base64
import io
import math
import struct
import wave
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from PIL import Image

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.outside import calls
from replayground.sandboxes.outside.config import EndpointSettings
from replayground.sandboxes.outside.contract import OutsideFailed
from replayground.sandboxes.outside.endpoints import (
    WHITE_IMAGE,
    ModelEndpoint,
    SpeechSession,
    VisionSession,
    audio_type,
    image_type,
    silence,
)
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS
from tests.sandboxes.outside_rollout import http_server, rollout_of


class ModelServer:
    """Speaks as OpenAI's API does, and answers with what it understood; `status` is what it answers otherwise."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.requests = 0
        self.fails_at: bytes | None = None
        "bytes in a request at which it fails"

    async def complete(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.fails_at is not None and self.fails_at in await request.read():
            return web.Response(status=500)
        if self.status != 200:
            return web.json_response({"error": {"message": "not today", "type": "test"}}, status=self.status)
        body = await request.json()
        (message,) = body["messages"]
        assert (body["model"], message["role"], request.headers["Authorization"]) == ("eyes", "user", "Bearer s3cret")
        text, image = message["content"]
        assert (text["type"], image["type"]) == ("text", "image_url")
        head, _, data = image["image_url"]["url"].partition(",")
        picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        said = f"{text['text']} {head} {picture.width}x{picture.height} {picture.getpixel((0, 0))}"
        return web.json_response(
            {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}]}
        )

    async def transcribe(self, request: web.Request) -> web.Response:
        self.requests += 1
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        data = file.file.read()
        if self.fails_at is not None and self.fails_at in data:
            return web.Response(status=500)
        with wave.open(io.BytesIO(data)) as sound:
            seconds = sound.getnframes() / sound.getframerate()
        fields = f"{form['model']!s} {form.get('language')!s}"
        said = f" {fields} {file.filename} {file.content_type} {seconds:.1f} s "
        return web.json_response({"text": said})


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    made = ModelServer()
    routes = {"/v1/chat/completions": made.complete, "/v1/audio/transcriptions": made.transcribe}
    async with http_server(routes) as url:
        made.url = f"{url}/v1"
        yield made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("EYES_KEY", "s3cret")


def vision(server: ModelServer, **changes: object) -> ModelEndpoint:
    fields = {"url": server.url, "model": "eyes", "key_environment": "EYES_KEY"} | changes
    return ModelEndpoint(EndpointSettings(**fields), VisionSession)  # type: ignore[arg-type]


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def sound(seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as tone:
        tone.setnchannels(1)
        tone.setsampwidth(2)
        tone.setframerate(8000)
        samples = (int(8000 * math.sin(number / 4)) for number in range(int(8000 * seconds)))
        tone.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()


async def test_a_file_that_the_agent_made_is_looked_at(server: ModelServer) -> None:
    """In a real sandbox: the picture is written there by the agent's code and read through `get`."""
    endpoint = vision(server)
    tools = toolset(["python", "ask_image"], endpoint.tools.values())
    backend = BubblewrapBackend(SHIPPED | WORLD_TOOLS, first_uid=330_000)
    async with Pool(backend, size=1) as pool, Workbench(pool, tools, seed=1, owner="test") as bench:
        code = f"import os; os.mkdir('shots'); open('shots/red.png', 'wb').write({picture()!r})"
        await bench.call("python", {"code": code})
        seen = await bench.call("ask_image", {"path": "shots/red.png", "question": "Which colour?"})
        assert (seen.error_kind, seen.content) == (
            None,
            "Which colour? data:image/png;base64 30x20 (200, 10, 10)",
        )
        await bench.call("python", {"code": "os.symlink('/etc/passwd', 'link.png')"})
        link = await bench.call("ask_image", {"path": "link.png", "question": "What is it?"})
        assert (link.error_kind, "link.png cannot be read" in link.content) == ("agent", True)
    await endpoint.close()


async def test_audio_is_transcribed(server: ModelServer) -> None:
    endpoint = ModelEndpoint(EndpointSettings(url=server.url, model="ears"), SpeechSession)
    async with rollout_of(endpoint) as rollout:
        await rollout.call("transcribe_audio", path="talk.wav")  # opens the sandbox
        await rollout.sandboxes[0].put("talk.wav", sound())
        assert await rollout.text("transcribe_audio", path="talk.wav") == "ears None audio.wav audio/wav 0.5 s"
        assert "ears de audio.wav" in await rollout.text("transcribe_audio", path="talk.wav", language="de")
        await rollout.sandboxes[0].put("notes.wav", b"not sound at all")
        wrong = await rollout.call("transcribe_audio", path="notes.wav")
        assert (wrong.error_kind, "is no WAV" in wrong.content) == ("agent", True)
    await endpoint.close()


async def test_files_that_cannot_be_sent_are_the_agents_error(server: ModelServer) -> None:
    endpoint = vision(server, file_bytes_max=1000)
    async with rollout_of(endpoint) as rollout:
        missing = await rollout.call("ask_image", path="no.png", question="?")
        assert (missing.error_kind, "no.png cannot be read" in missing.content) == ("agent", True)
        await rollout.sandboxes[0].put("big.png", picture() + bytes(1000))
        assert "1000 are allowed" in await rollout.text("ask_image", path="big.png", question="?")
        await rollout.sandboxes[0].put("text.png", b"hello")
        assert "is no PNG" in await rollout.text("ask_image", path="text.png", question="?")
        await rollout.sandboxes[0].put("red.png", picture())
        assert (await rollout.call("ask_image", path="red.png", question="")).error_kind == "agent"
    assert server.requests == 0
    await endpoint.close()


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refusal_of_the_request_is_the_agents_error(server: ModelServer, status: int) -> None:
    endpoint = vision(server)
    server.status = status
    async with rollout_of(endpoint) as rollout:
        await rollout.call("ask_image", path="red.png", question="?")
        await rollout.sandboxes[0].put("red.png", picture())
        refused = await rollout.call("ask_image", path="red.png", question="?")
        assert (refused.error_kind, refused.content) == ("agent", "error: the model refused this: not today")
    assert server.requests == 1
    await endpoint.close()


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_server_that_fails_is_asked_again_and_is_an_infra_error(server: ModelServer, status: int) -> None:
    endpoint = vision(server)
    server.status = status
    async with rollout_of(endpoint) as rollout:
        await rollout.call("ask_image", path="red.png", question="?")
        await rollout.sandboxes[0].put("red.png", picture())
        with pytest.raises(OutsideFailed, match=f"chat/completions answered {status}: not today"):
            await rollout.call("ask_image", path="red.png", question="?")
    assert server.requests == calls.ATTEMPTS_MAX + 1, "and once about a picture of our own"
    await endpoint.close()


async def test_requests_that_the_agent_used_up_are_a_tool_error(server: ModelServer) -> None:
    """Else whoever asks often enough could have bad attempts repeated."""
    endpoint = vision(server)
    async with rollout_of(endpoint) as rollout:
        await rollout.call("ask_image", path="red.png", question="?")
        await rollout.sandboxes[0].put("red.png", picture())
        server.status = 429
        limited = await rollout.call("ask_image", path="red.png", question="?")
        assert (limited.error_kind, "too many requests: " in limited.content) == ("tool", True), limited.content
        # A call that fails otherwise, when the question of our own is refused because of the limit.
        server.fails_at = b"the word that ends you"
        failed = await rollout.call("ask_image", path="red.png", question="the word that ends you")
        assert (failed.error_kind, "too many requests: " in failed.content) == ("tool", True), failed.content
        server.status = 200
        assert (await rollout.call("ask_image", path="red.png", question="?")).error_kind is None
    await endpoint.close()


async def test_a_question_at_which_the_server_fails_is_a_tool_error(server: ModelServer) -> None:
    """Else whoever knows such a question could have bad attempts repeated."""
    endpoint = vision(server)
    server.fails_at = b"the word that ends you"
    async with rollout_of(endpoint) as rollout:
        await rollout.call("ask_image", path="red.png", question="?")
        await rollout.sandboxes[0].put("red.png", picture())
        failed = await rollout.call("ask_image", path="red.png", question="the word that ends you")
        assert (failed.error_kind, "answered 500" in failed.content) == ("tool", True), failed.content
        assert (await rollout.call("ask_image", path="red.png", question="?")).error_kind is None
    await endpoint.close()


async def test_a_sound_at_which_the_server_fails_is_a_tool_error(server: ModelServer) -> None:
    endpoint = ModelEndpoint(EndpointSettings(url=server.url, model="ears"), SpeechSession)
    server.fails_at = b"\x11\x22\x33\x44" * 4
    async with rollout_of(endpoint) as rollout:
        await rollout.call("transcribe_audio", path="talk.wav")
        await rollout.sandboxes[0].put("talk.wav", sound() + server.fails_at)
        failed = await rollout.call("transcribe_audio", path="talk.wav")
        assert (failed.error_kind, "answered 500" in failed.content) == ("tool", True), failed.content
    await endpoint.close()


def test_files_of_our_own_are_what_they_should_be() -> None:
    with Image.open(io.BytesIO(WHITE_IMAGE)) as image:
        assert (image.size, image.convert("RGB").getextrema()) == ((32, 32), ((255, 255),) * 3)
    with wave.open(io.BytesIO(silence())) as sound:
        assert sound.getnframes() / sound.getframerate() == 0.5


async def test_no_server_is_an_infra_error() -> None:
    endpoint = ModelEndpoint(EndpointSettings(url="http://127.0.0.1:1/v1"), VisionSession)
    async with rollout_of(endpoint) as rollout:
        await rollout.call("ask_image", path="red.png", question="?")
        await rollout.sandboxes[0].put("red.png", picture())
        with pytest.raises(OutsideFailed, match="cannot be reached"):
            await rollout.call("ask_image", path="red.png", question="?")
    await endpoint.close()


async def test_an_answer_without_a_message_is_a_tool_error() -> None:
    async def empty(request: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    async with http_server({"/v1/chat/completions": empty}) as url:
        endpoint = ModelEndpoint(EndpointSettings(url=f"{url}/v1/"), VisionSession)
        async with rollout_of(endpoint) as rollout:
            await rollout.call("ask_image", path="red.png", question="?")
            await rollout.sandboxes[0].put("red.png", picture())
            answer = await rollout.call("ask_image", path="red.png", question="?")
            assert (answer.error_kind, answer.content) == ("tool", "error: the vision model's answer has no message")
        await endpoint.close()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_images_are_known_by_their_first_bytes(form: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, form)
    assert image_type(file.getvalue()) == f"image/{form.lower()}"


def test_audio_is_known_by_its_first_bytes() -> None:
    assert audio_type(sound()) == ("wav", "audio/wav")
    assert audio_type(b"ID3\x04") == ("mp3", "audio/mpeg")
    assert audio_type(b"\xff\xfb\x90") == ("mp3", "audio/mpeg")
    assert audio_type(b"\xff\xd8\xff") is None  # a JPEG
    assert audio_type(b"") is None
