"""Checkpoints go to the fast store of a host first, and from there to the durable one: the same ones on all members."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from craft.protocol.events import AnyNote, CheckpointFailed
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.checkpoint.writer import CheckpointWriter
from craft.snapshots.store.local import LocalStore
from craft.snapshots.store.manifest import chunk_path
from craft.snapshots.store.tiers import Tiers, open_tiers

from ..scene import LIMIT_S, Trained, crew, holds, place, steps_of
from ..travel import wait_until


def durable(members: Tiers) -> Tiers:
    return Tiers(None, members.durable)


def test_the_next_one_can_be_taken_though_nobody_copies_the_one_before(tmp_path: Path) -> None:
    """Member 0 chooses what is copied; it may have taken the next one already, and leaves this one out."""
    tiers = open_tiers(str(tmp_path / "far"), str(tmp_path / "near"))
    writer = CheckpointWriter(tiers, "w1", 3, lambda _: None)
    writer.take(Trained().at(1), place(1, part=1, of=2))
    assert writer.wait_free(LIMIT_S) and not writer.busy
    assert not writer.wait(0.01), "it is not in the durable store"
    writer.close()


@pytest.mark.parametrize("of", [1, 3])
def test_a_checkpoint_is_in_both_stores_when_the_wait_is_over(tmp_path: Path, of: int) -> None:
    with crew(tmp_path / "far", of, keep=2, local=tmp_path / "near") as members:
        members.save(1, 2, 3)
        for store in members.tiers.nearest_first:
            alone = Tiers(None, store)
            assert steps_of(alone) == [3, 2]
            assert all(holds(alone, manifest) for manifest in candidates(alone))
            assert store.files("parts") == store.files("pins") == []
        urls = [event.url for event in members.written]
        assert sorted(urls) == sorted([str(tmp_path / "near"), str(tmp_path / "far")] * 3)
        assert members.written[-1].total_bytes == members.trained.at(3).header.total_bytes


def test_what_is_lost_with_a_host_is_in_the_durable_store(tmp_path: Path) -> None:
    with crew(tmp_path / "far", 2, local=tmp_path / "near") as members:
        members.save(1)
        shutil.rmtree(tmp_path / "near")
        (manifest,) = candidates(members.tiers)
        assert holds(members.tiers, manifest)


def test_a_durable_store_that_is_away_holds_nobody_up_and_is_caught_up_with(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.write_text("in the way")
    with crew(far, 2, keep=3, local=tmp_path / "near") as members:
        for step in range(1, 7):
            members.take(step)
            wait_until(lambda: not any(writer.busy for writer in members.writers))
        assert steps_of(Tiers(None, LocalStore(tmp_path / "near")))[0] == 6
        wait_until(lambda: any(isinstance(event, CheckpointFailed) for event in members.events))
        assert {event.step for event in members.events if isinstance(event, CheckpointFailed)} <= {1, 2, 3, 4, 5, 6}
        far.unlink()
        members.wait()
        found = candidates(durable(members.tiers))
        assert found[0].step == 6
        assert all(verify(durable(members.tiers), manifest) == [] for manifest in found)


def test_those_with_a_tag_are_never_left_out(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.write_text("in the way")
    with crew(far, 2, keep=1, local=tmp_path / "near") as members:
        for step in range(1, 7):
            members.take(step, tag="best" if step == 3 else None)
            wait_until(lambda: not any(writer.busy for writer in members.writers))
        far.unlink()
        members.wait()
        assert {3, 6} <= set(steps_of(durable(members.tiers)))
        assert all(holds(durable(members.tiers), each) for each in candidates(durable(members.tiers)))


def test_hosts_that_hold_only_their_shares_make_a_whole_one_in_the_durable_store(tmp_path: Path) -> None:
    trained = Trained()
    events: list[AnyNote] = []
    hosts = [open_tiers(str(tmp_path / "far"), str(tmp_path / f"host{number}")) for number in (0, 1)]
    writers = [CheckpointWriter(tiers, f"w{number}", 2, events.append) for number, tiers in enumerate(hosts)]
    try:
        for step in range(1, 6):
            state = trained.at(step)
            for part, writer in enumerate(writers):
                writer.take(state, place(step, part, 2))
            assert all(writer.wait(LIMIT_S) for writer in writers)
        assert steps_of(Tiers(None, hosts[0].durable)) == [5, 4]
        for tiers in hosts:
            assert tiers.local is not None
            assert steps_of(Tiers(None, tiers.local)) == []
            manifest = candidates(tiers)[0]
            assert holds(tiers, manifest)
            own = [ref for ref in manifest.chunks if (tiers.local.root / chunk_path(ref.hash)).exists()]
            assert 0 < len(own) < len(manifest.chunks)
            # Shares of old ones do not pile up.
            assert len(tiers.local.files("parts")) == 2
    finally:
        for writer in writers:
            writer.close()


def test_a_slow_member_and_a_fast_one_copy_the_same_ones(tmp_path: Path) -> None:
    with crew(tmp_path / "far", 2, keep=50, local=tmp_path / "near") as members:
        state = members.trained.at(1)
        for step in range(1, 30):
            for part, writer in enumerate(members.writers):
                wait_until(lambda writer=writer: not writer.busy)  # type: ignore[misc]
                writer.take(state, place(step, part, 2))
        members.wait()
        wait_until(lambda: steps_of(durable(members.tiers))[:1] == [29])
        assert not [event for event in members.events if isinstance(event, CheckpointFailed)]
        # Only what was begun by all is there, and nothing half of it.
        assert members.tiers.durable.files("parts") == []


def test_threads_end_with_the_writer(tmp_path: Path) -> None:
    before = threading.active_count()
    with crew(tmp_path / "far", 2, local=tmp_path / "near") as members:
        members.save(1)
        assert threading.active_count() > before
    assert threading.active_count() == before
