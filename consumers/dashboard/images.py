"""Pictures among the files that tools returned, such as screenshots: the only blobs that the page hands out."""

from fastapi.responses import Response

from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BadInput, BlobDamaged, BlobsUnavailable

_SIZE_MAX = 16 * 1024 * 1024
# By their first bytes. Not SVG: it can hold scripts.
_KINDS = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def picture(blobs: Blobs | None, uri: str) -> Response:
    """The picture with this address, or why there is none. Blocks."""
    if blobs is None:
        return _none("blobs are not read while the field is down", 404)
    content = bytearray()
    try:
        # Named by its digest, which is checked: nothing else can be read, wherever the address leads.
        for chunk in blobs.chunks(uri, uri.rpartition("/")[2]):
            content += chunk
            if len(content) > _SIZE_MAX:
                return _none("it is too large for the page", 413)
    except (BadInput, BlobDamaged, ValueError) as error:
        return _none(str(error), 404)
    except BlobsUnavailable as error:
        return _none(str(error), 503)
    kind = next((kind for magic, kind in _KINDS if content.startswith(magic)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        kind = "image/webp"
    if kind is None:
        return _none("it is no picture", 415)
    headers = {"Cache-Control": "private, max-age=86400", "Content-Security-Policy": "default-src 'none'; sandbox"}
    return Response(bytes(content), headers=headers, media_type=kind)


def _none(sentence: str, status: int) -> Response:
    return Response(sentence[:500], status, media_type="text/plain")
