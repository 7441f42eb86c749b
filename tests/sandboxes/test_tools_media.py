"""Pictures and sound: drawn by Pillow, spoken by flite, understood in the sandbox by tesseract and pocketsphinx."""

import subprocess
import wave
from io import BytesIO
from pathlib import Path

import pytest
import soundfile
from PIL import Image, ImageDraw, ImageFont

from replayground.sandboxes.protocol import Sandbox
from tests.sandboxes.conftest import Call

SENTENCE = "please send the report to the office"


def picture(text: str, form: str) -> bytes:
    image = Image.new("RGB", (420, 120), "white")
    ImageDraw.Draw(image).text((10, 40), text, fill="black", font=ImageFont.load_default(24))
    data = BytesIO()
    image.save(data, form, dpi=(96, 96))
    return data.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
async def test_image(call: Call, equipped_sandbox: Sandbox, form: str) -> None:
    data = picture("Invoice 4711: total 95 EUR", form)
    await equipped_sandbox.put("scan.img", data)
    assert (await call("image_info", path="scan.img")).content == (
        f"{form}, 420 x 120 pixels, RGB, {len(data)} bytes, 96 dots per inch"
    )
    assert (await call("image_text", path="scan.img")).content == "Invoice 4711: total 95 EUR"


async def test_image_box_and_blank(call: Call, equipped_sandbox: Sandbox) -> None:
    await equipped_sandbox.put("scan.png", picture("Invoice        total", "PNG"))
    assert (await call("image_text", path="scan.png", box=[0, 20, 120, 90])).content == "Invoice"
    assert (await call("image_text", path="scan.png", box=[0, 0, 420, 30])).content == "[no text was found]"


@pytest.mark.parametrize(
    ("tool", "arguments", "content"),
    [
        ("image_info", {"path": "scna.png"}, "no file 'scna.png'; did you mean 'scan.png'?"),
        ("image_info", {"path": "notes.txt"}, "notes.txt is not a picture of a known format"),
        ("image_text", {"path": "half.png"}, "half.png is damaged: "),
        (
            "image_text",
            {"path": "scan.png", "box": [0, 0, 500, 10]},
            "box is left, top, right, bottom inside the picture; ",
        ),
        ("image_info", {"path": "bomb.png"}, "bomb.png has more than 40000000 pixels: 10000 x 10000"),
    ],
)
async def test_image_errors_help(
    call: Call, equipped_sandbox: Sandbox, tool: str, arguments: dict[str, object], content: str
) -> None:
    data = picture("text", "PNG")
    bomb = BytesIO()
    Image.new("1", (10_000, 10_000)).save(bomb, "PNG")
    for path, written in {
        "scan.png": data,
        "half.png": data[:-600],
        "bomb.png": bomb.getvalue(),
        "notes.txt": b"a",
    }.items():
        await equipped_sandbox.put(path, written)
    result = await call(tool, **arguments)
    assert result.content.startswith(f"error: {content}")
    assert result.error_kind == "agent"


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("speech") / "speech.wav"
    subprocess.run(["flite", "-voice", "rms", "-t", SENTENCE, "-o", str(path)], check=True, timeout=60)
    return path.read_bytes()


