"""Whatever happens to the files of a store: it is found, it is said which tensor it hits, and nothing of it is loaded (P7)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from craft.protocol.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.protocol.events import CheckpointRejected
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.restore import restore
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.store.manifest import (
    VERSION,
    Manifest,
    Ref,
    chunk_path,
    manifest_path,
    read_manifest,
    read_part,
    seal,
)
from craft.snapshots.store.store import Store
from craft.snapshots.store.tiers import Tiers, open_tiers

from ..scene import crew, flip, holds, place, steps_of


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of two steps, and a part of a third that never was complete."""
    path = tmp_path_factory.mktemp("original") / "store"
    with crew(path, 2) as members:
        members.save(1, 2)
        members.writers[0].take(members.trained.at(3), place(3, 0, 2))
        members.wait()
    return path


@pytest.fixture
def tiers(original: Path, tmp_path: Path) -> Tiers:
    shutil.copytree(original, tmp_path / "store")
    return open_tiers(str(tmp_path / "store"))


def root_of(tiers: Tiers) -> Path:
    return Path(tiers.durable.url)


def newest(tiers: Tiers) -> Manifest:
    return candidates(tiers)[0]


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte flipped": lambda path: flip(path, 0),
    "middle byte flipped": lambda path: flip(path, path.stat().st_size // 2),
    "last byte flipped": lambda path: flip(path, path.stat().st_size - 1),
    "truncated by a byte": rewrite(lambda data: data[:-1]),
    "emptied": rewrite(lambda data: b""),
    "a byte longer": rewrite(lambda data: data + b"\0"),
    "filled with zeros": rewrite(lambda data: bytes(len(data))),
    "missing": Path.unlink,
    "a folder": become_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_chunk_is_found_and_named(tiers: Tiers, damage: str) -> None:
    manifest = newest(tiers)
    for ref in [*manifest.chunks, manifest.header]:
        path = root_of(tiers) / chunk_path(ref.hash)
        data = path.read_bytes()
        DAMAGES[damage](path)
        with pytest.raises((SnapshotCorrupt, SnapshotMissing)) as raised:
            restore(tiers, manifest)
        what = "the header of checkpoint" if ref is manifest.header else "(model|optimizer)."
        assert ref.hash in str(raised.value)
        raised.match(what)
        raised.match(str(path))
        problems = verify(tiers, manifest)
        assert len(problems) == 1
        assert str(path) in problems[0]
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert verify(tiers, manifest) == []
    assert holds(tiers, manifest)


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "missing"])
def test_a_damaged_manifest_is_reported_and_an_older_one_is_found(tiers: Tiers, damage: str) -> None:
    path = root_of(tiers) / manifest_path(newest(tiers).name)
    if damage == "filled with zeros":
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    DAMAGES[damage](path)
    rejected: list[CheckpointRejected] = []
    (older,) = candidates(tiers, rejected.append)
    assert older.step == 1
    assert holds(tiers, older)
    if damage != "a folder":
        (event,) = rejected
        assert (event.step, event.url) == (2, tiers.url)
        assert str(path) in event.reason


def test_a_manifest_of_another_version_or_under_another_name_is_not_used(tiers: Tiers) -> None:
    manifest = newest(tiers)
    path = root_of(tiers) / manifest_path(manifest.name)
    path.write_bytes(seal(msgspec.structs.replace(manifest, version=VERSION + 1)))
    (path.parent / "0009-000000000009-copied.json").write_bytes(seal(manifest))
    (path.parent / "notes.txt").write_text("not ours")
    rejected: list[CheckpointRejected] = []
    assert [each.step for each in candidates(tiers, rejected.append)] == [1]
    assert "update CRAFT" in rejected[0].reason
    assert "holds another file" in rejected[1].reason
    assert "not a file of a checkpoint" in rejected[2].reason


