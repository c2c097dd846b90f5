"""Whoever is killed, at whatever instant: what is listed is whole and right, and the one before is still there (P7)."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.gc import OVERDUE_S, collect
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.store.local import LocalStore
from craft.snapshots.store.manifest import manifest_path
from craft.snapshots.store.store import StoreBusy
from craft.snapshots.store.tiers import Tiers, open_tiers

from ..nursery import Nursery
from ..scene import LIMIT_S, crew, holds, num_kills, place, s3_server, steps_of
from ..travel import wait_until

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
"""What Python does to files, as its audit events call it."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where the kernel keeps all that a killed process wrote, as on a disk, and nobody waits for one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="killed-writers-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


def assert_whole(tiers: Tiers) -> list[int]:
    """Every listed checkpoint has every byte of its step; returns their steps."""
    found = candidates(tiers)
    for manifest in found:
        assert verify(tiers, manifest) == []
        assert holds(tiers, manifest)
    return [manifest.step for manifest in found]


def save_until(store: Path, local: Path | None, last_change: int, counted: Path) -> None:
    """In another process: two checkpoints and what they make garbage, but killed at one change of a file."""
    changes = itertools.count(1)

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES and str(args[0]).startswith(str(store.parent)) and next(changes) == last_change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    with crew(store, 2, keep=1, local=local) as members:
        members.save(2, 3)
    counted.write_text(str(next(changes)))


@pytest.mark.parametrize("tiers", [pytest.param("one store", marks=pytest.mark.long), "two stores"])
def test_a_writer_killed_at_any_change_of_a_file_leaves_what_is_whole(
    folder: Path, nursery: Nursery, tiers: str
) -> None:
    before, at = folder / "before", folder / "at"
    for path in (before, at):
        path.mkdir()
    near = None if tiers == "one store" else "near"
    with crew(before / "store", 2, keep=1, local=before / near if near else None) as members:
        members.save(1)
    counted = folder / "counted"
    ends, total = 0, sys.maxsize
    chosen = [sys.maxsize]
    while chosen:
        change = chosen.pop()
        shutil.rmtree(at)
        shutil.copytree(before, at)
        code = nursery.wait(nursery.start(save_until, at / "store", at / near if near else None, change, counted))
        if total == sys.maxsize:
            assert code == 0
            total = int(counted.read_text())
            chosen = sorted(random.Random(0).sample(range(1, total), min(total - 1, num_kills(15))))
            continue
        ends += code == -signal.SIGKILL
        found = open_tiers(str(at / "store"), str(at / near) if near else None)
        assert set(assert_whole(Tiers(None, found.durable))) & {1, 2, 3}
        assert_whole(found)
        with crew(at / "store", 2, keep=1, local=at / near if near else None) as members:
            members.save(4)
        assert assert_whole(Tiers(None, found.durable)) == [4]
        (manifest,) = candidates(found)
        for store in found.nearest_first:
            # Nothing that was half done stays for ever.
            collect(store, 1, time.time() + OVERDUE_S + 60)
            needed = {ref.hash for ref in (*manifest.chunks, manifest.header)}
            assert {each.path.rpartition("/")[2] for each in store.files("chunks")} == needed
            assert store.files("unfinished") == store.files("parts") == store.files("pins") == []
    assert ends > 0


def save_forever(url: str, part: int, first: int) -> None:
    """In another process: one of two members, step by step with the other."""
    with crew(url, 2, keep=2) as members:
        for step in itertools.count(first):
            members.writers[part].take(members.trained.at(step), place(step, part, 2))
            assert members.writers[part].wait(LIMIT_S)
            name = manifest_path(place(step).name)
            give_up = time.monotonic() + 1.0
            while time.monotonic() < give_up and name not in [
                found.path for found in members.tiers.durable.files("manifests")
            ]:
                time.sleep(0.001)


def collect_forever(root: Path) -> None:
    """In another process: garbage collection, all the time."""
    store = LocalStore(root)
    while True:
        with contextlib.suppress(StoreBusy):
            collect(store, 2, time.time())
        # Or nobody would ever come to write.
        time.sleep(0.01)


def test_members_and_collectors_killed_at_any_instant_leave_what_is_whole(folder: Path, nursery: Nursery) -> None:
    rng = random.Random(1)
    tiers = open_tiers(str(folder))
    with crew(folder, 2, keep=2) as members:
        members.save(1)
    for _ in range(num_kills(15)):
        newest = steps_of(tiers)[0]
        started = [nursery.start(save_forever, str(folder), part, newest + 1) for part in (0, 1)]
        started.append(nursery.start(collect_forever, folder))
        wait_until(lambda newest=newest: steps_of(tiers)[0] > newest)  # type: ignore[misc]
        for victim in rng.sample(started, 3):
            time.sleep(rng.uniform(0.0, 0.1))
            nursery.kill(victim)
            # While the others go on, too, something is listed.
            assert steps_of(tiers)
        for victim in started:
            assert nursery.wait(victim) == -signal.SIGKILL
        assert assert_whole(tiers)
    with crew(folder, 2, keep=2) as members:
        members.save(steps_of(tiers)[0] + 1)
    needed = {ref.hash for manifest in candidates(tiers) for ref in (*manifest.chunks, manifest.header)}
    assert {each.path.rpartition("/")[2] for each in tiers.durable.files("chunks")} == needed


@pytest.mark.long
def test_members_killed_at_any_instant_leave_what_is_whole_in_an_object_store(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(2)
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tiers = open_tiers("s3://bucket/job")
        with crew("s3://bucket/job", 2, keep=2) as members:
            members.save(1)
        for _ in range(num_kills(3)):
            newest = steps_of(tiers)[0]
            started = [nursery.start(save_in_environment, environment, part, newest + 1) for part in (0, 1)]
            # Where a collector was killed, nobody writes until it is known to be gone.
            wait_until(lambda newest=newest: steps_of(tiers)[0] > newest, LIMIT_S)  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, 0.3))
            for victim in started:
                nursery.kill(victim)
            for victim in started:
                assert nursery.wait(victim) == -signal.SIGKILL
            assert assert_whole(tiers)


def save_in_environment(environment: dict[str, str], part: int, first: int) -> None:
    os.environ.update(environment)
    save_forever("s3://bucket/job", part, first)
