"""A manifest, or a part of one, is as it was written, or it is rejected with a sentence that names its file."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from craft.protocol.errors import BitsDiffer, SnapshotCorrupt
from craft.snapshots.store.manifest import (
    VERSION,
    Manifest,
    Numbered,
    Part,
    Ref,
    hashes_in,
    manifest_path,
    merge,
    name_of,
    part_path,
    place_of_name,
    read_manifest,
    read_part,
    seal,
)

NAME = name_of(2, 30, "a1")
FILE = f"/store/{manifest_path(NAME)}"
PART_FILE = f"/store/{part_path(NAME, 1, 2)}"
HASHES = [f"{number:064x}" for number in range(4)]


def manifest(**changed: Any) -> Manifest:
    whole = Manifest(
        name=NAME,
        branch=2,
        step=30,
        generation=7,
        time=1.5,
        tag="best",
        header=Ref(HASHES[0], 10),
        chunks=(Ref(HASHES[1], 5), Ref(HASHES[2], 6)),
        total_bytes=11,
        new_bytes=5,
    )
    return msgspec.structs.replace(whole, **changed)


def part(number: int, **changed: Any) -> Part:
    whole = Part(
        name=NAME,
        branch=2,
        step=30,
        generation=7,
        time=1.5 + number,
        tag=None,
        part=number,
        of=2,
        header=Ref(HASHES[0], 10),
        chunks=(Numbered(number, HASHES[number + 1], 5),),
        new_bytes=number,
    )
    return msgspec.structs.replace(whole, **changed)


def test_what_is_read_is_what_was_written() -> None:
    found = read_manifest(seal(manifest()), FILE)
    assert msgspec.structs.replace(found, digest="") == manifest()
    assert msgspec.structs.replace(read_part(seal(part(1)), PART_FILE), digest="") == part(1)


@pytest.mark.parametrize("kind", ["manifest", "part"])
def test_every_flipped_bit_and_every_truncation_is_found(kind: str) -> None:
    read: Any = read_manifest if kind == "manifest" else read_part
    data, file = (seal(manifest()), FILE) if kind == "manifest" else (seal(part(1)), PART_FILE)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(SnapshotCorrupt, match=file):
                read(bytes(damaged), file)
        with pytest.raises(SnapshotCorrupt, match=file):
            read(data[:position], file)
    with pytest.raises(SnapshotCorrupt, match=file):
        read(data + b"\n", file)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"version": VERSION + 1}, "newer CRAFT.*update CRAFT"),
        ({"version": 0}, "do not match"),
        ({"header": Ref("x" * 64, 10)}, "is not the hash of a chunk"),
        ({"header": Ref("../../etc/passwd", 10)}, "is not the hash of a chunk"),
        ({"chunks": (Ref(HASHES[1], -5), Ref(HASHES[2], 16))}, "cannot have -5 bytes"),
        ({"chunks": (Ref(HASHES[1], 5),)}, "do not add up to 11 bytes"),
        ({"new_bytes": -1}, "-1 new bytes are impossible"),
        ({"step": 31}, "do not match"),
        ({"generation": -1}, "do not match"),
        ({"name": name_of(2, 30, "b2")}, "holds another file"),
        ({"name": "../x"}, "do not match"),
    ],
)
def test_fields_that_cannot_be_are_rejected_though_the_digest_is_right(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SnapshotCorrupt, match=sentence) as raised:
        read_manifest(seal(manifest(**changed)), FILE)
    assert FILE in str(raised.value)


def test_there_is_no_part_beyond_the_last() -> None:
    with pytest.raises(SnapshotCorrupt, match="no part 2 of 2"):
        read_part(seal(part(1, part=2)), f"/store/{part_path(NAME, 2, 2)}")


def test_names_sort_in_the_order_of_history() -> None:
    places = [(0, 9), (0, 10), (0, 1_000_000), (1, 2), (10, 1)]
    names = [name_of(branch, step, "z" if step == 9 else "a") for branch, step in places]
    assert sorted(names) == names
    assert [place_of_name(name) for name in names] == places
    assert place_of_name("../0000-000000000001-a") is None


def test_parts_make_one_manifest_whoever_merges_them() -> None:
    found = merge([part(0), part(1)], "parts")
    assert found.chunks == (Ref(HASHES[1], 5), Ref(HASHES[2], 5))
    assert (found.total_bytes, found.new_bytes, found.time) == (10, 1, 1.5)
    assert read_manifest(seal(found), FILE).name == NAME


def test_members_with_different_states_make_no_checkpoint() -> None:
    with pytest.raises(BitsDiffer, match="members 0 and 1"):
        merge([part(0), part(1, header=Ref(HASHES[3], 10))], "parts")


def test_a_part_too_few_makes_no_checkpoint() -> None:
    with pytest.raises(SnapshotCorrupt, match="do not match"):
        merge([part(0)], "parts")
    with pytest.raises(SnapshotCorrupt, match="do not match"):
        merge([part(0), part(1, chunks=(Numbered(2, HASHES[2], 5),))], "parts")


def test_what_a_damaged_manifest_needs_is_still_known() -> None:
    data = seal(manifest())
    assert hashes_in(data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :]) >= {HASHES[0]}
    assert hashes_in(data) >= set(HASHES[:3])