def resampled(speech: bytes, rate: int) -> bytes:
    """The same sound in stereo at another rate, each frame taken from the nearest one."""
    with wave.open(BytesIO(speech)) as source:
        frames, old_rate = source.readframes(source.getnframes()), source.getframerate()
    count = len(frames) // 2 * rate // old_rate
    nearest = (frames[place : place + 2] * 2 for place in (2 * (n * old_rate // rate) for n in range(count)))
    data = BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"".join(nearest))
    return data.getvalue()


async def test_audio_is_understood(call: Call, equipped_sandbox: Sandbox, speech: bytes) -> None:
    await equipped_sandbox.put("speech.wav", speech)
    info = (await call("audio_info", path="speech.wav")).content
    assert info.startswith("wav, 2.")
    assert info.endswith(f" seconds, 16000 Hz, mono, 16 bit, {len(speech)} bytes")
    result = await call("audio_text", path="speech.wav")
    assert (result.is_error, result.content.partition(": ")[2]) == (False, SENTENCE)


async def test_audio_of_another_rate_is_resampled(call: Call, equipped_sandbox: Sandbox, speech: bytes) -> None:
    await equipped_sandbox.put("speech.wav", resampled(speech, 44_100))
    assert "44100 Hz, stereo" in (await call("audio_info", path="speech.wav")).content
    assert SENTENCE in (await call("audio_text", path="speech.wav")).content


@pytest.mark.parametrize(("form", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
async def test_audio_formats(call: Call, equipped_sandbox: Sandbox, speech: bytes, form: str, subtype: str) -> None:
    samples, rate = soundfile.read(BytesIO(speech))
    data = BytesIO()
    soundfile.write(data, samples, rate, format=form, subtype=subtype)
    await equipped_sandbox.put("speech.bin", data.getvalue())  # the name tells nothing
    assert (await call("audio_info", path="speech.bin")).content.startswith(f"{form.lower()}, 2.")
    await call("audio_trim", path="speech.bin", start_seconds=0, end_seconds=9, save_as="speech.wav")
    if form == "FLAC":
        assert await equipped_sandbox.get("speech.wav") == speech
    else:  # what is lost makes no difference to what is understood
        assert SENTENCE in (await call("audio_text", path="speech.wav")).content


async def test_audio_trim(call: Call, equipped_sandbox: Sandbox, speech: bytes) -> None:
    await equipped_sandbox.put("speech.wav", speech)
    result = await call("audio_trim", path="speech.wav", start_seconds=0.5, end_seconds=1.25, save_as="cut/part.wav")
    assert result.content == "wrote seconds 0.5 to 1.25 of speech.wav to cut/part.wav"
    with wave.open(BytesIO(speech)) as whole, wave.open(BytesIO(await equipped_sandbox.get("cut/part.wav"))) as part:
        assert part.getparams()[:3] == whole.getparams()[:3]
        whole.setpos(8000)
        assert part.readframes(12_000) == whole.readframes(12_000)
        assert part.readframes(1) == b""


async def test_long_audio_goes_on(call: Call, equipped_sandbox: Sandbox, tmp_path: Path) -> None:
    data = BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8_000)
        file.writeframes(bytes(2 * 8_000 * 70))
    await equipped_sandbox.put("silence.wav", data.getvalue())
    assert (await call("audio_text", path="silence.wav")).content == (
        "[no speech was found]\n[go on with start_seconds=60.0 of 70.0]"
    )
    assert (await call("audio_text", path="silence.wav", start_seconds=60)).content == "[no speech was found]"


@pytest.mark.parametrize(
    ("tool", "arguments", "content"),
    [
        ("audio_info", {"path": "notes.txt"}, "notes.txt is not a wav, mp3, flac or ogg file"),
        ("audio_info", {"path": "broken.wav"}, "broken.wav is damaged, or not a wav file that can be read"),
        ("audio_text", {"path": "speech.wav", "start_seconds": 9}, "the part must lie inside speech.wav, which is 2."),
        ("audio_text", {"path": "speech.wav", "end_seconds": -1}, "the part must lie inside speech.wav"),
        (
            "audio_trim",
            {"path": "speech.wav", "start_seconds": 0, "end_seconds": 1, "save_as": "part.mp3"},
            "'part.mp3' must end in .wav",
        ),
    ],
)
async def test_audio_errors_help(
    call: Call, equipped_sandbox: Sandbox, speech: bytes, tool: str, arguments: dict[str, object], content: str
) -> None:
    for path, written in {"speech.wav": speech, "broken.wav": b"RIFF....", "notes.txt": b"a"}.items():
        await equipped_sandbox.put(path, written)
    result = await call(tool, **arguments)
    assert result.content.startswith(f"error: {content}")
    assert result.error_kind == "agent"
