"""The tools `ask_image` and `transcribe_audio`: a file of the agent's sandbox is sent to an OpenAI-compatible endpoint.

The file is read through the sandbox's own `get`, which follows no links, and its type is decided by its first bytes.
The tools change nothing, so a request that failed is repeated a few times.

Status codes about the request (400, 413, 415, 422) are agent errors, since the agent chose the file. After any other
failure (a wrong key, an unknown model, a server that is down) the server is asked about a file of our own: it is an
infra error if that fails too, and otherwise the agent's file or question was at fault. A server that has had too many
requests (429) is a tool error.

Not covered: what the endpoint does with the file. The file leaves this machine if the endpoint is elsewhere.
"""

import base64
import io
import os
import wave
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from replayground.sandboxes.outside.config import EndpointSettings
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
from replayground.sandboxes.tools.tool import ToolError

# Added to the HTTP timeout: that is an infra error, while the timeout of a call is a tool error.
CALL_GRACE_SECONDS = 15.0
REFUSED_AS_ASKED = frozenset({400, 413, 415, 422})
COMPLAINT_CHARACTERS_MAX = 300
QUESTION_CHARACTERS_MAX = 4000
WHITE_IMAGE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAGElEQVR42mP8z4AfMDGMKhhVMKpghCoAAKM9AT8q/1PbAAAAAElFTkSuQmCC"
)
"a PNG of 32 by 32 pixels: some vision models refuse smaller ones"


