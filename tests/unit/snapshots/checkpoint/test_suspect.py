"""Checkpoints that may hold wrong bits are doubted in every store, by branch and step."""

from __future__ import annotations

from pathlib import Path

from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.suspect import SuspectCheckpoints, Suspicion, mark
from craft.snapshots.store.tiers import open_tiers

from ..scene import crew

FOUND = Suspicion(branch=1, after=20, step=33, reason="a bit flipped")


def doubted(tmp_path: Path) -> list[tuple[int, int]]:
    tiers = open_tiers(str(tmp_path / "far"), str(tmp_path / "near"))
    doubts = SuspectCheckpoints(tiers.nearest_first)
    return [(each.branch, each.step) for each in candidates(tiers) if doubts.about(each) is not None]


def test_all_of_its_branch_since_then_are_doubted_also_those_that_come_later(tmp_path: Path) -> None:
    with crew(tmp_path / "far", keep=99, local=tmp_path / "near") as members:
        for branch, step in ((0, 30), (1, 10), (1, 20), (1, 30)):
            members.take(step, branch=branch)
            members.wait()
        mark(members.tiers.nearest_first, FOUND)
        assert doubted(tmp_path) == [(1, 30)]
        for branch, step in ((1, 33), (2, 30)):
            members.take(step, branch=branch)
            members.wait()
    assert doubted(tmp_path) == [(1, 33), (1, 30)]
    assert SuspectCheckpoints(members.tiers.nearest_first).branches == {1}


def test_either_store_is_enough_and_a_damaged_mark_still_counts(tmp_path: Path) -> None:
    with crew(tmp_path / "far", keep=99, local=tmp_path / "near") as members:
        members.take(30, branch=1)
        members.wait()
    mark(members.tiers.nearest_first, FOUND)
    (tmp_path / "near" / FOUND.path).unlink()
    assert doubted(tmp_path) == [(1, 30)]
    path = tmp_path / "far" / FOUND.path
    good = path.read_bytes()
    for number in range(8 * len(good)):
        data = bytearray(good)
        data[number // 8] ^= 1 << number % 8
        path.write_bytes(data)
        (found,) = SuspectCheckpoints([members.tiers.durable])._found
        assert (found.branch, found.after, found.step) == (1, 20, 33)


def test_a_file_that_is_not_a_mark_is_left_alone(tmp_path: Path) -> None:
    store = open_tiers(str(tmp_path)).durable
    store.put("suspect/readme", b"")
    assert not SuspectCheckpoints([store]).branches
