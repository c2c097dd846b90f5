"""Garbage collection removes what nothing needs, and never what something does: not what is listed, not what is on its way."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec
import pytest

from craft.protocol.errors import SnapshotError
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.gc import DEAD_S, OVERDUE_S, collect
from craft.snapshots.checkpoint.suspect import Suspicion, mark
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.store.local import LocalStore
from craft.snapshots.store.manifest import VERSION, manifest_path, seal
from craft.snapshots.store.store import StoreBusy
from craft.snapshots.store.tiers import open_tiers

from ..nursery import Nursery
from ..scene import crew, flip, holds, place, steps_of
from ..travel import wait_until


def chunks_of(root: Path) -> set[str]:
    return {found.path.rpartition("/")[2] for found in LocalStore(root).files("chunks")}


def test_the_newest_and_those_with_a_tag_stay(tmp_path: Path) -> None:
    with crew(tmp_path, 2, keep=2) as members:
        members.save(1, 2)
        members.save(3, tag="best")
        members.save(4, 5, 6)
        assert steps_of(members.tiers) == [6, 5, 3]
        found = candidates(members.tiers)
        assert all(holds(members.tiers, manifest) for manifest in found)
        needed = {ref.hash for manifest in found for ref in (*manifest.chunks, manifest.header)}
        assert chunks_of(tmp_path) == needed


def test_those_that_may_hold_wrong_bits_push_out_no_good_ones(tmp_path: Path) -> None:
    with crew(tmp_path, keep=9) as members:
        members.save(1, 2, 3, 4, 5)
    store = LocalStore(tmp_path)
    mark([store], Suspicion(branch=0, after=3, step=6, reason=""))
    collect(store, 2, time.time())
    assert steps_of(open_tiers(str(tmp_path))) == [5, 4, 3, 2]


def test_a_dry_run_says_what_would_go_and_removes_nothing(tmp_path: Path) -> None:
    with crew(tmp_path, keep=9) as members:
        members.save(1, 2, 3)
    store = LocalStore(tmp_path)
    before = chunks_of(tmp_path)
    wanted = collect(store, 1, time.time(), dry_run=True)
    assert [name.split("-")[1] for name in wanted.manifests] == ["000000000001", "000000000002"]
    assert wanted.freed_bytes > 2 * 200_000
    assert chunks_of(tmp_path) == before
    assert collect(store, 1, time.time()) == wanted
    assert len(chunks_of(tmp_path)) == len(before) - len(wanted.chunks)
    assert steps_of(members.tiers) == [3]
    assert holds(members.tiers, candidates(members.tiers)[0])


def test_what_is_on_its_way_stays_until_it_can_never_be_complete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with crew(tmp_path, 2, keep=9) as members:
        members.save(1)
        members.writers[0].take(members.trained.at(2), place(2, 0, 2))
        members.wait()
        assert collect(store, 1, time.time()).chunks == ()
        # The other member comes late, and still finds the first share there.
        members.writers[1].take(members.trained.at(2), place(2, 1, 2))
        members.wait()
        assert holds(members.tiers, candidates(members.tiers)[0])
        members.writers[0].take(members.trained.at(3), place(3, 0, 2))
        members.wait()
        now = time.time()
        assert collect(store, 9, now + OVERDUE_S + 60) == ((), (), (), 0)
        assert collect(store, 9, now + DEAD_S + 60).parts != ()
        assert steps_of(members.tiers) == [2, 1]


def test_parts_that_are_older_than_what_is_listed_go_after_a_while(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with crew(tmp_path, 2, keep=9) as members:
        members.writers[0].take(members.trained.at(1), place(1, 0, 2))
        members.wait()
        members.save(2)
        assert collect(store, 9, time.time()).parts == ()
        assert len(collect(store, 9, time.time() + OVERDUE_S + 60).parts) == 1
        assert holds(members.tiers, candidates(members.tiers)[0])


def test_where_nothing_is_ever_complete_only_the_newest_parts_stay(tmp_path: Path) -> None:
    with crew(tmp_path, 2, keep=2) as members:
        for step in range(1, 6):
            members.writers[0].take(members.trained.at(step), place(step, 0, 2))
            members.wait()
        collect(LocalStore(tmp_path), 2, time.time())
        assert [found.path.split("-")[1] for found in LocalStore(tmp_path).files("parts")] == [
            "000000000004",
            "000000000005",
        ]


def test_what_a_damaged_manifest_needs_stays(tmp_path: Path) -> None:
    with crew(tmp_path, keep=9) as members:
        members.save(1, 2)
    newest, older = candidates(members.tiers)
    path = tmp_path / manifest_path(older.name)
    flip(path, 20)
    collect(LocalStore(tmp_path), 1, time.time())
    assert path.exists()
    flip(path, 20)
    assert [verify(members.tiers, manifest) for manifest in (newest, older)] == [[], []]


def test_nothing_is_collected_beside_a_manifest_of_a_newer_version(tmp_path: Path) -> None:
    with crew(tmp_path, keep=9) as members:
        members.save(1, 2)
    newest, older = candidates(members.tiers)
    store = LocalStore(tmp_path)
    store.put(manifest_path(newest.name), seal(msgspec.structs.replace(newest, version=VERSION + 1)))
    before = chunks_of(tmp_path)
    with pytest.raises(SnapshotError, match="newer CRAFT"):
        collect(store, 1, time.time())
    assert chunks_of(tmp_path) == before
    assert holds(members.tiers, older)


def test_what_was_taken_last_stays_whatever_its_step(tmp_path: Path) -> None:
    with crew(tmp_path, keep=1) as members:
        members.save(50)
        members.save(10)
        assert 10 in steps_of(members.tiers)


def hold(root: Path, kind: str) -> None:
    """In another process: write, or collect, until the end."""
    store = LocalStore(root)
    with store.writing("w0") if kind == "writing" else store.collecting("gc"):
        (root / "holding").touch()
        signal.pause()


@pytest.mark.parametrize("kind", ["writing", pytest.param("collecting", marks=pytest.mark.long)])
def test_whoever_is_killed_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    with crew(tmp_path) as members:
        members.save(1)
        nursery = Nursery()
        pid = nursery.start(hold, tmp_path, kind)
        try:
            wait_until((tmp_path / "holding").exists)
            with pytest.raises(StoreBusy, match="try again later"):
                collect(LocalStore(tmp_path), 1, time.time())
        finally:
            nursery.kill(pid)
            assert nursery.wait(pid) == -signal.SIGKILL
            nursery.close()
        collect(LocalStore(tmp_path), 1, time.time())
        members.save(2)
        assert steps_of(members.tiers) == [2, 1]