class ModelEndpoint:
    """The provider of one tool that a model server runs."""

    def __init__(self, settings: EndpointSettings, session: "type[VisionSession] | type[SpeechSession]") -> None:
        if settings.url is None:
            raise ValueError("an endpoint needs a url, such as http://127.0.0.1:8001/v1")
        self.settings = settings
        self._session = session
        key = os.environ.get(settings.key_environment, "") if settings.key_environment is not None else ""
        self._client = httpx.AsyncClient(
            base_url=settings.url.rstrip("/") + "/",
            timeout=settings.timeout_seconds,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        timeout_seconds = settings.timeout_seconds + CALL_GRACE_SECONDS
        self.tools: Mapping[str, OutsideTool] = method_tools(session, self, session.family, timeout_seconds)

    async def start(self) -> None:
        """Does nothing: the server may start later than this program."""

    async def open(self, rollout_handle: RolloutHandle) -> "VisionSession | SpeechSession":
        return self._session(self, rollout_handle)

    async def prove_health(self) -> None:
        """Ask about a file of our own. Raises OutsideFailed unless the server answers with success."""
        try:
            await self._session.ask_for_proof(self)
        except ToolError as error:
            raise OutsideFailed(f"the model server refuses a file of our own: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, path: str, **content: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response. Raises ToolError or OutsideFailed by status code,
        and ToolFailed for a malformed response."""
        try:
            response = await self._client.post(path, **content)
        except httpx.TimeoutException as error:
            raise OutsideFailed(f"{path} did not answer in {self.settings.timeout_seconds:g} s") from error
        except httpx.HTTPError as error:
            raise OutsideFailed(f"{path} cannot be reached: {error!r}") from error
        if response.status_code in REFUSED_AS_ASKED:
            raise ToolError(f"the model refused this: {complaint_in(response)}")
        if not response.is_success:
            kind = RateLimited if response.status_code == httpx.codes.TOO_MANY_REQUESTS else OutsideFailed
            raise kind(f"{path} answered {response.status_code}: {complaint_in(response)}")
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ToolFailed(f"the model's answer is no JSON object: {error}") from error


class FileSession(MethodSession):
    """A tool session that reads files of the sandbox."""

    def __init__(self, endpoint: ModelEndpoint, rollout_handle: RolloutHandle) -> None:
        self._endpoint = endpoint
        self._settings = endpoint.settings
        self._rollout_handle = rollout_handle

    async def close(self) -> None:
        """Nothing is held."""

    async def _file(self, path: str) -> bytes:
        try:
            data = await self._rollout_handle.get_file(path)
        except OSError as error:
            raise ToolError(f"{path} cannot be read: {error.strerror or error}") from None
        if len(data) > self._settings.file_bytes_max:
            raise ToolError(f"{path} has {len(data)} bytes; {self._settings.file_bytes_max} are allowed")
        return data


class VisionSession(FileSession):
    """Questions about images."""

    family = "ask_image"

    @tool_method(is_idempotent=True)
    async def ask_image(self, path: str, question: str) -> ToolOutput:
        """Ask a question about an image file. A vision model looks at it and answers.

        path: the file, PNG, JPEG, GIF or WebP
        question: what to find out, for example: What does the sign say?
        """
        if not 0 < len(question) <= QUESTION_CHARACTERS_MAX:
            raise ToolError(f"a question has between 1 and {QUESTION_CHARACTERS_MAX} characters")
        data = await self._file(path)
        media_type = image_type(data)
        if media_type is None:
            raise ToolError(f"{path} is no PNG, JPEG, GIF or WebP image")
        request = question_about(data, media_type, question, self._settings)
        answer = await self._endpoint.post("chat/completions", json=request)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ToolFailed("the vision model's answer has no message") from None
        return ToolOutput(str(text or "").strip())

    @staticmethod
    async def ask_for_proof(endpoint: ModelEndpoint) -> None:
        request = question_about(WHITE_IMAGE, "image/png", "Which colour is this?", endpoint.settings)
        await endpoint.post("chat/completions", json=request)


class SpeechSession(FileSession):
    """Transcriptions of speech."""

    family = "transcribe_audio"

    @tool_method(is_idempotent=True)
    async def transcribe_audio(self, path: str, language: str | None = None) -> ToolOutput:
        """Write down what is said in an audio file. A speech model listens to it.

        path: the file, WAV, MP3, FLAC, OGG, M4A or WebM
        language: two letters, for example en, if it is known
        """
        data = await self._file(path)
        kind = audio_type(data)
        if kind is None:
            raise ToolError(f"{path} is no WAV, MP3, FLAC, OGG, M4A or WebM audio")
        answer = await self._endpoint.post("audio/transcriptions", **recording(data, kind, language, self._settings))
        if not isinstance(answer.get("text"), str):
            raise ToolFailed("the speech model's answer has no text")
        return ToolOutput(answer["text"].strip())

    @staticmethod
    async def ask_for_proof(endpoint: ModelEndpoint) -> None:
        content = recording(silence(), ("wav", "audio/wav"), None, endpoint.settings)
        await endpoint.post("audio/transcriptions", **content)


def question_about(data: bytes, media_type: str, question: str, settings: EndpointSettings) -> dict[str, Any]:
    """The body of a chat completion about one image."""
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    return {
        "model": settings.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": settings.answer_tokens_max,
        "temperature": 0,
    }


def recording(data: bytes, kind: tuple[str, str], language: str | None, settings: EndpointSettings) -> dict[str, Any]:
    """The fields and the file of a request for a transcription."""
    fields = {"model": settings.model, "response_format": "json"}
    if language is not None:
        fields["language"] = language
    # Some servers take the format from the file name. The agent's own file name is not sent.
    return {"data": fields, "files": {"file": (f"audio.{kind[0]}", data, kind[1])}}


def silence() -> bytes:
    """Half a second of silence as WAV."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", "not compressed"))
        sound.writeframes(bytes(16_000))
    return file.getvalue()


def image_type(data: bytes) -> str | None:
    """The media type by the first bytes; None if it is not a supported image."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def audio_type(data: bytes) -> tuple[str, str] | None:
    """The file extension and media type by the first bytes; None if it is not supported audio."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav", "audio/wav"
    # An ID3 tag, or the sync word of an MPEG audio frame of layer III.
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2):
        return "mp3", "audio/mpeg"
    if data[:4] == b"fLaC":
        return "flac", "audio/flac"
    if data[:4] == b"OggS":
        return "ogg", "audio/ogg"
    if data[4:8] == b"ftyp":
        return "m4a", "audio/mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm", "audio/webm"
    return None


def complaint_in(response: httpx.Response) -> str:
    """The error message in a response, shortened. OpenAI's form is {"error": {"message": …}}."""
    try:
        body = msgspec.json.decode(response.content)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
    except msgspec.DecodeError:
        text = response.text
    return " ".join(str(text).split())[:COMPLAINT_CHARACTERS_MAX]
