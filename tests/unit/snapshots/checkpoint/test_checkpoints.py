"""A checkpoint that its members have written, each its share, is read back bit for bit, at any number of workers (P7)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from craft.protocol.errors import ConfigError, SnapshotError
from craft.protocol.events import AnyNote, CheckpointFailed, CheckpointRejected
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.publish import publish
from craft.snapshots.checkpoint.restore import restore
from craft.snapshots.checkpoint.verify import diff, verify
from craft.snapshots.checkpoint.writer import CheckpointWriter
from craft.snapshots.state.serialized import State, load
from craft.snapshots.store.background import insist
from craft.snapshots.store.manifest import Numbered, part_path, read_part, seal
from craft.snapshots.store.tiers import Tiers, open_store, open_tiers

from ..jobs import BUILDS, Job
from ..scene import LIMIT_S, Trained, crew, holds, place, steps_of
from ..travel import wait_until


@pytest.mark.parametrize("of", [1, 2, 3])
def test_a_checkpoint_is_listed_when_the_last_share_is_written(tmp_path: Path, of: int) -> None:
    with crew(tmp_path, of) as members:
        state = members.trained.at(7)
        for part in range(of):
            assert steps_of(members.tiers) == []
            members.writers[part].take(state, place(7, part, of))
            assert members.writers[part].wait(LIMIT_S)
        (manifest,) = candidates(members.tiers)
        assert holds(members.tiers, manifest)
        assert verify(members.tiers, manifest) == []
        (written,) = members.written
        assert (written.name, written.step, written.url) == (manifest.name, 7, str(tmp_path))
        assert written.total_bytes == state.header.total_bytes <= written.new_bytes
        assert [writer.last is not None and writer.last.written for writer in members.writers] == [True] * of
        assert [writer.last is not None and writer.last.complete for writer in members.writers].count(True) == 1
        assert open_store(str(tmp_path)).files("parts") == []


def test_members_that_finish_at_once_announce_it_once(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as members:
        members.save(*range(1, 11))
        assert [event.step for event in members.written] == list(range(1, 11))
        assert steps_of(members.tiers) == [10, 9, 8]


def test_members_that_all_find_the_last_part_write_the_same_and_one_announces(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as members:
        members.writers[0].take(members.trained.at(1), place(1, 0, 2))
        members.wait()
        store = members.tiers.durable
        (found,) = store.files("parts")
        alone = read_part(store.get(found.path), found.path)
        chunks = tuple(Numbered(number, each.hash, each.size) for number, each in enumerate(alone.chunks))
        parts = [msgspec.structs.replace(alone, of=3, part=part, chunks=()) for part in (1, 2)]
        parts.insert(0, msgspec.structs.replace(alone, of=3, chunks=chunks))
        for part in parts:
            store.put(part_path(part.name, part.part, 3), seal(part))
        with ThreadPoolExecutor(3) as pool:
            published = list(pool.map(lambda part: publish(store, part), parts))
        assert len([each for each in published if each is not None]) == 1
        assert len(candidates(members.tiers)) == 1


@pytest.mark.parametrize(
    "build", ["adamw", "lbfgs", "average and scaler", "two groups with tensors for learning rates"]
)
def test_all_that_a_script_registers_comes_back(tmp_path: Path, build: str) -> None:
    job, other = (Job(BUILDS[build], seed, torch.float32) for seed in (1, 2))
    for number in range(3):
        job.step(number)
    with crew(tmp_path, 2) as members:
        state = State(job.modules, job.items, b"")
        for part, writer in enumerate(members.writers):
            writer.take(state, place(3, part, 2))
        members.wait()
        found = restore(members.tiers, candidates(members.tiers)[0], other.modules)
    load(found.header, found.tensors, other.modules, other.items)
    assert other.digest() == job.digest()
    job.step(4)
    other.step(4)
    assert other.digest() == job.digest()


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    with crew(tmp_path) as members:
        members.take(1)
        members.trained.at(2)
        members.wait()
        assert holds(members.tiers, candidates(members.tiers)[0])


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    with crew(tmp_path, 2, keep=5) as members:
        members.save(1)
        frozen = 96 * 256 * 4
        members.save(2)
        changed = members.written[0].total_bytes - frozen
        assert changed <= members.written[1].new_bytes < changed + 8192
        members.take(3)
        members.wait()
        state = members.trained.at(3)
        for part, writer in enumerate(members.writers):
            writer.take(state, place(4, part, 2))
        members.wait()
        assert members.written[3].new_bytes == 0
        assert len({each.hash for manifest in candidates(members.tiers) for each in manifest.chunks}) == len(
            open_store(str(tmp_path)).files("chunks")
        ) - len({manifest.header.hash for manifest in candidates(members.tiers)})


def test_a_state_that_grows_and_shrinks_is_written_whole(tmp_path: Path) -> None:
    with crew(tmp_path, keep=9) as members:
        for step, width in enumerate([96, 300, 20]):
            trained = Trained(width)
            members.writers[0].take(trained.at(step), place(step))
            members.wait()
            found = restore(members.tiers, candidates(members.tiers)[0])
            assert found.header.total_bytes == trained.at(step).header.total_bytes
            assert all(map(torch.equal, found.tensors, trained.at(step).tensors))


def test_memory_is_set_aside_before_the_first_copy_and_used_again(tmp_path: Path) -> None:
    with crew(tmp_path) as members:
        (writer,) = members.writers
        writer.prepare(members.trained.at(1).header, 0, 1)
        members.save(1)
        memory = writer._memory
        members.save(2)
        assert writer._memory is memory
        assert writer.stall_s > 0 < writer.write_s
        assert holds(members.tiers, candidates(members.tiers)[0])


def test_nothing_is_taken_while_the_one_before_is_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("manifests/readme", b"")
    with crew(tmp_path) as members, store.collecting("somebody"):
        members.take(1)
        assert members.writers[0].busy
        assert not members.writers[0].wait(0.05)
        with pytest.raises(ConfigError, match="still being written"):
            members.take(2)


def test_members_that_hold_different_states_are_told_so(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as members:
        members.writers[0].take(members.trained.at(1), place(1, 0, 2))
        members.wait()
        state = State(members.trained.modules, members.trained.registered, b"other conditions")
        members.writers[1].take(state, place(1, 1, 2))
        wait_until(lambda: bool(members.events))
        (failed,) = members.events[:1]
        assert isinstance(failed, CheckpointFailed)
        assert "hold different training states" in failed.error
        assert (failed.worker_id, failed.tries, failed.retry_s) == ("w1", 1, None), "to try again would not help"
        assert steps_of(members.tiers) == []


def test_after_failures_the_writer_waits_longer_and_gives_up_in_the_end() -> None:
    pauses: list[float | None] = []

    def fail() -> None:
        raise SnapshotError("never")

    assert insist(fail, lambda error, tries, retry_s: pauses.append(retry_s), lambda seconds: False) is None
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, None]
    pauses.clear()
    assert insist(fail, lambda error, tries, retry_s: pauses.append(retry_s), lambda seconds: True) is None
    assert pauses == [0.5]


def test_an_event_that_nobody_can_take_does_not_end_the_writer(tmp_path: Path) -> None:
    def refuse(event: AnyNote) -> None:
        raise RuntimeError("not now")

    writer = CheckpointWriter(open_tiers(str(tmp_path)), "w0", 3, refuse)
    trained = Trained()
    for step in (1, 2):
        writer.take(trained.at(step), place(step))
        assert writer.wait(LIMIT_S)
    assert steps_of(open_tiers(str(tmp_path))) == [2, 1]
    writer.close()


def test_the_newest_is_found_by_branch_and_step(tmp_path: Path) -> None:
    with crew(tmp_path, keep=9) as members:
        for branch, step in [(0, 5), (0, 12), (1, 6)]:
            members.take(step, branch=branch)
            members.wait()
        assert [(each.branch, each.step) for each in candidates(members.tiers)] == [(1, 6), (0, 12), (0, 5)]


def test_two_checkpoints_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    with crew(tmp_path) as members:
        members.save(1, 2)
        newer, older = candidates(members.tiers)
        found = diff(members.tiers, older, newer)
    names = {change.name for change in found.tensors}
    assert "model.1.weight" in names
    assert "optimizer.state.0.step" in names
    assert not names & {"model.0.weight", "model.0.bias", "model.2.running_mean"}
    assert found.values == ()
    assert 96 * 256 * 4 <= found.shared_bytes < found.bytes_after == found.bytes_before
    assert diff(members.tiers, newer, newer).tensors == ()


def test_a_store_without_checkpoints_has_none(tmp_path: Path) -> None:
    rejected: list[CheckpointRejected] = []
    assert candidates(Tiers(None, open_store(str(tmp_path / "nowhere"))), rejected.append) == []
    assert rejected == []
