"""One suite, three stores: a folder, memory, and a real S3 server (rclone's) in a process of its own."""

import filecmp
import hashlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from replayground.schemas.blobs import CHUNK_BYTES, Blobs, StoredBlob
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, BlobDamaged, BlobsUnavailable, LogUnavailable, Undecodable
from replayground.schemas.registry import MemoryRegistry
from tests.schemas.test_schemas import large_observation

_PATIENCE_SECONDS = 60.0
_MULTIPART_BYTES = 12 * 1024 * 1024


class S3Server:
    """`rclone serve s3` on a free port of loopback, over a folder, with one bucket and one pair of keys."""

    def __init__(self, folder: Path) -> None:
        (folder / "bucket").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        rclone = Path(sys.executable).parent / "rclone"
        serve = [str(rclone), "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{self._port}"]
        command = [*serve, "--auth-key", "a-key,a-secret", str(folder)]
        with (folder.parent / "rclone.log").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self._await_listening()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
        }

    def _await_listening(self) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            assert self.process.poll() is None, "the S3 server did not start"
            time.sleep(0.05)
        raise TimeoutError("the S3 server does not listen")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    yield server
    server.end()


@pytest.fixture
def s3_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["file", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "s3":
        request.getfixturevalue("s3_environment")
        return Blobs(f"s3://bucket/{uuid.uuid4().hex}/blobs")
    return Blobs((tmp_path / "a folder" / "blobs").as_uri() if request.param == "file" else "memory://")


def stored_of(blobs: Blobs) -> dict[str | None, StoredBlob]:
    return {blob.sha256: blob for blob in blobs.list_stored()}


def damage(blobs: Blobs, sha256: str, data: bytes) -> None:
    """Writes other bytes under a name, as no program of ours does."""
    obstore.put(blobs._own.store, f"{sha256[:2]}/{sha256}", data)


@pytest.mark.parametrize("data", [b"", b"weights", os.urandom(300_000), bytes(_MULTIPART_BYTES)], ids=len)
def test_what_was_put_is_got_by_its_digest(blobs: Blobs, data: bytes) -> None:
    uri, sha256 = blobs.put(data)
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert uri == f"{blobs.url}/{sha256[:2]}/{sha256}"
    assert blobs.get(uri, sha256) == data


def test_the_same_data_is_one_blob(blobs: Blobs) -> None:
    assert blobs.put(b"the same") == blobs.put(b"the same")
    assert [blob.size_bytes for blob in blobs.list_stored()] == [8]


def test_putting_again_makes_a_blob_young_again(blobs: Blobs) -> None:
    """Else a sweep could take it between the second writer's put and the event that names it."""
    _, sha256 = blobs.put(b"the same")
    first = stored_of(blobs)[sha256].modified_seconds
    until = time.monotonic() + _PATIENCE_SECONDS
    while stored_of(blobs)[sha256].modified_seconds == first:  # a store may tell whole seconds only
        assert time.monotonic() < until, "it stays as old as it was"
        blobs.put(b"the same")


def test_a_missing_blob_is_named(blobs: Blobs) -> None:
    uri, sha256 = blobs.put(b"soon gone")
    blobs.remove(stored_of(blobs)[sha256])
    with pytest.raises(BlobDamaged, match=f"blob {uri} is missing"):
        blobs.get(uri, sha256)


def test_a_damaged_blob_is_named_and_mended_by_putting_it_again(blobs: Blobs) -> None:
    uri, sha256 = blobs.put(b"whole")
    damage(blobs, sha256, b"wh0le")
    with pytest.raises(BlobDamaged, match=f"blob {uri} is not the one it was named by"):
        blobs.get(uri, sha256)
    blobs.put(b"whole")
    assert blobs.get(uri, sha256) == b"whole"


@pytest.mark.parametrize("sha256", ["../../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "/x"])
def test_a_name_that_is_no_digest_leads_nowhere(blobs: Blobs, sha256: str) -> None:
    with pytest.raises(BlobDamaged, match="no sha256"):
        blobs.get("somewhere", sha256)


def test_blobs_are_listed_and_removed(blobs: Blobs) -> None:
    began = time.time()
    digests = {blobs.put(f"blob {number}".encode())[1] for number in range(5)}
    obstore.put(blobs._own.store, "notes/readme.txt", b"not ours")
    found = stored_of(blobs)
    assert set(found) == digests
    assert all(abs(blob.modified_seconds - began) < 3600 for blob in found.values())
    gone = found[digests.pop()]
    assert blobs.modified_seconds(gone) is not None
    blobs.remove(gone)
    blobs.remove(gone)  # twice is no error
    assert blobs.modified_seconds(gone) is None
    assert set(stored_of(blobs)) == digests


@pytest.mark.parametrize("size_bytes", [0, 7, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_files_and_streams_are_blobs_as_any_other(blobs: Blobs, tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "given").write_bytes(data)
    stored = blobs.put_file(tmp_path / "given")
    assert (stored.uri, stored.sha256, stored.size_bytes) == (*blobs.put(data), size_bytes)
    assert blobs.put_stream(data[start : start + 1_000_000] for start in range(0, size_bytes, 1_000_000)) == stored
    assert b"".join(blobs.chunks(stored.uri, stored.sha256)) == data
    (tmp_path / "taken").write_bytes(b"older")
    blobs.get_to_file(stored.uri, stored.sha256, tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["given", "taken"]
    assert [blob.sha256 for blob in blobs.list_stored()] == [stored.sha256]


def test_a_stream_that_breaks_leaves_no_blob(blobs: Blobs) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(3 * CHUNK_BYTES)
        assert not list(stored_of(blobs).keys() - {None}), "visible before it is whole"
        raise ConnectionResetError("the source is gone")

    with pytest.raises(ConnectionResetError, match="the source is gone"):
        blobs.put_stream(broken())
    assert list(blobs.list_stored()) == []


@pytest.mark.parametrize("found", [b"", b"wh", b"wh0le", b"whole and more", None], ids=repr)
def test_a_damaged_short_or_missing_blob_never_ends_up_in_the_file(
    blobs: Blobs, tmp_path: Path, found: bytes | None
) -> None:
    uri, sha256 = blobs.put(b"whole")
    if found is None:
        blobs.remove(stored_of(blobs)[sha256])
    else:
        damage(blobs, sha256, found)
    (tmp_path / "there").write_bytes(b"older")
    for name in ("new", "there"):
        with pytest.raises(BlobDamaged, match=f"blob {uri} is"):
            blobs.get_to_file(uri, sha256, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["there"]
    assert (tmp_path / "there").read_bytes() == b"older"


def test_a_file_that_changes_while_it_is_stored_is_not_stored_under_the_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass names it; the second one sends it."""
    blobs = Blobs("memory://")
    (tmp_path / "file").write_bytes(b"before")
    upload = blobs._own.upload

    def changed_before(sha256: str, data: bytes | Iterator[bytes], size_bytes: int) -> None:
        (tmp_path / "file").write_bytes(b"after!")
        upload(sha256, data, size_bytes)

    monkeypatch.setattr(blobs._own, "upload", changed_before)
    with pytest.raises(BlobDamaged, match="changed while it was stored"):
        blobs.put_file(tmp_path / "file")
    assert list(blobs.list_stored()) == []


_MEMORY_CODE = """
import resource, sys
from pathlib import Path
from replayground.schemas.blobs import Blobs
blobs, folder = Blobs(sys.argv[1]), Path(sys.argv[2])
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
blobs.get(*blobs.put(b"small"))
before = peak_bytes()
put = blobs.put_file(folder / "large")
with (folder / "large").open("rb") as file:
    assert blobs.put_stream(iter(lambda: file.read(1_000_000), b"")) == put
blobs.get_to_file(put.uri, put.sha256, folder / "again")
print(peak_bytes() - before)
"""


@pytest.mark.parametrize(("scheme", "size_mebibytes"), [("file", 512), ("s3", 256)])
def test_a_large_file_goes_in_and_out_in_bounded_memory(
    scheme: str, size_mebibytes: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By the peak of a process of its own. The file is far larger than what may be held of it."""
    if scheme == "s3":
        request.getfixturevalue("s3_environment")
    url = f"s3://bucket/{uuid.uuid4().hex}" if scheme == "s3" else (tmp_path / "blobs").as_uri()
    with (tmp_path / "large").open("wb") as file:
        file.write(os.urandom(CHUNK_BYTES))
        file.truncate(size_mebibytes * 1024 * 1024)
    measured = subprocess.run(
        [sys.executable, "-c", _MEMORY_CODE, url, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
    )
    assert int(measured.stdout) < 16 * CHUNK_BYTES
    assert filecmp.cmp(tmp_path / "large", tmp_path / "again", shallow=False)
    for name in ("large", "again"):
        (tmp_path / name).unlink()


@pytest.fixture(params=["file", "s3"])
def field_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3_environment")
        return f"s3://bucket/{uuid.uuid4().hex}"
    return tmp_path.as_uri()


def test_runs_read_each_others_blobs_at_the_address_they_name(field_url: str) -> None:
    uri, sha256 = Blobs(f"{field_url}/a-run").put(b"of a run")
    assert Blobs(field_url).get(uri, sha256) == b"of a run"  # below the own address
    assert Blobs(f"{field_url}/other", [f"{field_url}/a-run"]).get(uri, sha256) == b"of a run"
    with pytest.raises(BlobDamaged, match="nothing else may be read"):
        Blobs(f"{field_url}/other").get(uri, sha256)


def test_a_store_that_was_moved_is_read_by_digest(field_url: str) -> None:
    _, sha256 = Blobs(field_url).put(b"moved with its store")
    for old in ("file:///an/old/place", "s3://an-old-bucket"):
        assert Blobs(field_url).get(f"{old}/{sha256[:2]}/{sha256}", sha256) == b"moved with its store"


def test_an_address_on_the_log_leads_to_no_file_of_somebody_else(tmp_path: Path) -> None:
    """Whoever writes events may name any address; even a file whose digest they know must not be read."""
    secret = b"secret"
    sha256 = hashlib.sha256(secret).hexdigest()
    for folder in (tmp_path / "elsewhere", tmp_path / "field" / "other"):
        (folder / sha256[:2]).mkdir(parents=True)
        (folder / sha256[:2] / sha256).write_bytes(secret)
    (tmp_path / "secret").write_bytes(secret)
    own = (tmp_path / "field" / "own").as_uri()
    blobs = Blobs(own, [(tmp_path / "allowed").as_uri()])
    Blobs((tmp_path / "allowed").as_uri())
    place = f"{sha256[:2]}/{sha256}"
    for uri in (
        (tmp_path / "secret").as_uri(),
        f"{(tmp_path / 'elsewhere').as_uri()}/{place}",
        f"{own}/../other/{place}",
        f"{own}/%2e%2e/other/{place}",
        f"{own}/..%2fother/{place}",
        f"{own}other/{place}",
        f"{own}/x/../../other/{place}",
        f"{own}//{place}",
        f"{(tmp_path / 'allowed').as_uri()}/../elsewhere/{place}",
        f"file://localhost{tmp_path}/elsewhere/{place}",
        f"s3://bucket/{place}",
        f"http://127.0.0.1/{place}",
    ):
        with pytest.raises(BlobDamaged, match="is missing"):
            blobs.get(uri, sha256)
        with pytest.raises(BlobDamaged, match="is missing"):
            blobs.get_to_file(uri, sha256, tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


def test_another_store_must_have_the_scheme_of_the_own_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="also_read s3://bucket"):
        Blobs(tmp_path.as_uri(), ["s3://bucket"])


def test_another_store_is_not_made_and_while_it_is_away_nothing_is_said_of_its_blobs(tmp_path: Path) -> None:
    other = (tmp_path / "other").as_uri()
    blobs = Blobs((tmp_path / "own").as_uri(), [other])
    with pytest.raises(BlobsUnavailable, match="no store of blobs"):
        blobs.get(f"{other}/{'00'}/{'0' * 64}", "0" * 64)
    assert not (tmp_path / "other").exists()


def test_a_spilled_event_goes_through_the_store_and_a_lost_one_names_its_blob(blobs: Blobs) -> None:
    codec = Codec(MemoryRegistry(), blobs)
    event = large_observation()
    data = codec.encode(event)
    assert codec.decode(data, "messages") == event
    (blob,) = blobs.list_stored()
    assert blob.sha256 is not None
    damage(blobs, blob.sha256, b"something else")
    with pytest.raises(Undecodable, match=f"{blob.sha256} is not the one it was named by"):
        codec.decode(data, "messages")
    blobs.remove(blob)
    with pytest.raises(Undecodable, match=f"{blob.sha256} is missing"):
        codec.decode(data, "messages")


def test_readers_never_see_half_a_blob(blobs: Blobs) -> None:
    """Many writers of the same blob, and a reader that is always there."""
    data = os.urandom(2_000_000)
    uri, sha256 = blobs.put(data)
    writers = [threading.Thread(target=lambda: [blobs.put(data) for _ in range(5)]) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert blobs.get(uri, sha256) == data
    for writer in writers:
        writer.join()


def test_a_blob_is_flushed_with_its_names_before_put_returns(tmp_path: Path) -> None:
    """Seen from outside, by the system calls that were made: of the file, its folder and the store's folder."""
    code = (
        "import sys; from replayground.schemas.blobs import Blobs\n"
        "Blobs(sys.argv[1]).put(b'weights'); print('returned', flush=True)"
    )
    trace = tmp_path / "trace"
    watched = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat2,write", "-o", str(trace)]
    put = [sys.executable, "-c", code, (tmp_path / "blobs").as_uri()]
    subprocess.run([*watched, *put], cwd=Path(__file__).parents[2], check=True, capture_output=True)
    before_return, returned, _ = trace.read_text().partition('"returned')
    assert returned
    sha256 = hashlib.sha256(b"weights").hexdigest()
    before_rename, renamed, after_rename = before_return.rpartition(f'blobs/{sha256[:2]}/{sha256}"')
    assert renamed
    assert re.search(r"fsync\(\d+<\S*blobs/unfinished/\S+>\)", before_rename), "named before it was flushed"
    for place in (f"blobs/{sha256[:2]}>", "blobs>"):
        assert f"{place})" in after_rename, f"{place} was not flushed"


def test_what_an_interrupted_write_left_is_listed_as_nothing_that_can_be_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri())
    _, sha256 = blobs.put(b"whole")
    (tmp_path / sha256[:2] / f"{sha256}#1").write_bytes(b"wh")
    (tmp_path / "unfinished" / "0a1b#1").write_bytes(b"wh")
    assert sorted(blob.path for blob in blobs.list_stored()) == sorted(
        [f"{sha256[:2]}/{sha256}", f"{sha256[:2]}/{sha256}#1", "unfinished/0a1b#1"]
    )
    for blob in [blob for blob in blobs.list_stored() if blob.sha256 is None]:
        blobs.remove(blob)
    assert {blob.sha256 for blob in blobs.list_stored()} == {sha256}


@pytest.mark.usefixtures("s3_environment")
def test_without_a_bucket_or_with_wrong_keys_nothing_is_said_of_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Blobs("s3://no-such-bucket/blobs")
    for refused in (lambda: elsewhere.put(b"data"), lambda: elsewhere.get("uri", "0" * 64)):
        with pytest.raises(BlobsUnavailable, match="blobs at s3://no-such-bucket/blobs"):
            refused()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = Blobs("s3://bucket/blobs")
    for refused in (lambda: stranger.put(b"data"), lambda: stranger.get("uri", "0" * 64)):
        with pytest.raises(BlobsUnavailable, match="cannot be reached"):
            refused()


def test_a_server_that_is_gone_makes_an_event_unjudged_not_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server(tmp_path / "data")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    codec = Codec(MemoryRegistry(), Blobs("s3://bucket/blobs"))
    data = codec.encode(large_observation())
    server.end()
    with pytest.raises(LogUnavailable, match="cannot be reached"):
        codec.decode(data, "messages")


def test_a_folder_that_is_gone_makes_a_blob_unjudged(tmp_path: Path) -> None:
    blobs = Blobs((tmp_path / "blobs").as_uri())
    (tmp_path / "blobs").rmdir()
    with pytest.raises(BlobsUnavailable, match="there is no store"):
        blobs.get("uri", "0" * 64)


@pytest.mark.parametrize("url", ["nowhere://x", "s3://", "relative/folder", "file:///proc/1/blobs"])
def test_an_address_that_is_none_is_bad_input(url: str) -> None:
    with pytest.raises(BadInput):
        Blobs(url)
