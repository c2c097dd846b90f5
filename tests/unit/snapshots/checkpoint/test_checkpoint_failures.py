"""A store that is full, forbidden or unreliable: it is said so, nothing half is listed, and writing goes on when it can."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.small_disk import mounted
from tests.users import STRANGER, needs_root, reachable_folder

from craft.protocol.errors import SnapshotError
from craft.protocol.events import CheckpointFailed
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.gc import collect
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.store.lease_files import INTENTS, LEASES, TTL_S, LeaseFile
from craft.snapshots.store.remote import RemoteStore
from craft.snapshots.store.store import StoreBusy
from craft.snapshots.store.tiers import open_tiers

from ..nursery import Nursery
from ..scene import crew, holds, s3_server, steps_of
from ..travel import wait_until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints and a bit."""
    with mounted(tmp_path / "small", "1m") as path:
        yield path


def failures(members: Any) -> list[CheckpointFailed]:
    return [event for event in members.events if isinstance(event, CheckpointFailed)]


def test_a_full_disk_is_told_and_writing_goes_on_when_there_is_room(small_disk: Path) -> None:
    with crew(small_disk / "store", 2, keep=1) as members:
        members.save(1)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(450_000))
        members.take(2)
        wait_until(lambda: bool(failures(members)))
        assert "No space left on device" in failures(members)[0].error
        assert failures(members)[0].retry_s == 0.5
        assert steps_of(members.tiers) == [1]
        assert verify(members.tiers, candidates(members.tiers)[0]) == []
        filler.unlink()
        members.wait()
        assert steps_of(members.tiers) == [2]
        assert holds(members.tiers, candidates(members.tiers)[0])
        assert list((small_disk / "store" / "unfinished").iterdir()) == []


def save_as_stranger(store: Path, told: Path) -> None:
    """In another process: as a user who may not write there."""
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    with crew(store) as members:
        members.take(2)
        wait_until(lambda: bool(failures(members)))
        with open(told, "w") as file:
            file.write(failures(members)[0].error)


@needs_root
def test_a_store_that_must_not_be_written_to_is_told() -> None:
    with reachable_folder() as folder:
        store, told = folder / "store", folder / "told"
        with crew(store) as members:
            members.save(1)
        # Readable, as a store of another user may be.
        store.chmod(store.stat().st_mode | 0o055)
        told.touch()
        told.chmod(0o666)
        nursery = Nursery()
        try:
            assert nursery.wait(nursery.start(save_as_stranger, store, told)) == 0
        finally:
            nursery.close()
        assert "Permission denied" in told.read_text()
        assert steps_of(members.tiers) == [1]


