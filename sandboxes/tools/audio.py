"""The tools `audio_info`, `audio_trim` and `audio_text`: sound files, by miniaudio, and offline speech recognition, by
pocketsphinx with its English model.

Reads WAV, MP3, FLAC and Ogg Vorbis, writes WAV. Not covered: other languages, several speakers at once, music, and
punctuation; a word that the model does not know comes out as another one that sounds alike.
"""

from collections.abc import Iterator
from typing import Any

from replayground.sandboxes.tools.paths import existing_file, replace_file, work_path
from replayground.sandboxes.tools.tool import ToolError, tool

TRANSCRIBED_SECONDS_MAX = 60.0
# A long stretch of speech is recognised in pieces, so that what is done is kept when the CPU time runs out.
PIECE_SECONDS_MAX = 10.0
WRITTEN_BYTES_MAX = 16 * 1024 * 1024
# The sample rate that the model of pocketsphinx expects.
SPEECH_RATE = 16_000
BEGINNINGS = {
    "wav": (b"RIFF",),
    "ogg": (b"OggS",),
    "flac": (b"fLaC",),
    "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"),
}


@tool(needs=frozenset({"files"}))
def audio_info(path: str) -> str:
    """Tell the format, length, sample rate and channels of a sound file.

    path: a wav, mp3, flac or ogg file, relative to /work
    """
    import os

    kind, info = sound_info(path)
    channels = {1: "mono", 2: "stereo"}.get(info.nchannels, f"{info.nchannels} channels")
    size = os.path.getsize(existing_file(path))
    return f"{kind}, {info.duration:.2f} seconds, {info.sample_rate} Hz, {channels}, {8 * info.sample_width} bit, {size} bytes"


@tool(needs=frozenset({"files"}), call_timeout_seconds=60.0)
def audio_trim(path: str, start_seconds: float, end_seconds: float, save_as: str) -> str:
    """Cut a part out of a sound file and save it as WAV with the same sample rate and channels.

    path: a wav, mp3, flac or ogg file, relative to /work
    start_seconds: where the part begins
    end_seconds: where it ends
    save_as: the new file, for example part.wav
    """
    import io
    import wave

    _, info = sound_info(path)
    start, end = checked_part(path, info, start_seconds, end_seconds)
    # Checked before decoding, since the whole part is held in memory. 2 bytes a sample.
    if (end - start) * info.sample_rate * info.nchannels * 2 > WRITTEN_BYTES_MAX:
        raise ToolError(f"the part would be longer than {WRITTEN_BYTES_MAX} bytes: cut out less")
    if not save_as.endswith(".wav"):
        raise ToolError(f"{save_as!r} must end in .wav")
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(info.nchannels)
        file.setsampwidth(2)
        file.setframerate(info.sample_rate)
        file.writeframes(samples(path, info.nchannels, info.sample_rate, start, end))
    replace_file(work_path(save_as), data.getvalue())
    return f"wrote seconds {start:g} to {end:g} of {path} to {save_as}"


@tool(needs=frozenset({"files"}), call_timeout_seconds=120.0)
def audio_text(path: str, start_seconds: float = 0.0, end_seconds: float | None = None) -> str:
    """Write down the English speech in a sound file: one line an utterance, with its seconds. At most a minute at once.

    path: a wav, mp3, flac or ogg file, relative to /work
    start_seconds: where to begin
    end_seconds: where to end; the default is the end of the file, or a minute on
    """
    _, info = sound_info(path)
    wanted = min(start_seconds + TRANSCRIBED_SECONDS_MAX, info.duration) if end_seconds is None else end_seconds
    start, end = checked_part(path, info, start_seconds, wanted)
    if end - start > TRANSCRIBED_SECONDS_MAX:
        raise ToolError(
            f"at most {TRANSCRIBED_SECONDS_MAX:g} seconds at once: end at {start + TRANSCRIBED_SECONDS_MAX:g}"
        )
    utterances, is_whole = understood(samples(path, 1, SPEECH_RATE, start, end))
    lines = [
        f"{start + begin:.1f}-{min(start + stop, end):.1f}: {text or '(not understood)'}"
        for begin, stop, text in utterances
    ]
    reached = end if is_whole else start + (utterances[-1][1] if utterances else 0.0)
    if not lines and is_whole:
        lines.append("[no speech was found]")
    if (reached < info.duration - 0.1 and end_seconds is None) or not is_whole:
        why = "" if is_whole else "the computing time was used up; "
        lines.append(f"[{why}go on with start_seconds={reached:.1f} of {info.duration:.1f}]")
    return "\n".join(lines)