def test_sizes_that_contradict_the_header_are_found(tiers: Tiers) -> None:
    manifest = newest(tiers)
    swapped = (manifest.chunks[1], manifest.chunks[0], *manifest.chunks[2:])
    assert swapped[0].size != swapped[1].size
    store = tiers.durable
    store.put(manifest_path(manifest.name), seal(msgspec.structs.replace(manifest, chunks=swapped)))
    with pytest.raises(SnapshotCorrupt, match="contradicts itself"):
        restore(tiers, newest(tiers))
    assert "contradicts itself" in verify(tiers, newest(tiers))[0]


def test_a_header_of_something_else_is_found(tiers: Tiers) -> None:
    manifest = newest(tiers)
    other = manifest.chunks[0]
    store = tiers.durable
    store.put(manifest_path(manifest.name), seal(msgspec.structs.replace(manifest, header=other)))
    with pytest.raises(SnapshotCorrupt, match="not the header"):
        restore(tiers, newest(tiers))
    assert "not the header" in verify(tiers, newest(tiers))[0]


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("missing", "a folder")])
def test_a_damaged_part_makes_no_checkpoint(tiers: Tiers, damage: str) -> None:
    (part,) = tiers.durable.files("parts")
    DAMAGES[damage](root_of(tiers) / part.path)
    with crew(root_of(tiers), 2) as members:
        members.writers[1].take(members.trained.at(3), place(3, 1, 2))
        assert not members.writers[1].wait(0.3)
    assert steps_of(tiers) == [2, 1]
    assert part.path in str(members.events[0])


@pytest.mark.parametrize("damage", ["missing", "truncated by a byte"])
def test_a_share_that_was_lost_meanwhile_makes_no_checkpoint(tiers: Tiers, damage: str) -> None:
    (part,) = tiers.durable.files("parts")
    lost = read_part(tiers.durable.get(part.path), part.path).chunks[-1]
    DAMAGES[damage](root_of(tiers) / chunk_path(lost.hash))
    with crew(root_of(tiers), 2) as members:
        members.writers[1].take(members.trained.at(3), place(3, 1, 2))
        assert not members.writers[1].wait(0.3)
    assert steps_of(tiers) == [2, 1]
    assert "cannot be listed" in str(members.events[0])
    assert lost.hash in str(members.events[0])


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "a folder"])
def test_a_job_that_starts_again_does_not_build_on_damaged_chunks(tiers: Tiers, damage: str) -> None:
    for ref in newest(tiers).chunks:
        DAMAGES[damage](root_of(tiers) / chunk_path(ref.hash))
    assert verify(tiers, newest(tiers))
    with crew(root_of(tiers), 2) as members:
        state = members.trained.at(2)
        for part, writer in enumerate(members.writers):
            writer.take(state, place(4, part, 2))
        members.wait()
    assert verify(tiers, newest(tiers)) == []


def test_files_that_do_not_belong_there_change_nothing(tiers: Tiers) -> None:
    root = root_of(tiers)
    for path in ("chunks/zz/what", "chunks/README", "parts/what", "manifests/.hidden", "unfinished/1", "else/where"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(b"what")
    assert steps_of(tiers) == [2, 1]
    assert all(holds(tiers, manifest) for manifest in candidates(tiers))
    with crew(root, 2) as members:
        members.save(4)
        assert holds(tiers, newest(tiers))


def test_a_chunk_that_is_damaged_nearby_is_taken_from_the_durable_store(tiers: Tiers, original: Path) -> None:
    both = open_tiers(str(original), str(root_of(tiers)))
    manifest = newest(both)
    for number, ref in enumerate(manifest.chunks):
        [*DAMAGES.values()][number % len(DAMAGES)](root_of(tiers) / chunk_path(ref.hash))
    assert holds(both, manifest)
    problems = verify(both, manifest)
    assert problems
    assert all("another store has it" in problem for problem in problems)


def test_nothing_outside_of_the_store_can_be_named(tiers: Tiers) -> None:
    manifest = newest(tiers)
    evil = msgspec.structs.replace(manifest, header=Ref("../../../etc/passwd", 10))
    store: Store = tiers.durable
    store.put(manifest_path(manifest.name), seal(evil))
    with pytest.raises(SnapshotError, match="not the hash of a chunk"):
        read_manifest(store.get(manifest_path(manifest.name)), store.where(manifest_path(manifest.name)))