def test_a_job_that_is_done_does_not_wait_for_a_place_that_became_read_only(small_disk: Path) -> None:
    with crew(small_disk / "store") as members:
        members.save(1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        members.take(2)
        members.wait()
        assert [(event.tries, event.retry_s is None) for event in failures(members)] == [(1, False), (2, True)]
        assert all("Read-only file system" in event.error for event in failures(members))
        assert steps_of(members.tiers) == [1]


def test_a_job_that_is_done_does_not_wait_for_a_place_with_a_pipe_where_a_folder_was(tmp_path: Path) -> None:
    with crew(tmp_path / "store") as members:
        members.save(1)
        shutil.rmtree(tmp_path / "store" / "parts")
        os.mkfifo(tmp_path / "store" / "parts")
        members.take(2)
        members.wait()
        assert [(event.tries, event.retry_s is None) for event in failures(members)] == [(1, False), (2, True)]
        assert all("Not a directory" in event.error for event in failures(members))


def test_a_copy_to_a_place_that_became_read_only_is_not_waited_for(small_disk: Path, tmp_path: Path) -> None:
    with crew(small_disk / "far", local=tmp_path / "near") as members:
        members.save(1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        members.take(2)
        members.wait()
        assert failures(members)[-1].retry_s is None and failures(members)[-1].tries <= 3


class Unreliable(MemoryFileSystem):  # type: ignore[misc]
    """A store that fails every second request."""

    protocol = "unreliable"
    requests = itertools.count()
    failed: list[str] = []  # noqa: RUF012  (as fsspec's own: of the class)

    def _request(self, name: str, *args: Any, **settings: Any) -> Any:
        if next(self.requests) % 2 == 0:
            self.failed.append(name)
            raise OSError(f"{name}: 503 slow down")
        return getattr(MemoryFileSystem, name)(self, *args, **settings)

    def pipe_file(self, *args: Any, **settings: Any) -> Any:
        return self._request("pipe_file", *args, **settings)

    def cat_file(self, *args: Any, **settings: Any) -> Any:
        return self._request("cat_file", *args, **settings)

    def rm_file(self, *args: Any, **settings: Any) -> Any:
        return self._request("rm_file", *args, **settings)


def test_a_store_that_fails_every_second_request_is_written_and_read_whole() -> None:
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    with crew("unreliable://job/store", 2, keep=2) as members:
        members.save(1, 2, 3)
        assert steps_of(members.tiers) == [3, 2]
        assert all(holds(members.tiers, manifest) for manifest in candidates(members.tiers))
        assert failures(members) == []
        assert {"pipe_file", "cat_file", "rm_file"} <= set(Unreliable.failed)


class Refusing(MemoryFileSystem):  # type: ignore[misc]
    """A store that is away while ``away`` is set."""

    protocol = "refusing"
    away = threading.Event()

    def pipe_file(self, *args: Any, **settings: Any) -> Any:
        if self.away.is_set():
            raise OSError("500 internal error")
        return super().pipe_file(*args, **settings)


def test_an_object_store_that_is_away_is_told_and_waited_for() -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with crew("refusing://job/store", 2) as members:
        members.save(1)
        Refusing.away.set()
        members.take(2)
        wait_until(lambda: bool(failures(members)))
        assert "500 internal error" in failures(members)[0].error
        Refusing.away.clear()
        members.wait()
        assert steps_of(members.tiers) == [2, 1]


def test_checkpoints_in_an_object_store_are_kept_verified_and_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with crew("s3://bucket/job", 2, keep=2) as members:
            members.save(1, 2, 3)
            found = candidates(members.tiers)
            assert [manifest.step for manifest in found] == [3, 2]
            assert all(holds(members.tiers, manifest) for manifest in found)
            needed = {ref.hash for manifest in found for ref in (*manifest.chunks, manifest.header)}
            store = members.tiers.durable
            assert {each.path.rpartition("/")[2] for each in store.files("chunks")} == needed
            assert store.files("parts") == store.files(INTENTS) == store.files(LEASES) == []
            store.put(store.files("chunks")[0].path, b"not this")
            assert any("8 bytes" in problem for manifest in found for problem in verify(members.tiers, manifest))
        with pytest.raises(SnapshotError, match="make the bucket, or correct the URL"):
            open_tiers("s3://nosuch/job").durable.put("manifests/x", b"")


def test_claims_of_the_dead_run_out_by_the_clock_of_the_store(tmp_path: Path) -> None:
    store = RemoteStore(f"file://{tmp_path}/store")
    with crew(store.url) as members:
        members.save(1)
    for folder in (INTENTS, LEASES):
        dead = LeaseFile(store, store.modified, folder, "dead")
        dead.speak()
        with pytest.raises(StoreBusy, match="try again later"):
            collect(store, 1, time.time())
        past = time.time() - TTL_S[folder] - 5
        os.utime(tmp_path / "store" / dead.path, (past, past))
        collect(store, 1, time.time())
        # Who comes back after that must not rely on anything.
        dead.spoken = past
        with pytest.raises(StoreBusy, match="unreachable for too long"):
            dead.check()
        store.remove([dead.path])


def test_a_writer_does_not_wait_for_a_collector_that_is_dead(tmp_path: Path) -> None:
    store = RemoteStore(f"file://{tmp_path}/store")
    dead = LeaseFile(store, store.modified, LEASES, "dead")
    dead.speak()
    past = time.time() - TTL_S[LEASES] - 5
    os.utime(tmp_path / "store" / dead.path, (past, past))
    with store.writing("w0") as writing:
        writing.check()