def sound_info(path: str) -> tuple[str, Any]:
    """The format and what miniaudio tells about the file. ToolError when it is not a sound file."""
    import miniaudio

    absolute = existing_file(path)
    with open(absolute, "rb") as file:
        beginning = file.read(4)
    # By the first bytes: the extension may be wrong or missing.
    kind = next((kind for kind, beginnings in BEGINNINGS.items() if beginning.startswith(beginnings)), None)
    if kind is None:
        raise ToolError(f"{path} is not a wav, mp3, flac or ogg file")
    read = {
        "wav": miniaudio.wav_get_file_info,
        "ogg": miniaudio.vorbis_get_file_info,
        "flac": miniaudio.flac_get_file_info,
        "mp3": miniaudio.mp3_get_file_info,
    }[kind]
    try:
        return kind, read(absolute)
    except miniaudio.DecodeError as error:
        raise ToolError(f"{path} is damaged, or not a {kind} file that can be read: {error}") from None


def checked_part(path: str, info: Any, start_seconds: float, end_seconds: float) -> tuple[float, float]:
    if not 0 <= start_seconds < end_seconds or start_seconds >= info.duration:
        raise ToolError(f"the part must lie inside {path}, which is {info.duration:.2f} seconds long")
    return float(start_seconds), min(float(end_seconds), info.duration)


def samples(path: str, channels: int, rate: int, start: float, end: float) -> bytes:
    """The part as 16-bit samples, with this number of channels and this sample rate."""
    import miniaudio

    wanted_bytes = round((end - start) * rate) * channels * 2
    gathered = bytearray()
    try:
        stream = miniaudio.stream_file(
            existing_file(path),
            nchannels=channels,
            sample_rate=rate,
            frames_to_read=rate,
            seek_frame=round(start * rate),
        )
        for piece in stream:
            gathered += piece.tobytes()
            # Decodes no further than needed.
            if len(gathered) >= wanted_bytes:
                break
    except miniaudio.DecodeError as error:
        raise ToolError(f"{path} cannot be decoded: {error}") from None
    return bytes(gathered[:wanted_bytes])


def understood(speech: bytes) -> tuple[list[tuple[float, float, str]], bool]:
    """Recognised utterances, and whether they are complete. RuntimeError when recognition fails."""
    import json
    import os

    reading, writing = os.pipe()
    try:
        # A separate process: RLIMIT_CPU counts per process, so a long recognition does not end the tool process, and
        # what it wrote before it ran out of CPU time is kept.
        child = os.fork()
    except OSError as error:
        raise ToolError(f"no process could be started: {error.strerror}") from None
    if child == 0:
        try:
            with open(writing, "w", encoding="utf-8") as pipe:
                for utterance in recognise(speech):
                    print(json.dumps(utterance), file=pipe, flush=True)
            os._exit(0)
        finally:
            # Also after an exception: the child must not return into the tool.
            os._exit(1)
    # Or the pipe would never reach its end.
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        utterances = [tuple(json.loads(line)) for line in pipe]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # Negative: killed by a signal, normally SIGXCPU; the result is then incomplete but useful.
    if code > 0:
        raise RuntimeError("speech recognition failed")
    return utterances, code == 0


def recognise(speech: bytes) -> Iterator[tuple[float, float, str]]:
    """Begin, end and text of each stretch of speech; a long stretch is split into pieces."""
    import io

    from pocketsphinx import Decoder, Segmenter

    decoder = Decoder(samprate=SPEECH_RATE, loglevel="FATAL")
    piece_bytes = int(PIECE_SECONDS_MAX * SPEECH_RATE) * 2
    # Half a second of silence, so that the last stretch has an end.
    silence = bytes(SPEECH_RATE)
    for segment in Segmenter(sample_rate=SPEECH_RATE).segment(io.BytesIO(speech + silence)):
        for offset in range(0, len(segment.pcm), piece_bytes):
            piece = segment.pcm[offset : offset + piece_bytes]
            decoder.start_utt()
            decoder.process_raw(piece, full_utt=True)
            decoder.end_utt()
            begin = segment.start_time + offset / SPEECH_RATE / 2
            hypothesis = decoder.hyp()
            yield begin, begin + len(piece) / SPEECH_RATE / 2, hypothesis.hypstr if hypothesis else ""
