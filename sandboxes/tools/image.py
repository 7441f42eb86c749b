"""The tools `image_info` and `image_text`: format and size of a picture, and the text in it, by Pillow and tesseract.

Formats: PNG, JPEG, GIF, WebP, BMP, TIFF and whatever else Pillow opens. Not covered: handwriting, languages other than
English, and what the picture shows.
"""

from typing import Any

from replayground.sandboxes.tools.paths import existing_file
from replayground.sandboxes.tools.tool import ToolError, tool

PIXELS_MAX = 40_000_000
SHORT_SIDE_PIXELS_MIN = 100
"""Tesseract needs letters of about 20 pixels; a picture whose shorter side is smaller than this is enlarged."""
# Below the 60 s of the call, so that a slow recognition is an error and does not end the tool process.
SECONDS_MAX = 50


@tool(needs=frozenset({"files"}))
def image_info(path: str) -> str:
    """Tell the format, size in pixels, colours and frames of a picture.

    path: relative to /work, for example scan.png
    """
    import os

    picture = opened_picture(path)
    width, height = picture.size
    facts = [
        f"{picture.format}, {width} x {height} pixels, {picture.mode}, {os.path.getsize(existing_file(path))} bytes"
    ]
    frames = getattr(picture, "n_frames", 1)
    if frames > 1:
        facts.append(f"{frames} frames")
    if "dpi" in picture.info:
        facts.append(f"{round(float(picture.info['dpi'][0]))} dots per inch")
    return ", ".join(facts)


@tool(needs=frozenset({"files"}), call_timeout_seconds=60.0)
def image_text(path: str, box: list[int] | None = None) -> str:
    """Read the printed English text in a picture (OCR).

    path: relative to /work, for example scan.png
    box: only this part: left, top, right, bottom in pixels
    """
    from PIL import ImageOps

    # Cameras store the rotation in EXIF data, which the PNG for tesseract does not carry.
    picture = ImageOps.exif_transpose(opened_picture(path))
    if box is not None:
        if len(box) != 4 or not (0 <= box[0] < box[2] <= picture.width and 0 <= box[1] < box[3] <= picture.height):
            size = f"the picture is {picture.width} x {picture.height} pixels"
            raise ToolError(f"box is left, top, right, bottom inside the picture; {size}")
        left, top, right, bottom = box
        picture = picture.crop((left, top, right, bottom))
    return recognised(legible(picture)).strip() or "[no text was found]"


def opened_picture(path: str) -> Any:
    """Open and decode a picture. ToolError when it is not one, is damaged, or has too many pixels."""
    import warnings

    from PIL import Image, UnidentifiedImageError

    absolute = existing_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(absolute)
        # open() reads only the header; load() below decodes. A file of a few kB can claim a huge size.
        if picture.width * picture.height > PIXELS_MAX:
            raise ToolError(f"{path} has more than {PIXELS_MAX} pixels: {picture.width} x {picture.height}")
        picture.load()
    except UnidentifiedImageError:
        raise ToolError(f"{path} is not a picture of a known format") from None
    except Image.DecompressionBombError as error:
        raise ToolError(f"{path} is too large: {error}") from None
    # Pillow raises SyntaxError for a broken PNG.
    except (OSError, SyntaxError, ValueError) as error:
        raise ToolError(f"{path} is damaged: {error}") from None
    return picture


def legible(picture: Any) -> bytes:
    """The picture as a greyscale PNG on white, enlarged if it is too small for tesseract."""
    import io

    from PIL import Image

    # Transparent pixels are often stored as black, which would hide black text.
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("L")
    factor = min(4, -(-SHORT_SIDE_PIXELS_MIN // max(1, min(picture.size))))
    if factor > 1 and picture.width * picture.height * factor**2 <= PIXELS_MAX:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    picture.save(data, "PNG", compress_level=1)
    return data.getvalue()


def recognised(png: bytes) -> str:
    """The text that tesseract reads. ToolError when it takes too long; RuntimeError when it is missing or fails."""
    import os
    import subprocess

    command = ["tesseract", "stdin", "stdout", "-l", "eng", "--psm", "3"]
    # One thread: the others would count as processes of the agent and share one CPU.
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    try:
        ended = subprocess.run(command, input=png, capture_output=True, env=environment, timeout=SECONDS_MAX)
    except FileNotFoundError:
        raise RuntimeError("tesseract is not installed on this machine: make setup") from None
    except subprocess.TimeoutExpired:
        raise ToolError(f"reading took more than {SECONDS_MAX} s: name a smaller part by box") from None
    # SIGXCPU: the CPU limit of the process.
    if ended.returncode == -24:
        raise ToolError("reading took too much computing time: name a smaller part by box")
    if ended.returncode != 0:
        raise RuntimeError(f"tesseract failed with {ended.returncode}: {ended.stderr.decode(errors='replace')[-500:]}")
    return ended.stdout.decode("utf-8", "replace")
