"""Every kind of store keeps the same promises: what is there is whole, and nobody removes what somebody relies on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from craft.protocol.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.snapshots.store.local import LocalStore
from craft.snapshots.store.manifest import Ref, chunk_path
from craft.snapshots.store.remote import RemoteStore
from craft.snapshots.store.store import Store, StoreBusy
from craft.snapshots.store.tiers import open_store

from ..scene import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["directory", "file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "directory":
        return open_store(str(tmp_path / "store"))
    if request.param == "file":
        return RemoteStore(f"file://{tmp_path}/store")
    if request.param == "memory":
        return open_store(f"memory://{tmp_path}/store")
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://bucket{tmp_path}/store")


def ref_of(data: bytes) -> Ref:
    return Ref(blake3(data).hexdigest(), len(data))


def add(store: Store, data: bytes, name: Ref | None = None) -> bool:
    adding = store.adding()
    new = adding.add(name or ref_of(data), lambda: memoryview(data))
    adding.finish()
    return new


def read(store: Store, ref: Ref) -> bytes:
    out = bytearray(ref.size)
    store.read(ref, memoryview(out))
    return bytes(out)


def test_a_url_says_which_kind_of_store_it_is(tmp_path: Path) -> None:
    assert isinstance(open_store(f"file://{tmp_path}/a"), LocalStore)
    assert open_store(f"file://{tmp_path}/a").url == str(tmp_path / "a")
    assert isinstance(open_store("memory://a"), RemoteStore)
    with pytest.raises(ConfigError, match=r"nosuch://x.*give another place for checkpoints"):
        open_store("nosuch://x")


def test_a_chunk_is_written_once_and_read_back(store: Store) -> None:
    data = os.urandom(100_000)
    assert add(store, data)
    assert not add(store, data)
    assert read(store, ref_of(data)) == data
    adding = store.adding()
    assert [adding.add(ref_of(b"twice"), lambda: memoryview(b"twice")) for _ in range(2)] == [True, False]
    adding.finish()
    assert {(found.path, found.size) for found in store.files("chunks")} == {
        (chunk_path(ref_of(data).hash), 100_000),
        (chunk_path(ref_of(b"twice").hash), 5),
    }


def test_a_chunk_of_the_wrong_size_is_written_again(store: Store) -> None:
    data = b"whole chunk"
    store.put(chunk_path(ref_of(data).hash), data[:4])
    with pytest.raises(SnapshotCorrupt, match="has 4 bytes where the chunk has 11"):
        read(store, ref_of(data))
    assert add(store, data)
    assert read(store, ref_of(data)) == data


def test_what_is_not_there_is_missing(store: Store) -> None:
    with pytest.raises(SnapshotMissing, match=r"there is no .*manifests/x.json"):
        store.get("manifests/x.json")
    with pytest.raises(SnapshotMissing, match="there is no"):
        read(store, ref_of(b"nothing"))
    assert store.files("manifests") == []
    store.remove(["manifests/x.json"])
    assert not store.remove_one("manifests/x.json")


def test_small_files_are_replaced_and_removed(store: Store) -> None:
    for data in (b"first", b"second one"):
        store.put("parts/name/0-of-1.json", data)
        assert store.get("parts/name/0-of-1.json") == data
    store.put("parts/other/0-of-1.json", b"")
    paths = ["parts/name/0-of-1.json", "parts/other/0-of-1.json"]
    assert [(found.path, found.size) for found in store.files("parts")] == list(zip(paths, (10, 0), strict=True))
    assert store.remove_one(paths[0])
    store.remove(paths)
    assert store.files("parts") == []


def test_nobody_collects_while_somebody_writes(store: Store) -> None:
    with store.writing("w0") as first, store.writing("w1") as second:
        with pytest.raises(StoreBusy, match="another process writes"), store.collecting("gc"):
            pass
        first.check()
        second.check()
    with store.collecting("gc") as alone:
        alone.check()
        with pytest.raises(StoreBusy, match="collects garbage"), store.collecting("another"):
            pass


def test_who_wants_to_write_waits_for_a_collection_to_end(store: Store) -> None:
    store.put("manifests/x.json", b"")
    order = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.collecting("gc"))

        def write() -> None:
            with store.writing("w0"):
                order.append("written")

        writer = threading.Thread(target=write)
        writer.start()
        writer.join(0.3)
        order.append("collected")
    writer.join(30)
    assert order == ["collected", "written"]


def test_a_file_in_the_way_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = LocalStore(tmp_path / "file" / "store")
    with pytest.raises(SnapshotError, match="file/store"), store.writing("w0"):
        pass


def test_what_is_not_a_regular_file_is_left_out_and_never_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, ref = LocalStore(tmp_path), ref_of(b"abc")
    add(store, b"abc")
    store.put("manifests/whole.json", b"{}")
    os.mkfifo(tmp_path / "manifests/pipe.json")
    os.symlink(tmp_path / "nowhere", tmp_path / "manifests/link.json")
    assert [found.path for found in store.files("manifests")] == ["manifests/whole.json"]
    assert "pipe.json is not a regular file" in caplog.text and "link.json is not a regular file" in caplog.text
    with pytest.raises(SnapshotCorrupt, match="is not a regular file: remove it"):
        store.get("manifests/pipe.json")
    chunk = tmp_path / chunk_path(ref.hash)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(SnapshotCorrupt, match="is not a regular file: remove it"):
        read(store, ref)
    assert add(store, b"abc") and read(store, ref) == b"abc", "a chunk takes its place"
    (tmp_path / "pins").mkdir()
    os.mkfifo(tmp_path / "pins/pipe")
    assert store.pinned() == []
    with store.collecting("me") as guard:
        guard.tidy()


def test_what_dies_half_written_is_never_seen_and_goes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    adding = store.adding()
    adding.add(ref_of(b"data"), lambda: memoryview(b"data"))
    assert len(list((tmp_path / "unfinished").iterdir())) == 1
    assert store.files("chunks") == []
    with store.collecting("gc") as alone:
        alone.tidy()
    assert list((tmp_path / "unfinished").iterdir()) == []
    with pytest.raises(SnapshotError):
        adding.finish()


def test_what_is_put_while_a_collector_tidies_up_is_there_P7(tmp_path: Path) -> None:
    """Such as the mark of checkpoints that may hold wrong bits, which is written when a checkpoint was published just now."""
    store, over = LocalStore(tmp_path), threading.Event()
    failed: list[SnapshotError] = []

    def tidy() -> None:
        while not over.is_set():
            try:
                with store.collecting("gc") as alone:
                    alone.tidy()
            except SnapshotError as error:
                failed.append(error)

    tidying = threading.Thread(target=tidy)
    tidying.start()
    try:
        for number in range(300):
            store.put(f"suspect/{number}.json", b"{}")
    finally:
        over.set()
        tidying.join()
    assert len(store.files("suspect")) == 300 and not failed
